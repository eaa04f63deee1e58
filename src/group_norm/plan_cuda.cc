#include "group_norm/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "core/fast_divide.h"
#include "core/integer.h"

namespace jax_fastops::group_norm {
namespace {

// Completes a plan whose unit and layout are set, for sets of `groups` groups in `parts` parts.
void Divide(int groups, int64_t parts, Plan* plan) {
  plan->set_groups = groups;
  plan->sets = static_cast<int32_t>(CeilDiv(plan->groups, groups));
  plan->part_units = CeilDiv(plan->units, parts);
  plan->parts = static_cast<int32_t>(CeilDiv(plan->units, plan->part_units));
  // Channels first, neighboring threads have at least four sectors of a channel, but of a short one
  // a thread has four units, so that several loads are under way.
  const auto least = std::clamp<int64_t>(plan->part_units / 4, 1, 8);
  const auto widest = plan->last ? kThreads : static_cast<int>(kThreads / least);
  plan->passes = static_cast<int32_t>(CeilDiv(plan->slots(), widest));
  plan->width = static_cast<int32_t>(CeilDiv(plan->slots(), plan->passes));
  plan->lanes = kThreads / plan->width;
  if (!plan->last && plan->lanes > 8) plan->lanes -= plan->lanes % 4;
}

// Sets the shared memory of a block, which keeps the units that there is room for if a processor
// has `blocks` blocks. False if it has not.
bool Keep(const Shape& shape, const Limits& limits, int blocks, Plan* plan) {
  plan->row = static_cast<int32_t>(RoundUp(plan->set_channels(), 4));
  const int table = 2 * kTableStride * plan->unit_channels();
  plan->kept_at = static_cast<int32_t>(RoundUp((TableAt(*plan) + table) * shape.accumulator, 16));
  const int64_t room =
      std::min(limits.shared_per_block, limits.shared_per_processor / blocks - kBlockShared) -
      plan->kept_at;
  if (room < 0) return false;
  const int64_t bytes = int64_t{kThreads} * plan->unit * shape.item * shape.arrays;
  // The backward keeps a gradient, of types of 16 bits a rounded one, which a group of a few
  // elements would show: their gradients almost cancel.
  const bool few = shape.arrays > 1 && shape.item == 2 && shape.channels * shape.positions <= 8;
  plan->kept = few ? 0 : static_cast<int32_t>(std::min(room / bytes, plan->thread_units()));
  plan->shared_bytes = static_cast<int32_t>(plan->kept_at + plan->kept * bytes);
  return true;
}

// An estimate in nanoseconds for a launch with `blocks` blocks on a processor, and `resident` in
// all. The constants are a fit to the times of all plans of 207 shapes on an H200.
double TimeOf(const Plan& plan, const Shape& shape, int blocks, int resident) {
  const bool backward = shape.arrays > 1;
  // Bytes that arrive at or leave a processor in a nanosecond: at most, and of a block, by the
  // loads that it has under way.
  const double most = backward ? 55 : 70, of_block = 40;
  const double grid = static_cast<double>(shape.samples * plan.sets) * plan.parts;
  const double used = std::min(grid, static_cast<double>(resident) / blocks);  // processors
  const double rounds = std::ceil(grid / resident), busiest = std::ceil(grid / used);
  // Rows of a set begin and end within lines that another block reads, too.
  const double row = static_cast<double>(plan.set_channels()) * shape.item;
  const double lines = plan.last && plan.sets > 1 ? (row + 68) / row : 1;
  const double thread_units = static_cast<double>(plan.thread_units());
  const double bytes =
      static_cast<double>(plan.part_units) * plan.slots() * plan.unit * shape.item * lines;
  // What is read again counts twice: nothing is summed at the same time.
  const double again = 2 * (1 - plan.kept / thread_units);
  const double moved = bytes * (shape.arrays * (1 + again) + 1);
  const double rate = std::min(most, of_block * std::min<double>(busiest, blocks));
  // What elements take besides. Idle threads of a warp execute as others do.
  const double computed = thread_units * kThreads * plan.unit * 0.07;
  // Before the first element, for the sums of a block, and until those of other blocks are there.
  const double parts = plan.parts, groups = plan.set_groups;
  const double wait = plan.parts == 1 ? 0
                      : plan.clusters ? 450 + 66 * parts
                                      : 1450 + (26 + 0.9 * groups) * parts;
  const double once = 2000 + 1200 * plan.passes + 4.0 * plan.set_channels() + 50 * groups + wait;
  return once * rounds + busiest * (moved / rate + computed);
}

}  // namespace

Plan MakePlan(const Shape& shape, int alignment, int64_t max_parts, const Limits& limits) {
  Plan plan = {};
  plan.channels = shape.groups * shape.channels;
  plan.positions = shape.positions;
  plan.groups = static_cast<int32_t>(shape.groups);
  plan.group_channels = static_cast<int32_t>(shape.channels);
  plan.last = shape.last;
  const int64_t contiguous = shape.last ? plan.channels : shape.positions;
  // 16 bytes, or 8 of types of 16 bits, or an element.
  plan.unit = 1;
  for (int unit = 4; unit * shape.item <= kUnitBytes; unit *= 2) {
    const int bytes = unit * shape.item;
    if (alignment % bytes == 0 && contiguous % unit == 0) plan.unit = unit;
  }
  plan.inverse_size =
      1 / (static_cast<double>(shape.channels) * static_cast<double>(shape.positions));
  // The groups of a set that begins and ends with a whole unit.
  int least = 1;
  if (shape.last) {
    least = static_cast<int>(plan.unit / std::gcd<int64_t>(plan.unit, shape.channels));
    if (least * shape.channels > int64_t{kThreads} * plan.unit) plan.unit = least = 1;
  }
  plan.slot_step = shape.last ? plan.unit : shape.positions;
  plan.unit_step = shape.last ? plan.channels : plan.unit;
  plan.units = shape.last ? shape.positions : shape.positions / plan.unit;

  const auto sets_of = [&](int64_t groups) {
    return static_cast<int>(
        std::min<int64_t>(RoundUp(std::max<int64_t>(groups, 1), least), shape.groups));
  };
  // Channels last, all groups of a sample and then halves of them, while rows have a sector;
  // channels first, those whose channels a block has at once. Of all plans the one that takes the
  // least time by an estimate.
  int groups = shape.last ? sets_of(kThreads * plan.unit / shape.channels / least * least)
                          : sets_of(kThreads / shape.channels);
  Plan best = {};
  double least_time = 0;
  const auto consider = [&](int blocks, int log_cluster) {
    const int resident = limits.resident[log_cluster][blocks - 1];
    if (resident == 0 || !Keep(shape, limits, blocks, &plan)) return;
    const double time = TimeOf(plan, shape, blocks, resident);
    if (best.parts == 0 || time < least_time) best = plan, least_time = time;
  };
  for (;; groups = sets_of(groups / 2)) {
    for (int log = 0; log <= kMaxLogCluster; ++log) {
      Divide(groups, 1 << log, &plan);
      plan.clusters = log > 0;
      for (int blocks = limits.blocks; blocks >= 1 && plan.parts == 1 << log; --blocks) {
        consider(blocks, log);
      }
    }
    // As many as are resident, if a part has some units for each thread.
    plan.clusters = false;
    for (int blocks = limits.cooperative ? limits.blocks : 0; blocks >= 1; --blocks) {
      Divide(groups, 1, &plan);
      const int64_t share = int64_t{blocks} * limits.processors / (shape.samples * plan.sets);
      const int64_t parts = std::min({share, plan.thread_units() / 4, max_parts});
      if (parts > 1) Divide(groups, parts, &plan), consider(blocks, 0);
    }
    if (groups <= least || (shape.last && groups * shape.channels * shape.item < 64)) break;
  }
  if (best.parts == 0) return best;
  const auto by = [](int32_t divisor) { return FastDivisor(static_cast<uint32_t>(divisor)); };
  best.by_parts = by(best.parts), best.by_sets = by(best.sets);
  best.by_inner = by(best.last ? best.width : best.lanes), best.by_lanes = by(best.lanes);
  best.by_group_channels = by(best.group_channels);
  return best;
}

}  // namespace jax_fastops::group_norm

#include "group_norm/plan.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <numeric>

#include "core/integer.h"

namespace jax_fastops::group_norm {
namespace {

// Cycles between the first loads of two blocks of a processor, at most.
constexpr double kMaxDelay = 3000;

// Completes a plan whose unit and layout are set, for sets of `groups` groups in `parts` parts.
void Divide(int groups, int64_t parts, bool keep, Plan* plan) {
  plan->set_groups = groups;
  plan->sets = static_cast<int32_t>(CeilDiv(plan->groups, groups));
  plan->part_units = CeilDiv(plan->units, parts);
  plan->parts = static_cast<int32_t>(CeilDiv(plan->units, plan->part_units));
  if (plan->last) {
    plan->width = std::min(plan->slots(), kThreads);
    plan->lanes = kThreads / plan->width;
  } else {
    // A power of two, so that a thread has a few units of each slot and few lanes are idle.
    const int most = plan->slots() > kThreads ? 32 : kThreads;
    int lanes = 1;
    while (lanes < most && lanes * 8 <= plan->part_units) lanes *= 2;
    plan->lanes = lanes;
    plan->width = kThreads / lanes;
  }
  plan->passes = static_cast<int32_t>(CeilDiv(plan->slots(), plan->width));
  plan->kept_units = keep ? static_cast<int32_t>(std::min<int64_t>(
                                plan->passes * CeilDiv(plan->part_units, plan->lanes), 1 << 20))
                          : 0;
  plan->table_channels = static_cast<int32_t>(RoundUp(plan->set_channels(), 4));
  plan->group_slots = 1;
  const int size = plan->unit_channels();
  for (int group = 0; group < std::min(groups, size); ++group) {  // units and groups repeat
    const int first = group * plan->group_channels, last = first + plan->group_channels - 1;
    plan->group_slots = std::max(plan->group_slots, last / size - first / size + 1);
  }
}

// The blocks of such a plan that are resident by their shared memory, 0 if none fits.
int Resident(const Plan& plan, const Shape& shape, const Limits& limits) {
  if (plan.kept_units > 4096) return 0;
  const int bytes = LayoutOf(plan, shape).bytes;
  return bytes > limits.shared_per_block ? 0 : limits.shared_per_processor / (bytes + kBlockShared);
}

// The bytes of an array that a block keeps.
double BytesOf(const Plan& plan, const Shape& shape) {
  return static_cast<double>(plan.part_units) * plan.slots() * plan.unit * shape.item;
}

// Sets how many clusters are launched: those that are resident if a processor has `resident`
// blocks. The blocks of a processor start one after the other, when the loads of the one before may
// have arrived.
void SetClusters(const Shape& shape, const Limits& limits, int resident, Plan* plan) {
  plan->tiles = static_cast<int32_t>(shape.samples * plan->sets);
  const int all =
      limits.clusters[std::countr_zero(static_cast<uint32_t>(plan->parts))][resident - 1];
  plan->clusters = all > 0 ? std::min(plan->tiles, all) : plan->tiles;
  plan->resident = static_cast<int32_t>(std::clamp<int64_t>(
      CeilDiv(int64_t{plan->clusters} * plan->parts, limits.processors), 1, resident));
  // On an H200, 15 bytes arrive in a cycle.
  plan->delay =
      static_cast<int32_t>(std::min<double>(kMaxDelay, BytesOf(*plan, shape) * shape.arrays / 15));
}

// An estimate in nanoseconds. In each round, all resident blocks have a tile. They move its
// elements while they compute, except the first loads, and wait for each other. A thread executes
// some instructions for each tile, and some for each element.
double TimeOf(const Plan& plan, const Shape& shape) {
  // Of a processor of an H200 in a nanosecond: bytes, and instructions of lanes. Blocks use a part
  // of these: the fewer warps, the more wait.
  constexpr double kBytes = 30, kInstructions = 224, kUsed[] = {0.22, 0.42, 0.57, 0.7};
  constexpr double kWait = 3000;
  static_assert(std::size(kUsed) == kBlocks);
  const double rounds = static_cast<double>(CeilDiv(plan.tiles, plan.clusters));
  const int blocks = plan.resident;
  // Rows that are not whole sectors share some with other blocks.
  const int row = plan.set_channels() * shape.item;
  const double sectors = shape.last ? static_cast<double>(RoundUp(row, 32)) / row : 1;
  const double moves = (shape.arrays + 1) * blocks * BytesOf(plan, shape) * sectors / kBytes;
  const double once = shape.backward ? 1200 : 1000, each = shape.backward ? 24 : 15;
  const double computes = blocks * kThreads * (once + each * plan.kept_units * plan.unit) /
                          (kInstructions * kUsed[blocks - 1]);
  return rounds * (std::max(moves, computes) + kWait) + moves / 2;
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

  // A row of the channels of a set should have kRowBytes.
  const auto sets_of = [&](int64_t groups) {
    return static_cast<int>(
        std::min<int64_t>(RoundUp(std::max<int64_t>(groups, 1), least), shape.groups));
  };
  int wanted;
  if (shape.last) {
    wanted = sets_of(CeilDiv(kRowBytes, shape.channels * shape.item));
  } else {
    Divide(1, 1, true, &plan);
    wanted = sets_of(plan.width / shape.channels);
  }
  // The plan that takes the least time by an estimate, of those that keep the elements. What is
  // kept of types of 16 bits is rounded, which a group of a few elements would show: their
  // gradients almost cancel.
  const bool keeps = !shape.backward || shape.item != 2 || shape.channels * shape.positions > 8;
  Plan best = {};
  double least_time = 0;
  for (int groups = wanted; keeps; groups = sets_of(groups / 2)) {
    for (int parts = 1; parts <= limits.max_cluster; parts *= 2) {
      Divide(groups, parts, true, &plan);
      if (plan.parts != parts) continue;
      for (int resident = std::min(Resident(plan, shape, limits), kBlocks); resident >= 1;
           --resident) {
        SetClusters(shape, limits, resident, &plan);
        const double time = TimeOf(plan, shape);
        const bool more = time == least_time && plan.resident > best.resident;
        if (best.kept_units == 0 || time < least_time || more) best = plan, least_time = time;
      }
    }
    const bool narrow = shape.last && groups * shape.channels * shape.item < 64;
    if (groups <= least || narrow) break;
  }
  if (best.kept_units > 0) return best;

  // Rows as long as the block is wide, and as many blocks as are resident.
  const int64_t row = int64_t{kThreads} * (shape.last ? plan.unit : 1);
  const int groups = shape.last ? sets_of(row / shape.channels / least * least) : wanted;
  Divide(groups, 1, false, &plan);
  const int64_t parts = CeilDiv(int64_t{kBlocks} * limits.processors, shape.samples * plan.sets);
  const int64_t most = std::max<int64_t>(1, plan.units * plan.passes / (plan.lanes * 4));
  Divide(groups, std::max<int64_t>(1, std::min({parts, most, max_parts})), false, &plan);
  plan.tiles = plan.clusters = static_cast<int32_t>(shape.samples * plan.sets);
  return plan;
}

}  // namespace jax_fastops::group_norm

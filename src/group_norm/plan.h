// How group norm is divided over blocks, on the host and on the device.
//
// A *slot* is what a thread has of the channels at one position: a unit of neighboring channels if
// channels are last, one channel if they are first. A *unit* is one step along the positions: one
// position if channels are last, a unit of neighboring positions if they are first. So an element
// is at origin + slot * slot_step + unit * unit_step, and a thread has every lanes-th unit of each
// of its slots.
//
// A block has whole groups, a *set*, and a *part* of their units. The parts of a set exchange their
// sums. If the elements of all parts fit into the shared memory of a cluster, memory is read once
// (`kept`). If not, one launch writes the sums of each part, and a second one adds them up and
// reads the elements again.
#ifndef JAX_FASTOPS_GROUP_NORM_PLAN_H_
#define JAX_FASTOPS_GROUP_NORM_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "core/integer.h"

namespace jax_fastops::group_norm {

inline constexpr int kThreads = 256;
inline constexpr int kMaxCluster = 16;
inline constexpr int64_t kRowBytes = 128;  // four sectors
// Elements of a unit: more would take more registers, and fewer blocks would be resident. Then
// loads would wait for the arithmetic: on one H200, bfloat16, (16, 64, 64, 320), two blocks with
// units of 8 elements took 73 us for a forward.
inline constexpr int kUnit = 4;
// Blocks of a processor that have the registers for it.
inline constexpr int kForwardBlocks = 4, kBackwardBlocks = 3;

struct Shape {
  int64_t samples, groups, channels, positions;  // channels of a group
  bool last;                                     // the channels are
  int item, accumulator;                         // bytes
  int arrays;                                    // that are kept
  bool backward;

  constexpr int most() const { return backward ? kBackwardBlocks : kForwardBlocks; }
};

struct Limits {
  int processors = 1;
  int shared_per_block = 48 << 10, shared_per_processor = 64 << 10;
  int max_cluster = 1;
};

struct Plan {
  int64_t channels, positions;  // all channels
  int64_t slot_step, unit_step, part_units, units;
  int32_t groups, group_channels;
  int32_t unit;  // elements
  int32_t sets, set_groups, parts;
  int32_t width;       // slots that the block has at once
  int32_t lanes;       // threads of a slot
  int32_t passes;      // until the block has had all of its slots
  int32_t kept_units;  // of a thread, 0 if elements are read again
  bool last;

  constexpr int set_channels() const { return set_groups * group_channels; }
  constexpr int unit_channels() const { return last ? unit : 1; }
  constexpr int slots() const { return static_cast<int>(CeilDiv(set_channels(), unit_channels())); }
};

// Offsets in bytes in the shared memory of a block.
struct SharedLayout {
  int sums;        // two doubles of each group, or two accumulators of each channel
  int group_sums;  // two accumulators of each group, of the backward
  int statistics;  // two accumulators of each group
  int base;        // one accumulator of each group
  int table;       // two accumulators of each thread and channel of a unit
  int kept;
  int bytes;
};

constexpr SharedLayout LayoutOf(const Plan& plan, const Shape& shape) {
  SharedLayout at = {};
  const int channels = plan.set_channels(), accumulator = shape.accumulator;
  const bool backward = shape.backward;
  at.group_sums = backward ? channels * 2 * accumulator : plan.set_groups * 16;
  at.statistics = at.group_sums + (backward ? plan.set_groups * 2 * accumulator : 0);
  at.base = at.statistics + plan.set_groups * 2 * accumulator;
  at.table = static_cast<int>(RoundUp(at.base + plan.set_groups * accumulator, 16));
  // Channels first, the backward has an entry for each warp and slot.
  const int warps = std::max(plan.lanes / 32, 1);
  const int entries = plan.last  ? kThreads * plan.unit
                      : backward ? std::max(warps * plan.slots(), kThreads)
                                 : kThreads;
  at.kept = static_cast<int>(RoundUp(at.table + entries * 2 * accumulator, 16));
  at.bytes = at.kept + plan.kept_units * kThreads * plan.unit * shape.item * shape.arrays;
  return at;
}

// Completes a plan whose unit and layout are set, for sets of `groups` groups in `parts` parts.
inline void Divide(int groups, int64_t parts, bool keep, Plan* plan) {
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
}

// The blocks of such a plan that are resident by their shared memory, 0 if none fits.
inline int Resident(const Plan& plan, const Shape& shape, const Limits& limits) {
  if (plan.kept_units > 4096) return 0;
  const int bytes = LayoutOf(plan, shape).bytes;
  return bytes > limits.shared_per_block ? 0 : limits.shared_per_processor / (bytes + 2048);
}

// `alignment` of the arrays in bytes, at most 16. `max_parts`: the parts for whose sums there is a
// workspace.
inline Plan MakePlan(const Shape& shape, int alignment, int64_t max_parts, const Limits& limits) {
  Plan plan = {};
  plan.channels = shape.groups * shape.channels;
  plan.positions = shape.positions;
  plan.groups = static_cast<int32_t>(shape.groups);
  plan.group_channels = static_cast<int32_t>(shape.channels);
  plan.last = shape.last;
  const int64_t contiguous = shape.last ? plan.channels : shape.positions;
  const int bytes = kUnit * shape.item;
  const bool whole = alignment % bytes == 0 && contiguous * shape.item % bytes == 0;
  plan.unit = whole && shape.item < 8 ? kUnit : 1;
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
  const auto blocks = [&] { return shape.samples * plan.sets * plan.parts; };
  for (int resident = shape.most(); resident > 1; --resident) {
    for (int groups = wanted;; groups = sets_of(groups / 2)) {
      for (int parts = 1; parts <= limits.max_cluster; parts *= 2) {
        Divide(groups, parts, true, &plan);
        if (plan.parts != parts || Resident(plan, shape, limits) < resident) continue;
        // More parts if there are few blocks, as long as each thread has some units.
        for (int more = 2 * parts;
             more <= limits.max_cluster && blocks() < limits.processors * 2 && plan.kept_units >= 4;
             more *= 2) {
          const Plan before = plan;
          Divide(groups, more, true, &plan);
          if (plan.parts != more) {
            plan = before;
            break;
          }
        }
        return plan;
      }
      const bool narrow = shape.last && groups * shape.channels * shape.item < 64;
      if (groups <= least || narrow) break;
    }
  }

  // Rows as long as the block is wide, and as many blocks as are resident.
  const int64_t row = int64_t{kThreads} * (shape.last ? plan.unit : 1);
  const int groups = shape.last ? sets_of(row / shape.channels / least * least) : wanted;
  Divide(groups, 1, false, &plan);
  const int64_t parts =
      CeilDiv(int64_t{shape.most()} * limits.processors, shape.samples * plan.sets);
  const int64_t most = std::max<int64_t>(1, plan.units * plan.passes / (plan.lanes * 4));
  Divide(groups, std::max<int64_t>(1, std::min({parts, most, max_parts})), false, &plan);
  return plan;
}

}  // namespace jax_fastops::group_norm

#endif  // JAX_FASTOPS_GROUP_NORM_PLAN_H_

// How group norm is divided over blocks, on the host and on the device.
//
// A *slot* is what a thread has of the channels at one position: a unit of neighboring channels if
// channels are last, one channel if they are first. A *unit* is one step along the positions: one
// position if channels are last, a unit of neighboring positions if they are first. So an element
// is at origin + slot * slot_step + unit * unit_step, and a thread has every lanes-th unit of each
// of its slots.
//
// A block has whole groups, a *set*, and a *part* of their units. Sums are those of a part.
#ifndef JAX_FASTOPS_GROUP_NORM_PLAN_H_
#define JAX_FASTOPS_GROUP_NORM_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "core/integer.h"

namespace jax_fastops::group_norm {

inline constexpr int kThreads = 256;
inline constexpr int kResident = 3;  // blocks of a processor
inline constexpr int kUnitBytes = 16;
// For each part, a block adds up its sums, and waits, for as long as for so many units of a thread.
inline constexpr int kPartUnits = 10;
// Units of a thread in a part, at most. The first phase of as many parts as there are blocks, and
// what they write, should stay in the L2 cache.
inline constexpr int kForwardUnits = 40, kBackwardUnits = 20;

struct Shape {
  int64_t samples, groups, channels, positions;  // channels of a group
  bool last;                                     // the channels are
  int item, accumulator;                         // bytes
  bool backward;
};

struct Plan {
  int64_t channels, positions;  // all channels
  int64_t slot_step, unit_step, part_units, units;
  int32_t groups, group_channels;
  int32_t unit;  // elements
  int32_t sets, set_groups, parts;
  int32_t width;   // slots that the block has at once
  int32_t lanes;   // threads of a slot
  int32_t passes;  // until the block has had all of its slots
  bool last;

  constexpr int set_channels() const { return set_groups * group_channels; }
  constexpr int slots_of(int64_t groups) const {
    return static_cast<int>(CeilDiv(groups * group_channels, last ? unit : 1));
  }
  constexpr int slots() const { return slots_of(set_groups); }
};

// Offsets in bytes in the shared memory of a block.
struct SharedLayout {
  int sums;        // two doubles of each group, or two accumulators of each channel
  int statistics;  // two accumulators of each group
  int base;        // one accumulator of each group
  int table;       // two accumulators of each thread and channel of a unit
  int bytes;
};

constexpr SharedLayout LayoutOf(const Plan& plan, const Shape& shape) {
  SharedLayout at = {};
  at.statistics = shape.backward ? plan.set_channels() * 2 * shape.accumulator
                                 : plan.set_groups * 2 * static_cast<int>(sizeof(double));
  at.base = at.statistics + plan.set_groups * 2 * shape.accumulator;
  at.table = static_cast<int>(RoundUp(at.base + plan.set_groups * shape.accumulator, 16));
  // Channels first, the backward has an entry for each warp and slot.
  const int warps = std::max(plan.lanes / 32, 1);
  const int entries = plan.last        ? kThreads * plan.unit
                      : shape.backward ? std::max(warps * plan.slots(), kThreads)
                                       : kThreads;
  at.bytes = at.table + entries * 2 * shape.accumulator;
  return at;
}

// Sets a set's groups, and the threads of its slots.
inline void Divide(int64_t groups, int lanes, Plan* plan) {
  plan->set_groups = static_cast<int32_t>(std::min<int64_t>(groups, plan->groups));
  plan->sets = static_cast<int32_t>(CeilDiv(plan->groups, plan->set_groups));
  plan->lanes = lanes;
  plan->width = kThreads / lanes;
  if (plan->last) plan->width = std::min(plan->width, plan->slots());
  plan->passes = static_cast<int32_t>(CeilDiv(plan->slots(), plan->width));
}

// Channels last: sets whose slots leave few threads idle, of as many groups as possible. The groups
// of a set are a multiple of `least`.
inline void DivideLast(int64_t least, Plan* plan) {
  int64_t best = least;
  int most = 0;
  for (int64_t sets = 1; sets <= plan->groups; ++sets) {
    const int64_t groups = RoundUp(CeilDiv(plan->groups, sets), least);
    const int slots = plan->slots_of(std::min<int64_t>(groups, plan->groups));
    if (slots > kThreads) continue;
    const int busy = slots * (kThreads / slots);
    if (busy > most) most = busy, best = groups;
    if (most >= kThreads * 7 / 8 || slots < 32) break;
  }
  const int slots = plan->slots_of(std::min<int64_t>(best, plan->groups));
  Divide(best, std::max(kThreads / slots, 1), plan);
}

// Channels first: lanes are a power of two. Small groups are several in a set, in one pass. A large
// one has the fewest steps, where each pass takes as long as one unit more.
inline void DivideFirst(Plan* plan) {
  int lanes = 1;
  while (lanes < kThreads && lanes * 8 <= plan->units) lanes *= 2;
  if (plan->group_channels <= kThreads / lanes) {
    return Divide(kThreads / lanes / plan->group_channels, lanes, plan);
  }
  // Many channels have one warp each, whose sums fit into shared memory.
  const int most = plan->group_channels > kThreads ? 32 : kThreads;
  int64_t fewest = INT64_MAX;
  for (int each = 1; each <= most; each *= 2) {
    const int64_t passes = CeilDiv(plan->group_channels, kThreads / each);
    const int64_t steps = passes * (CeilDiv(plan->units, each) + 1);
    if (steps <= fewest) fewest = steps, lanes = each;
  }
  Divide(1, lanes, plan);
}

// `alignment` of the arrays in bytes. `max_parts`: the parts for whose sums there is a workspace.
inline Plan MakePlan(const Shape& shape, int alignment, int64_t max_parts, int processors) {
  Plan plan = {};
  plan.channels = shape.groups * shape.channels;
  plan.positions = shape.positions;
  plan.groups = static_cast<int32_t>(shape.groups);
  plan.group_channels = static_cast<int32_t>(shape.channels);
  plan.last = shape.last;
  const int64_t contiguous = shape.last ? plan.channels : shape.positions;
  const bool whole = alignment % kUnitBytes == 0 && contiguous * shape.item % kUnitBytes == 0;
  plan.unit = whole && shape.item < 8 ? kUnitBytes / shape.item : 1;
  // The groups of a set that begins and ends with a whole unit.
  int least = 1;
  if (shape.last) {
    least = static_cast<int>(plan.unit / std::gcd<int64_t>(plan.unit, shape.channels));
    if (least * shape.channels > int64_t{kThreads} * plan.unit) plan.unit = least = 1;
  }
  plan.slot_step = shape.last ? plan.unit : shape.positions;
  plan.unit_step = shape.last ? plan.channels : plan.unit;
  plan.units = shape.last ? shape.positions : shape.positions / plan.unit;

  if (shape.last) {
    DivideLast(least, &plan);
  } else {
    DivideFirst(&plan);
  }
  // The parts with the fewest steps of all blocks, one after the other.
  const int64_t steps = CeilDiv(plan.units, plan.lanes) * plan.passes;  // of a thread
  const int64_t blocks = int64_t{kResident} * processors, jobs = shape.samples * plan.sets;
  const int64_t few = CeilDiv(steps, shape.backward ? kBackwardUnits : kForwardUnits);
  int64_t parts = 1, fewest = INT64_MAX;
  for (int64_t more = few; more < few + 512 && more <= max_parts; ++more) {
    const int64_t all = CeilDiv(jobs * more, blocks) * (CeilDiv(steps, more) + kPartUnits);
    if (all <= fewest) fewest = all, parts = more;
  }
  if (few > max_parts) parts = max_parts;
  plan.part_units = RoundUp(CeilDiv(plan.units, parts), plan.lanes);
  plan.parts = static_cast<int32_t>(CeilDiv(plan.units, plan.part_units));
  return plan;
}

}  // namespace jax_fastops::group_norm

#endif  // JAX_FASTOPS_GROUP_NORM_PLAN_H_

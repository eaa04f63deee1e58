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
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/integer.h"

namespace jax_fastops::group_norm {

inline constexpr int kThreads = 128;
inline constexpr int kMaxCluster = 16;
inline constexpr int64_t kRowBytes = 128;  // four sectors
inline constexpr int kUnitBytes = 16;
// Blocks of a processor that have the registers for it.
inline constexpr int kBlocks = 512 / kThreads;
// Bytes of shared memory of a block that are not dynamic, and with those that the device takes.
inline constexpr int kStaticShared = 1280, kBlockShared = kStaticShared + 1024;

struct Shape {
  int64_t samples, groups, channels, positions;  // channels of a group
  bool last;                                     // the channels are
  int item, accumulator;                         // bytes
  int arrays;                                    // that are kept
  bool backward;
};

struct Limits {
  int processors = 1;
  int shared_per_block = 48 << 10, shared_per_processor = 64 << 10;
  int max_cluster = 1;
  // The clusters of 2^i blocks that are resident, if a processor has j + 1 blocks; 0 if unknown.
  int clusters[5][kBlocks] = {};
};

struct Plan {
  int64_t channels, positions;  // all channels
  int64_t slot_step, unit_step, part_units, units;
  int32_t groups, group_channels;
  int32_t unit;  // elements
  int32_t sets, set_groups, parts;
  int32_t width;           // slots that the block has at once
  int32_t lanes;           // threads of a slot
  int32_t passes;          // until the block has had all of its slots
  int32_t kept_units;      // of a thread, 0 if elements are read again
  int32_t tiles;           // sets of all samples
  int32_t clusters;        // that are launched: each has every clusters-th tile
  int32_t resident;        // blocks that a processor has at once
  int32_t delay;           // cycles from the first loads of one of them to those of the next one
  int32_t group_slots;     // that a group has a part of, at most
  int32_t table_channels;  // of a set, rounded up to 16 bytes
  double inverse_size;     // of a group
  bool last;

  constexpr int set_channels() const { return set_groups * group_channels; }
  constexpr int unit_channels() const { return last ? unit : 1; }
  constexpr int slots() const { return static_cast<int>(CeilDiv(set_channels(), unit_channels())); }
};

// Offsets in bytes in the shared memory of a block.
struct SharedLayout {
  int sums;          // two doubles of each group, or two accumulators of each channel
  int group_sums;    // two accumulators of each group, of the backward
  int coefficients;  // of a turn: two accumulators of each channel, in the backward four
  int statistics;    // two accumulators of each group
  int base;          // one accumulator of each group
  int inbox;         // of a turn: sums from all parts
  int inbox_bytes;
  int table;  // two accumulators of each thread and channel of a unit
  int kept;
  int bytes;
};

// The threads' entries of a channel in the table begin so many entries after those of the channel
// before it, so that they are in other banks.
inline constexpr int kTableStride = kThreads + 2;

constexpr SharedLayout LayoutOf(const Plan& plan, const Shape& shape) {
  SharedLayout at = {};
  const int channels = plan.set_channels(), accumulator = shape.accumulator;
  const bool backward = shape.backward;
  const int pair = 2 * (backward ? accumulator : 8);
  at.group_sums = (backward ? channels : plan.set_groups) * pair;
  at.coefficients =
      static_cast<int>(RoundUp(at.group_sums + (backward ? plan.set_groups * pair : 0), 16));
  const int turns = plan.kept_units > 0 ? 2 : 1;
  at.statistics = at.coefficients + turns * (backward ? 4 : 2) * plan.table_channels * accumulator;
  at.base = at.statistics + plan.set_groups * 2 * accumulator;
  at.inbox = static_cast<int>(RoundUp(at.base + plan.set_groups * accumulator, 16));
  if (plan.kept_units > 0) {
    const int shared = backward ? static_cast<int>(CeilDiv(channels, plan.parts)) : 0;
    at.inbox_bytes = plan.parts * (plan.set_groups + shared) * pair;
  }
  at.table = static_cast<int>(RoundUp(at.inbox + 2 * at.inbox_bytes, 16));
  // Channels first, the backward has an entry for each warp and slot.
  const int warps = std::max(plan.lanes / 32, 1);
  const int entries = plan.last  ? kTableStride * plan.unit
                      : backward ? std::max(warps * plan.slots(), kThreads)
                                 : kThreads;
  at.kept = static_cast<int>(RoundUp(at.table + entries * 2 * accumulator, 16));
  at.bytes = at.kept + plan.kept_units * kThreads * plan.unit * shape.item * shape.arrays;
  return at;
}

// `alignment` of the arrays in bytes, at most 16. `max_parts`: the parts for whose sums there is a
// workspace.
Plan MakePlan(const Shape& shape, int alignment, int64_t max_parts, const Limits& limits);

}  // namespace jax_fastops::group_norm

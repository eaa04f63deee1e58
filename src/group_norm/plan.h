// How group norm is divided over blocks, on the host and on the device.
//
// A *slot* is what a thread has of the channels at one position: a unit of neighboring channels if
// channels are last, one channel if they are first. A *unit* is one step along the positions: one
// position if channels are last, a unit of neighboring positions if they are first. So an element
// is at origin + slot * slot_step + unit * unit_step, and a thread has every lanes-th unit of each
// of its slots.
//
// A block has whole groups, a *set*, and a *part* of their units. The set of a sample is a *tile*.
// The parts of a tile exchange their sums: they are a cluster, or all blocks of a launch are
// resident. A thread keeps its first units in shared memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/fast_divide.h"
#include "core/integer.h"

namespace jax_fastops::group_norm {

inline constexpr int kThreads = 256;
inline constexpr int kUnitBytes = 16;
inline constexpr int kMaxLogCluster = 4;
// Blocks of a processor that have the registers for it, at most.
inline constexpr int kMaxBlocks = 4;
// Bytes of shared memory of a block that are not dynamic, and with those that the device takes.
inline constexpr int kStaticShared = 512, kBlockShared = kStaticShared + 1024;
// The threads' entries of a channel in the table of sums begin so many entries after those of the
// channel before it, so that they are in other banks.
inline constexpr int kTableStride = kThreads + 2;

struct Shape {
  int64_t samples, groups, channels, positions;  // channels of a group
  bool last;                                     // the channels are
  int item, accumulator;                         // bytes
  int arrays;                                    // that are read
};

struct Plan {
  int64_t channels, positions;  // all channels
  int64_t slot_step, unit_step, part_units, units;
  int32_t groups, group_channels;
  int32_t unit;  // elements
  int32_t sets, set_groups, parts;
  int32_t width;         // slots that the block has at once
  int32_t lanes;         // threads of a slot
  int32_t passes;        // until the block has had all of its slots
  int32_t kept;          // units of a thread in shared memory, at most
  int32_t kept_at;       // in bytes
  int32_t row;           // of a coefficient of all channels of a set, in accumulators
  int32_t shared_bytes;  // of a block
  double inverse_size;   // of a group
  bool last, clusters;   // the channels are; the parts of a tile are a cluster
  // `inner`: width if channels are last, lanes if they are first.
  FastDivisor by_parts, by_sets, by_inner, by_lanes, by_group_channels;

  constexpr int set_channels() const { return set_groups * group_channels; }
  constexpr int unit_channels() const { return last ? unit : 1; }
  // Of all passes of a thread.
  constexpr int64_t thread_units() const { return passes * CeilDiv(part_units, lanes); }
  constexpr int slots() const { return static_cast<int>(CeilDiv(set_channels(), unit_channels())); }
};

// A block has in shared memory, in accumulators: rows of coefficients of channels, the two sums of
// each channel and of each group, four numbers of each group, a table of sums, two of each thread
// and channel of a unit, and the units that are kept.
inline constexpr int kCoefficients = 5;
constexpr int GroupSumsAt(const Plan& plan) { return (kCoefficients + 2) * plan.row; }
constexpr int GroupsAt(const Plan& plan) {
  return GroupSumsAt(plan) + static_cast<int>(RoundUp(2 * plan.set_groups, 4));
}
constexpr int TableAt(const Plan& plan) { return GroupsAt(plan) + 4 * plan.set_groups; }

struct Limits {
  int processors = 1, blocks = 1;  // blocks of a processor by their registers
  int shared_per_block = 48 << 10, shared_per_processor = 64 << 10;
  // The blocks that run at once in clusters of 2^i blocks, if a processor has j + 1; 0 if none.
  int resident[kMaxLogCluster + 1][kMaxBlocks] = {};
  bool cooperative = false;  // resident blocks may wait for each other
};

// `alignment` of the arrays in bytes, at most 16. `max_parts`: the parts for whose sums there is a
// workspace.
Plan MakePlan(const Shape& shape, int alignment, int64_t max_parts, const Limits& limits);

}  // namespace jax_fastops::group_norm

// The plan of an element-wise backward over broadcast operands: how it is cut into boxes. The host
// computes it once per shape. elementwise/backward.cuh describes how a block processes a box.
//
// The innermost dimension is cut into chunks. The other dimensions are sorted into two sets, A and
// B, so that every summed gradient keeps all dimensions of a set or none. A box is a range of
// indices into A, a range of indices into B, and some chunks. A gradient has one partial sum for
// every element that it keeps, and for every box along the dimensions that it does not keep.
#ifndef JAX_FASTOPS_ELEMENTWISE_PLAN_H_
#define JAX_FASTOPS_ELEMENTWISE_PLAN_H_

#include <cstdint>

#include "core/broadcast.h"

namespace jax_fastops::cuda {

inline constexpr int kMaxSums = 3;
inline constexpr int kMaxColumnSums = 2;  // kept in registers
inline constexpr int kBoxThreads = 256;
inline constexpr int kTableBytes = 12 << 10;  // of shared memory: the offsets of a box's rows
// Of shared memory, for slots. Four blocks of this size fit on an SM of an H100.
inline constexpr int kMostSlotBytes = 32 << 10;

// A gradient that is summed.
struct SumPlan {
  bool keeps_a = true, keeps_b = true, keeps_inner = true;
  // Partial sums [parts_a][parts_b][parts_inner]. Along kept dimensions, parts are elements.
  int64_t parts_a = 1, parts_b = 1, parts_inner = 1;
  bool complete = false;  // as many parts as elements

  int64_t parts() const { return parts_a * parts_b * parts_inner; }
  // One sum for each index of B, over the indices of A. The blocks keep it in shared memory.
  bool in_slots() const { return keeps_b && !keeps_a; }
};

struct BoxPlan {
  bool valid = false;
  int dims_a[kMaxBroadcastRank], dims_b[kMaxBroadcastRank];  // major to minor
  int rank_a = 0, rank_b = 0;
  int64_t length_a = 1, length_b = 1;
  int box_a = 1, box_b = 1;  // the largest number of indices in a box
  int64_t boxes_a = 1, boxes_b = 1, boxes_inner = 1;
  int lanes = 32;              // of a group, which takes a chunk together
  int range = 1;               // chunks that a group takes one after another
  int ranges = 1;              // per block, each with its own groups; their chunks interleave
  bool groups_over_a = false;  // the groups divide the indices of A, not those of B
  int slot_elements = 0;       // of the accumulator type, for all sums in slots
  SumPlan sum[kMaxSums];

  int64_t blocks() const { return boxes_a * boxes_b * boxes_inner; }
};

struct BoxLimits {
  int unit = 1;           // elements that a lane loads at once
  int units = 1;          // units of a lane per chunk
  int most_range = 64;    // of BoxPlan::range
  int table_columns = 1;  // 8 bytes each, for every index of a box
  int element_bytes = 4, accumulator_bytes = 4;
  int slot_bytes = 0;     // of shared memory
  int64_t workspace = 0;  // elements for partial sums
  int processors = 1;
};

// `arrays` are the arrays of the shape that are the `sums` gradients to sum. The plan is not valid
// if they cannot share a pass, or if the partial sums do not fit into the workspace.
BoxPlan PlanBoxes(const BroadcastShape& shape, const int* arrays, int sums,
                  const BoxLimits& limits);
// The same, cached by shape. Thread-safe.
BoxPlan CachedBoxes(const BroadcastShape& shape, const int* arrays, int sums,
                    const BoxLimits& limits);

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_PLAN_H_

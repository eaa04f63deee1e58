// How the backward of an element-wise op over broadcast operands is cut into boxes; worked out on
// the host, once per shape. cuda/elementwise_backward.cuh says what a block does with one.
//
// The innermost dimension is cut into chunks. The dimensions in front of it are sorted into two
// sets, A and B, so that every gradient that is summed keeps all or nothing of each. A box is a
// range of indices into A, one of indices into B, and some chunks. A gradient has one partial sum
// for every place that it keeps, and for every box along what it does not keep.
#ifndef JAX_FASTOPS_CUDA_ELEMENTWISE_PLAN_H_
#define JAX_FASTOPS_CUDA_ELEMENTWISE_PLAN_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "broadcast.h"

namespace jax_fastops::cuda {

inline constexpr int kMaxSums = 3;
inline constexpr int kMaxColumnSums = 2;  // kept in registers
inline constexpr int kBoxThreads = 256;
inline constexpr int kTableBytes = 12 << 10;  // of shared memory: the places of a box

// A gradient that is summed.
struct SumPlan {
  bool keeps_a = true, keeps_b = true, keeps_inner = true;
  // Partial sums [parts_a][parts_b][parts_inner]; along what it keeps they are its elements.
  int64_t parts_a = 1, parts_b = 1, parts_inner = 1;
  bool complete = false;  // as many parts as elements

  int64_t parts() const { return parts_a * parts_b * parts_inner; }
  // One sum for each index of B, over those of A: the blocks keep it in shared memory.
  bool in_slots() const { return keeps_b && !keeps_a; }
};

struct BoxPlan {
  bool valid = false;
  int dims_a[kMaxBroadcastRank], dims_b[kMaxBroadcastRank];  // major to minor
  int rank_a = 0, rank_b = 0;
  int64_t length_a = 1, length_b = 1;
  int box_a = 1, box_b = 1;  // the most indices of a box
  int64_t boxes_a = 1, boxes_b = 1, boxes_inner = 1;
  int lanes = 32;              // a group, which takes a chunk together
  int range = 1;               // chunks that a group takes one after the other
  int ranges = 1;              // of a block, for other groups each; their chunks alternate
  bool groups_over_a = false;  // the groups share the indices of A, not those of B
  int slot_elements = 0;       // of the accumulator's type, for all sums in slots
  SumPlan sum[kMaxSums];

  int64_t blocks() const { return boxes_a * boxes_b * boxes_inner; }
};

struct BoxLimits {
  int unit = 1;           // elements that a lane loads at once
  int units = 1;          // of them per chunk
  int table_columns = 1;  // 8 bytes each, for every index of a box
  int element_bytes = 4, accumulator_bytes = 4;
  int slot_bytes = 0;     // of shared memory
  int64_t workspace = 0;  // elements for partial sums
  int processors = 1;
};

// `arrays`: those of the shape that are the `sums` gradients to be summed. Not valid where they
// cannot share one pass, or where the partial sums do not fit into the workspace.
BoxPlan PlanBoxes(const BroadcastShape& shape, const int* arrays, int sums,
                  const BoxLimits& limits);
// The same, made once for each shape. Thread-safe.
BoxPlan CachedBoxes(const BroadcastShape& shape, const int* arrays, int sums,
                    const BoxLimits& limits);

// The shape with rows of which every array has neighbours, or one element. Where it does not (the
// bytes of a mask whose rows have one bit; copies of an operand along a dimension that is cut to
// nothing), rows of one element are put behind. False if there is no room for a dimension more.
bool WithRows(const BroadcastShape& shape, BroadcastShape* with_rows);

// What a device has.
struct DeviceLimits {
  int processors = 0;
  int slot_bytes = 0;
};
cudaError_t GetDeviceLimits(DeviceLimits* limits);

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CUDA_ELEMENTWISE_PLAN_H_

// Launches the backward of an element-wise op (elementwise/backward.cuh), for any op.
#ifndef JAX_FASTOPS_ELEMENTWISE_BACKWARD_H_
#define JAX_FASTOPS_ELEMENTWISE_BACKWARD_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"
#include "elementwise/broadcast.h"
#include "elementwise/elementwise.h"
#include "elementwise/plan.h"

namespace jax_fastops::cuda {

struct BackwardOperand {
  const void* data;
  bool needed;  // for the requested gradients
  bool wide;    // has the accumulator type
  bool one;     // one element for each row
  bool full;    // has the result's shape
  bool units;   // whole units of rows are aligned to 16 bytes
};

struct BackwardSum {
  void* out;  // the gradient, or its partial sums
  SumKind kind;
  bool wide;  // has the accumulator type
  bool keeps_a, keeps_b;
  int64_t plane;  // partial sums: from one part to the next
};

struct BackwardParams {
  // Arrays with offsets: one of the result's shape, the operands, and the sums.
  static constexpr int kArrays = 1 + kMaxElementwiseOperands + kMaxSums;

  const void* dy;
  BackwardOperand operand[kMaxElementwiseOperands];
  BackwardSum sum[kMaxSums];
  int64_t elements, n;
  int64_t length_a, length_b, boxes_a, boxes_b;
  uint32_t classes, strips, segments;
  int lanes, slots;
  int column;  // the general kernel: the gradient that is a sum of columns, or -1
  bool over_a, any_rows;
  // Dimensions of A, then of B.
  int rank_a, rank;
  int64_t size[kMaxBroadcastRank];
  int64_t stride[kArrays][kMaxBroadcastRank];
};

using BackwardKernel = void (*)(BackwardParams);

// What the launcher must know of an op's kernels for one element type.
struct BackwardKernels {
  int operands, gradients;
  bool bits;   // operand 0 is a bitmask
  int blocks;  // on a processor
  // Which operands the requested gradients need.
  void (*needed)(const bool* wanted, bool* needed);
  // The kernel for these sums of columns (BackwardPlan::columns), or the general one (-1). Null if
  // the element type has only that.
  BackwardKernel (*choose)(int columns, bool crossed);
};

// Arrays of `shape`: the operands, then the gradients.
cudaError_t LaunchBackward(const BackwardKernels& kernels, const BroadcastShape& shape, DType dtype,
                           const void* dy, const Operand* operands, const Gradient* gradients,
                           SumWorkspace workspace, cudaStream_t stream);

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_BACKWARD_H_

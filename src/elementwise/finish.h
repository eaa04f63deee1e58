// The second pass of an element-wise backward: adds up the partial sums of a gradient.
#ifndef JAX_FASTOPS_ELEMENTWISE_FINISH_H_
#define JAX_FASTOPS_ELEMENTWISE_FINISH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/broadcast.h"
#include "core/dtype.h"
#include "elementwise/plan.h"

namespace jax_fastops::cuda {

struct FinishKernels;  // the family of KernelOf

struct FinishSum {
  const void* parts;
  void* out;
  bool wide;
  // Along A, B and the innermost dimension: the number of kept and of added elements, one of which
  // is 1. `step` is the stride of the partial sums.
  int64_t kept[3], added[3], step[3];
  // The dimensions of A and B in the gradient.
  int rank_a, rank_b;
  int64_t size_a[kMaxBroadcastRank], size_b[kMaxBroadcastRank];
  int64_t stride_a[kMaxBroadcastRank], stride_b[kMaxBroadcastRank];

  int64_t results() const { return kept[0] * kept[1] * kept[2]; }
  int64_t terms() const { return added[0] * added[1] * added[2]; }
};

// The sums of one pass that the second kernel finishes.
class SumsToFinish {
 public:
  // Adds a sum, which the caller fills in.
  FinishSum& Add() { return sum_[count_++]; }

  // Adds a sum over the planes of partial sums [planes][sizes][inner]. `strides` are the gradient's
  // strides along `sizes`.
  void AddPlanes(const void* parts, int64_t planes, const int64_t (&sizes)[2],
                 const int64_t (&strides)[2], int64_t inner, void* out, bool wide) {
    FinishSum& sum = Add();
    const int64_t kept = sizes[0] * sizes[1];
    sum.parts = parts;
    sum.out = out;
    sum.wide = wide;
    const int64_t all_kept[3] = {1, kept, inner}, all_added[3] = {planes, 1, 1};
    const int64_t steps[3] = {kept * inner, inner, 1};
    for (int i = 0; i < 3; ++i) {
      sum.kept[i] = all_kept[i];
      sum.added[i] = all_added[i];
      sum.step[i] = steps[i];
    }
    sum.rank_a = 0;
    sum.rank_b = 2;
    for (int d = 0; d < 2; ++d) {
      sum.size_b[d] = sizes[d];
      sum.stride_b[d] = strides[d];
    }
  }

  // Adds up the sums of an op whose elements have the type `dtype`.
  cudaError_t Launch(DType dtype, cudaStream_t stream) const;

 private:
  FinishSum sum_[kMaxSums] = {};
  int count_ = 0;
};

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_FINISH_H_

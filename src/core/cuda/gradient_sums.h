// The second pass of an element-wise backward: adds up the partial sums of a gradient.
#pragma once

#include <cuda_runtime_api.h>

#include "core/dtype.h"
#include "core/plan_elements.h"

namespace jax_fastops::cuda {

struct GradientSumsKernels;  // the family of KernelOf

// The sums of one pass that the second kernel finishes.
class SumsToFinish {
 public:
  void Add(const FinishSum& sum) { sum_[count_++] = sum; }

  // Adds up the sums of an op whose elements have the type `dtype`.
  cudaError_t Launch(DType dtype, cudaStream_t stream) const;

 private:
  FinishSum sum_[kMaxGradients] = {};
  int count_ = 0;
};

}  // namespace jax_fastops::cuda

// The second pass of an element-wise backward: adds up the partial sums of a gradient.
#ifndef JAX_FASTOPS_CORE_CUDA_GRADIENT_SUMS_H_
#define JAX_FASTOPS_CORE_CUDA_GRADIENT_SUMS_H_

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

#endif  // JAX_FASTOPS_CORE_CUDA_GRADIENT_SUMS_H_

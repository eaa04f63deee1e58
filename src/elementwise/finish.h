// The second kernel of an element-wise backward: adds up partial sums.
#ifndef JAX_FASTOPS_ELEMENTWISE_FINISH_H_
#define JAX_FASTOPS_ELEMENTWISE_FINISH_H_

#include <cuda_runtime_api.h>

#include "core/dtype.h"
#include "elementwise/plan.h"

namespace jax_fastops::cuda {

struct FinishSum {
  FinishPlan plan;
  const void* parts;
  void* out;
  bool wide;  // the gradient has the accumulator type
};

// Loads the kernels on the current device.
cudaError_t LoadFinishKernels();

// Adds up `count` sums, at most kMaxSums. `dtype` is that of the op.
cudaError_t FinishSums(const FinishSum* sums, int count, DType dtype, cudaStream_t stream);

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_FINISH_H_

// The interface between softmax.cu and the files that instantiate the kernels, one for each element
// type.
#ifndef JAX_FASTOPS_SOFTMAX_RUN_H_
#define JAX_FASTOPS_SOFTMAX_RUN_H_

#include <cuda_runtime_api.h>

#include "softmax/math.cuh"
#include "softmax/plan.h"

namespace jax_fastops::cuda::softmax {

struct Softmax;  // the family, in the list of kernels

// Enqueues the kernels of a plan, of the backward if kGrad.
template <typename T, bool kGrad>
cudaError_t Run(const Plan& plan, const Params& p, void* workspace, cudaStream_t stream);

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_RUN_H_

// Layer norm and RMS norm, with what is added before them, on raw device pointers.
//
// Every function enqueues kernels (and perhaps memsets) on `stream` and returns what the launch
// returned. None allocates or synchronises, so all may be captured into a CUDA graph, once their
// kernels were loaded into the device. Sizes of zero succeed; without rows the partial sums are
// zeroed. Pointers need no more alignment than an element does; outputs must not overlap inputs.
#ifndef JAX_FASTOPS_CUDA_NORM_H_
#define JAX_FASTOPS_CUDA_NORM_H_

#include <cuda_runtime_api.h>

#include "dtype.h"
#include "norm_shape.h"

namespace jax_fastops::cuda {

cudaError_t NormForward(const NormShape& shape, NormKind kind, DType dtype, double eps,
                        const NormForwardArrays& arrays, cudaStream_t stream);

cudaError_t NormBackward(const NormShape& shape, NormKind kind, DType dtype,
                         const NormBackwardArrays& arrays, cudaStream_t stream);

// Load every kernel of the one and of the other into the current device, and set the attributes
// that launches need.
cudaError_t LoadNormForwardKernels();
cudaError_t LoadNormBackwardKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CUDA_NORM_H_

// Layer norm and RMS norm, with the residual and input bias that are added before them, on raw
// device pointers.
//
// Every function enqueues kernels (and possibly memsets) on `stream` and returns the result of the
// launches. The functions do not allocate or synchronize. Once their kernels are loaded on the
// device, they may be captured into a CUDA graph. Empty arrays succeed; if there are no rows, the
// partial sums are set to zero. Pointers need only the alignment of an element; outputs must not
// overlap inputs.
#ifndef JAX_FASTOPS_NORM_NORM_CUDA_H_
#define JAX_FASTOPS_NORM_NORM_CUDA_H_

#include <cuda_runtime_api.h>

#include "core/dtype.h"
#include "norm/shape.h"

namespace jax_fastops::cuda {

cudaError_t NormForward(const NormShape& shape, NormKind kind, DType dtype, double eps,
                        const NormForwardArrays& arrays, cudaStream_t stream);

cudaError_t NormBackward(const NormShape& shape, NormKind kind, DType dtype,
                         const NormBackwardArrays& arrays, cudaStream_t stream);

// Load the kernels of the forward and of the backward on the current device, and set the function
// attributes that launches need.
cudaError_t LoadNormForwardKernels();
cudaError_t LoadNormBackwardKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_NORM_NORM_CUDA_H_

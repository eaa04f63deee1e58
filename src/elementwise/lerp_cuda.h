// CUDA launchers of lerp. elementwise/lerp.cu describes the kernels.
#ifndef JAX_FASTOPS_ELEMENTWISE_LERP_CUDA_H_
#define JAX_FASTOPS_ELEMENTWISE_LERP_CUDA_H_

#include <cuda_runtime_api.h>

#include "core/dtype.h"
#include "elementwise/broadcast.h"
#include "elementwise/elementwise.h"

namespace jax_fastops::cuda {

// Loads all kernels on the current device. Must be called before a stream is captured.
cudaError_t LoadLerpKernels();

// out = start + weight * (end - start). Arrays of `shape`: start, end, weight.
cudaError_t LerpForward(const BroadcastShape& shape, DType dtype, const Operand operands[3],
                        void* out, cudaStream_t stream);

// Arrays of `shape`: start, end, weight, and their gradients. A gradient that is not requested has
// the result's strides.
cudaError_t LerpBackward(const BroadcastShape& shape, DType dtype, const void* dy,
                         const Operand operands[3], const Gradient gradients[3],
                         SumWorkspace workspace, cudaStream_t stream);

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_LERP_CUDA_H_

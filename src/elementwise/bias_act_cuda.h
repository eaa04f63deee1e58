// CUDA launchers of bias_act. elementwise/bias_act.cu describes the kernels.
#ifndef JAX_FASTOPS_ELEMENTWISE_BIAS_ACT_CUDA_H_
#define JAX_FASTOPS_ELEMENTWISE_BIAS_ACT_CUDA_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"
#include "elementwise/broadcast.h"
#include "elementwise/elementwise.h"

namespace jax_fastops::cuda {

// Loads all kernels on the current device. Must be called before a stream is captured.
cudaError_t LoadBiasActKernels();

// out = act(x + bias). Arrays of `shape`: x, bias, and for relu with a mask also the mask, whose
// strides count bits. `mask` is null if it is not requested. Bit i of a byte is set if element i of
// its eight elements is greater than 0. Unused bits at the end of a row are 0.
cudaError_t BiasActForward(const BroadcastShape& shape, DType dtype, Activation activation,
                           const Operand operands[2], void* out, uint8_t* mask,
                           cudaStream_t stream);

// Arrays of `shape`: x, bias, dx, dbias. A gradient that is not requested has the result's strides.
cudaError_t BiasActBackward(const BroadcastShape& shape, DType dtype, Activation activation,
                            const void* dy, const Operand operands[2], const Gradient gradients[2],
                            SumWorkspace workspace, cudaStream_t stream);

// Arrays of `shape`: the mask, dx, dbias. The cotangent is selected by the mask, never multiplied.
cudaError_t BiasReluBackward(const BroadcastShape& shape, DType dtype, const void* dy,
                             const uint8_t* mask, const Gradient gradients[2],
                             SumWorkspace workspace, cudaStream_t stream);

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_BIAS_ACT_CUDA_H_

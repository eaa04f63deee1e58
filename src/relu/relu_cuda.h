// ReLU and add + ReLU on raw device pointers.
//
// Every function enqueues at most one kernel on `stream` and returns the result of the launch. The
// functions do not allocate or synchronize. Once LoadReluKernels has run on the device, they may be
// captured into a CUDA graph. Empty arrays succeed without a launch. Pointers need only the
// alignment of an element; outputs must not overlap inputs.
#ifndef JAX_FASTOPS_RELU_RELU_CUDA_H_
#define JAX_FASTOPS_RELU_RELU_CUDA_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"

namespace jax_fastops::cuda {

// y = max(x, 0). NaN stays NaN, and -0 becomes +0.
cudaError_t Relu(DType dtype, const void* x, void* y, int64_t size, cudaStream_t stream);

// Relu, and the mask u8[rows, ceil(columns / 8)]: bit j of byte b of a row is set if element 8 * b
// + j of the row is greater than zero. Bits past the end of the row are 0.
cudaError_t ReluForward(DType dtype, const void* x, void* y, uint8_t* mask, int64_t rows,
                        int64_t columns, cudaStream_t stream);

// dx = dy where the mask bit is set, and +0 elsewhere, whatever dy is there.
cudaError_t ReluBackward(DType dtype, const uint8_t* mask, const void* dy, void* dx, int64_t rows,
                         int64_t columns, cudaStream_t stream);

// z = max(x + y, 0). The sum is rounded to the element type first.
cudaError_t AddRelu(DType dtype, const void* x, const void* y, void* z, int64_t size,
                    cudaStream_t stream);

// AddRelu, and the mask of the sum.
cudaError_t AddReluForward(DType dtype, const void* x, const void* y, void* z, uint8_t* mask,
                           int64_t rows, int64_t columns, cudaStream_t stream);

// Loads all kernels of this header on the current device, before a stream is captured (see
// load_kernels.h). After the first call on a device it returns immediately.
cudaError_t LoadReluKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_RELU_RELU_CUDA_H_

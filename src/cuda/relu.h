// ReLU and add + ReLU on raw device pointers.
//
// Every function enqueues at most one kernel on `stream` and returns what the launch returned. None
// allocates or synchronises, so all may be captured into a CUDA graph, once LoadReluKernels has run
// on the device. Sizes of zero succeed without a launch. Pointers need no more alignment than an
// element does; outputs must not overlap inputs.
#ifndef JAX_FASTOPS_CUDA_RELU_H_
#define JAX_FASTOPS_CUDA_RELU_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtype.h"

namespace jax_fastops::cuda {

// y = max(x, 0), NaN where x is NaN, +0 for -0.
cudaError_t Relu(DType dtype, const void* x, void* y, int64_t size, cudaStream_t stream);

// The same, and mask u8[rows, ceil(columns / 8)]: bit j of byte b of a row says that element 8 * b
// + j of the row is greater than zero. Bits past the row's end are 0.
cudaError_t ReluForward(DType dtype, const void* x, void* y, uint8_t* mask, int64_t rows,
                        int64_t columns, cudaStream_t stream);

// dx = dy where the mask's bit is set, elsewhere +0 (whatever dy is there).
cudaError_t ReluBackward(DType dtype, const uint8_t* mask, const void* dy, void* dx, int64_t rows,
                         int64_t columns, cudaStream_t stream);

// z = max(x + y, 0), the sum rounded to the element type first.
cudaError_t AddRelu(DType dtype, const void* x, const void* y, void* z, int64_t size,
                    cudaStream_t stream);

// The same, and the mask of the sum.
cudaError_t AddReluForward(DType dtype, const void* x, const void* y, void* z, uint8_t* mask,
                           int64_t rows, int64_t columns, cudaStream_t stream);

// Loads every kernel above into the current device. The CUDA runtime otherwise loads a kernel at
// its first launch, which fails while a stream is being captured. After the first call on a device
// it costs nothing.
cudaError_t LoadReluKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CUDA_RELU_H_

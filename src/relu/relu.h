// ReLU and add + ReLU with a bitmask, on raw pointers.
//
// Arrays are dense, rows x columns. A mask has ceil(columns / 8) bytes per row. Bit j of byte b is
// set if element 8 * b + j of the row is greater than zero. The unused high bits of a row's last
// byte are 0. Without a mask, or if columns is a multiple of 8, rows may be merged into one. Empty
// arrays succeed. Pointers need only the alignment of an element. Outputs must not overlap inputs.
#ifndef JAX_FASTOPS_RELU_RELU_H_
#define JAX_FASTOPS_RELU_RELU_H_

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"

namespace jax_fastops::FASTOPS_BACKEND {

// y = max(x, 0). NaN stays NaN, and -0 becomes +0. `mask` may be null.
Status Relu(DType dtype, const void* x, void* y, uint8_t* mask, int64_t rows, int64_t columns,
            Queue queue);

// z = max(x + y, 0). The sum is first rounded to the dtype. `mask` may be null.
Status AddRelu(DType dtype, const void* x, const void* y, void* z, uint8_t* mask, int64_t rows,
               int64_t columns, Queue queue);

// dx = dy where the mask bit is set, and +0 elsewhere. This is a selection, so NaN and Inf in dy
// have no effect if the bit is 0.
Status ReluBackward(DType dtype, const uint8_t* mask, const void* dy, void* dx, int64_t rows,
                    int64_t columns, Queue queue);

// CUDA only: loads the kernels on the current device.
Status LoadReluKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND

#endif  // JAX_FASTOPS_RELU_RELU_H_

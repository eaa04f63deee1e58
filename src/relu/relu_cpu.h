// ReLU and add + ReLU with a bitmask, on the CPU.
//
// Arrays are dense, rows x columns. A mask has ceil(columns / 8) bytes per row. Bit j of byte b is
// set if element 8 * b + j of the row is greater than zero. The unused high bits of a row's last
// byte are 0. Without a mask, or if columns is a multiple of 8, rows may be merged into one.
// Pointers need no alignment. An output may be the same array as an input of the same size, but
// must not overlap it otherwise.
#ifndef JAX_FASTOPS_RELU_RELU_CPU_H_
#define JAX_FASTOPS_RELU_RELU_CPU_H_

#include <cstdint>

#include "core/cpu/parallel.h"
#include "core/dtype.h"

namespace jax_fastops::cpu {

// y = max(x, 0). NaN stays NaN, and -0 becomes +0. `mask` may be null.
void Relu(DType dtype, const void* x, void* y, uint8_t* mask, int64_t rows, int64_t columns,
          Executor& executor);

// z = relu(x + y). The sum is first rounded to the dtype. `mask` may be null.
void AddRelu(DType dtype, const void* x, const void* y, void* z, uint8_t* mask, int64_t rows,
             int64_t columns, Executor& executor);

// dx = bit ? dy : +0. This is a selection, so NaN and Inf in dy have no effect if the bit is 0.
void ReluBackward(DType dtype, const uint8_t* mask, const void* dy, void* dx, int64_t rows,
                  int64_t columns, Executor& executor);

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_RELU_RELU_CPU_H_

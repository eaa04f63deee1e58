// ReLU and add + ReLU with a bitmask, on the CPU.
//
// Arrays are rows x columns, dense. A mask has ceil(columns / 8) bytes per row; bit j of byte b
// says that element 8 * b + j of the row is greater than zero, and the unused high bits of a row's
// last byte are 0. Where no mask is involved, or columns is a multiple of 8, rows may be merged
// into one. Pointers need no alignment. Outputs may be the same array as an input of their size,
// but must not overlap otherwise.
#ifndef JAX_FASTOPS_CPU_RELU_H_
#define JAX_FASTOPS_CPU_RELU_H_

#include <cstdint>

#include "cpu/parallel.h"
#include "dtype.h"

namespace jax_fastops::cpu {

// y = max(x, 0), where NaN stays and -0 becomes +0. `mask` may be null.
void Relu(DType dtype, const void* x, void* y, uint8_t* mask, int64_t rows, int64_t columns,
          Executor& executor);

// z = relu(x + y), the sum rounded to the type first. `mask` may be null.
void AddRelu(DType dtype, const void* x, const void* y, void* z, uint8_t* mask, int64_t rows,
             int64_t columns, Executor& executor);

// dx = bit ? dy : +0. A selection: whatever dy holds where the bit is 0 has no influence.
void ReluBackward(DType dtype, const uint8_t* mask, const void* dy, void* dx, int64_t rows,
                  int64_t columns, Executor& executor);

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_CPU_RELU_H_

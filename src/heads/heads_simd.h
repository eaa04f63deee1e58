// The kernels of the head ops for one instruction set. isa.h says what this header may contain.
#pragma once

#include <stdint.h>

#include "core/cpu/isa.h"
#include "core/dtype.h"

namespace jax_fastops::cpu {

// Strides are in bytes, from row to row. The elements of a row are contiguous.
struct HeadsKernels {
  // y[r, i] = x[r, i] + bias[i] for r < rows and i < n, rounded once. The bias has the type of x,
  // or, if `wide`, the accumulator type.
  void (*add_bias)(const char* x, int64_t x_stride, const void* bias, bool wide, char* y,
                   int64_t y_stride, int64_t rows, int64_t n);
  // y[r, i] = x[r, i], and sums[i] += sum over r of x[r, i]. If `first`, the sums are set instead.
  // The sum over r starts from 0 and goes in order.
  void (*add_rows)(const char* x, int64_t x_stride, char* y, int64_t y_stride, int64_t rows,
                   int64_t n, void* sums, bool first);
};
FASTOPS_DECLARE_KERNELS(HeadsKernels, heads_kernels[kNumDTypes])

}  // namespace jax_fastops::cpu

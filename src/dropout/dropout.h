// Dropout, on raw pointers.
//
// Arrays are dense, rows x columns. core/philox.h defines which elements are kept. Empty
// arrays succeed. Pointers need only the alignment of an element. The output may be x or the
// residual.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"
#include "core/philox.h"

namespace jax_fastops {

struct DropoutArrays {
  const void* x = nullptr;
  const void* bias = nullptr;      // one element for each column; null: absent
  bool wide_bias = false;          // the bias has the accumulator type
  const void* residual = nullptr;  // null: absent
  void* y = nullptr;
};

}  // namespace jax_fastops

namespace jax_fastops::FASTOPS_BACKEND {

// y = (x + bias) * scale for the elements that are kept, and +0 for the others; then the residual
// is added. Dropped elements are selected, never multiplied by 0. All is computed in the
// accumulator type, to which `scale` is rounded, and rounded once.
Status Dropout(DType dtype, const DropoutArrays& arrays, int64_t rows, int64_t columns,
               const RowDropout& dropout, Queue queue);

// CUDA only: loads the kernels on the current device.
Status LoadDropoutKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND

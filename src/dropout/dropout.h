// Dropout, on raw pointers.
//
// Arrays are dense, rows x columns. A row has a seed of four words (core/philox.h), which says
// which of its elements are kept. Empty arrays succeed. Pointers need only the alignment of an
// element. The output may be the input.
#ifndef JAX_FASTOPS_DROPOUT_DROPOUT_H_
#define JAX_FASTOPS_DROPOUT_DROPOUT_H_

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"

namespace jax_fastops::FASTOPS_BACKEND {

// y = x * scale for the elements whose 16 random bits are at most `largest`, and +0 for the others.
// This is a selection. The product is computed in the accumulator type, to which `scale` is
// rounded. `largest` is below 2^16.
Status Dropout(DType dtype, const void* x, const uint32_t* seeds, void* y, int64_t rows,
               int64_t columns, uint32_t largest, double scale, Queue queue);

// CUDA only: loads the kernels on the current device.
Status LoadDropoutKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND

#endif  // JAX_FASTOPS_DROPOUT_DROPOUT_H_

// Transposition of dense arrays on raw pointers: any rank, any permutation, any element of 1, 2, 4,
// 8 or 16 bytes. Empty arrays succeed. Pointers need only the alignment of an element; x and y must
// not overlap.
#pragma once

#include <cstdint>

#include "core/backend.h"

namespace jax_fastops::FASTOPS_BACKEND {

// y[i0, i1, ...] = x[...], where dimension i of y is dimension axes[i] of x. `dims` are those of x.
Status Transpose(const void* x, void* y, const int64_t* dims, const int* axes, int rank,
                 int64_t itemsize, Queue queue);

// CUDA only: loads the kernels on the current device.
Status LoadTransposeKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND

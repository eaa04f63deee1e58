// Transposition of dense arrays on the CPU: any rank, any permutation, any element of 1, 2, 4, 8 or
// 16 bytes. Pointers need no alignment. x and y must not overlap.
#ifndef JAX_FASTOPS_TRANSPOSE_TRANSPOSE_CPU_H_
#define JAX_FASTOPS_TRANSPOSE_TRANSPOSE_CPU_H_

#include <cstdint>

#include "core/cpu/parallel.h"

namespace jax_fastops::cpu {

// y[i0, i1, ...] = x[...], where dimension i of y is dimension axes[i] of x. `dims` are the
// dimensions of x.
void Transpose(const void* x, void* y, const int64_t* dims, const int* axes, int rank,
               int64_t itemsize, Executor& executor);

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_TRANSPOSE_TRANSPOSE_CPU_H_

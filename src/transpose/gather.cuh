// Transpositions that are neither rows nor tiles: the runs of a tile would need the same dimension,
// because one is short (3 channels), or dimensions are permuted within a small block.
//
// A thread moves a few elements, all of which it loads before it stores the first. Neighboring
// threads write neighboring elements; what they read is close together, because the dimensions are
// short, and so comes from the L1 cache. A box in shared memory, with a table of addresses, was as
// fast as plain JAX or slower, except for elements of 1 byte (docs/dev/log/transpose.md).
#ifndef JAX_FASTOPS_TRANSPOSE_GATHER_CUH_
#define JAX_FASTOPS_TRANSPOSE_GATHER_CUH_

#include <cstdint>

#include "core/cuda/offsets.cuh"
#include "core/cuda/vec.cuh"
#include "transpose/plan.h"

namespace jax_fastops::cuda::transpose {

// `in`: where each element of the output is in the input.
template <int kElement>
__global__ void __launch_bounds__(kGatherThreads)
    GatherKernel(const char* x, char* y, int64_t count,
                 const __grid_constant__ Offsets<kMaxPermutationRank> in) {
  using Element = Word<kElement>;
  const int64_t first = int64_t{blockIdx.x} * (kGatherThreads * kGathered) + threadIdx.x;
  int64_t at[kGathered];
#pragma unroll
  for (int k = 0; k < kGathered; ++k) at[k] = min(first + k * kGatherThreads, count - 1);
  in.ToOffsets(at);
  Element elements[kGathered];
#pragma unroll
  for (int k = 0; k < kGathered; ++k) elements[k] = reinterpret_cast<const Element*>(x)[at[k]];
#pragma unroll
  for (int k = 0; k < kGathered; ++k) {
    const int64_t to = first + k * kGatherThreads;
    if (to < count) reinterpret_cast<Element*>(y)[to] = elements[k];
  }
}

}  // namespace jax_fastops::cuda::transpose

#endif  // JAX_FASTOPS_TRANSPOSE_GATHER_CUH_

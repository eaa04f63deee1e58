// Transpositions in which the minor dimension stays, and is not a multiple of 16 bytes: copies of
// rows of at least 16 bytes, of any length and alignment.
//
// They are still written 16 bytes at a time: an unaligned window of the input is two aligned loads
// and a shift. If a row ends within the 16 bytes, there is a second window. Every thread computes
// offsets, so the kernel exists for 32-bit and 64-bit indices.
#ifndef JAX_FASTOPS_TRANSPOSE_ROWS_CUH_
#define JAX_FASTOPS_TRANSPOSE_ROWS_CUH_

#include <cstdint>

#include "transpose/bytes.cuh"
#include "transpose/plan.h"
#include "transpose/units.cuh"

namespace jax_fastops::cuda::transpose {

// The first `count` bytes of a, then those of b.
__device__ __forceinline__ uint4 Merge(uint4 a, uint4 b, int count) {
  const auto merge = [](uint32_t a, uint32_t b, int count) {
    const uint32_t mask = count >= 4 ? ~0u : count <= 0 ? 0u : (1u << 8 * count) - 1;
    return (a & mask) | (b & ~mask);
  };
  a.x = merge(a.x, b.x, count);
  a.y = merge(a.y, b.y, count - 4);
  a.z = merge(a.z, b.z, count - 8);
  a.w = merge(a.w, b.w, count - 12);
  return a;
}

// The offset of the first byte of row n in the input.
template <typename Index>
__device__ __forceinline__ int64_t RowOffset(const UnitsPlan<Index>& p, Index n) {
  Index offset[1] = {n};
  ToInput(p, 1, offset);
  return static_cast<int64_t>(offset[0]);
}

template <typename Index>
__global__ void __launch_bounds__(kUnitsThreads)
    ByteRowsKernel(const char* x, char* y, const __grid_constant__ UnitsPlan<Index> p) {
  const int head = ToAlignment(y, 16);
  const int64_t bytes = static_cast<int64_t>(p.count);
  const char* end = x + bytes;
  const int64_t row = p.dims[0].size.divisor;

  Window first[kChunksPerThread], second[kChunksPerThread];
  int64_t begin[kChunksPerThread];  // of the chunk in the output; the first may begin before it
  int rest[kChunksPerThread];       // of the row, from there
  bool wide[kChunksPerThread];
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    const int64_t chunk =
        int64_t{blockIdx.x} * (kUnitsThreads * kChunksPerThread) + k * kUnitsThreads + threadIdx.x;
    begin[k] = 16 * chunk + head - 16;
    rest[k] = 16;
    wide[k] = begin[k] >= 0 && begin[k] + 16 <= bytes;
    if (!wide[k]) continue;
    Index n = static_cast<Index>(begin[k]);
    const int64_t within = static_cast<int64_t>(TakeRemainder(n, p.dims[0].size));
    const char* from = x + RowOffset(p, n) + within;
    wide[k] = Window::IsReadable(from, x, end);
    if (wide[k]) first[k] = Window(from);
    if (row - within < 16) {
      rest[k] = static_cast<int>(row - within);
      // At the end of the array there is no next row, but then the chunk has no further bytes.
      const char* next = x + RowOffset(p, static_cast<Index>(n + 1)) - rest[k];
      wide[k] = wide[k] && Window::IsReadable(next, x, end);
      if (wide[k]) second[k] = Window(next);
    }
  }
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    if (wide[k]) {
      uint4 value = Bytes(first[k]);
      if (rest[k] < 16) value = Merge(value, Bytes(second[k]), rest[k]);
      Store(y + begin[k], value);
    } else {
      for (int64_t b = max(begin[k], int64_t{0}); b < min(begin[k] + 16, bytes); ++b) {
        Index n = static_cast<Index>(b);
        const int64_t within = static_cast<int64_t>(TakeRemainder(n, p.dims[0].size));
        y[b] = x[RowOffset(p, n) + within];
      }
    }
  }
}

}  // namespace jax_fastops::cuda::transpose

#endif  // JAX_FASTOPS_TRANSPOSE_ROWS_CUH_

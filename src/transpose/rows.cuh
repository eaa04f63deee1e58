// Transpositions in which the minor dimension stays: copies of rows.
//
// Each thread moves a few units of 16 bytes that are neighbors of other threads' units in the
// output. Rows whose length is not a multiple of 16 bytes are still written 16 bytes at a time: an
// unaligned window of the input is two aligned loads and a shift. If a row ends within the 16
// bytes, there is a second window. Every thread computes offsets, so the kernels exist for 32-bit
// and 64-bit indices.
#pragma once

#include <cstdint>

#include "transpose/bytes.cuh"
#include "transpose/plan.h"

namespace jax_fastops::cuda::transpose {

// The source of unit or byte n of the output, from dimension `first` on.
template <typename Index>
__device__ __forceinline__ int64_t InputOffset(const RowsPlan<Index>& p, int first, Index n) {
  int64_t offset = 0;
  for (int d = first; d < p.rank - 1; ++d) {
    offset += static_cast<int64_t>(TakeRemainder(n, p.dims[d].size)) * p.dims[d].in_stride;
  }
  return offset + static_cast<int64_t>(n) * p.dims[p.rank - 1].in_stride;
}

// Rows of whole units.
template <typename Index>
__global__ void __launch_bounds__(kRowsThreads)
    UnitRowsKernel(const char* x, char* y, const __grid_constant__ RowsPlan<Index> p) {
  const Index begin = Index{blockIdx.x} * (kRowsThreads * kUnitsPerThread) + threadIdx.x;
  uint4 units[kUnitsPerThread];
#pragma unroll
  for (int k = 0; k < kUnitsPerThread; ++k) {
    const Index n = begin + k * kRowsThreads;
    if (n < p.count) units[k] = Load<uint4>(x + InputOffset(p, 0, n));
  }
#pragma unroll
  for (int k = 0; k < kUnitsPerThread; ++k) {
    const Index n = begin + k * kRowsThreads;
    if (n < p.count) Store(y + static_cast<int64_t>(n) * 16, units[k]);
  }
}

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

// Rows of at least 16 bytes, of any length and alignment.
template <typename Index>
__global__ void __launch_bounds__(kRowsThreads)
    ByteRowsKernel(const char* x, char* y, const __grid_constant__ RowsPlan<Index> p) {
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
        int64_t{blockIdx.x} * (kRowsThreads * kChunksPerThread) + k * kRowsThreads + threadIdx.x;
    begin[k] = 16 * chunk + head - 16;
    rest[k] = 16;
    wide[k] = begin[k] >= 0 && begin[k] + 16 <= bytes;
    if (!wide[k]) continue;
    Index n = static_cast<Index>(begin[k]);
    const int64_t within = static_cast<int64_t>(TakeRemainder(n, p.dims[0].size));
    const char* from = x + InputOffset(p, 1, n) + within;
    wide[k] = Window::IsReadable(from, x, end);
    if (wide[k]) first[k] = Window(from);
    if (row - within < 16) {
      rest[k] = static_cast<int>(row - within);
      // At the end of the array there is no next row, but then the chunk has no further bytes.
      const char* next = x + InputOffset(p, 1, static_cast<Index>(n + 1)) - rest[k];
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
        y[b] = x[InputOffset(p, 1, n) + within];
      }
    }
  }
}

}  // namespace jax_fastops::cuda::transpose

// Transpositions of units, each of which is read from its own place: rows of 16-byte units, and
// permutations that no tile takes. The sides of a tile would share a dimension, because one is
// short (3 channels), or dimensions are permuted within a small block.
//
// Neighboring threads write neighboring words. Units that are narrower than a sector are read from
// sectors that other threads read, too: from a cache.
#ifndef JAX_FASTOPS_TRANSPOSE_UNITS_CUH_
#define JAX_FASTOPS_TRANSPOSE_UNITS_CUH_

#include <cstdint>
#include <cstring>

#include "transpose/bytes.cuh"
#include "transpose/plan.h"

namespace jax_fastops::cuda::transpose {

// Replaces indices in the output, from dimension `first` on, by offsets in the input. A dimension's
// constants are loaded once, and the chains of multiplications overlap.
template <typename Index, int kCount>
__device__ __forceinline__ void ToInput(const UnitsPlan<Index>& p, int first, Index (&n)[kCount]) {
  Index offset[kCount] = {};
#pragma unroll 1
  for (int d = first; d < p.rank - 1; ++d) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      offset[k] += TakeRemainder(n[k], p.dims[d].size) * p.dims[d].in_stride;
    }
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) n[k] = offset[k] + n[k] * p.dims[p.rank - 1].in_stride;
}

template <int kUnit, typename Index>
__global__ void __launch_bounds__(kUnitsThreads)
    UnitsKernel(const char* x, char* y, const __grid_constant__ UnitsPlan<Index> p) {
  constexpr int kPack = UnitsPerWord(kUnit), kWords = WordsPerThread(kUnit);
  constexpr int kUnits = kWords * kPack;
  // Indices count from the aligned word that has the first unit.
  const Index skew = kPack == 1 ? 0 : Misalignment(y, kPack * kUnit) / kUnit;
  const Index end = p.count + skew;
  const Index begin = (Index{blockIdx.x} * (kUnitsThreads * kWords) + threadIdx.x) * kPack;
  const auto word = [&](int k) { return begin + k * (kUnitsThreads * kPack); };

  Index source[kUnits];
  if (kPack > 1 && p.together) {
    Index words[kWords];
#pragma unroll
    for (int k = 0; k < kWords; ++k) words[k] = min(word(k), end - kPack);
    ToInput(p, 0, words);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      source[i] = words[i / kPack] + i % kPack * p.dims[0].in_stride;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      source[i] = min(max(word(i / kPack) + i % kPack, skew), end - 1) - skew;
    }
    ToInput(p, 0, source);
  }
  Word<kUnit> units[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    units[i] = Load<Word<kUnit>>(x + static_cast<int64_t>(source[i]) * kUnit);
  }
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    const Index n = word(k);
    char* out = y + (static_cast<int64_t>(n) - static_cast<int64_t>(skew)) * kUnit;
    if (n - skew <= p.count - kPack) {  // no word before the first unit: that is a large number
      Word<kPack * kUnit> packed;
      memcpy(&packed, units + k * kPack, sizeof(packed));
      Store(out, packed);
    } else if (kPack > 1) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        if (n + i - skew < p.count) Store(out + i * kUnit, units[k * kPack + i]);
      }
    }
  }
}

}  // namespace jax_fastops::cuda::transpose

#endif  // JAX_FASTOPS_TRANSPOSE_UNITS_CUH_

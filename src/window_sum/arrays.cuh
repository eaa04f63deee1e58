// The arrays of a window sum, and loads from any address within x.
//
// All reads lie completely within the array: a word at its ends is assembled from elements. Loads
// keep their words unchanged, so that many are in flight; words are shifted after all loads.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/cuda/vec.cuh"
#include "window_sum/plan.h"

namespace jax_fastops::cuda::window_sum {

struct Arrays : WindowSumSizes {
  const char* x;
  const char* x_end;
  char* y;
};

template <int kWords>
__device__ __forceinline__ bool Inside(const Arrays& arrays, const char* word) {
  return word >= arrays.x && word + 16 * kWords <= arrays.x_end;
}

// Words of x beginning with that of `address`; 0 if not requested or not completely within x.
template <int kWords>
__device__ __forceinline__ void LoadWords(const Arrays& arrays, const void* address, bool wanted,
                                          uint4 (&words)[kWords]) {
  const char* low = static_cast<const char*>(address) - WordShift(address);
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = make_uint4(0, 0, 0, 0);
  if (wanted && Inside<kWords>(arrays, low)) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = __ldg(reinterpret_cast<const uint4*>(low) + w);
  }
}

// Reads the elements that LoadWords left out: those of words at the ends of x.
template <typename T, int kWords>
__device__ __forceinline__ void PatchWords(const Arrays& arrays, const void* address, bool wanted,
                                           uint4 (&words)[kWords]) {
  constexpr int kSize = 16 / sizeof(T);
  const char* low = static_cast<const char*>(address) - WordShift(address);
  if (!wanted || Inside<kWords>(arrays, low)) return;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    T elements[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const char* at = low + (w * kSize + i) * static_cast<int>(sizeof(T));
      const bool inside = at >= arrays.x && at < arrays.x_end;
      elements[i] = inside ? *reinterpret_cast<const T*>(at) : FromCompute<T>(0);
    }
    memcpy(&words[w], elements, 16);
  }
}

// A unit whose first element is `first`, with zeros for elements outside [0, n).
template <typename T>
__device__ __forceinline__ void MaskUnit(int first, int n, uint4* unit) {
  constexpr int kSize = 16 / sizeof(T);
  if (first >= 0 && first + kSize <= n) return;
  T elements[kSize];
  memcpy(elements, unit, 16);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (first + i < 0 || first + i >= n) elements[i] = FromCompute<T>(0);
  }
  memcpy(unit, elements, 16);
}

}  // namespace jax_fastops::cuda::window_sum

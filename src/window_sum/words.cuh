// Loads units from any address: reads aligned words of 16 bytes and extracts the unit's bytes.
//
// All reads lie completely within the array: a word at its ends is assembled from elements. Loads
// keep their words unchanged, so that many are in flight; words are shifted after all loads.
#ifndef JAX_FASTOPS_WINDOW_SUM_WORDS_CUH_
#define JAX_FASTOPS_WINDOW_SUM_WORDS_CUH_

#include <cstdint>
#include <cstring>

#include "core/cuda/packed.cuh"

namespace jax_fastops::cuda::window_sum {

struct Array {
  const char* begin;
  const char* end;
};

// The distance from the beginning of the word to the address, in bytes.
__device__ __forceinline__ int WordShift(const void* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) & 15);
}

// The units that begin `shift` bytes (0 to 15) after the beginning of the first word. Elements are
// aligned to kElement bytes.
template <int kElement, int kUnits>
__device__ __forceinline__ void ShiftWords(const uint4 (&words)[kUnits + 1], int shift,
                                           uint4 (&units)[kUnits]) {
  constexpr int kOut = 4 * kUnits;
  uint32_t w[kOut + 4], two[kOut + 2], one[kOut + 1], out[kOut];
  memcpy(w, words, sizeof(w));
#pragma unroll
  for (int i = 0; i < kOut + 2; ++i) two[i] = shift & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < kOut + 1; ++i) one[i] = kElement < 8 && shift & 4 ? two[i + 1] : two[i];
#pragma unroll
  for (int i = 0; i < kOut; ++i) {
    out[i] = kElement < 4 ? __funnelshift_r(one[i], one[i + 1], (shift & 3) * 8) : one[i];
  }
  memcpy(units, out, sizeof(out));
}

template <int kElement>
__device__ __forceinline__ uint4 ShiftUnit(const uint4& low, const uint4& high, int shift) {
  const uint4 words[2] = {low, high};
  uint4 unit[1];
  ShiftWords<kElement>(words, shift, unit);
  return unit[0];
}

template <int kWords>
__device__ __forceinline__ bool Inside(const Array& array, const char* word) {
  return word >= array.begin && word + 16 * kWords <= array.end;
}

// Words beginning with that of `address`; 0 if not requested or not completely within the array.
template <int kWords>
__device__ __forceinline__ void LoadWords(const Array& array, const void* address, bool wanted,
                                          uint4 (&words)[kWords]) {
  const char* low = static_cast<const char*>(address) - WordShift(address);
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = make_uint4(0, 0, 0, 0);
  if (wanted && Inside<kWords>(array, low)) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = __ldg(reinterpret_cast<const uint4*>(low) + w);
  }
}

// Reads the elements that LoadWords left out: those of words at the ends of the array.
template <typename T, int kWords>
__device__ __forceinline__ void PatchWords(const Array& array, const void* address, bool wanted,
                                           uint4 (&words)[kWords]) {
  constexpr int kSize = 16 / sizeof(T);
  const char* low = static_cast<const char*>(address) - WordShift(address);
  if (!wanted || Inside<kWords>(array, low)) return;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    T elements[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const char* at = low + (w * kSize + i) * static_cast<int>(sizeof(T));
      const bool inside = at >= array.begin && at < array.end;
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

#endif  // JAX_FASTOPS_WINDOW_SUM_WORDS_CUH_

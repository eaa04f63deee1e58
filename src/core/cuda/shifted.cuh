// Loads contiguous elements from any address by aligned loads: the 16-byte words that contain the
// first and the last element, and a shift. The words are loaded like any others, and shifted when
// they are used. Eight elements of 16 bits take two loads instead of eight, and a warp touches each
// of its cache lines twice instead of eight times.
#ifndef JAX_FASTOPS_CORE_CUDA_SHIFTED_CUH_
#define JAX_FASTOPS_CORE_CUDA_SHIFTED_CUH_

#include <cstdint>
#include <cstring>

#include "core/cuda/unit.cuh"

namespace jax_fastops::cuda {

// The distance from the beginning of the aligned word to the address, in bytes.
__device__ __forceinline__ int WordShift(const void* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) & 15);
}

// Sets `out`, one word fewer than there are `words`, to the bytes that begin `shift` bytes (0 to
// 15) after the beginning of `words`. `shift` is a multiple of kElement bytes.
template <int kElement, int kWords, typename Out>
__device__ __forceinline__ void ShiftWords(const uint4 (&words)[kWords], int shift, Out& out) {
  constexpr int kOut = 4 * (kWords - 1);
  static_assert(sizeof(Out) == 4 * kOut);
  uint32_t w[kOut + 4], two[kOut + 2], one[kOut + 1];
  memcpy(w, words, sizeof(w));
#pragma unroll
  for (int i = 0; i < kOut + 2; ++i) two[i] = shift & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < kOut + 1; ++i) one[i] = kElement < 8 && shift & 4 ? two[i + 1] : two[i];
  if constexpr (kElement < 4) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) one[i] = __funnelshift_r(one[i], one[i + 1], (shift & 3) * 8);
  }
  memcpy(&out, one, sizeof(out));
}

// kSize elements, 16 or 32 bytes in total.
template <typename T, int kSize>
struct Shifted {
  static constexpr int kWords = kSize * sizeof(T) / 16;
  static constexpr int kPerWord = 16 / sizeof(T);

  uint4 words[kWords + 1];
  int shift;  // in bytes, from 0 to 15

  // Loads elements of an aligned array, beginning with `first`. The word of the last one must lie
  // completely within the array: first + kSize - 1 < (the array's size, rounded down to words).
  __device__ __forceinline__ void Load(const void* data, uint32_t first) {
    const T* p = static_cast<const T*>(data);
    shift = static_cast<int>(first % kPerWord * sizeof(T));
    const uint4* low = reinterpret_cast<const uint4*>(p + first / kPerWord * kPerWord);
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldg(low + i);
    // Without a shift this loads the last word again, so no condition is needed.
    const uint32_t last = (first + kSize - 1) / kPerWord * kPerWord;
    words[kWords] = __ldg(reinterpret_cast<const uint4*>(p + last));
  }

  // Loads elements of an aligned array, beginning with `first`, a multiple of kSize.
  __device__ __forceinline__ void LoadAligned(const void* data, int64_t first) {
    const T* p = static_cast<const T*>(data) + first;
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(p)[i];
  }

  // Loads element by element: `left` elements beginning with `first`, then those beginning with
  // `next`.
  __device__ __forceinline__ void Gather(const void* data, int64_t first, int64_t next, int left) {
    const T* here = static_cast<const T*>(data) + first;
    const T* there = static_cast<const T*>(data) + (next - left);
    T elements[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) elements[i] = (i < left ? here : there)[i];
    memcpy(words, elements, sizeof(elements));
    shift = 0;
  }

  __device__ __forceinline__ void TakeAligned(T (&elements)[kSize]) const {
    memcpy(elements, words, sizeof(elements));
  }

  __device__ __forceinline__ void Take(T (&elements)[kSize]) const {
    ShiftWords<sizeof(T)>(words, shift, elements);
  }
};

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CORE_CUDA_SHIFTED_CUH_

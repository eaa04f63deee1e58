// Window sums along the last axis, for windows that are short compared with the elements of a
// block.
//
// There is no shared memory and no barrier: each warp computes the sums of its own units, and reads
// every element that they need. So an element is read a few times, but only once from memory: the
// other warps of the block hit L1. That allows many loads in flight and takes few instructions.
//
// A warp's 32 units are cut into groups of adjacent lanes, c to c + G, that are at most one element
// shorter than a window. The window of the group's element i is
//
//   (i to c + G) + (c + G to c + window - 1) + (c + window - 1 to i + window - 1, inclusive)
//
// The first part is a sum to the end of the group, the last one a sum from the beginning of the
// group's elements a window further right: serially within a unit, by shuffles across lanes. The
// part between is the same for the whole group. A lane adds its share of it to the values that it
// passes to the lanes on its left and right, so it gets to all of them without more shuffles.
//
// Units begin where y is aligned. A window of at most a unit and one element needs only this unit
// and the next one.
#ifndef JAX_FASTOPS_WINDOW_SUM_WARPS_CUH_
#define JAX_FASTOPS_WINDOW_SUM_WARPS_CUH_

#include <cstdint>
#include <cstring>

#include "core/cuda/divide.cuh"
#include "core/cuda/packed.cuh"
#include "core/fast_divide.h"
#include "window_sum/words.cuh"

namespace jax_fastops::cuda::window_sum {

enum class WarpsKind {
  kNear,     // windows of up to a unit and one element
  kAligned,  // groups; x is aligned as y is, at both ends of windows
  kShifted,  // groups, at any alignment
};

inline constexpr int kWarpsThreads = 256;  // per block
inline constexpr int kWarpsShares = 4;     // per group: the maximum shares of the part between
inline constexpr int kWarpsUnits = 2;      // per thread
inline constexpr int kWarpsLongest = 1 << 29;

// Blocks per SM, as registers allow.
template <WarpsKind kKind>
inline constexpr int kWarpsBlocks = kKind == WarpsKind::kNear ? 4 : 3;

struct WarpsParams {
  Array x;
  char* y;
  int64_t n;
  int64_t m;
  int pad;
  int window;
  int log_lanes;       // of a group
  FastDivisor chunks;  // of a row: the units of a warp
  uint32_t total;      // chunks of y
};

// The sums of kSize windows from two units of elements.
template <int kWindow, int kSize, typename A>
__device__ __forceinline__ void NearSums(const A (&values)[2 * kSize], int window,
                                         A (&sums)[kSize]) {
  if constexpr (kWindow > kSize) {
    A end = 0, begin = 0;
#pragma unroll
    for (int i = kSize - 1; i >= 0; --i) sums[i] = end = end + values[i];
#pragma unroll
    for (int i = 0; i < kSize; ++i) sums[i] += begin = begin + values[kSize + i];
  } else if (window == kWindow) {  // the same for all
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      sums[i] = values[i];
#pragma unroll
      for (int j = 1; j < kWindow; ++j) sums[i] += values[i + j];
    }
  } else {
    NearSums<kWindow + 2>(values, window, sums);
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void ToValues(const uint4* units, ComputeType<T> (&values)[kCount]) {
  T elements[kCount];
  memcpy(elements, units, sizeof(elements));
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = ToCompute(elements[i]);
}

// The places of a thread's units.
template <typename T, int kUnits>
struct WarpsPlace {
  const T* x[kUnits];  // the beginning of the unit's windows
  T* y[kUnits];
  int at[kUnits];  // index in y's row; negative if the row begins within a unit
};

// The sums of a thread's units. `kPlain`: all accesses of the warp are within the row, with a spare
// word at both ends.
template <typename T, WarpsKind kKind, bool kPlain, int kUnits>
__device__ __forceinline__ void WarpsSums(const WarpsParams& p,
                                          const WarpsPlace<T, kUnits>& place) {
  using A = ComputeType<T>;
  constexpr int kSize = 16 / sizeof(T);
  constexpr bool kNear = kKind == WarpsKind::kNear;
  constexpr int kWords = kNear ? 3 : kKind == WarpsKind::kAligned ? 1 : 2;
  constexpr unsigned kAll = 0xffffffffu;
  const int n = static_cast<int>(p.n), m = static_cast<int>(p.m), lane = threadIdx.x & 31;
  const auto& x = place.x;
  const auto& y = place.y;
  const auto& at = place.at;

  // One or two units beginning with element `first` of a row; 0 for elements at or after `end`.
  const auto wanted = [](int first, int end) {
    return first < end && first + (kNear ? 2 * kSize : kSize) > 0;
  };
  const auto load = [&](const T* address, int first, int end, uint4(&words)[kWords]) {
    if constexpr (kPlain) {
      const uint4* low =
          reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(address) & ~uintptr_t{15});
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] = __ldg(low + w);
    } else {
      LoadWords(p.x, address, wanted(first, end), words);
    }
  };
  // Extracts the units from their words.
  const auto settle = [&](const T* address, int first, int end, uint4(&words)[kWords]) {
    if constexpr (!kPlain) PatchWords<T>(p.x, address, wanted(first, end), words);
    if constexpr (kWords > 1) {
      uint4 units[kWords - 1];
      ShiftWords<sizeof(T)>(words, WordShift(address), units);
      memcpy(words, units, sizeof(units));
    }
    if constexpr (!kPlain) {
      MaskUnit<T>(first, end, &words[0]);
      if constexpr (kNear) MaskUnit<T>(first + kSize, end, &words[1]);
    }
  };
  const auto store = [&](int k, const A(&sums)[kSize]) {
    Packed128<T> out;
#pragma unroll
    for (int i = 0; i < kSize; ++i) out[i] = FromCompute<T>(sums[i]);
    if (kPlain || (at[k] >= 0 && at[k] + kSize <= m)) {
      StorePacked<CacheHint::kStreaming>(y[k], out);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (at[k] + i >= 0 && at[k] + i < m) y[k][i] = out[i];
      }
    }
  };

  uint4 back[kUnits][kWords];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    load(x[k], at[k] - p.pad, n, back[k]);
  }
  if constexpr (kNear) {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      A values[2 * kSize], sums[kSize];
      settle(x[k], at[k] - p.pad, n, back[k]);
      ToValues<T>(back[k], values);
      NearSums<3>(values, p.window, sums);
      store(k, sums);
    }
  } else {
    const int behind = p.window - 1;
    uint4 front[kUnits][kWords];
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      load(x[k] + behind, at[k] - p.pad + behind, n, front[k]);
    }

    const int lanes = 1 << p.log_lanes, in_group = lane & (lanes - 1), group = lanes * kSize;
    A between[kUnits];
#pragma unroll
    for (int k = 0; k < kUnits; ++k) between[k] = 0;
    for (int share = group; share < behind; share += group) {
      uint4 words[kUnits][kWords];
      const auto end = [&](int k) {  // the end of the part between
        const int end = at[k] - p.pad - in_group * kSize + behind;
        return end < n ? end : n;
      };
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        load(x[k] + share, at[k] - p.pad + share, end(k), words[k]);
      }
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        A values[kSize];
        settle(x[k] + share, at[k] - p.pad + share, end(k), words[k]);
        if constexpr (kPlain) MaskUnit<T>(share, behind - in_group * kSize, &words[k][0]);
        ToValues<T>(words[k], values);
#pragma unroll
        for (int i = 1; i < kSize; ++i) values[0] += values[i];
        between[k] += values[0];
      }
    }

    A left[kUnits],
        right[kUnits];  // the parts of this lane's sums from the lanes on its left and right
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      settle(x[k], at[k] - p.pad, n, back[k]);
      settle(x[k] + behind, at[k] - p.pad + behind, n, front[k]);
      A values[kSize];
      ToValues<T>(back[k], values);
      right[k] = values[kSize - 1];
#pragma unroll
      for (int i = kSize - 2; i >= 0; --i) right[k] += values[i];
      ToValues<T>(front[k], values);
      left[k] = values[0];
#pragma unroll
      for (int i = 1; i < kSize; ++i) left[k] += values[i];
      right[k] += between[k];
      left[k] += between[k];
      const A from_left = __shfl_up_sync(kAll, left[k], 1);
      const A from_right = __shfl_down_sync(kAll, right[k], 1);
      left[k] = in_group > 0 ? from_left : A(0);
      right[k] = in_group + 1 < lanes ? from_right : A(0);
    }
    for (int d = 1; d < lanes; d *= 2) {
      const bool has_left = in_group >= d, has_right = in_group + d < lanes;
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        const A from_left = __shfl_up_sync(kAll, left[k], d);
        const A from_right = __shfl_down_sync(kAll, right[k], d);
        if (has_left) left[k] = from_left + left[k];
        if (has_right) right[k] += from_right;
      }
    }

#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      A values[kSize], sums[kSize];
      const A middle = left[k] + between[k] + right[k];
      ToValues<T>(back[k], values);
      A end = middle, begin = 0;
#pragma unroll
      for (int i = kSize - 1; i >= 0; --i) sums[i] = end = end + values[i];
      ToValues<T>(front[k], values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sums[i] += begin = begin + values[i];
      store(k, sums);
    }
  }
}

template <typename T, WarpsKind kKind>
__global__ void __launch_bounds__(kWarpsThreads, kWarpsBlocks<kKind>)
    WarpsKernel(const WarpsParams p) {
  constexpr int kSize = 16 / sizeof(T), kUnits = kWarpsUnits, kWarps = kWarpsThreads / 32;
  const int n = static_cast<int>(p.n), m = static_cast<int>(p.m);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  // The elements of a row that may be read after the first element of a unit.
  const int behind = (p.window > kSize ? p.window - 1 : kSize) + 2 * kSize;
  WarpsPlace<T, kUnits> place;
  bool plain = true;
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const uint32_t chunk = (blockIdx.x * kUnits + k) * kWarps + warp;
    const uint32_t row = chunk < p.total ? Divide(chunk, p.chunks) : 0;
    T* const y_row = reinterpret_cast<T*>(p.y) + row * p.m;
    int at = static_cast<int>((chunk - row * p.chunks.divisor) * 32 + lane) * kSize -
             WordShift(y_row) / static_cast<int>(sizeof(T));
    if (chunk >= p.total) at = kWarpsLongest;  // after every row
    const int first = at - p.pad;
    plain = plain && at >= 0 && at + kSize <= m && first >= kSize && first + behind <= n;
    place.at[k] = at;
    place.y[k] = y_row + at;
    place.x[k] = reinterpret_cast<const T*>(p.x.begin) + row * p.n + first;
  }
  if (__all_sync(0xffffffffu, plain)) {
    WarpsSums<T, kKind, true>(p, place);
  } else {
    WarpsSums<T, kKind, false>(p, place);
  }
}

}  // namespace jax_fastops::cuda::window_sum

#endif  // JAX_FASTOPS_WINDOW_SUM_WARPS_CUH_

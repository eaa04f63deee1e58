// Window sums along the last axis, for windows that are not summed from a tree.
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
#pragma once

#include <cstdint>
#include <cstring>

#include "core/cuda/divide.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/vec.cuh"
#include "window_sum/arrays.cuh"
#include "window_sum/plan.h"

namespace jax_fastops::cuda::window_sum {

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
template <typename T>
struct WarpsPlace {
  const T* x[kWarpsUnits];  // the beginning of the unit's windows
  T* y[kWarpsUnits];
  int at[kWarpsUnits];  // index in y's row; negative if the row begins within a unit
};

// What a warp loads and stores for its units. `kPlain`: all accesses of the warp are within the
// row, with a spare word at both ends.
template <typename T, WindowSumKernel kKind, bool kPlain>
struct WarpsAccess {
  using A = ComputeType<T>;
  static constexpr int kSize = 16 / sizeof(T);
  static constexpr bool kNear = kKind == WindowSumKernel::kWarpsNear;
  static constexpr int kUnits = kNear ? 2 : 1;  // that are loaded at once
  static constexpr int kWords = kKind == WindowSumKernel::kWarpsAligned ? 1 : kUnits + 1;
  using Words = uint4[kWords];

  const Arrays& arrays;

  static __device__ __forceinline__ bool Wanted(int first, int end) {
    return first < end && first + kUnits * kSize > 0;
  }

  // Loads the units that begin with element `first` of a row, at `address`; elements at or after
  // `end` count as 0.
  __device__ __forceinline__ void Load(const T* address, int first, int end, Words& words) const {
    if constexpr (kPlain) {
      const uint4* low =
          reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(address) & ~uintptr_t{15});
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] = __ldg(low + w);
    } else {
      LoadWords(arrays, address, Wanted(first, end), words);
    }
  }

  // Extracts the units from their words.
  __device__ __forceinline__ void Settle(const T* address, int first, int end, Words& words) const {
    if constexpr (!kPlain) PatchWords<T>(arrays, address, Wanted(first, end), words);
    if constexpr (kWords > 1) {
      uint4 units[kUnits];
      ShiftWords<sizeof(T)>(words, WordShift(address), units);
      memcpy(words, units, sizeof(units));
    }
    if constexpr (!kPlain) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) MaskUnit<T>(first + u * kSize, end, &words[u]);
    }
  }

  __device__ __forceinline__ void Store(const WarpsPlace<T>& place, int k,
                                        const A (&sums)[kSize]) const {
    const int m = static_cast<int>(arrays.m);
    Unit<T, 16> out;
#pragma unroll
    for (int i = 0; i < kSize; ++i) out.elements[i] = FromCompute<T>(sums[i]);
    if (kPlain || (place.at[k] >= 0 && place.at[k] + kSize <= m)) {
      out.template Store<CacheHint::kStreaming>(place.y[k]);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (place.at[k] + i >= 0 && place.at[k] + i < m) place.y[k][i] = out.elements[i];
      }
    }
  }
};

// The sums of a thread's units, for windows of up to a unit and one element.
template <typename T, bool kPlain>
__device__ __forceinline__ void WarpsNearSums(const Arrays& a, const WarpsPlace<T>& place) {
  using Access = WarpsAccess<T, WindowSumKernel::kWarpsNear, kPlain>;
  const Access access = {a};
  const int n = static_cast<int>(a.n);
  const int pad = static_cast<int>(a.pad), window = static_cast<int>(a.window);
  typename Access::Words words[kWarpsUnits];
#pragma unroll
  for (int k = 0; k < kWarpsUnits; ++k) {
    access.Load(place.x[k], place.at[k] - pad, n, words[k]);
  }
#pragma unroll
  for (int k = 0; k < kWarpsUnits; ++k) {
    ComputeType<T> values[2 * Access::kSize], sums[Access::kSize];
    access.Settle(place.x[k], place.at[k] - pad, n, words[k]);
    ToValues<T>(words[k], values);
    NearSums<3>(values, window, sums);
    access.Store(place, k, sums);
  }
}

// The sums of a thread's units by groups.
template <typename T, WindowSumKernel kKind, bool kPlain>
__device__ __forceinline__ void WarpsGroupSums(const Arrays& a, int log_lanes,
                                               const WarpsPlace<T>& place) {
  using A = ComputeType<T>;
  using Access = WarpsAccess<T, kKind, kPlain>;
  constexpr int kSize = Access::kSize, kUnits = kWarpsUnits;
  const Access access = {a};
  const int n = static_cast<int>(a.n);
  const int pad = static_cast<int>(a.pad), behind = static_cast<int>(a.window) - 1;
  const auto& x = place.x;
  const auto& at = place.at;

  typename Access::Words back[kUnits], front[kUnits];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) access.Load(x[k], at[k] - pad, n, back[k]);
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    access.Load(x[k] + behind, at[k] - pad + behind, n, front[k]);
  }

  const int lane = threadIdx.x & 31, lanes = 1 << log_lanes;
  const int in_group = lane & (lanes - 1), group = lanes * kSize;
  A between[kUnits];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) between[k] = 0;
  for (int share = group; share < behind; share += group) {
    typename Access::Words words[kUnits];
    const auto end = [&](int k) { return min(at[k] - pad - in_group * kSize + behind, n); };
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      access.Load(x[k] + share, at[k] - pad + share, end(k), words[k]);
    }
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      A values[kSize];
      access.Settle(x[k] + share, at[k] - pad + share, end(k), words[k]);
      if constexpr (kPlain) MaskUnit<T>(share, behind - in_group * kSize, &words[k][0]);
      ToValues<T>(words[k], values);
#pragma unroll
      for (int i = 1; i < kSize; ++i) values[0] += values[i];
      between[k] += values[0];
    }
  }

  A left[kUnits], right[kUnits];  // the parts of this lane's sums from its left and its right
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    access.Settle(x[k], at[k] - pad, n, back[k]);
    access.Settle(x[k] + behind, at[k] - pad + behind, n, front[k]);
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
  }
  SumOthers(left, right, in_group, lanes);

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
    access.Store(place, k, sums);
  }
}

template <typename T, WindowSumKernel kKind>
__global__ void __launch_bounds__(kWindowSumThreads, kKind == WindowSumKernel::kWarpsNear ? 4 : 3)
    WarpsKernel(const Arrays a, const WindowSumWarps tiles) {
  constexpr int kSize = 16 / sizeof(T), kWarps = kWindowSumThreads / 32;
  const int n = static_cast<int>(a.n), m = static_cast<int>(a.m);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int pad = static_cast<int>(a.pad), window = static_cast<int>(a.window);
  // The elements of a row that may be read after the first element of a unit.
  const int behind = (window > kSize ? window - 1 : kSize) + 2 * kSize;
  WarpsPlace<T> place;
  bool plain = true;
#pragma unroll
  for (int k = 0; k < kWarpsUnits; ++k) {
    const uint32_t chunk = (blockIdx.x * kWarpsUnits + k) * kWarps + warp;
    const uint32_t row = chunk < tiles.total ? Divide(chunk, tiles.chunks) : 0;
    T* const y_row = reinterpret_cast<T*>(a.y) + row * a.m;
    int at = static_cast<int>((chunk - row * tiles.chunks.divisor) * 32 + lane) * kSize -
             WordShift(y_row) / static_cast<int>(sizeof(T));
    if (chunk >= tiles.total) at = kWarpsLongest;  // after every row
    const int first = at - pad;
    plain = plain && at >= 0 && at + kSize <= m && first >= kSize && first + behind <= n;
    place.at[k] = at;
    place.y[k] = y_row + at;
    place.x[k] = reinterpret_cast<const T*>(a.x) + row * a.n + first;
  }
  const auto sums = [&]<bool kPlain>() {
    if constexpr (kKind == WindowSumKernel::kWarpsNear) {
      WarpsNearSums<T, kPlain>(a, place);
    } else {
      WarpsGroupSums<T, kKind, kPlain>(a, tiles.log_lanes, place);
    }
  };
  if (HoldsInWarp(plain)) {
    sums.template operator()<true>();
  } else {
    sums.template operator()<false>();
  }
}

}  // namespace jax_fastops::cuda::window_sum

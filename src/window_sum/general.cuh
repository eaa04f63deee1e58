// Window sums of any shape: of short axes, and of windows that are too long for the chip. float64
// has no other kernel for axes that are not the last.
//
// Direct adds up each sum from its elements, which the L1 cache holds.
//
// In Tree a thread takes 16 adjacent windows. It adds up their common part once, and the rest
// from the elements at both ends. For long windows there is a tree over the axis: the sums of 16
// elements, of 16 of those, and so on. The common part is then at most 15 nodes on each side of
// each level.
#pragma once

#include <cstdint>

#include "core/cuda/vec.cuh"
#include "core/integer.h"
#include "window_sum/arrays.cuh"
#include "window_sum/plan.h"

namespace jax_fastops::cuda::window_sum {

template <typename T, int kBytes>
__device__ __forceinline__ void SumDirectly(const Arrays& a) {
  using A = ComputeType<T>;
  using U = Unit<T, kBytes>;
  const int64_t units = a.inner / U::kSize, total = a.outer * a.m * units;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWindowSumThreads;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kWindowSumThreads + threadIdx.x; at < total;
       at += step) {
    int64_t above, outer;
    if (total < int64_t{1} << 32) {
      const uint32_t index = static_cast<uint32_t>(at);
      above = index / static_cast<uint32_t>(units);
      outer = static_cast<uint32_t>(above) / static_cast<uint32_t>(a.m);
    } else {
      above = at / units;
      outer = above / a.m;
    }
    const int64_t column = at - above * units, i = above - outer * a.m;
    const int64_t begin = max(i - a.pad, int64_t{0}), end = min(i - a.pad + a.window, a.n);
    const U* x = reinterpret_cast<const U*>(a.x) + outer * a.n * units + column;
    A sums[U::kSize];
#pragma unroll
    for (int e = 0; e < U::kSize; ++e) sums[e] = 0;
#pragma unroll 4
    for (int64_t j = begin; j < end; ++j) {
      const U unit = U::Load(x + j * units);
#pragma unroll
      for (int e = 0; e < U::kSize; ++e) sums[e] += ToCompute(unit.elements[e]);
    }
    U out;
#pragma unroll
    for (int e = 0; e < U::kSize; ++e) out.elements[e] = FromCompute<T>(sums[e]);
    out.Store(reinterpret_cast<U*>(a.y) + at);
  }
}

template <typename T>
__global__ void __launch_bounds__(kWindowSumThreads) DirectUnitsKernel(const Arrays a) {
  SumDirectly<T, 16>(a);
}

// Single elements.
struct Direct {
  static constexpr int kBlocks = 6;
  Arrays a;

  template <typename T>
  __device__ __forceinline__ void Run() const {
    SumDirectly<T, sizeof(T)>(a);
  }
};

// The nodes of a level from those below it: [outer, below, inner] to [outer, above, inner].
struct TreeLevel {
  static constexpr int kBlocks = 8;
  const void* x;
  void* y;
  int64_t outer, below, above, inner;

  template <typename T>
  __device__ __forceinline__ void Run() const {
    using A = ComputeType<T>;
    const int64_t total = outer * above * inner;
    const int64_t step = static_cast<int64_t>(gridDim.x) * kWindowSumThreads;
    for (int64_t at = static_cast<int64_t>(blockIdx.x) * kWindowSumThreads + threadIdx.x;
         at < total; at += step) {
      const int64_t line = at / inner, column = at - line * inner;
      const int64_t o = line / above, node = line - o * above;
      const int64_t first = node * kTreeFan;
      const T* from = static_cast<const T*>(x) + (o * below + first) * inner + column;
      A sum = 0;
      if (first + kTreeFan <= below) {
        A values[kTreeFan];
#pragma unroll
        for (int i = 0; i < kTreeFan; ++i) values[i] = ToCompute(from[i * inner]);
#pragma unroll
        for (int d = 1; d < kTreeFan; d *= 2) {
#pragma unroll
          for (int i = 0; i < kTreeFan; i += 2 * d) values[i] += values[i + d];
        }
        sum = values[0];
      } else {
        for (int64_t i = 0; first + i < below; ++i) sum += ToCompute(from[i * inner]);
      }
      static_cast<A*>(y)[at] = sum;
    }
  }
};

// `nodes`: the sums of the levels above the elements, one level after the other.
struct Tree {
  static constexpr int kBlocks = 3;
  Arrays a;
  WindowSumTree tree;
  const void* nodes;

  template <typename T>
  __device__ __forceinline__ void Run() const {
    using A = ComputeType<T>;
    const int64_t runs = CeilDiv(a.m, kTreeFan), total = a.outer * runs * a.inner;
    const int64_t step = static_cast<int64_t>(gridDim.x) * kWindowSumThreads;
    for (int64_t at = static_cast<int64_t>(blockIdx.x) * kWindowSumThreads + threadIdx.x;
         at < total; at += step) {
      const int64_t line = at / a.inner, column = at - line * a.inner;
      const int64_t o = line / runs, i0 = (line - o * runs) * kTreeFan;
      const T* x = reinterpret_cast<const T*>(a.x) + o * a.n * a.inner + column;
      T* y = reinterpret_cast<T*>(a.y) + (o * a.m + i0) * a.inner + column;
      const auto element = [&](int64_t j) {
        return j >= 0 && j < a.n ? ToCompute(x[j * a.inner]) : A(0);
      };

      // The common part of all 16 windows.
      const int64_t first = i0 - a.pad;
      int64_t low = first + kTreeFan - 1, high = first + a.window;
      low = max(low, int64_t{0});
      high = min(high, a.n);
      A common = 0;
      const A* sums = static_cast<const A*>(nodes);  // of the level: [outer, count, inner]
      for (int level = 0; low < high; ++level) {
        const int64_t line_at = o * tree.count[level] * a.inner + column;
        const auto node = [&](int64_t j) {
          return level > 0 ? sums[line_at + j * a.inner] : ToCompute(x[j * a.inner]);
        };
        A sum = 0;
        const bool top = level == tree.levels;
        while (low < high && (top || low % kTreeFan != 0)) {
          // In runs, for a smaller rounding error where there is no tree.
          A run = node(low++);
          while (low < high && low % kTreeFan != 0) run += node(low++);
          sum += run;
        }
        while (low < high && high % kTreeFan != 0) sum += node(--high);
        low /= kTreeFan;
        high /= kTreeFan;
        common += sum;
        if (level > 0) sums += a.outer * tree.count[level] * a.inner;
      }

      A ends[kTreeFan];
      A end = 0;
#pragma unroll
      for (int i = kTreeFan - 1; i >= 0; --i) {
        ends[i] = end;
        if (i > 0) end += element(first + i - 1);
      }
      A begin = 0;
#pragma unroll
      for (int i = 0; i < kTreeFan; ++i) {
        if (i > 0) begin += element(first + a.window + i - 1);
        if (i0 + i < a.m) y[i * a.inner] = FromCompute<T>(ends[i] + common + begin);
      }
    }
  }
};

}  // namespace jax_fastops::cuda::window_sum

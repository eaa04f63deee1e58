// Window sums of short axes, and of windows that are too long for the chip.
//
// Over a short axis each sum is added up from its elements, which the L1 cache holds.
//
// For long windows there is a tree over the axis: the sums of 16 elements, of 16 of those, and so
// on. A thread takes 16 adjacent windows. It adds up their common part from at most 15 nodes on
// each side of each level, and the rest from the elements at both ends.
#ifndef JAX_FASTOPS_WINDOW_SUM_LONG_CUH_
#define JAX_FASTOPS_WINDOW_SUM_LONG_CUH_

#include <cstdint>

#include "core/cuda/packed.cuh"
#include "core/cuda/unit.cuh"

namespace jax_fastops::cuda::window_sum {

inline constexpr int kTreeFan = 16, kTreeLevels = 16;

struct DirectParams {
  const char* x;
  char* y;
  int64_t n;
  int64_t units;  // of inner
  int64_t m;
  int64_t pad;
  int64_t window;
  int64_t total;  // units of y
};

template <typename T, int kBytes>
__global__ void __launch_bounds__(256) DirectKernel(const DirectParams p) {
  using A = ComputeType<T>;
  using U = Unit<T, kBytes>;
  const int64_t step = static_cast<int64_t>(gridDim.x) * 256;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; at < p.total;
       at += step) {
    int64_t above, column, outer, i;
    if (p.total < int64_t{1} << 32) {
      const uint32_t index = static_cast<uint32_t>(at);
      above = index / static_cast<uint32_t>(p.units);
      outer = static_cast<uint32_t>(above) / static_cast<uint32_t>(p.m);
    } else {
      above = at / p.units;
      outer = above / p.m;
    }
    column = at - above * p.units;
    i = above - outer * p.m;
    int64_t begin = i - p.pad, end = begin + p.window;
    begin = begin < 0 ? 0 : begin;
    end = end > p.n ? p.n : end;
    const U* x = reinterpret_cast<const U*>(p.x) + outer * p.n * p.units + column;
    A sums[U::kSize];
#pragma unroll
    for (int e = 0; e < U::kSize; ++e) sums[e] = 0;
#pragma unroll 4
    for (int64_t j = begin; j < end; ++j) {
      const U unit = U::Load(x + j * p.units);
#pragma unroll
      for (int e = 0; e < U::kSize; ++e) sums[e] += ToCompute(unit.elements[e]);
    }
    U out;
#pragma unroll
    for (int e = 0; e < U::kSize; ++e) out.elements[e] = FromCompute<T>(sums[e]);
    out.Store(reinterpret_cast<U*>(p.y) + at);
  }
}

struct TreeParams {
  const char* x;
  char* y;
  int64_t outer;
  int64_t n;
  int64_t inner;
  int64_t m;
  int64_t pad;
  int64_t window;
  int levels;                     // above the elements
  int64_t count[kTreeLevels];     // nodes of a line; count[0] is n
  const void* sums[kTreeLevels];  // [outer, count, inner]; sums[0] is not used
};

// The nodes of a level from those below it: [outer, below, inner] to [outer, above, inner].
template <typename In, typename A>
__global__ void __launch_bounds__(256)
    TreeLevelKernel(const In* x, A* y, int64_t outer, int64_t below, int64_t above, int64_t inner) {
  const int64_t total = outer * above * inner, step = static_cast<int64_t>(gridDim.x) * 256;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; at < total; at += step) {
    const int64_t line = at / inner, column = at - line * inner;
    const int64_t o = line / above, node = line - o * above;
    const int64_t first = node * kTreeFan;
    const In* from = x + (o * below + first) * inner + column;
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
    y[at] = sum;
  }
}

template <typename T>
__global__ void __launch_bounds__(256) TreeKernel(const TreeParams p) {
  using A = ComputeType<T>;
  const int64_t runs = (p.m + kTreeFan - 1) / kTreeFan, total = p.outer * runs * p.inner;
  const int64_t step = static_cast<int64_t>(gridDim.x) * 256;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; at < total; at += step) {
    const int64_t line = at / p.inner, column = at - line * p.inner;
    const int64_t o = line / runs, i0 = (line - o * runs) * kTreeFan;
    const T* x = reinterpret_cast<const T*>(p.x) + o * p.n * p.inner + column;
    T* y = reinterpret_cast<T*>(p.y) + (o * p.m + i0) * p.inner + column;
    const auto element = [&](int64_t j) {
      return j >= 0 && j < p.n ? ToCompute(x[j * p.inner]) : A(0);
    };

    // The common part of all 16 windows.
    const int64_t first = i0 - p.pad;
    int64_t low = first + kTreeFan - 1, high = first + p.window;
    low = low < 0 ? 0 : low;
    high = high > p.n ? p.n : high;
    A common = 0;
    for (int level = 0; low < high; ++level) {
      const int64_t count = p.count[level];
      const A* nodes =
          level > 0 ? static_cast<const A*>(p.sums[level]) + o * count * p.inner + column : nullptr;
      const auto node = [&](int64_t j) {
        return level > 0 ? nodes[j * p.inner] : ToCompute(x[j * p.inner]);
      };
      A sum = 0;
      const bool top = level == p.levels;
      while (low < high && (top || low % kTreeFan != 0)) sum += node(low++);
      while (low < high && high % kTreeFan != 0) sum += node(--high);
      low /= kTreeFan;
      high /= kTreeFan;
      common += sum;
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
      if (i > 0) begin += element(first + p.window + i - 1);
      if (i0 + i < p.m) y[i * p.inner] = FromCompute<T>(ends[i] + common + begin);
    }
  }
}

}  // namespace jax_fastops::cuda::window_sum

#endif  // JAX_FASTOPS_WINDOW_SUM_LONG_CUH_

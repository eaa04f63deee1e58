// Softmax along the minor axis for short rows that are no whole number of 16-byte units.
//
// If threads accessed such rows in global memory, most of their 16-byte units would be partial, or
// they would access single elements. Both take more instructions than the bandwidth allows: on an
// H100, 16-bit rows of 77 elements measured 2.6 times the copy floor. But the rows of a block are
// contiguous. A block copies this span into shared memory, in whole 16-byte words and
// asynchronously, and writes its results from there in the same way. Only the words at the two ends
// of the span are written by element, because they belong to two blocks. In between, threads access
// shared memory in units of 4 bytes. A unit of two elements may contain the end of a row, which is
// cheap to handle. A row takes as few lanes as can hold it, so that what a thread does once per row
// is shared by many elements.
#ifndef JAX_FASTOPS_SOFTMAX_SPAN_CUH_
#define JAX_FASTOPS_SOFTMAX_SPAN_CUH_

#include <cstdint>

#include "core/cuda/async_copy.cuh"
#include "softmax/math.cuh"
#include "softmax/plan.h"
#include "softmax/rows.cuh"

namespace jax_fastops::cuda::softmax {

// `count` contiguous elements of an array, and their copy in shared memory. Element i of the span
// is shared[i]. A 16-byte word of the array is a 16-byte word of the copy.
template <typename T>
struct Span {
  static constexpr int kPerWord = 16 / sizeof(T);

  T* global;
  T* shared;
  int before;  // elements of the first word that come before the span
  int count;

  // `words` has room for the words that the span overlaps.
  __device__ __forceinline__ Span(const void* array, int64_t first, int count, uint4* words)
      : global(const_cast<T*>(static_cast<const T*>(array)) + first),
        before(static_cast<int>(reinterpret_cast<uintptr_t>(global) % 16 / sizeof(T))),
        count(count) {
    shared = reinterpret_cast<T*>(words) + before;
  }

  // Calls whole(i) for each word in the elements from `begin` to `end`, where i is the word's first
  // element, and single(i) for each element of the span that is in no such word.
  template <typename Whole, typename Single>
  __device__ __forceinline__ void ForWords(int begin, int end, const Whole& whole,
                                           const Single& single) const {
#pragma unroll 2
    for (int i = threadIdx.x * kPerWord - before; i < count; i += kSpanThreads * kPerWord) {
      if (i >= begin && i + kPerWord <= end) {
        whole(i);
      } else {
#pragma unroll 1
        for (int k = max(i, 0); k < min(i + kPerWord, count); ++k) single(k);
      }
    }
  }

  // Begins to copy the span into shared memory. The span begins at element `first` of the array,
  // which has `size` elements. Words may contain elements before and after the span.
  __device__ __forceinline__ void Read(int64_t first, int64_t size) const {
    const int begin = static_cast<int>(max(-first, int64_t{-kPerWord}));
    const int end = static_cast<int>(min(size - first, int64_t{count} + kPerWord));
    ForWords(
        begin, end, [&](int i) { CopyAsync<16, true>(shared + i, global + i); },
        [&](int i) { shared[i] = global[i]; });
  }
  __device__ __forceinline__ void Write() const {
    ForWords(
        0, count,
        [&](int i) {
          *reinterpret_cast<uint4*>(global + i) = *reinterpret_cast<const uint4*>(shared + i);
        },
        [&](int i) { global[i] = shared[i]; });
  }
};

// A row of a span, in units of 4 bytes. `at` is the index of its first element in the span.
template <typename T>
__device__ __forceinline__ Stretch<T, 4> RowOfSpan(const Span<T>& span, int at, int n) {
  Stretch<T, 4> part;
  part.before = (span.before + at) % Stretch<T, 4>::kSize;
  part.origin = at - part.before;
  part.n = n;
  part.mask = nullptr;
  return part;
}

template <typename T, bool kGrad>
__global__ void __launch_bounds__(kSpanThreads, 6)
    SpanKernel(const __grid_constant__ Params p, const __grid_constant__ SpanParams q) {
  using A = ComputeType<T>;
  using Part = Stretch<T, 4>;
  using H = typename Part::H;
  using Threads = RowThreads<A, 1, 1>;

  extern __shared__ uint4 words[];
  __shared__ typename Threads::Scratch scratch;  // unused: a row is within a warp
  const int n = static_cast<int>(p.n), lanes = 1 << q.log_lanes, lane = threadIdx.x & (lanes - 1);
  const int groups = kSpanThreads >> q.log_lanes, group = threadIdx.x >> q.log_lanes;
  const int64_t first_row = int64_t{blockIdx.x} * q.rows, first = first_row * n;
  const int rows = static_cast<int>(min(int64_t{q.rows}, p.outer - first_row));
  const Span<T> x(p.a, first, rows * n, words);
  const Span<T> dy(kGrad ? p.b : p.a, first, rows * n, words + q.words);
  const Span<T> out(p.out, first, rows * n, words + (kGrad ? 2 : 1) * q.words);
  x.Read(first, p.outer * n);
  if constexpr (kGrad) dy.Read(first, p.outer * n);
  AwaitAllCopies();
  __syncthreads();

  const T excluded = Excluded<T, kGrad>(p.log, p);
  [[maybe_unused]] const T zero = FromCompute<T>(0);
#pragma unroll 1
  for (int base = 0; base < rows; base += groups) {
    const int row = base + group;
    const bool live = row < rows;
    Part part = RowOfSpan(x, live ? row * n : 0, live ? n : 0);
    HeldRow<T, 4, kSpanUnits, false> a[1], b[1];  // `b` only with kGrad
    const auto load = [&](const Span<T>& span, int unit, T outside) {
      if (part.First(unit) >= part.n) return H::Filled(outside);
      H held = H::Load(part.Address(span.shared, unit));
      part.Trim(unit, held, outside);
      return held;
    };
#pragma unroll
    for (int k = 0; k < kSpanUnits; ++k) {
      if (k >= q.units) break;
      a[0].units[k] = load(x, lane + k * lanes, excluded);
      if constexpr (kGrad) b[0].units[k] = load(dy, lane + k * lanes, zero);
    }
    if (!kGrad && p.zero_scale) {
#pragma unroll
      for (int k = 0; k < kSpanUnits; ++k) {
        if (k >= q.units) break;
        part.TimesZero(lane + k * lanes, a[0].units[k], excluded);
      }
    }
    if (p.mask != nullptr) {
      part.mask = p.mask + p.mask_outer.Offset(first_row + (live ? row : 0));
      ExcludeUnits<kGrad>(p, part, lane, lanes, q.units, excluded, a[0].units, b[0].units);
    }

    Threads threads{scratch, lanes};
    A totals[1];
    if constexpr (kGrad) {
      BackwardRows(p, threads, q.units, a, b, static_cast<A>(p.scale), totals);
    } else {
      ForwardRows(p, threads, q.units, a, totals);
    }
    if (IsUndefined<kGrad, T>(p, totals[0])) {
      StoreUndefined<kGrad>(p, first + row * n, part.n, part.mask, out.shared + row * n, lane,
                            lanes, totals[0]);
      continue;
    }
#pragma unroll
    for (int k = 0; k < kSpanUnits; ++k) {
      if (k >= q.units) break;
      part.Store(out.shared, lane + k * lanes, a[0].units[k]);
    }
  }
  __syncthreads();
  out.Write();
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_SPAN_CUH_

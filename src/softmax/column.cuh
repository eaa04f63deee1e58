// What the two kernels along any axis except the minor one share: a thread's column of units,
// passes over a unit whose elements belong to different rows, and the reduction over the lanes of a
// column.
#ifndef JAX_FASTOPS_SOFTMAX_COLUMN_CUH_
#define JAX_FASTOPS_SOFTMAX_COLUMN_CUH_

#include <cstdint>

#include "core/cuda/group.cuh"
#include "core/cuda/vec.cuh"
#include "core/fast_divide.h"
#include "softmax/math.cuh"

namespace jax_fastops::cuda::softmax {

// A thread's part of one column of units: every `lanes`-th index of n, starting at `first`.
template <typename T, bool kGrad, int kBytes>
struct Column {
  using H = Vec<T, kBytes>;
  using Keep = Unit<uint8_t, H::kSize>;

  const Params& p;
  T excluded;
  int64_t origin;  // of the first unit, in elements of the array
  int64_t step;
  const uint8_t* mask;  // of the first unit
  int64_t mask_step;

  // `column` is the index among the units of all of outer and inner.
  __device__ __forceinline__ Column(const Params& p, bool log, const FastDivisor64& row_units,
                                    int64_t column, int64_t first, int lanes)
      : p(p),
        excluded(Excluded<T, kGrad>(log, p)),
        step(p.inner * lanes),
        mask(p.mask),
        mask_step(p.mask_stride * lanes) {
    const int64_t outer = Divide(static_cast<uint64_t>(column), row_units);
    const int64_t in_row = (column - outer * static_cast<int64_t>(row_units.divisor)) * H::kSize;
    origin = (outer * p.n + first) * p.inner + in_row;
    if (mask != nullptr) {
      mask += p.mask_outer.Offset(outer) + p.mask_inner.Offset(in_row) + first * p.mask_stride;
    }
  }

  // The unit with this index in the thread's part.
  __device__ __forceinline__ T* Address(const void* array, int64_t index) const {
    return const_cast<T*>(static_cast<const T*>(array)) + (origin + index * step);
  }
  __device__ __forceinline__ H Load(const void* array, int64_t index) const {
    return H::template Load<CacheHint::kNoAllocate>(Address(array, index));
  }
  __device__ __forceinline__ Keep LoadMask(int64_t index) const {
    const uint8_t* bytes = mask + index * mask_step;
    if (p.mask_units) return Keep::Load(bytes);
    Keep keep;  // broadcast over inner, or a unit of one element
#pragma unroll
    for (int i = 0; i < H::kSize; ++i) keep.elements[i] = *bytes;
    return keep;
  }

  // Applies the mask and a scale of zero. Changes() says whether there is anything to apply.
  __device__ __forceinline__ bool Changes() const {
    return mask != nullptr || (!kGrad && p.zero_scale);
  }
  __device__ __forceinline__ void TimesZero(H& a) const {
    a.TimesZero([](int) { return true; }, excluded);
  }
  __device__ __forceinline__ void Exclude(const Keep& keep, H& a, [[maybe_unused]] H& b) const {
    a.Exclude(keep, excluded);
    if constexpr (kGrad) b.Exclude(keep, FromCompute<T>(0));
  }
  __device__ __forceinline__ void Change(int64_t index, H& a, H& b) const {
    if (!kGrad && p.zero_scale) TimesZero(a);
    if (mask != nullptr) Exclude(LoadMask(index), a, b);
  }
};

// The maximum for each element of a unit; see Top.
template <typename T, int kBytes>
struct ColumnTops {
  using A = ComputeType<T>;
  using H = Vec<T, kBytes>;
  static constexpr int kSize = H::kSize;

  A values[kSize];
  PairOf<std::conditional_t<sizeof(T) == 2, T, __half>> pairs[H::kWords];
  bool negative;

  explicit __device__ __forceinline__ ColumnTops(A scale) : negative(scale < 0) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = Max::Identity<A>();
    if constexpr (H::kPairs) {
#pragma unroll
      for (int i = 0; i < H::kWords; ++i) {
        pairs[i] = H::Filled(FromCompute<T>(-A(INFINITY))).Pair(0);
      }
    }
  }
  __device__ __forceinline__ void Add(const H& x) {
    if constexpr (H::kPairs) {
      const uint32_t sign = negative ? 0x80008000u : 0u;
#pragma unroll
      for (int i = 0; i < H::kWords; ++i) {
        H flipped;
        flipped.words[0] = x.words[i] ^ sign;
        pairs[i] = __hmax2(pairs[i], flipped.Pair(0));
      }
    } else {
      A xs[kSize];
      x.Unpack(xs);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = Max()(values[i], negative ? -xs[i] : xs[i]);
    }
  }
  __device__ __forceinline__ void Get(A (&tops)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) tops[i] = values[i];
    if constexpr (H::kPairs) {
#pragma unroll
      for (int i = 0; i < H::kWords; ++i) {
        tops[2 * i] = ToCompute(pairs[i].x);
        tops[2 * i + 1] = ToCompute(pairs[i].y);
      }
    }
  }
};

// Adds the terms of each element of a unit to its sum.
template <typename T, int kBytes>
__device__ __forceinline__ void AddColumnTerms(bool log, const Vec<T, kBytes>& y,
                                               const Vec<T, kBytes>& dy, bool skip_zeros,
                                               ComputeType<T> (&totals)[Vec<T, kBytes>::kSize]) {
  constexpr int kSize = Vec<T, kBytes>::kSize;
  Branch(log, [&](auto is_log) {
    ComputeType<T> ys[kSize], dys[kSize];
    y.Unpack(ys);
    dy.Unpack(dys);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      totals[i] += Gradient<T>::Term(is_log, ys[i], dys[i], skip_zeros);
    }
  });
}

// Replaces the elements of a unit by their results. `kept` says that they are exponentials.
// `factors` are Normalizer::last or Gradient::sum of each element, and tops(i) its top element.
template <bool kGrad, typename T, int kBytes, typename Tops>
__device__ __forceinline__ void ToColumnResults(
    const Params& p, bool log, bool kept, const ComputeType<T> (&factors)[Vec<T, kBytes>::kSize],
    const Tops& tops, Vec<T, kBytes>& a, [[maybe_unused]] const Vec<T, kBytes>& b) {
  using A = ComputeType<T>;
  constexpr int kSize = Vec<T, kBytes>::kSize;
  const A scale = static_cast<A>(p.scale);
  Branch(log, [&](auto is_log) {
    A as[kSize];
    a.Unpack(as);
    if constexpr (kGrad) {
      A bs[kSize];
      b.Unpack(bs);
      Gradient<T> gradient(is_log, scale, A(0), p.skip_zeros);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        gradient.sum = factors[i];
        as[i] = gradient(as[i], bs[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        Normalizer<T> normalize(is_log, scale, tops(i));
        normalize.last = factors[i];
        as[i] = kept && !is_log ? as[i] * normalize.last : normalize(as[i]);
      }
    }
    a.Pack(as);
  });
}

// Replaces the sums of each element by the factors of ToColumnResults. Returns a bit for each
// element whose row is undefined; 0 if there is no mask.
template <bool kGrad, typename T, int kSize, typename Tops>
__device__ __forceinline__ uint32_t ToFactors(const Params& p, bool log, const Tops& tops,
                                              ComputeType<T> (&totals)[kSize]) {
  using A = ComputeType<T>;
  const A scale = static_cast<A>(p.scale);
  uint32_t undefined = 0;
  if ((!kGrad || log) && p.mask != nullptr) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      bool is_undefined;
      if constexpr (kGrad) {
        is_undefined = Gradient<T>::Undefined(totals[i], scale);
      } else {
        is_undefined = Normalizer<T>::Undefined(totals[i]);
      }
      undefined |= uint32_t{is_undefined} << i;
    }
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if constexpr (kGrad) {
      totals[i] = Gradient<T>(log, scale, totals[i], false).sum;
    } else {
      Normalizer<T> normalize(log, scale, tops(i));
      normalize.SetTotal(totals[i]);
      totals[i] = normalize.last;
    }
  }
  return undefined;
}

// Reduces each of `values` over the lanes of a column, which are adjacent threads of a warp.
template <typename Op, typename A, int kSize>
__device__ __forceinline__ void ReduceAdjacent(Op op, A (&values)[kSize], int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      values[i] = op(values[i], __shfl_xor_sync(0xffffffffu, values[i], step));
    }
  }
}

// Reduces each of `values` over the lanes of a column. `threads` are those of the tile: the whole
// block, or 32 if each warp has its own tile. The lanes of a column are 1 << log_width threads
// apart. `scratch` has room for the `values` of all columns of the tile, once per warp or once per
// lane, whichever is fewer.
template <typename Op, typename A, int kSize>
__device__ __forceinline__ void ReduceLanes(Op op, A (&values)[kSize], A* scratch, int log_width,
                                            int threads) {
  constexpr int kPiece = kSize * sizeof(A) < 16 ? kSize * sizeof(A) : 16;
  using Piece = Unit<A, kPiece>;
  const int width = 1 << log_width;
  for (int lanes = width; lanes < 32; lanes *= 2) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      values[i] = op(values[i], __shfl_xor_sync(0xffffffffu, values[i], lanes));
    }
  }
  const int parts = threads / max(width, 32);
  if (parts == 1) return;
  const int column = threadIdx.x & (width - 1);
  const int part = width < 32 ? threadIdx.x / 32 : threadIdx.x >> log_width;
  __syncthreads();  // others may still read the values of the last reduction
  if (threadIdx.x % 32 < width) {
#pragma unroll
    for (int at = 0; at < kSize; at += Piece::kSize) {
      Piece piece;
#pragma unroll
      for (int i = 0; i < Piece::kSize; ++i) piece.elements[i] = values[at + i];
      piece.Store(scratch + (part * width + column) * kSize + at);
    }
  }
  __syncthreads();
  // One thread combines each value. If every thread combined all that it needs, the number of
  // instructions would multiply.
  for (int at = threadIdx.x; at < width * kSize; at += threads) {
    A value = scratch[at];
#pragma unroll 4
    for (int other = 1; other < parts; ++other) {
      value = op(value, scratch[other * width * kSize + at]);
    }
    scratch[at] = value;
  }
  __syncthreads();
#pragma unroll
  for (int at = 0; at < kSize; at += Piece::kSize) {
    const Piece piece = Piece::Load(scratch + column * kSize + at);
#pragma unroll
    for (int i = 0; i < Piece::kSize; ++i) values[at + i] = piece.elements[i];
  }
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_COLUMN_CUH_

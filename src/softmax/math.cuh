// The arithmetic of softmax on single elements and words, which does not depend on how threads
// share a row.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/cuda/math.cuh"
#include "core/cuda/vec.cuh"
#include "softmax/shape.h"

namespace jax_fastops::cuda::softmax {

struct OpParams {
  double scale;
  bool log;         // log_softmax; a flag of the kernels, which are bound by memory
  bool zero_scale;  // the scale rounds to 0: x is replaced by 0 * x, and the scale by 1
  bool skip_zeros;  // backward of a masked softmax: elements with y = 0 take no part
  RowDropout dropout;
};

// -------------------------------------------------------------------------------------------------
// Rows

// Finds the elements for which scale * x is largest: the largest elements, or the smallest ones if
// the scale is negative. Element i of a word counts for column i % kColumns. 16-bit types compare
// two elements at once.
template <typename T, int kColumns>
struct Tops {
  using A = ComputeType<T>;
  static constexpr int kPairs = (kColumns + 1) / 2;

  A values[kColumns];
  PairOf<std::conditional_t<sizeof(T) == 2, T, __half>> pairs[kPairs];
  bool negative;

  explicit __device__ __forceinline__ Tops(A scale) : negative(scale < 0) {
#pragma unroll
    for (A& value : values) value = -A(INFINITY);
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (auto& pair : pairs) pair = Broadcast(FromCompute<T>(-A(INFINITY)));
    }
  }
  template <int kBytes>
  __device__ __forceinline__ void Add(const Vec<T, kBytes>& x) {
    if constexpr (Vec<T, kBytes>::kPairs) {
      const uint32_t sign = negative ? 0x80008000u : 0u;
#pragma unroll
      for (int i = 0; i < Vec<T, kBytes>::kWords; ++i) {
        Vec<T, 4> flipped;
        flipped.words[0] = x.words[i] ^ sign;
        pairs[i % kPairs] = __hmax2(pairs[i % kPairs], flipped.Pair(0));
      }
    } else {
      A xs[Vec<T, kBytes>::kSize];
      x.Unpack(xs);
#pragma unroll
      for (int i = 0; i < Vec<T, kBytes>::kSize; ++i) {
        values[i % kColumns] = fmax(values[i % kColumns], negative ? -xs[i] : xs[i]);
      }
    }
  }
  // The maxima of -x if the scale is negative, so that maxima can be combined by a maximum again.
  __device__ __forceinline__ void Get(A (&tops)[kColumns]) const {
    if constexpr (sizeof(T) == 2 && kColumns == 1) {
      tops[0] = fmax(values[0], fmax(ToCompute(pairs[0].x), ToCompute(pairs[0].y)));
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        tops[i] = values[i];
        if constexpr (sizeof(T) == 2) tops[i] = ToCompute(i % 2 ? pairs[i / 2].y : pairs[i / 2].x);
      }
    }
  }
};

// A result of Tops as an element; NaN if scale * x is infinite.
template <typename A>
__device__ __forceinline__ A TopElement(A top, A scale) {
  if (scale < 0) top = -top;
  return fabs(top * scale) < A(INFINITY) ? top : A(NAN);
}

// Whether a result of Tops gives -inf when multiplied by the scale. If that is the maximum of
// the whole row, the row is undefined. If it is the maximum of a part, the part adds nothing to the
// sum of the row.
template <typename A>
__device__ __forceinline__ bool IsBottom(A top, A scale) {
  return top * fabs(scale) == -A(INFINITY);
}

// The element to subtract from the elements of a part of a row, as far as it is known.
template <typename A>
__device__ __forceinline__ A PartTopElement(A top, A scale) {
  return IsBottom(top, scale) ? A(0) : TopElement(top, scale);
}

// Converts a sum of exponentials relative to the maximum `from` into one relative to `to`. A
// maximum of -inf means a sum over nothing, which is 0 or NaN. Maxima are results of Tops, so
// the scale is taken without its sign.
template <typename A>
__device__ __forceinline__ A Corrected(A total, A from, A to, A scale) {
  return from == -A(INFINITY) ? total : total * Exp((from - to) * fabs(scale));
}

// The forward of one row, given its top element and its sum. The top element is subtracted first,
// so rows far from 0 lose no accuracy. Excluded elements are held as the infinity that the scale
// turns into -inf. They add 0 to the sum, and their result is 0, or -inf for log_softmax. In an
// undefined row the sum is NaN. A row is undefined if it contains a NaN or if its maximum is
// infinite, which includes fully excluded rows.
//
// For softmax of 16-bit types, the exponentials and their sum are 2^64 times as large. The
// instruction for powers of two flushes subnormal results to 0. With the factor, subnormal results
// come from the final product instead.
template <typename T>
struct Normalizer {
  using A = ComputeType<T>;
  static constexpr bool kHalf = sizeof(T) == 2;

  bool log;
  A scale;
  A top;
  A last;  // reciprocal of the sum, or its logarithm

  __device__ __forceinline__ Normalizer(bool log, A scale, A top)
      : log(log), scale(scale), top(top), last(0) {}
  __device__ __forceinline__ void SetTotal(A total) {
    if (log) {
      last = ::log(total);
    } else if constexpr (kHalf) {
      last = Reciprocal(total);
    } else {
      last = A(1) / total;
    }
  }

  // The exponential of an element, the term of the sum.
  __device__ __forceinline__ A Power(A x) const {
    const A d = x - top;
    if constexpr (!kHalf) return Exp(d * scale);
    return log ? Exp2(d * scale * kLog2E) : Exp2(fmaf(d, scale * kLog2E, 64.0f));
  }
  static __device__ __forceinline__ bool Undefined(A total) { return !(total < A(INFINITY)); }
};

// The backward of one row. For excluded elements y is held as -inf (log_softmax) or 0, and dy as 0.
template <typename T>
struct Gradient {
  using A = ComputeType<T>;

  bool log;
  bool skip_zeros;
  A scale;
  A sum;  // log_softmax: times 2^-32 for 16-bit types; softmax: times the scale

  __device__ __forceinline__ Gradient(bool log, A scale, A total, bool skip_zeros)
      : log(log), skip_zeros(skip_zeros), scale(scale), sum(total) {
    if (!log) {
      sum *= scale;
    } else if constexpr (sizeof(T) == 2) {
      sum *= 2.3283064365386963e-10f;
    }
  }
  static __device__ __forceinline__ A Term(bool log, A y, A dy, bool skip_zeros) {
    return log ? dy : skip_zeros && y == A(0) ? A(0) : y * dy;
  }
  __device__ __forceinline__ A operator()(A y, A dy) const {
    if (log) {
      if constexpr (sizeof(T) == 2) {
        return scale * fmaf(-Exp2(fmaf(y, kLog2E, 32.0f)), sum, dy);
      }
      return scale * fma(-Exp(y), sum, dy);
    }
    return skip_zeros && y == A(0) ? A(0) : y * fma(dy, scale, -sum);
  }
  static __device__ __forceinline__ bool Undefined(A total, A scale) {
    return !(fabs(total * scale) < A(INFINITY));
  }
};

// The element that represents an excluded one.
template <typename T, bool kGrad>
__device__ __forceinline__ T Excluded(bool log, const OpParams& p) {
  using A = ComputeType<T>;
  if constexpr (kGrad) return FromCompute<T>(log ? -A(INFINITY) : A(0));
  return FromCompute<T>(static_cast<A>(p.scale) < A(0) ? A(INFINITY) : -A(INFINITY));
}

// The result for an excluded element.
template <typename T, bool kGrad>
__device__ __forceinline__ T ExcludedResult(bool log) {
  using A = ComputeType<T>;
  return FromCompute<T>(!kGrad && log ? -A(INFINITY) : A(0));
}

// Calls run(std::bool_constant<flag>()). The code after the branch knows the flag. Use it around a
// whole pass, so that the branch does not stand between the operations of each element.
template <typename Run>
__device__ __forceinline__ void Branch(bool flag, const Run& run) {
  if (flag) {
    run(std::true_type());
  } else {
    run(std::false_type());
  }
}

// -------------------------------------------------------------------------------------------------
// Passes over one word

// Adds value i to the sum of column i % kColumns. Pairwise, which is faster and more accurate than
// one after another.
template <typename A, int kSize, int kColumns>
__device__ __forceinline__ void AddTo(A (&values)[kSize], A (&sums)[kColumns]) {
#pragma unroll
  for (int half = kSize / 2; half >= kColumns; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) values[i] += values[i + half];
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sums[i] += values[i];
}

}  // namespace jax_fastops::cuda::softmax

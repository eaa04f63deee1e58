// ReLU and addition of single elements and of 16-byte vectors, for every op that ends in a ReLU.
#pragma once

#include <cstdint>

#include <type_traits>

#include "core/cuda/vec.cuh"

namespace jax_fastops::cuda {

// max(x, 0) by the hardware's NaN-propagating maximum, which XLA uses too: -0 becomes +0, and NaN
// becomes the canonical NaN. float64 has no such instruction. There a NaN fails the comparison and
// is returned unchanged.
template <typename T>
__device__ __forceinline__ T ReluOf(T x) {
  if constexpr (sizeof(T) == 2) {
    return __hmax_nan(x, FromCompute<T>(0));
  } else if constexpr (sizeof(T) == 4) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
  } else {
    return !(x <= 0) ? x : T{0};
  }
}

// The ReLU of a sum that may have the accumulator type, as T.
template <typename T, typename S>
__device__ __forceinline__ T ReluTo(S sum) {
  if constexpr (std::is_same_v<T, S>) {
    return ReluOf(sum);
  } else {
    return FromCompute<T>(ReluOf(sum));
  }
}

template <typename T>
__device__ __forceinline__ T SumOf(T x, T y) {
  return FromCompute<T>(ToCompute(x) + ToCompute(y));
}

// The same for 16 bytes. 16-bit elements are processed in pairs, two per register.
template <typename T>
__device__ __forceinline__ Unit<T> SumOf(Unit<T> x, const Unit<T>& y) {
  if constexpr (sizeof(T) == 2) {
    using Pair = PairOf<T>;
    Unit<Pair> pairs = Reinterpret<Pair>(x);
    const Unit<Pair> addends = Reinterpret<Pair>(y);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __hadd2_rn(pairs[i], addends[i]);
    return Reinterpret<T>(pairs);
  } else {
#pragma unroll
    for (int i = 0; i < x.kSize; ++i) x[i] = SumOf(x[i], y[i]);
    return x;
  }
}

// Replaces the elements by their ReLU. Bit i of the result is set if element i was greater than
// zero.
template <typename T>
__device__ __forceinline__ uint32_t ReluInPlace(Unit<T>& x) {
  uint32_t bits = 0;
  if constexpr (sizeof(T) == 2) {
    using Pair = PairOf<T>;
    Unit<Pair> pairs = Reinterpret<Pair>(x);
    const Pair zero = Broadcast(FromCompute<T>(0));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // A comparison sets each 16-bit half to all ones or all zeros. The lower half's result goes
      // to an even bit, the upper half's to the same bit 16 positions higher.
      bits |= __hgt2_mask(pairs[i], zero) & (0x00010001u << 2 * i);
      pairs[i] = __hmax2_nan(pairs[i], zero);
    }
    bits = (bits | bits >> 15) & 0xff;
    x = Reinterpret<T>(pairs);
  } else {
#pragma unroll
    for (int i = 0; i < x.kSize; ++i) {
      if (ToCompute(x[i]) > 0) bits |= 1u << i;
      x[i] = ReluOf(x[i]);
    }
  }
  return bits;
}

}  // namespace jax_fastops::cuda

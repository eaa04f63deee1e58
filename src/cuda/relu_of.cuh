// What ReLU makes of elements, alone and 16 bytes of them at once, for every op that ends in it.
#ifndef JAX_FASTOPS_CUDA_RELU_OF_CUH_
#define JAX_FASTOPS_CUDA_RELU_OF_CUH_

#include <cstdint>

#include "cuda/packed.cuh"

namespace jax_fastops::cuda {

// max(x, 0) with the hardware's maximum that propagates NaN, which XLA uses too: -0 becomes +0, and
// NaN the canonical NaN. For float64 there is no such instruction: NaN fails the comparison and
// stays.
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

template <typename T>
__device__ __forceinline__ T SumOf(T x, T y) {
  return FromCompute<T>(ToCompute(x) + ToCompute(y));
}

// The same on 16 bytes. Of 16-bit types two elements share a register, and are worked on together.
template <typename T>
__device__ __forceinline__ Packed128<T> SumOf(Packed128<T> x, const Packed128<T>& y) {
  if constexpr (sizeof(T) == 2) {
    using Pair = PairOf<T>;
    Packed128<Pair> pairs = Reinterpret<Pair>(x);
    const Packed128<Pair> addends = Reinterpret<Pair>(y);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __hadd2_rn(pairs[i], addends[i]);
    return Reinterpret<T>(pairs);
  } else {
#pragma unroll
    for (int i = 0; i < x.kSize; ++i) x[i] = SumOf(x[i], y[i]);
    return x;
  }
}

// Replaces the elements by their ReLU; bit i of the result says that element i was greater than
// zero.
template <typename T>
__device__ __forceinline__ uint32_t ReluInPlace(Packed128<T>& x) {
  uint32_t bits = 0;
  if constexpr (sizeof(T) == 2) {
    using Pair = PairOf<T>;
    Packed128<Pair> pairs = Reinterpret<Pair>(x);
    const Pair zero = Broadcast(FromCompute<T>(0));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Comparisons give 16 ones or zeros per half; the lower halves' go to even bits, the upper
      // ones' to the same bits 16 further up.
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

#endif  // JAX_FASTOPS_CUDA_RELU_OF_CUH_

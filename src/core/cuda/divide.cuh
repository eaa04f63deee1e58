// Division by divisors that the host has prepared: the device side of core/fast_divide.h.
#pragma once

#include <cstdint>

#include "core/fast_divide.h"

namespace jax_fastops::cuda {

// n / d for n < 2^31.
__device__ __forceinline__ uint32_t Divide(uint32_t n, const FastDivisor& d) {
  return d.divisor == 1 ? n : __umulhi(n, d.multiplier) >> d.shift;
}

// n / d for n < 2^63.
__device__ __forceinline__ uint64_t Divide(uint64_t n, const FastDivisor64& d) {
  return d.divisor == 1 ? n : __umul64hi(n, d.multiplier) >> d.shift;
}

}  // namespace jax_fastops::cuda

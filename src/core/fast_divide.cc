#include "core/fast_divide.h"

#include <cstdint>

namespace jax_fastops {

// With l = ceil(log2 d), the quotient is the high half of n * ceil(2^(32 + l - 1) / d), shifted by
// l - 1. For n < 2^31 this is exact, and the multiplier is below 2^32.
FastDivisor::FastDivisor(uint32_t d) : divisor(d) {
  if (d == 1) return;  // the device code tests for it
  uint32_t l = 1;
  while ((uint64_t{1} << l) < d) ++l;
  shift = l - 1;
  multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + l)) + d - 1) / d);
}

FastDivisor64::FastDivisor64(uint64_t d) : divisor(d) {
  if (d == 1) return;
  uint32_t l = 1;
  while ((uint64_t{1} << l) < d) ++l;
  shift = l - 1;
  // ceil(2^(63 + l) / d) by long division, because not every compiler has 128-bit integers.
  uint64_t quotient = 0, remainder = uint64_t{1} << (l - 1);  // 2^(l - 1) is below d
  for (int i = 0; i < 64; ++i) {
    remainder *= 2;  // d < 2^63: no overflow
    quotient *= 2;
    if (remainder >= d) {
      remainder -= d;
      ++quotient;
    }
  }
  multiplier = quotient + (remainder != 0 ? 1 : 0);
}

}  // namespace jax_fastops

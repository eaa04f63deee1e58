// Division by divisors that only the host knows, as multiplication and shift. The device side is
// core/cuda/divide.cuh.
#pragma once

#include <cstdint>

namespace jax_fastops {

// Division of n < 2^31 by a divisor that only the host knows: the high half of a product, and a
// shift. A GPU has no instruction for it: a plain division takes about twenty instructions.
//
// Exact for 0 <= n < 2^31 and 1 <= divisor < 2^31 (Granlund and Montgomery, "Division by invariant
// integers using multiplication").
struct FastDivisor {
  uint32_t divisor = 1;
  uint32_t multiplier = 0;  // ceil(2^(32 + shift) / divisor); unused for divisor 1
  uint32_t shift = 0;

  FastDivisor() = default;
  explicit FastDivisor(uint32_t d);
};

// The same for 0 <= n < 2^63 and 1 <= divisor < 2^63.
struct FastDivisor64 {
  uint64_t divisor = 1;
  uint64_t multiplier = 0;
  uint32_t shift = 0;

  FastDivisor64() = default;
  explicit FastDivisor64(uint64_t d);
};

}  // namespace jax_fastops

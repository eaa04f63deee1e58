// Integer arithmetic of sizes, on the host and on the device.
#pragma once

#include <cstdint>

namespace jax_fastops {

// ceil(a / b), for a >= 0 and b > 0 whose sum does not overflow.
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The smallest multiple of b that is not below a.
constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// ceil(log2(n)); 0 for 0.
constexpr int CeilLog2(int64_t n) {
  int log = 0;
  while (int64_t{1} << log < n) ++log;
  return log;
}

}  // namespace jax_fastops

// Division by divisors that only the host knows: the high half of a product, and a shift. A GPU has
// no instruction for it: a plain division takes about twenty instructions. The device side is
// core/cuda/divide.cuh.
#pragma once

#include <bit>
#include <cstdint>

namespace jax_fastops {

// Exact for 0 <= n < 2^(b - 1) and 1 <= divisor < 2^(b - 1), where Word has b bits, and Wide has
// twice as many (Granlund and Montgomery, "Division by invariant integers using multiplication").
template <typename Word, typename Wide>
struct FastDivisorOf {
  Word divisor = 1;
  Word multiplier = 0;  // ceil(2^(b + shift) / divisor); unused for divisor 1
  uint32_t shift = 0;   // ceil(log2(divisor)) - 1, so the multiplier is below 2^b

  FastDivisorOf() = default;
  explicit FastDivisorOf(Word d) : divisor(d) {
    if (d == 1) return;  // the device code tests for it
    shift = static_cast<uint32_t>(std::bit_width(d - 1)) - 1;
    multiplier = static_cast<Word>(((Wide{1} << (8 * sizeof(Word) + shift)) + d - 1) / d);
  }
};

using FastDivisor = FastDivisorOf<uint32_t, uint64_t>;
using FastDivisor64 = FastDivisorOf<uint64_t, unsigned __int128>;

}  // namespace jax_fastops

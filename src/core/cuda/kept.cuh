// Which elements dropout keeps (core/philox.h), for units that a thread holds.
//
// A call of Philox takes about 60 instructions for eight elements, so what follows it must take
// few. Two elements are compared at once, and their results are two bits of a word.
#pragma once

#include <cstdint>

#include "core/philox.h"

namespace jax_fastops::cuda {

// The largest 16 random bits that are kept, in both halves of a word.
struct KeptLimit {
  uint32_t low;   // its lower 15 bits, and 2^15
  uint32_t high;  // every bit is a copy of its bit 15

  explicit __device__ __forceinline__ KeptLimit(uint32_t largest)
      : low((largest | 0x8000u) * 0x10001u), high(largest & 0x8000u ? ~0u : 0u) {}

  // Bits 15 and 31 say whether the lower and the upper half of `word` are kept; other bits are
  // arbitrary. A half is at most the limit if two of three hold, compared without the highest bits:
  // it is at most the limit; its highest bit is 0; that of the limit is 1.
  __device__ __forceinline__ uint32_t Halves(uint32_t word) const {
    const uint32_t lower = low - (word & 0x7fff7fffu);
    return (lower & ~word) | (high & (lower | ~word));
  }
};

// Sets bits 15 and 31 of kept[i] for elements 2 * i and 2 * i + 1 of the kSize elements of a row
// that begin at `first`, which may be before the row. With kWhole, all are in one block of random
// bits, and `first` is a multiple of kSize.
template <bool kWhole, int kWords>
__device__ __forceinline__ void KeptPairs(const PhiloxWords& seed, int first,
                                          const KeptLimit& limit, uint32_t (&kept)[kWords]) {
  constexpr int kSize = 2 * kWords, kBlockWords = kSeedBlock / 2;
  if constexpr (kWhole) {
    static_assert(kSize == kSeedBlock || 2 * kSize == kSeedBlock);
    const PhiloxWords bits = RandomBits(seed, static_cast<uint32_t>(first) / kSeedBlock);
    const bool upper = first % kSeedBlock != 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t word = upper ? bits.word[kBlockWords - kWords + i] : bits.word[i];
      kept[i] = limit.Halves(word);
    }
  } else {
    const int block = (first + kSeedBlock) / kSeedBlock - 1, skipped = first - block * kSeedBlock;
    uint32_t found = 0;  // a bit for each element of two blocks
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const PhiloxWords bits = RandomBits(seed, static_cast<uint32_t>(block + k));
#pragma unroll
      for (int i = 0; i < kBlockWords; ++i) {
        const uint32_t halves = limit.Halves(bits.word[i]);
        found |= (halves >> 15 & 1u | halves >> 30 & 2u) << (k * kSeedBlock + 2 * i);
      }
    }
    found >>= skipped;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      kept[i] = (found >> 2 * i & 1u) << 15 | (found >> (2 * i + 1) & 1u) << 31;
    }
  }
}

// Whether an element of a row is kept.
__device__ __forceinline__ bool IsElementKept(const PhiloxWords& seed, int index,
                                              uint32_t largest) {
  const PhiloxWords bits = RandomBits(seed, static_cast<uint32_t>(index) / kSeedBlock);
  const int i = index % kSeedBlock / 2;
  const uint32_t word = i < 2 ? bits.word[i == 0 ? 0 : 1] : bits.word[i == 2 ? 2 : 3];
  return (index % 2 == 0 ? word & 0xffffu : word >> 16) <= largest;
}

// Which of a thread's elements of a row are kept, one bit for each: kUnits units of kSize, which
// must be 4 or 8. Element 0 of unit k is element `first` + k * `stride` of the row; these are
// multiples of kSize, and with kSize 4, `stride` is one of 8.
template <int kSize, int kUnits>
struct KeptUnits {
  static constexpr int kPairs = kSize / 2;
  uint32_t bits;

  __device__ __forceinline__ bool Has(int unit, int element) const {
    return bits >> ((element % 2 == 0 ? 15 : 31) - unit * kPairs - element / 2) & 1u;
  }

  // Units of 4 are half a block of random bits. Adjacent lanes, which have the halves of the same
  // blocks, draw every other block and exchange them, so all lanes must call it together.
  __device__ __forceinline__ void Draw(const PhiloxWords& seed, int first, int stride,
                                       const KeptLimit& limit) {
    static_assert(kSize * kUnits <= 32 && (kSize == 8 || (kSize == 4 && kUnits % 2 == 0)));
    constexpr int kStep = kSeedBlock / kSize;
    const int half = kStep == 1 ? 0 : first / kSize % kStep;
    bits = 0;
#pragma unroll
    for (int k = 0; k < kUnits; k += kStep) {
      const PhiloxWords block = RandomBits(seed, (first + (k + half) * stride) / kSeedBlock);
#pragma unroll
      for (int i = 0; i < kSeedBlock / 2; ++i) {
        bits |= (limit.Halves(block.word[i]) & 0x80008000u) >> (k * kPairs + i);
      }
    }
    if constexpr (kStep == 2) {
      const uint32_t others = __shfl_xor_sync(0xffffffffu, bits, 1);
      const uint32_t even = (half == 0 ? bits : others) << 2 * half;
      const uint32_t odd = (half == 0 ? others : bits) << 2 * half;
      bits = (even & 0xccccccccu) | (odd >> 2 & 0x33333333u);
    }
  }
};

// Sets the elements to 0 that are not kept, in words of elements of type T.
template <typename T, int kWords, int kPairs>
__device__ __forceinline__ void KeepOnly(const uint32_t (&kept)[kPairs],
                                         uint32_t (&words)[kWords]) {
  static_assert(kWords * 4 == kPairs * 2 * static_cast<int>(sizeof(T)));
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const int element = w * 4 / static_cast<int>(sizeof(T));
    // Bytes that are copies of the highest bit of byte 1 (selected by 9), or of byte 3 (by 11).
    const uint32_t bytes = sizeof(T) == 2 ? 0xbb99u : element % 2 == 0 ? 0x9999u : 0xbbbbu;
    uint32_t mask;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(kept[element / 2]), "r"(bytes));
    words[w] &= mask;
  }
}

}  // namespace jax_fastops::cuda

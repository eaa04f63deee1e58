// The random bits of dropout (core/philox.h) for the instruction set for which a *_simd.cc file is
// compiled. As in simd_math.h, everything is in the anonymous namespace.
#pragma once

#include "core/cpu/simd.h"
#include "core/philox.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

typedef uint64_t U64 __attribute__((vector_size(kVectorBytes)));

// The blocks of one vector: a 64-bit lane for each.
constexpr int kPhiloxLanes = kVectorBytes / 8;

// The products of the low halves of the lanes.
FASTOPS_INLINE U64 LowProduct(U64 a, U64 b) {
#if !defined(__x86_64__)
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#elif FASTOPS_ISA_LEVEL == 2
  return (U64)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b);
#elif FASTOPS_ISA_LEVEL == 1
  return (U64)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
  return (U64)_mm_mul_epu32((__m128i)a, (__m128i)b);
#endif
}

// The blocks of the lanes, relative to the first one. With AVX-512, they are in the order in which
// StoreKept interleaves them.
FASTOPS_INLINE U64 BlocksOfLanes() {
  U64 lane;
  for (int i = 0; i < kPhiloxLanes; ++i) {
    lane[i] = static_cast<uint64_t>(FASTOPS_ISA_LEVEL == 2 ? i % 2 * 4 + i / 2 : i);
  }
  return lane;
}

// Stores a byte for each block. `first` has elements 0 to 3 of the blocks, `last` has 4 to 7.
FASTOPS_INLINE void StoreKept(U64 first, U64 last, uint32_t largest, uint8_t* bytes) {
#if !defined(__x86_64__)
  for (int i = 0; i < kPhiloxLanes; ++i) {
    unsigned byte = 0;
    for (int e = 0; e < 8; ++e) {
      const uint64_t bits = e < 4 ? first[i] : last[i];
      byte |= static_cast<unsigned>((bits >> 16 * (e % 4) & 0xffffu) <= largest) << e;
    }
    bytes[i] = static_cast<uint8_t>(byte);
  }
#elif FASTOPS_ISA_LEVEL == 2
  const __m512i limit = _mm512_set1_epi16(static_cast<int16_t>(largest));
  const uint32_t kept[] = {
      _mm512_cmple_epu16_mask(_mm512_maskz_unpacklo_epi64(0xff, (__m512i)first, (__m512i)last),
                              limit),
      _mm512_cmple_epu16_mask(_mm512_maskz_unpackhi_epi64(0xff, (__m512i)first, (__m512i)last),
                              limit)};
  memcpy(bytes, kept, sizeof(kept));
#else
  // Bytes of both packed together, per 128 bits: elements 0 to 3 of two blocks, then 4 to 7.
#if FASTOPS_ISA_LEVEL == 1
  const __m256i limit = _mm256_set1_epi16(static_cast<int16_t>(largest)), zero = {};
  const auto kept = [&](U64 v) FASTOPS_LAMBDA {
    return _mm256_cmpeq_epi16(_mm256_subs_epu16((__m256i)v, limit), zero);
  };
  const __m256i packed = _mm256_packs_epi16(kept(first), kept(last));
  const int mask = _mm256_movemask_epi8(_mm256_shuffle_epi32(packed, _MM_SHUFFLE(3, 1, 2, 0)));
#else
  const __m128i limit = _mm_set1_epi16(static_cast<int16_t>(largest)), zero = {};
  const auto kept = [&](U64 v) FASTOPS_LAMBDA {
    return _mm_cmpeq_epi16(_mm_subs_epu16((__m128i)v, limit), zero);
  };
  const __m128i packed = _mm_packs_epi16(kept(first), kept(last));
  const int mask = _mm_movemask_epi8(_mm_shuffle_epi32(packed, _MM_SHUFFLE(3, 1, 2, 0)));
#endif
  memcpy(bytes, &mask, kPhiloxLanes);
#endif
}

// Stores which elements of `count` blocks of a row are kept: a byte for each block, its first
// element lowest. Writes up to a multiple of kPhiloxLanes bytes.
FASTOPS_INLINE void KeptBits(const PhiloxWords& seed, uint32_t block, int64_t count,
                             uint32_t largest, uint8_t* bytes) {
  const U64 lanes = BlocksOfLanes();
  const U64 m0 = U64{} + kPhiloxMultiplier0, m1 = U64{} + kPhiloxMultiplier1;
  for (int64_t i = 0; i < count; i += kPhiloxLanes) {
    // Only the low halves of lanes count, and the high halves are never cleared.
    U64 c0 = lanes + (block + static_cast<uint64_t>(i)), c1 = U64{} + seed.word[0];
    U64 c2 = U64{} + seed.word[1], c3 = {};
    uint32_t key0 = seed.word[2], key1 = seed.word[3];
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const U64 p0 = LowProduct(m0, c0), p1 = LowProduct(m1, c2);
      c0 = p1 >> 32 ^ c1 ^ (U64{} + key0);
      c1 = p1;
      c2 = p0 >> 32 ^ c3 ^ (U64{} + key1);
      c3 = p0;
      key0 += kPhiloxStep0;
      key1 += kPhiloxStep1;
    }
    StoreKept((c0 & 0xffffffffu) | c1 << 32, (c2 & 0xffffffffu) | c3 << 32, largest, bytes + i);
  }
}

}  // namespace
}  // namespace jax_fastops::cpu::FASTOPS_ISA

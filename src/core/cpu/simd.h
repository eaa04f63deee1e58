// Vectors of each element type, for the instruction set for which a *_simd.cc file is compiled.
//
// A type F32, F64, BF16 or F16 describes blocks of kLanes elements, one or a few registers wide:
//
//   Vec                  a block in registers
//   Bits                 an unsigned integer with one bit per lane, lane 0 lowest
//   Load, Store          from and to memory of any alignment
//   Stream               to memory aligned to sizeof(Vec), bypassing the caches if supported
//   Add                  rounded to the element type
//   Positive(x, &kept)   the bits of x > 0; kept = relu(x)
//   Select(bits, x)      x if the bit is set, else +0
//
// F32, F64 and BF16 (as float) are compared by floating-point instructions, so subnormals count as
// zero exactly if the calling thread is in that mode, as XLA's CPU threads are. A float16 subnormal
// is a normal float32, and keeps its value. NaN is not > 0, but relu returns it unchanged.
//
// This header may define things only in the anonymous namespace, and include only C headers: see
// isa.h.
#ifndef JAX_FASTOPS_CORE_CPU_SIMD_H_
#define JAX_FASTOPS_CORE_CPU_SIMD_H_

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "masks and 16-bit lanes assume it");

#define FASTOPS_INLINE inline __attribute__((always_inline))

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

// Prefetches the cache line `bytes` bytes after p. An address after the end of an array is
// harmless.
FASTOPS_INLINE void FetchAhead(const char* p, int64_t bytes) {
  __builtin_prefetch((const void*)((uintptr_t)p + (uintptr_t)bytes));
}

#if FASTOPS_ISA_LEVEL == 2  // ---- AVX-512 (F, BW, DQ, VL) ----

struct F32 {
  using Vec = __m512;
  using Bits = uint16_t;
  static constexpr int kLanes = 16, kBytes = 4;
  static FASTOPS_INLINE Vec Load(const void* p) { return _mm512_loadu_ps(p); }
  static FASTOPS_INLINE void Store(void* p, Vec v) { _mm512_storeu_ps(p, v); }
  static FASTOPS_INLINE void Stream(void* p, Vec v) { _mm512_stream_ps(static_cast<float*>(p), v); }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static FASTOPS_INLINE Bits Positive(Vec x, Vec* kept) {
    const __m512 zero = _mm512_setzero_ps();
    *kept = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, zero, _CMP_NLE_UQ), x);
    return _mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ);
  }
  static FASTOPS_INLINE Vec Select(Bits bits, Vec x) { return _mm512_maskz_mov_ps(bits, x); }
};

struct F64 {
  using Vec = __m512d;
  using Bits = uint8_t;
  static constexpr int kLanes = 8, kBytes = 8;
  static FASTOPS_INLINE Vec Load(const void* p) { return _mm512_loadu_pd(p); }
  static FASTOPS_INLINE void Store(void* p, Vec v) { _mm512_storeu_pd(p, v); }
  static FASTOPS_INLINE void Stream(void* p, Vec v) {
    _mm512_stream_pd(static_cast<double*>(p), v);
  }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) { return _mm512_add_pd(a, b); }
  static FASTOPS_INLINE Bits Positive(Vec x, Vec* kept) {
    const __m512d zero = _mm512_setzero_pd();
    *kept = _mm512_maskz_mov_pd(_mm512_cmp_pd_mask(x, zero, _CMP_NLE_UQ), x);
    return _mm512_cmp_pd_mask(x, zero, _CMP_GT_OQ);
  }
  static FASTOPS_INLINE Vec Select(Bits bits, Vec x) { return _mm512_maskz_mov_pd(bits, x); }
};

struct Bits16 {
  using Vec = __m512i;
  using Bits = uint32_t;
  static constexpr int kLanes = 32, kBytes = 2;
  static FASTOPS_INLINE Vec Load(const void* p) { return _mm512_loadu_si512(p); }
  static FASTOPS_INLINE void Store(void* p, Vec v) { _mm512_storeu_si512(p, v); }
  static FASTOPS_INLINE void Stream(void* p, Vec v) {
    _mm512_stream_si512(static_cast<__m512i*>(p), v);
  }
  static FASTOPS_INLINE Vec Select(Bits bits, Vec x) { return _mm512_maskz_mov_epi16(bits, x); }
};

struct BF16 : Bits16 {
  // The even and the odd lanes as floats. No lane moves.
  static FASTOPS_INLINE __m512 Even(Vec x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
  static FASTOPS_INLINE __m512 Odd(Vec x) {
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-65536)));
  }
  // Rounds to nearest even. The result is in the high half of each float's bits; the low half is
  // undefined.
  static FASTOPS_INLINE __m512i Round(__m512 f) {
    const __m512i bits = _mm512_castps_si512(f);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q), bits,
                                _mm512_set1_epi32(0x400000));
  }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) {
    const __m512i even = Round(_mm512_add_ps(Even(a), Even(b)));
    const __m512i odd = Round(_mm512_add_ps(Odd(a), Odd(b)));
    return _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(even, 16), odd);
  }
  static FASTOPS_INLINE Vec Lanes(__mmask16 even, __mmask16 odd) {
    return _mm512_or_si512(_mm512_maskz_set1_epi32(even, 0xffff),
                           _mm512_maskz_set1_epi32(odd, -65536));
  }
  static FASTOPS_INLINE Bits Positive(Vec x, Vec* kept) {
    const __m512 zero = _mm512_setzero_ps(), even = Even(x), odd = Odd(x);
    *kept = _mm512_and_si512(x, Lanes(_mm512_cmp_ps_mask(even, zero, _CMP_NLE_UQ),
                                      _mm512_cmp_ps_mask(odd, zero, _CMP_NLE_UQ)));
    return _mm512_movepi16_mask(Lanes(_mm512_cmp_ps_mask(even, zero, _CMP_GT_OQ),
                                      _mm512_cmp_ps_mask(odd, zero, _CMP_GT_OQ)));
  }
};

struct F16 : Bits16 {
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) {
    const __m512 low = _mm512_add_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(a)),
                                     _mm512_cvtph_ps(_mm512_castsi512_si256(b)));
    const __m512 high = _mm512_add_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(a, 1)),
                                      _mm512_cvtph_ps(_mm512_extracti64x4_epi64(b, 1)));
    return _mm512_inserti64x4(
        _mm512_castsi256_si512(_mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT)),
        _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT), 1);
  }
  static FASTOPS_INLINE Bits Positive(Vec x, Vec* kept) {
    const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
    const __mmask32 nan = _mm512_cmpgt_epi16_mask(magnitude, _mm512_set1_epi16(0x7c00));
    const __mmask32 positive = _mm512_cmpgt_epi16_mask(x, _mm512_setzero_si512());
    *kept = _mm512_maskz_mov_epi16(positive | nan, x);
    return positive & ~nan;
  }
};

FASTOPS_INLINE void StreamFence() { _mm_sfence(); }

#elif FASTOPS_ISA_LEVEL == 1  // ---- AVX2, F16C ----

struct F32 {
  using Vec = __m256;
  using Bits = uint8_t;
  static constexpr int kLanes = 8, kBytes = 4;
  static FASTOPS_INLINE Vec Load(const void* p) {
    return _mm256_loadu_ps(static_cast<const float*>(p));
  }
  static FASTOPS_INLINE void Store(void* p, Vec v) { _mm256_storeu_ps(static_cast<float*>(p), v); }
  static FASTOPS_INLINE void Stream(void* p, Vec v) { _mm256_stream_ps(static_cast<float*>(p), v); }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static FASTOPS_INLINE Bits Positive(Vec x, Vec* kept) {
    const __m256 zero = _mm256_setzero_ps();
    *kept = _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_NLE_UQ), x);
    return static_cast<Bits>(_mm256_movemask_ps(_mm256_cmp_ps(x, zero, _CMP_GT_OQ)));
  }
  static FASTOPS_INLINE Vec Select(Bits bits, Vec x) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(bits), lane);
    return _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane)), x);
  }
};

struct F64 {
  struct Vec {
    __m256d low, high;
  };
  using Bits = uint8_t;
  static constexpr int kLanes = 8, kBytes = 8;
  static FASTOPS_INLINE Vec Load(const void* p) {
    const double* d = static_cast<const double*>(p);
    return {_mm256_loadu_pd(d), _mm256_loadu_pd(d + 4)};
  }
  static FASTOPS_INLINE void Store(void* p, Vec v) {
    double* d = static_cast<double*>(p);
    _mm256_storeu_pd(d, v.low);
    _mm256_storeu_pd(d + 4, v.high);
  }
  static FASTOPS_INLINE void Stream(void* p, Vec v) {
    double* d = static_cast<double*>(p);
    _mm256_stream_pd(d, v.low);
    _mm256_stream_pd(d + 4, v.high);
  }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) {
    return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)};
  }
  static FASTOPS_INLINE int Half(__m256d x, __m256d* kept) {
    const __m256d zero = _mm256_setzero_pd();
    *kept = _mm256_and_pd(_mm256_cmp_pd(x, zero, _CMP_NLE_UQ), x);
    return _mm256_movemask_pd(_mm256_cmp_pd(x, zero, _CMP_GT_OQ));
  }
  static FASTOPS_INLINE Bits Positive(Vec x, Vec* kept) {
    const int low = Half(x.low, &kept->low);
    return static_cast<Bits>(low | Half(x.high, &kept->high) << 4);
  }
  static FASTOPS_INLINE __m256d SelectHalf(__m256i bits, __m256i lane, __m256d x) {
    return _mm256_and_pd(
        _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_and_si256(bits, lane), lane)), x);
  }
  static FASTOPS_INLINE Vec Select(Bits bits, Vec x) {
    const __m256i all = _mm256_set1_epi64x(bits);
    return {SelectHalf(all, _mm256_setr_epi64x(1, 2, 4, 8), x.low),
            SelectHalf(all, _mm256_setr_epi64x(16, 32, 64, 128), x.high)};
  }
};

struct Bits16 {
  using Vec = __m256i;
  using Bits = uint16_t;
  static constexpr int kLanes = 16, kBytes = 2;
  static FASTOPS_INLINE Vec Load(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  static FASTOPS_INLINE void Store(void* p, Vec v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), v);
  }
  static FASTOPS_INLINE void Stream(void* p, Vec v) {
    _mm256_stream_si256(static_cast<__m256i*>(p), v);
  }
  static FASTOPS_INLINE Vec Select(Bits bits, Vec x) {
    const __m256i lane = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096,
                                           8192, 16384, static_cast<int16_t>(0x8000));
    const __m256i set = _mm256_and_si256(_mm256_set1_epi16(static_cast<int16_t>(bits)), lane);
    return _mm256_and_si256(_mm256_cmpeq_epi16(set, lane), x);
  }
  // One bit per 16-bit lane, set if the lane is all ones.
  static FASTOPS_INLINE Bits FromLanes(__m256i lanes) {
    const __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    return static_cast<Bits>(_mm_movemask_epi8(bytes));
  }
};

struct BF16 : Bits16 {
  // The even and the odd lanes as floats. No lane moves.
  static FASTOPS_INLINE __m256 Even(Vec x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
  static FASTOPS_INLINE __m256 Odd(Vec x) {
    return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(-65536)));
  }
  // Rounds to nearest even. The result is in the high half of each float's bits; the low half is
  // undefined.
  static FASTOPS_INLINE __m256i Round(__m256 f) {
    const __m256i bits = _mm256_castps_si256(f);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded),
                                                _mm256_castsi256_ps(quiet),
                                                _mm256_cmp_ps(f, f, _CMP_UNORD_Q)));
  }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) {
    const __m256i even = Round(_mm256_add_ps(Even(a), Even(b)));
    const __m256i odd = Round(_mm256_add_ps(Odd(a), Odd(b)));
    return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xAA);
  }
  static FASTOPS_INLINE __m256i Lanes(__m256 even, __m256 odd) {
    return _mm256_blend_epi16(_mm256_castps_si256(even), _mm256_castps_si256(odd), 0xAA);
  }
  static FASTOPS_INLINE Bits Positive(Vec x, Vec* kept) {
    const __m256 zero = _mm256_setzero_ps(), even = Even(x), odd = Odd(x);
    *kept = _mm256_and_si256(
        x, Lanes(_mm256_cmp_ps(even, zero, _CMP_NLE_UQ), _mm256_cmp_ps(odd, zero, _CMP_NLE_UQ)));
    return FromLanes(
        Lanes(_mm256_cmp_ps(even, zero, _CMP_GT_OQ), _mm256_cmp_ps(odd, zero, _CMP_GT_OQ)));
  }
};

struct F16 : Bits16 {
  static FASTOPS_INLINE __m128i AddHalf(__m128i a, __m128i b) {
    return _mm256_cvtps_ph(_mm256_add_ps(_mm256_cvtph_ps(a), _mm256_cvtph_ps(b)),
                           _MM_FROUND_TO_NEAREST_INT);
  }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) {
    return _mm256_set_m128i(AddHalf(_mm256_extracti128_si256(a, 1), _mm256_extracti128_si256(b, 1)),
                            AddHalf(_mm256_castsi256_si128(a), _mm256_castsi256_si128(b)));
  }
  static FASTOPS_INLINE Bits Positive(Vec x, Vec* kept) {
    const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7fff));
    const __m256i nan = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(0x7c00));
    const __m256i positive = _mm256_cmpgt_epi16(x, _mm256_setzero_si256());
    *kept = _mm256_and_si256(_mm256_or_si256(positive, nan), x);
    return FromLanes(_mm256_andnot_si256(nan, positive));
  }
};

FASTOPS_INLINE void StreamFence() { _mm_sfence(); }

#else  // ---- 16-byte vectors in the compiler's own notation: SSE2 on x86-64, NEON on aarch64 ----

typedef float F32x4 __attribute__((vector_size(16)));
typedef double F64x2 __attribute__((vector_size(16)));
typedef int16_t I16x8 __attribute__((vector_size(16)));
typedef int32_t I32x4 __attribute__((vector_size(16)));
typedef uint32_t U32x4 __attribute__((vector_size(16)));
typedef int64_t I64x2 __attribute__((vector_size(16)));

// Lanes are all ones or all zeros. The result has the low half of each lane, first those of a.
FASTOPS_INLINE I16x8 NarrowTo16(I32x4 a, I32x4 b) {
#if defined(__SSE2__)
  return (I16x8)_mm_packs_epi32((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
  return (I16x8)vuzp1q_s16((int16x8_t)a, (int16x8_t)b);
#else
  const I16x8 result = {(int16_t)a[0], (int16_t)a[1], (int16_t)a[2], (int16_t)a[3],
                        (int16_t)b[0], (int16_t)b[1], (int16_t)b[2], (int16_t)b[3]};
  return result;
#endif
}

FASTOPS_INLINE I32x4 NarrowTo32(I64x2 a, I64x2 b) {
#if defined(__SSE2__)
  return (I32x4)_mm_shuffle_ps((__m128)a, (__m128)b, 0x88);
#elif defined(__aarch64__)
  return (I32x4)vuzp1q_s32((int32x4_t)a, (int32x4_t)b);
#else
  const I32x4 result = {(int32_t)a[0], (int32_t)a[1], (int32_t)b[0], (int32_t)b[1]};
  return result;
#endif
}

FASTOPS_INLINE uint8_t FromLanes(I16x8 lanes) {
#if defined(__SSE2__)
  return (uint8_t)_mm_movemask_epi8(_mm_packs_epi16((__m128i)lanes, (__m128i)lanes));
#else
  const I16x8 lane = {1, 2, 4, 8, 16, 32, 64, 128};
#if defined(__aarch64__)
  return (uint8_t)vaddvq_s16((int16x8_t)(lanes & lane));
#else
  const I64x2 words = (I64x2)(lanes & lane);
  const uint64_t all = (uint64_t)(words[0] | words[1]);
  const uint64_t half = all | all >> 32;
  return (uint8_t)(half | half >> 16);
#endif
#endif
}

template <typename V>
FASTOPS_INLINE V LoadVector(const void* p) {
  V v;
  memcpy(&v, p, sizeof(v));
  return v;
}
template <typename V>
FASTOPS_INLINE void StoreVector(void* p, V v) {
  memcpy(p, &v, sizeof(v));
}
template <typename V>
FASTOPS_INLINE void StreamVector(void* p, V v) {
#if defined(__SSE2__)
  _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)v);
#else
  StoreVector(p, v);
#endif
}
FASTOPS_INLINE void StreamFence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

struct F32 {
  struct Vec {
    F32x4 low, high;
  };
  using Bits = uint8_t;
  static constexpr int kLanes = 8, kBytes = 4;
  static FASTOPS_INLINE Vec Load(const void* p) { return LoadVector<Vec>(p); }
  static FASTOPS_INLINE void Store(void* p, Vec v) { StoreVector(p, v); }
  static FASTOPS_INLINE void Stream(void* p, Vec v) {
    StreamVector(p, v.low);
    StreamVector(static_cast<char*>(p) + 16, v.high);
  }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) { return {a.low + b.low, a.high + b.high}; }
  static FASTOPS_INLINE F32x4 Kept(F32x4 x) { return (F32x4)(~(x <= 0.0f) & (I32x4)x); }
  static FASTOPS_INLINE Bits Positive(Vec x, Vec* kept) {
    *kept = {Kept(x.low), Kept(x.high)};
    return FromLanes(NarrowTo16(x.low > 0.0f, x.high > 0.0f));
  }
  static FASTOPS_INLINE F32x4 SelectHalf(int bits, I32x4 lane, F32x4 x) {
    const I32x4 all = {bits, bits, bits, bits};
    return (F32x4)(((all & lane) == lane) & (I32x4)x);
  }
  static FASTOPS_INLINE Vec Select(Bits bits, Vec x) {
    const I32x4 low = {1, 2, 4, 8}, high = {16, 32, 64, 128};
    return {SelectHalf(bits, low, x.low), SelectHalf(bits, high, x.high)};
  }
};

struct F64 {
  struct Vec {
    F64x2 part[4];
  };
  using Bits = uint8_t;
  static constexpr int kLanes = 8, kBytes = 8;
  static FASTOPS_INLINE Vec Load(const void* p) { return LoadVector<Vec>(p); }
  static FASTOPS_INLINE void Store(void* p, Vec v) { StoreVector(p, v); }
  static FASTOPS_INLINE void Stream(void* p, Vec v) {
    for (int i = 0; i < 4; ++i) StreamVector(static_cast<char*>(p) + 16 * i, v.part[i]);
  }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) {
    for (int i = 0; i < 4; ++i) a.part[i] += b.part[i];
    return a;
  }
  static FASTOPS_INLINE Bits Positive(Vec x, Vec* kept) {
    for (int i = 0; i < 4; ++i) {
      kept->part[i] = (F64x2)(~(x.part[i] <= 0.0) & (I64x2)x.part[i]);
    }
    return FromLanes(NarrowTo16(NarrowTo32((I64x2)(x.part[0] > 0.0), (I64x2)(x.part[1] > 0.0)),
                                NarrowTo32((I64x2)(x.part[2] > 0.0), (I64x2)(x.part[3] > 0.0))));
  }
  static FASTOPS_INLINE Vec Select(Bits bits, Vec x) {
    for (int i = 0; i < 4; ++i) {
      const I64x2 keep = {-(int64_t)(bits >> 2 * i & 1), -(int64_t)(bits >> (2 * i + 1) & 1)};
      x.part[i] = (F64x2)(keep & (I64x2)x.part[i]);
    }
    return x;
  }
};

struct Bits16 {
  using Vec = I16x8;
  using Bits = uint8_t;
  static constexpr int kLanes = 8, kBytes = 2;
  static FASTOPS_INLINE Vec Load(const void* p) { return LoadVector<Vec>(p); }
  static FASTOPS_INLINE void Store(void* p, Vec v) { StoreVector(p, v); }
  static FASTOPS_INLINE void Stream(void* p, Vec v) { StreamVector(p, v); }
  static FASTOPS_INLINE Vec Select(Bits bits, Vec x) {
    const I16x8 lane = {1, 2, 4, 8, 16, 32, 64, 128};
    const int16_t b = bits;
    const I16x8 all = {b, b, b, b, b, b, b, b};
    return ((all & lane) == lane) & x;
  }
};

// For each lane: a if the lane of `lanes` is all ones, else b.
FASTOPS_INLINE U32x4 Choose(I32x4 lanes, U32x4 a, U32x4 b) {
  return ((U32x4)lanes & a) | (~(U32x4)lanes & b);
}

struct BF16 : Bits16 {
  // The even and the odd lanes as floats. No lane moves.
  static FASTOPS_INLINE F32x4 Even(Vec x) { return (F32x4)((U32x4)x << 16); }
  static FASTOPS_INLINE F32x4 Odd(Vec x) { return (F32x4)((U32x4)x & 0xffff0000u); }
  // Rounds to nearest even. The result is in the high half of each float's bits; the low half is
  // undefined.
  static FASTOPS_INLINE U32x4 Round(F32x4 f) {
    const U32x4 bits = (U32x4)f;
    return Choose(f == f, bits + ((bits >> 16 & 1u) + 0x7fffu), bits | 0x400000u);
  }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) {
    return (Vec)(Round(Even(a) + Even(b)) >> 16 | (Round(Odd(a) + Odd(b)) & 0xffff0000u));
  }
  static FASTOPS_INLINE I16x8 Lanes(I32x4 even, I32x4 odd) {
    return (I16x8)(((U32x4)even & 0xffffu) | ((U32x4)odd & 0xffff0000u));
  }
  static FASTOPS_INLINE Bits Positive(Vec x, Vec* kept) {
    const F32x4 even = Even(x), odd = Odd(x);
    *kept = ~Lanes(even <= 0.0f, odd <= 0.0f) & x;
    return FromLanes(Lanes(even > 0.0f, odd > 0.0f));
  }
};

struct F16 : Bits16 {
  // No step reads or produces a subnormal float, which the thread's mode might flush to zero.
  static FASTOPS_INLINE F32x4 Widen(U32x4 half) {
    const U32x4 magnitude = half & 0x7fffu;
    const U32x4 normal = (magnitude << 13) + (112u << 23);
    const U32x4 special = normal + (112u << 23);  // Inf and NaN
    const F32x4 subnormal = __builtin_convertvector((I32x4)magnitude, F32x4) * 0x1p-24f;
    U32x4 bits = Choose((I32x4)magnitude < 0x400, (U32x4)subnormal, normal);
    bits = Choose((I32x4)magnitude >= 0x7c00, special, bits);
    return (F32x4)(bits | (half & 0x8000u) << 16);
  }
  static FASTOPS_INLINE U32x4 Round(F32x4 f) {
    const U32x4 bits = (U32x4)f & 0x7fffffffu;
    const U32x4 sign = ((U32x4)f >> 16) & 0x8000u;
    // Too small for a normal half: adding 1/2 leaves the rounded multiple of 2^-24 in the low bits.
    const U32x4 subnormal = (U32x4)((F32x4)bits + 0.5f) - 0x3f000000u;
    const U32x4 normal = (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13;
    U32x4 half = Choose((I32x4)bits < (113 << 23), subnormal, normal);
    half = Choose((I32x4)bits >= (143 << 23), U32x4{} + 0x7c00u, half);
    half = Choose((I32x4)bits > 0x7f800000, U32x4{} + 0x7e00u, half);
    return half | sign;
  }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) {
    const U32x4 x = (U32x4)a, y = (U32x4)b;
    return (Vec)(Round(Widen(x & 0xffffu) + Widen(y & 0xffffu)) |
                 Round(Widen(x >> 16) + Widen(y >> 16)) << 16);
  }
  static FASTOPS_INLINE Bits Positive(Vec x, Vec* kept) {
    const I16x8 nan = (x & 0x7fff) > 0x7c00, positive = x > 0;
    *kept = (positive | nan) & x;
    return FromLanes(positive & ~nan);
  }
};

#endif

}  // namespace
}  // namespace jax_fastops::cpu::FASTOPS_ISA

#endif  // JAX_FASTOPS_CORE_CPU_SIMD_H_

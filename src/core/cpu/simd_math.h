// Arithmetic on rows: vectors of float or double, and blocks of elements of every type as two such
// vectors, for the instruction set for which a *_simd.cc file is compiled.
//
// Floats and Doubles describe vectors of the accumulator type:
//
//   Scalar, Vec, Mask, kLanes
//   Set, Load, Store, Add, Sub, Mul
//   MulAdd(a, b, c)      a * b + c, rounded once if the machine has FMA
//   NegMulAdd(a, b, c)   c - a * b, likewise
//   Max(a, b)            b if either is NaN
//   Exp
//   Rsqrt                1 / sqrt(v), only for Doubles
//   FirstLanes(n)        the lanes below n, which may be negative or greater than kLanes
//   FromBytes(p)         the lanes whose byte is not 0
//   NotZero(v)           the lanes that are not 0, by floating-point comparison; NaN is not 0
//   Equal(a, b)          the lanes where a = b
//   Select(m, a, b)      a in the lanes of the mask, else b
//   Sum, Largest         over the lanes
//
// Element types E32, EBF16, EF16, E64 describe blocks of kBlock = 2 * kLanes elements in memory:
//
//   A, kBytes, kBlock
//   Raw                  a block in registers, in the format of memory
//   Load, Store          of raw blocks, with any alignment
//   Stream               stores and bypasses the caches; aligned to a block or to 64 bytes,
//                        whichever is smaller
//   LoadPart, StorePart  the first n < kBlock elements; other elements are not accessed, and are 0
//                        after a load
//   Widen, Narrow        to a Pair of vectors, in order, and back, rounded to nearest even
//
// As in simd.h, everything is in the anonymous namespace.
#ifndef JAX_FASTOPS_CORE_CPU_SIMD_MATH_H_
#define JAX_FASTOPS_CORE_CPU_SIMD_MATH_H_

#include "core/cpu/simd.h"

// For lambdas that a loop calls for each block.
#define FASTOPS_LAMBDA __attribute__((always_inline))

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

// ---- The exponential function -------------------------------------------------------------------
//
// exp(x) = 2^n * exp(r) with n = round(x / ln 2) and r = x - n * ln 2. The subtraction takes two
// steps: kLn2High has so few bits that n * kLn2High is exact, with or without FMA. For |r| <= ln(2)
// / 2, exp(r) is 1 + r + r^2 * q(r), where q is fitted for the smallest maximum relative error of
// the whole: 3.1e-9 for float, 3.7e-18 for double. This is far below the rounding of the last
// additions.
//
// x is clamped to the range outside of which the result is 0 or Inf. NaN stays NaN. Results below
// the smallest normal number are rounded once, to a subnormal, unless the thread flushes those.
template <typename Scalar>
struct ExpOf;

template <>
struct ExpOf<float> {
  static constexpr float kLow = -105.0f, kHigh = 90.0f;
  static constexpr float kInvLn2 = 0x1.715476p0f;
  static constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  // Adding kRound rounds to an integer, and leaves it, plus the exponent's bias, in the low bits.
  static constexpr float kRound = 0x1.8p23f + 127.0f;
  static constexpr int kMantissa = 23, kTerms = 5;
  static constexpr float kQ[kTerms] = {0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558f2p-5f,
                                       0x1.123a2p-7f, 0x1.6a23ccp-10f};
};

template <>
struct ExpOf<double> {
  static constexpr double kLow = -746.0, kHigh = 711.0;
  static constexpr double kInvLn2 = 0x1.71547652b82fep0;
  static constexpr double kLn2High = 0x1.62e42fefap-1, kLn2Low = 0x1.cf79abc9e3b3ap-40;
  static constexpr double kRound = 0x1.8p52 + 1023.0;
  static constexpr int kMantissa = 52, kTerms = 10;
  static constexpr double kQ[kTerms] = {
      0x1.000000000000ap-1,  0x1.55555555554f9p-3,  0x1.555555555083dp-5,  0x1.1111111127d10p-7,
      0x1.6c16c18438e14p-10, 0x1.a01a012a0f2d8p-13, 0x1.a01999e1ecbe2p-16, 0x1.71df25b248596p-19,
      0x1.28ad9be8bf84dp-22, 0x1.ad7f410eca90cp-26};
};

// The largest error found (float: every seventh of all floats; double: 10^7 random numbers): 1.01
// ulp for float, 1.03 ulp for double, 0.98 ulp for both without FMA, and 0.77 ulp for subnormal
// results.
template <typename A>
FASTOPS_INLINE typename A::Vec ExpVector(typename A::Vec x) {
  using C = ExpOf<typename A::Scalar>;
  using Vec = typename A::Vec;
  x = A::Max(A::Set(C::kLow), x);
  x = A::Min(A::Set(C::kHigh), x);
  const Vec n = A::RoundToInteger(A::Mul(x, A::Set(C::kInvLn2)));
  Vec r = A::NegMulAdd(n, A::Set(C::kLn2High), x);
  r = A::NegMulAdd(n, A::Set(C::kLn2Low), r);
  Vec q = A::Set(C::kQ[C::kTerms - 1]);
#pragma GCC unroll 16
  for (int i = C::kTerms - 2; i >= 0; --i) q = A::MulAdd(q, r, A::Set(C::kQ[i]));
  const Vec p = A::Add(A::Set(1), A::MulAdd(A::Mul(r, r), q, r));
  return A::TimesPowerOf2(p, n);
}

// log(x) for a normal x > 0, without a library call. x = 2^k * m with 1/sqrt(2) <= m < sqrt(2), and
// log(m) = 2 artanh(f) by its series, with f = (m - 1) / (m + 1), |f| < 0.172. The error is at most
// 2.0 ulp for 1 <= x < 10^12, and 0 for x = 1.
FASTOPS_INLINE float Log(float x) {
  const int32_t bits = __builtin_bit_cast(int32_t, x);
  const int32_t k = (bits - 0x3f3504f3) >> 23;
  const float m = __builtin_bit_cast(float, bits - k * (1 << 23)), n = static_cast<float>(k);
  const float f = (m - 1) / (m + 1), z = f * f;
  const float p = 2.0f / 3 + z * (2.0f / 5 + z * (2.0f / 7 + z * (2.0f / 9)));
  const float r = 2 * f + (f * z * p + n * ExpOf<float>::kLn2Low);
  return n * ExpOf<float>::kLn2High + r;
}

FASTOPS_INLINE double Log(double x) {
  const int64_t bits = __builtin_bit_cast(int64_t, x);
  const int64_t k = (bits - 0x3fe6a09e667f3bcd) >> 52;
  const double m = __builtin_bit_cast(double, bits - k * (int64_t{1} << 52));
  const double n = static_cast<double>(k);
  const double f = (m - 1) / (m + 1), z = f * f;
  double p = 2.0 / 25;
#pragma GCC unroll 16
  for (int i = 23; i >= 3; i -= 2) p = 2.0 / i + z * p;
  const double r = 2 * f + (f * z * p + n * ExpOf<double>::kLn2Low);
  return n * ExpOf<double>::kLn2High + r;
}

#if FASTOPS_ISA_LEVEL == 2  // ---- AVX-512 ----

struct Floats {
  using Scalar = float;
  using Vec = __m512;
  using Mask = __mmask16;
  static constexpr int kLanes = 16;
  static FASTOPS_INLINE Vec Set(Scalar x) { return _mm512_set1_ps(x); }
  static FASTOPS_INLINE Vec Load(const void* p) { return _mm512_loadu_ps(p); }
  static FASTOPS_INLINE void Store(void* p, Vec v) { _mm512_storeu_ps(p, v); }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static FASTOPS_INLINE Vec Sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static FASTOPS_INLINE Vec Mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static FASTOPS_INLINE Vec MulAdd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static FASTOPS_INLINE Vec NegMulAdd(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
  static FASTOPS_INLINE Vec Max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static FASTOPS_INLINE Vec Min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
  static FASTOPS_INLINE Vec RoundToInteger(Vec v) { return _mm512_roundscale_ps(v, 8); }
  static FASTOPS_INLINE Vec TimesPowerOf2(Vec v, Vec n) { return _mm512_scalef_ps(v, n); }
  static FASTOPS_INLINE Vec Exp(Vec x) { return ExpVector<Floats>(x); }
  static FASTOPS_INLINE Mask FirstLanes(int64_t n) {
    return static_cast<Mask>(n >= kLanes ? 0xffff : n <= 0 ? 0 : (1 << n) - 1);
  }
  static FASTOPS_INLINE Mask FromBytes(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm_test_epi8_mask(bytes, bytes);
  }
  static FASTOPS_INLINE Mask NotZero(Vec v) {
    return _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  }
  static FASTOPS_INLINE Mask Equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static FASTOPS_INLINE Vec Select(Mask m, Vec a, Vec b) { return _mm512_mask_blend_ps(m, b, a); }
  // GCC 12's own reductions and casts warn of undefined registers. With a full mask, the masked
  // extraction is equal to the plain one.
  template <int kWhich>
  static FASTOPS_INLINE __m256 Half(Vec v) {
    return _mm512_maskz_extractf32x8_ps(0xff, v, kWhich);
  }
  static FASTOPS_INLINE Scalar Sum(Vec v) {
    const __m256 t = _mm256_add_ps(Half<0>(v), Half<1>(v));
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static FASTOPS_INLINE Scalar Largest(Vec v) {
    const __m256 t = _mm256_max_ps(Half<0>(v), Half<1>(v));
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
};

struct Doubles {
  using Scalar = double;
  using Vec = __m512d;
  using Mask = __mmask8;
  static constexpr int kLanes = 8;
  static FASTOPS_INLINE Vec Set(Scalar x) { return _mm512_set1_pd(x); }
  static FASTOPS_INLINE Vec Load(const void* p) { return _mm512_loadu_pd(p); }
  static FASTOPS_INLINE void Store(void* p, Vec v) { _mm512_storeu_pd(p, v); }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) { return _mm512_add_pd(a, b); }
  static FASTOPS_INLINE Vec Sub(Vec a, Vec b) { return _mm512_sub_pd(a, b); }
  static FASTOPS_INLINE Vec Mul(Vec a, Vec b) { return _mm512_mul_pd(a, b); }
  static FASTOPS_INLINE Vec MulAdd(Vec a, Vec b, Vec c) { return _mm512_fmadd_pd(a, b, c); }
  static FASTOPS_INLINE Vec NegMulAdd(Vec a, Vec b, Vec c) { return _mm512_fnmadd_pd(a, b, c); }
  static FASTOPS_INLINE Vec Max(Vec a, Vec b) { return _mm512_max_pd(a, b); }
  static FASTOPS_INLINE Vec Min(Vec a, Vec b) { return _mm512_min_pd(a, b); }
  static FASTOPS_INLINE Vec RoundToInteger(Vec v) { return _mm512_roundscale_pd(v, 8); }
  static FASTOPS_INLINE Vec TimesPowerOf2(Vec v, Vec n) { return _mm512_scalef_pd(v, n); }
  static FASTOPS_INLINE Vec Rsqrt(Vec v) { return _mm512_div_pd(Set(1), _mm512_sqrt_pd(v)); }
  static FASTOPS_INLINE Vec Exp(Vec x) { return ExpVector<Doubles>(x); }
  static FASTOPS_INLINE Mask FirstLanes(int64_t n) {
    return static_cast<Mask>(n >= kLanes ? 0xff : n <= 0 ? 0 : (1 << n) - 1);
  }
  static FASTOPS_INLINE Mask FromBytes(const uint8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return static_cast<Mask>(_mm_test_epi8_mask(bytes, bytes));
  }
  static FASTOPS_INLINE Mask NotZero(Vec v) {
    return _mm512_cmp_pd_mask(v, _mm512_setzero_pd(), _CMP_NEQ_UQ);
  }
  static FASTOPS_INLINE Mask Equal(Vec a, Vec b) { return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ); }
  static FASTOPS_INLINE Vec Select(Mask m, Vec a, Vec b) { return _mm512_mask_blend_pd(m, b, a); }
  template <int kWhich>
  static FASTOPS_INLINE __m256d Half(Vec v) {
    return _mm512_maskz_extractf64x4_pd(0xff, v, kWhich);
  }
  static FASTOPS_INLINE Scalar Sum(Vec v) {
    const __m256d t = _mm256_add_pd(Half<0>(v), Half<1>(v));
    const __m128d s = _mm_add_pd(_mm256_castpd256_pd128(t), _mm256_extractf128_pd(t, 1));
    return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
  }
  static FASTOPS_INLINE Scalar Largest(Vec v) {
    const __m256d t = _mm256_max_pd(Half<0>(v), Half<1>(v));
    const __m128d s = _mm_max_pd(_mm256_castpd256_pd128(t), _mm256_extractf128_pd(t, 1));
    return _mm_cvtsd_f64(_mm_max_sd(s, _mm_unpackhi_pd(s, s)));
  }
};

#elif FASTOPS_ISA_LEVEL == 1  // ---- AVX2, FMA ----

struct Floats {
  using Scalar = float;
  using Vec = __m256;
  using Mask = __m256;
  static constexpr int kLanes = 8;
  static FASTOPS_INLINE Vec Set(Scalar x) { return _mm256_set1_ps(x); }
  static FASTOPS_INLINE Vec Load(const void* p) {
    return _mm256_loadu_ps(static_cast<const float*>(p));
  }
  static FASTOPS_INLINE void Store(void* p, Vec v) { _mm256_storeu_ps(static_cast<float*>(p), v); }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static FASTOPS_INLINE Vec Sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
  static FASTOPS_INLINE Vec Mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static FASTOPS_INLINE Vec MulAdd(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static FASTOPS_INLINE Vec NegMulAdd(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
  static FASTOPS_INLINE Vec Max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  static FASTOPS_INLINE Vec Min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
  static FASTOPS_INLINE Vec RoundToInteger(Vec v) { return _mm256_round_ps(v, 8); }
  static FASTOPS_INLINE Vec PowerOf2(Vec biased) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_castps_si256(biased), ExpOf<float>::kMantissa));
  }
  // Multiplies in two steps, because 2^n may be out of range. The first step is exact.
  static FASTOPS_INLINE Vec TimesPowerOf2(Vec v, Vec n) {
    const Vec round = Set(ExpOf<float>::kRound);
    const Vec half = Add(Mul(n, Set(0.5f)), round);
    const Vec rest = Add(Sub(n, Sub(half, round)), round);
    return Mul(Mul(v, PowerOf2(half)), PowerOf2(rest));
  }
  static FASTOPS_INLINE Vec Exp(Vec x) { return ExpVector<Floats>(x); }
  static FASTOPS_INLINE Mask FirstLanes(int64_t n) {
    const int count = n >= kLanes ? kLanes : n <= 0 ? 0 : static_cast<int>(n);
    return _mm256_castsi256_ps(
        _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
  }
  static FASTOPS_INLINE Mask FromBytes(const uint8_t* p) {
    const __m256i lanes =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(lanes, _mm256_setzero_si256()));
  }
  static FASTOPS_INLINE Mask NotZero(Vec v) {
    return _mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_NEQ_UQ);
  }
  static FASTOPS_INLINE Mask Equal(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  static FASTOPS_INLINE Vec Select(Mask m, Vec a, Vec b) { return _mm256_blendv_ps(b, a, m); }
  static FASTOPS_INLINE Scalar Sum(Vec v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static FASTOPS_INLINE Scalar Largest(Vec v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
};

struct Doubles {
  using Scalar = double;
  using Vec = __m256d;
  using Mask = __m256d;
  static constexpr int kLanes = 4;
  static FASTOPS_INLINE Vec Set(Scalar x) { return _mm256_set1_pd(x); }
  static FASTOPS_INLINE Vec Load(const void* p) {
    return _mm256_loadu_pd(static_cast<const double*>(p));
  }
  static FASTOPS_INLINE void Store(void* p, Vec v) { _mm256_storeu_pd(static_cast<double*>(p), v); }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) { return _mm256_add_pd(a, b); }
  static FASTOPS_INLINE Vec Sub(Vec a, Vec b) { return _mm256_sub_pd(a, b); }
  static FASTOPS_INLINE Vec Mul(Vec a, Vec b) { return _mm256_mul_pd(a, b); }
  static FASTOPS_INLINE Vec MulAdd(Vec a, Vec b, Vec c) { return _mm256_fmadd_pd(a, b, c); }
  static FASTOPS_INLINE Vec NegMulAdd(Vec a, Vec b, Vec c) { return _mm256_fnmadd_pd(a, b, c); }
  static FASTOPS_INLINE Vec Max(Vec a, Vec b) { return _mm256_max_pd(a, b); }
  static FASTOPS_INLINE Vec Min(Vec a, Vec b) { return _mm256_min_pd(a, b); }
  static FASTOPS_INLINE Vec RoundToInteger(Vec v) { return _mm256_round_pd(v, 8); }
  static FASTOPS_INLINE Vec Rsqrt(Vec v) { return _mm256_div_pd(Set(1), _mm256_sqrt_pd(v)); }
  static FASTOPS_INLINE Vec PowerOf2(Vec biased) {
    return _mm256_castsi256_pd(
        _mm256_slli_epi64(_mm256_castpd_si256(biased), ExpOf<double>::kMantissa));
  }
  static FASTOPS_INLINE Vec TimesPowerOf2(Vec v, Vec n) {
    const Vec round = Set(ExpOf<double>::kRound);
    const Vec half = Add(Mul(n, Set(0.5)), round);
    const Vec rest = Add(Sub(n, Sub(half, round)), round);
    return Mul(Mul(v, PowerOf2(half)), PowerOf2(rest));
  }
  static FASTOPS_INLINE Vec Exp(Vec x) { return ExpVector<Doubles>(x); }
  static FASTOPS_INLINE Mask FirstLanes(int64_t n) {
    const int64_t count = n >= kLanes ? kLanes : n <= 0 ? 0 : n;
    return _mm256_castsi256_pd(
        _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3)));
  }
  static FASTOPS_INLINE Mask FromBytes(const uint8_t* p) {
    int32_t bytes;
    memcpy(&bytes, p, sizeof(bytes));
    const __m256i lanes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
    return _mm256_castsi256_pd(_mm256_cmpgt_epi64(lanes, _mm256_setzero_si256()));
  }
  static FASTOPS_INLINE Mask NotZero(Vec v) {
    return _mm256_cmp_pd(v, _mm256_setzero_pd(), _CMP_NEQ_UQ);
  }
  static FASTOPS_INLINE Mask Equal(Vec a, Vec b) { return _mm256_cmp_pd(a, b, _CMP_EQ_OQ); }
  static FASTOPS_INLINE Vec Select(Mask m, Vec a, Vec b) { return _mm256_blendv_pd(b, a, m); }
  static FASTOPS_INLINE Scalar Sum(Vec v) {
    const __m128d s = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
  }
  static FASTOPS_INLINE Scalar Largest(Vec v) {
    const __m128d s = _mm_max_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_max_sd(s, _mm_unpackhi_pd(s, s)));
  }
};

#else  // ---- 16-byte vectors in the compiler's own notation ----

// The common part of float and double: V has kLanes elements of type Scalar, and I has integers of
// the same width.
template <typename S, typename V, typename I, int kCount>
struct SmallVectors {
  using Scalar = S;
  using Vec = V;
  using Mask = I;
  static constexpr int kLanes = kCount;
  static FASTOPS_INLINE Vec Set(Scalar x) { return Vec{} + x; }
  static FASTOPS_INLINE Vec Load(const void* p) { return LoadVector<Vec>(p); }
  static FASTOPS_INLINE void Store(void* p, Vec v) { StoreVector(p, v); }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) { return a + b; }
  static FASTOPS_INLINE Vec Sub(Vec a, Vec b) { return a - b; }
  static FASTOPS_INLINE Vec Mul(Vec a, Vec b) { return a * b; }
  static FASTOPS_INLINE Vec Select(Mask m, Vec a, Vec b) {
    return (Vec)((m & (Mask)a) | (~m & (Mask)b));
  }
  static FASTOPS_INLINE Vec RoundToInteger(Vec v) {
    const Vec round = Set(ExpOf<Scalar>::kRound);
    return v + round - round;
  }
  static FASTOPS_INLINE Vec PowerOf2(Vec biased) {
    return (Vec)((Mask)biased << ExpOf<Scalar>::kMantissa);
  }
  // Multiplies in two steps, because 2^n may be out of range. The first step is exact.
  static FASTOPS_INLINE Vec TimesPowerOf2(Vec v, Vec n) {
    const Vec round = Set(ExpOf<Scalar>::kRound);
    const Vec half = n * (Scalar)0.5 + round;
    const Vec rest = n - (half - round) + round;
    return v * PowerOf2(half) * PowerOf2(rest);
  }
  static FASTOPS_INLINE Mask FirstLanes(int64_t n) {
    const Scalar count = (Scalar)(n >= kLanes ? kLanes : n);
    Vec lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = (Scalar)i;
    return (Mask)(lane < Set(count));
  }
  static FASTOPS_INLINE Mask FromBytes(const uint8_t* p) {
    Mask m;
    for (int i = 0; i < kLanes; ++i) m[i] = p[i];
    return (Mask)(m != 0);
  }
  static FASTOPS_INLINE Mask NotZero(Vec v) { return (Mask)(v != (Scalar)0); }
  static FASTOPS_INLINE Mask Equal(Vec a, Vec b) { return (Mask)(a == b); }
};

struct Floats : SmallVectors<float, F32x4, I32x4, 4> {
#if defined(__aarch64__)
  static FASTOPS_INLINE Vec MulAdd(Vec a, Vec b, Vec c) {
    return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
  }
  static FASTOPS_INLINE Vec NegMulAdd(Vec a, Vec b, Vec c) {
    return (Vec)vfmsq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
  }
#else
  static FASTOPS_INLINE Vec MulAdd(Vec a, Vec b, Vec c) { return a * b + c; }
  static FASTOPS_INLINE Vec NegMulAdd(Vec a, Vec b, Vec c) { return c - a * b; }
#endif
#if defined(__SSE2__)
  static FASTOPS_INLINE Vec Max(Vec a, Vec b) { return (Vec)_mm_max_ps((__m128)a, (__m128)b); }
  static FASTOPS_INLINE Vec Min(Vec a, Vec b) { return (Vec)_mm_min_ps((__m128)a, (__m128)b); }
#else
  static FASTOPS_INLINE Vec Max(Vec a, Vec b) { return Select((Mask)(a > b), a, b); }
  static FASTOPS_INLINE Vec Min(Vec a, Vec b) { return Select((Mask)(a < b), a, b); }
#endif
  static FASTOPS_INLINE Vec Exp(Vec x) { return ExpVector<Floats>(x); }
  static FASTOPS_INLINE Scalar Sum(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
  static FASTOPS_INLINE Scalar Largest(Vec v) {
    const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
  }
};

struct Doubles : SmallVectors<double, F64x2, I64x2, 2> {
#if defined(__aarch64__)
  static FASTOPS_INLINE Vec MulAdd(Vec a, Vec b, Vec c) {
    return (Vec)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
  }
  static FASTOPS_INLINE Vec NegMulAdd(Vec a, Vec b, Vec c) {
    return (Vec)vfmsq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
  }
#else
  static FASTOPS_INLINE Vec MulAdd(Vec a, Vec b, Vec c) { return a * b + c; }
  static FASTOPS_INLINE Vec NegMulAdd(Vec a, Vec b, Vec c) { return c - a * b; }
#endif
#if defined(__SSE2__)
  static FASTOPS_INLINE Vec Max(Vec a, Vec b) { return (Vec)_mm_max_pd((__m128d)a, (__m128d)b); }
  static FASTOPS_INLINE Vec Min(Vec a, Vec b) { return (Vec)_mm_min_pd((__m128d)a, (__m128d)b); }
#else
  static FASTOPS_INLINE Vec Max(Vec a, Vec b) { return Select((Mask)(a > b), a, b); }
  static FASTOPS_INLINE Vec Min(Vec a, Vec b) { return Select((Mask)(a < b), a, b); }
#endif
#if defined(__SSE2__)
  static FASTOPS_INLINE Vec Rsqrt(Vec v) { return Set(1) / (Vec)_mm_sqrt_pd((__m128d)v); }
#elif defined(__aarch64__)
  static FASTOPS_INLINE Vec Rsqrt(Vec v) { return Set(1) / (Vec)vsqrtq_f64((float64x2_t)v); }
#else
  static FASTOPS_INLINE Vec Rsqrt(Vec v) {
    const Vec root = {__builtin_sqrt(v[0]), __builtin_sqrt(v[1])};
    return Set(1) / root;
  }
#endif
  static FASTOPS_INLINE Vec Exp(Vec x) { return ExpVector<Doubles>(x); }
  static FASTOPS_INLINE Scalar Sum(Vec v) { return v[0] + v[1]; }
  static FASTOPS_INLINE Scalar Largest(Vec v) { return v[0] > v[1] ? v[0] : v[1]; }
};

#endif

// ---- Two vectors --------------------------------------------------------------------------------

template <typename A>
struct Pair {
  typename A::Vec part[2];
};

template <typename A>
struct PairMask {
  typename A::Mask part[2];
};

template <typename A>
FASTOPS_INLINE Pair<A> SetPair(typename A::Scalar x) {
  return {{A::Set(x), A::Set(x)}};
}
template <typename A>
FASTOPS_INLINE Pair<A> LoadPair(const typename A::Scalar* p) {
  return {{A::Load(p), A::Load(p + A::kLanes)}};
}
template <typename A>
FASTOPS_INLINE void StorePair(typename A::Scalar* p, Pair<A> v) {
  A::Store(p, v.part[0]);
  A::Store(p + A::kLanes, v.part[1]);
}
template <typename A>
FASTOPS_INLINE Pair<A> Add(Pair<A> a, Pair<A> b) {
  return {{A::Add(a.part[0], b.part[0]), A::Add(a.part[1], b.part[1])}};
}
template <typename A>
FASTOPS_INLINE Pair<A> Sub(Pair<A> a, Pair<A> b) {
  return {{A::Sub(a.part[0], b.part[0]), A::Sub(a.part[1], b.part[1])}};
}
template <typename A>
FASTOPS_INLINE Pair<A> Mul(Pair<A> a, Pair<A> b) {
  return {{A::Mul(a.part[0], b.part[0]), A::Mul(a.part[1], b.part[1])}};
}
template <typename A>
FASTOPS_INLINE Pair<A> MulAdd(Pair<A> a, Pair<A> b, Pair<A> c) {
  return {{A::MulAdd(a.part[0], b.part[0], c.part[0]), A::MulAdd(a.part[1], b.part[1], c.part[1])}};
}
template <typename A>
FASTOPS_INLINE Pair<A> Max(Pair<A> a, Pair<A> b) {
  return {{A::Max(a.part[0], b.part[0]), A::Max(a.part[1], b.part[1])}};
}
template <typename A>
FASTOPS_INLINE Pair<A> Exp(Pair<A> x) {
  return {{A::Exp(x.part[0]), A::Exp(x.part[1])}};
}
// Scalar, because it is called rarely.
template <typename A>
FASTOPS_INLINE Pair<A> LogOf(Pair<A> x) {
  typename A::Scalar values[2 * A::kLanes];
  StorePair<A>(values, x);
  for (int i = 0; i < 2 * A::kLanes; ++i) values[i] = Log(values[i]);
  return LoadPair<A>(values);
}
template <typename A>
FASTOPS_INLINE PairMask<A> NotZero(Pair<A> x) {
  return {{A::NotZero(x.part[0]), A::NotZero(x.part[1])}};
}
template <typename A>
FASTOPS_INLINE PairMask<A> Equal(Pair<A> a, Pair<A> b) {
  return {{A::Equal(a.part[0], b.part[0]), A::Equal(a.part[1], b.part[1])}};
}
template <typename A>
FASTOPS_INLINE Pair<A> Select(PairMask<A> m, Pair<A> a, Pair<A> b) {
  return {{A::Select(m.part[0], a.part[0], b.part[0]), A::Select(m.part[1], a.part[1], b.part[1])}};
}
template <typename A>
FASTOPS_INLINE PairMask<A> FirstOfPair(int64_t n) {
  return {{A::FirstLanes(n), A::FirstLanes(n - A::kLanes)}};
}
template <typename A>
FASTOPS_INLINE PairMask<A> PairFromBytes(const uint8_t* p) {
  return {{A::FromBytes(p), A::FromBytes(p + A::kLanes)}};
}
template <typename A>
FASTOPS_INLINE PairMask<A> PairFromBytesPart(const uint8_t* p, int64_t n) {
  uint8_t block[2 * A::kLanes] = {};
  memcpy(block, p, static_cast<size_t>(n));
  return PairFromBytes<A>(block);
}
template <typename A>
FASTOPS_INLINE typename A::Scalar SumOf(Pair<A> v) {
  return A::Sum(A::Add(v.part[0], v.part[1]));
}
template <typename A>
FASTOPS_INLINE typename A::Scalar LargestOf(Pair<A> v) {
  return A::Largest(A::Max(v.part[0], v.part[1]));
}

// ---- Blocks of elements -------------------------------------------------------------------------

template <typename E>
FASTOPS_INLINE typename E::Raw LoadPartThroughStack(const void* p, int64_t n) {
  alignas(64) char block[E::kBlock * E::kBytes] = {};
  memcpy(block, p, static_cast<size_t>(n * E::kBytes));
  return E::Load(block);
}

template <typename E>
FASTOPS_INLINE void StorePartThroughStack(void* p, typename E::Raw v, int64_t n) {
  alignas(64) char block[E::kBlock * E::kBytes];
  E::Store(block, v);
  memcpy(p, block, static_cast<size_t>(n * E::kBytes));
}

// Elements of the accumulator type.
template <typename Vectors, typename T>
struct SameElement {
  using A = Vectors;
  using Raw = Pair<A>;
  static constexpr int kBytes = sizeof(typename A::Scalar), kBlock = 2 * A::kLanes;
  static FASTOPS_INLINE const char* Second(const void* p) {
    return static_cast<const char*>(p) + A::kLanes * kBytes;
  }
  static FASTOPS_INLINE Raw Load(const void* p) { return {{A::Load(p), A::Load(Second(p))}}; }
  static FASTOPS_INLINE void Store(void* p, Raw v) {
    A::Store(p, v.part[0]);
    A::Store(const_cast<char*>(Second(p)), v.part[1]);
  }
  static FASTOPS_INLINE Pair<A> Widen(Raw v) { return v; }
  static FASTOPS_INLINE Raw Narrow(Pair<A> v) { return v; }
};

struct E32 : SameElement<Floats, F32> {
#if FASTOPS_ISA_LEVEL == 2
  static FASTOPS_INLINE void Stream(void* p, Raw v) {
    _mm512_stream_ps(static_cast<float*>(p), v.part[0]);
    _mm512_stream_ps(static_cast<float*>(p) + 16, v.part[1]);
  }
  static FASTOPS_INLINE Raw LoadPart(const void* p, int64_t n) {
    return {
        { _mm512_maskz_loadu_ps(A::FirstLanes(n), p),
          _mm512_maskz_loadu_ps(A::FirstLanes(n - 16), static_cast<const float*>(p) + 16) }};
  }
  static FASTOPS_INLINE void StorePart(void* p, Raw v, int64_t n) {
    _mm512_mask_storeu_ps(p, A::FirstLanes(n), v.part[0]);
    _mm512_mask_storeu_ps(static_cast<float*>(p) + 16, A::FirstLanes(n - 16), v.part[1]);
  }
#elif FASTOPS_ISA_LEVEL == 1
  static FASTOPS_INLINE void Stream(void* p, Raw v) {
    _mm256_stream_ps(static_cast<float*>(p), v.part[0]);
    _mm256_stream_ps(static_cast<float*>(p) + 8, v.part[1]);
  }
  static FASTOPS_INLINE __m256i Lanes(int64_t n) { return _mm256_castps_si256(A::FirstLanes(n)); }
  static FASTOPS_INLINE Raw LoadPart(const void* p, int64_t n) {
    return {
        { _mm256_maskload_ps(static_cast<const float*>(p), Lanes(n)),
          _mm256_maskload_ps(static_cast<const float*>(p) + 8, Lanes(n - 8)) }};
  }
  static FASTOPS_INLINE void StorePart(void* p, Raw v, int64_t n) {
    _mm256_maskstore_ps(static_cast<float*>(p), Lanes(n), v.part[0]);
    _mm256_maskstore_ps(static_cast<float*>(p) + 8, Lanes(n - 8), v.part[1]);
  }
#else
  static FASTOPS_INLINE void Stream(void* p, Raw v) {
    StreamVector(p, v.part[0]);
    StreamVector(const_cast<char*>(Second(p)), v.part[1]);
  }
  static FASTOPS_INLINE Raw LoadPart(const void* p, int64_t n) {
    return LoadPartThroughStack<E32>(p, n);
  }
  static FASTOPS_INLINE void StorePart(void* p, Raw v, int64_t n) {
    StorePartThroughStack<E32>(p, v, n);
  }
#endif
};

struct E64 : SameElement<Doubles, F64> {
#if FASTOPS_ISA_LEVEL == 2
  static FASTOPS_INLINE void Stream(void* p, Raw v) {
    _mm512_stream_pd(static_cast<double*>(p), v.part[0]);
    _mm512_stream_pd(static_cast<double*>(p) + 8, v.part[1]);
  }
  static FASTOPS_INLINE Raw LoadPart(const void* p, int64_t n) {
    return {
        { _mm512_maskz_loadu_pd(A::FirstLanes(n), p),
          _mm512_maskz_loadu_pd(A::FirstLanes(n - 8), static_cast<const double*>(p) + 8) }};
  }
  static FASTOPS_INLINE void StorePart(void* p, Raw v, int64_t n) {
    _mm512_mask_storeu_pd(p, A::FirstLanes(n), v.part[0]);
    _mm512_mask_storeu_pd(static_cast<double*>(p) + 8, A::FirstLanes(n - 8), v.part[1]);
  }
#elif FASTOPS_ISA_LEVEL == 1
  static FASTOPS_INLINE void Stream(void* p, Raw v) {
    _mm256_stream_pd(static_cast<double*>(p), v.part[0]);
    _mm256_stream_pd(static_cast<double*>(p) + 4, v.part[1]);
  }
  static FASTOPS_INLINE __m256i Lanes(int64_t n) { return _mm256_castpd_si256(A::FirstLanes(n)); }
  static FASTOPS_INLINE Raw LoadPart(const void* p, int64_t n) {
    return {
        { _mm256_maskload_pd(static_cast<const double*>(p), Lanes(n)),
          _mm256_maskload_pd(static_cast<const double*>(p) + 4, Lanes(n - 4)) }};
  }
  static FASTOPS_INLINE void StorePart(void* p, Raw v, int64_t n) {
    _mm256_maskstore_pd(static_cast<double*>(p), Lanes(n), v.part[0]);
    _mm256_maskstore_pd(static_cast<double*>(p) + 4, Lanes(n - 4), v.part[1]);
  }
#else
  static FASTOPS_INLINE void Stream(void* p, Raw v) {
    StreamVector(p, v.part[0]);
    StreamVector(const_cast<char*>(Second(p)), v.part[1]);
  }
  static FASTOPS_INLINE Raw LoadPart(const void* p, int64_t n) {
    return LoadPartThroughStack<E64>(p, n);
  }
  static FASTOPS_INLINE void StorePart(void* p, Raw v, int64_t n) {
    StorePartThroughStack<E64>(p, v, n);
  }
#endif
};

// The element type that is equal to the accumulator type.
template <typename A>
struct SameTypeOf;
template <>
struct SameTypeOf<Floats> {
  using Element = E32;
};
template <>
struct SameTypeOf<Doubles> {
  using Element = E64;
};

// 16-bit elements. A block is one register.
template <typename T>
struct HalfElement {
  using A = Floats;
  using Raw = typename T::Vec;
  static constexpr int kBytes = 2, kBlock = T::kLanes;
  static_assert(kBlock == 2 * A::kLanes);
  static FASTOPS_INLINE Raw Load(const void* p) { return T::Load(p); }
  static FASTOPS_INLINE void Store(void* p, Raw v) { T::Store(p, v); }
  static FASTOPS_INLINE void Stream(void* p, Raw v) { T::Stream(p, v); }
#if FASTOPS_ISA_LEVEL == 2
  static FASTOPS_INLINE __mmask32 Lanes(int64_t n) {
    return static_cast<__mmask32>((uint64_t{1} << n) - 1);
  }
  static FASTOPS_INLINE Raw LoadPart(const void* p, int64_t n) {
    return _mm512_maskz_loadu_epi16(Lanes(n), p);
  }
  static FASTOPS_INLINE void StorePart(void* p, Raw v, int64_t n) {
    _mm512_mask_storeu_epi16(p, Lanes(n), v);
  }
#else
  static FASTOPS_INLINE Raw LoadPart(const void* p, int64_t n) {
    return LoadPartThroughStack<HalfElement>(p, n);
  }
  static FASTOPS_INLINE void StorePart(void* p, Raw v, int64_t n) {
    StorePartThroughStack<HalfElement>(p, v, n);
  }
#endif
};

#if FASTOPS_ISA_LEVEL == 0
// The 16-bit lanes of the lower and of the upper half of a block, zero-extended to 32 bits.
FASTOPS_INLINE U32x4 LowerHalves(I16x8 v) {
#if defined(__SSE2__)
  return (U32x4)_mm_unpacklo_epi16((__m128i)v, _mm_setzero_si128());
#elif defined(__aarch64__)
  return (U32x4)vmovl_u16(vget_low_u16((uint16x8_t)v));
#else
  const U32x4 result = {(uint16_t)v[0], (uint16_t)v[1], (uint16_t)v[2], (uint16_t)v[3]};
  return result;
#endif
}
FASTOPS_INLINE U32x4 UpperHalves(I16x8 v) {
#if defined(__SSE2__)
  return (U32x4)_mm_unpackhi_epi16((__m128i)v, _mm_setzero_si128());
#elif defined(__aarch64__)
  return (U32x4)vmovl_u16(vget_high_u16((uint16x8_t)v));
#else
  const U32x4 result = {(uint16_t)v[4], (uint16_t)v[5], (uint16_t)v[6], (uint16_t)v[7]};
  return result;
#endif
}
// The high halves of the lanes of a, then of b. The shift is arithmetic because the packing needs
// the sign.
FASTOPS_INLINE I16x8 PackHighHalves(U32x4 a, U32x4 b) {
  return NarrowTo16((I32x4)a >> 16, (I32x4)b >> 16);
}
#endif

struct EBF16 : HalfElement<BF16> {
#if FASTOPS_ISA_LEVEL == 2
  // The indices that move 16-bit word `first` + i to the upper half of 32-bit lane i.
  static FASTOPS_INLINE __m512i Spread(int first) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(first)), 16);
  }
  // The indices of the upper halves of the lanes of two vectors.
  static FASTOPS_INLINE __m512i HighHalves() {
    const __m512i even =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60);
    return _mm512_add_epi32(_mm512_or_si512(even, _mm512_slli_epi32(even, 16)),
                            _mm512_set1_epi32(0x30001));
  }
  // Like BF16::Round, with one instruction less.
  static FASTOPS_INLINE __m512i Rounded(__m512 f) {
    const __m512i bits = _mm512_castps_si512(f);
    const __m512i up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    const __m512i even = _mm512_mask_sub_epi32(
        up, _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000)), up, _mm512_set1_epi32(-1));
    return _mm512_mask_or_epi32(even, _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q), bits,
                                _mm512_set1_epi32(0x400000));
  }
#endif
  static FASTOPS_INLINE Pair<A> Widen(Raw v) {
#if FASTOPS_ISA_LEVEL == 2
    const __m512i low = _mm512_maskz_permutexvar_epi16(0xAAAAAAAA, Spread(0), v);
    const __m512i high = _mm512_maskz_permutexvar_epi16(0xAAAAAAAA, Spread(16), v);
    return {{ _mm512_castsi512_ps(low), _mm512_castsi512_ps(high) }};
#elif FASTOPS_ISA_LEVEL == 1
    const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(v));
    const __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1));
    return {
        { _mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(high, 16)) }};
#else
    return {{(F32x4)(LowerHalves(v) << 16), (F32x4)(UpperHalves(v) << 16)}};
#endif
  }
  static FASTOPS_INLINE Raw Narrow(Pair<A> v) {
#if FASTOPS_ISA_LEVEL == 2
    return _mm512_permutex2var_epi16(Rounded(v.part[0]), HighHalves(), Rounded(v.part[1]));
#elif FASTOPS_ISA_LEVEL == 1
    const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(BF16::Round(v.part[0]), 16),
                                               _mm256_srli_epi32(BF16::Round(v.part[1]), 16));
    return _mm256_permute4x64_epi64(packed, 0xD8);
#else
    return PackHighHalves(BF16::Round(v.part[0]), BF16::Round(v.part[1]));
#endif
  }
};

struct EF16 : HalfElement<F16> {
  static FASTOPS_INLINE Pair<A> Widen(Raw v) {
#if FASTOPS_ISA_LEVEL == 2
    return {
        { _mm512_cvtph_ps(_mm512_castsi512_si256(v)),
          _mm512_cvtph_ps(_mm512_extracti64x4_epi64(v, 1)) }};
#elif FASTOPS_ISA_LEVEL == 1
    return {
        { _mm256_cvtph_ps(_mm256_castsi256_si128(v)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)) }};
#else
    return {{F16::Widen(LowerHalves(v)), F16::Widen(UpperHalves(v))}};
#endif
  }
  static FASTOPS_INLINE Raw Narrow(Pair<A> v) {
#if FASTOPS_ISA_LEVEL == 2
    return _mm512_inserti64x4(
        _mm512_castsi256_si512(_mm512_cvtps_ph(v.part[0], _MM_FROUND_TO_NEAREST_INT)),
        _mm512_cvtps_ph(v.part[1], _MM_FROUND_TO_NEAREST_INT), 1);
#elif FASTOPS_ISA_LEVEL == 1
    return _mm256_set_m128i(_mm256_cvtps_ph(v.part[1], _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(v.part[0], _MM_FROUND_TO_NEAREST_INT));
#else
    return PackHighHalves(F16::Round(v.part[0]) << 16, F16::Round(v.part[1]) << 16);
#endif
  }
};

// ---- Loops over a row ---------------------------------------------------------------------------

struct Whole {
  static constexpr bool kWhole = true;
};
struct Part {
  static constexpr bool kWhole = false;
};

// Calls f(Whole(), i, kBlock) for the whole blocks between begin and end, then f(Part(), i, n) for
// the remaining n elements, if any.
template <int kBlock, typename F>
FASTOPS_INLINE void OverBlocks(int64_t begin, int64_t end, const F& f) {
  int64_t i = begin;
  for (; i + kBlock <= end; i += kBlock) f(Whole(), i, int64_t{kBlock});
  if (i < end) f(Part(), i, end - i);
}

// Loads n elements. If Whole, n is kBlock.
template <typename E, typename Extent>
FASTOPS_INLINE Pair<typename E::A> LoadElements(Extent, const char* p, int64_t n) {
  if constexpr (Extent::kWhole) {
    return E::Widen(E::Load(p));
  } else {
    return E::Widen(E::LoadPart(p, n));
  }
}

template <typename E, bool kStream, typename Extent>
FASTOPS_INLINE void StoreElements(Extent, char* p, typename E::Raw v, int64_t n) {
  if constexpr (!Extent::kWhole) {
    E::StorePart(p, v, n);
  } else if constexpr (kStream) {
    E::Stream(p, v);
  } else {
    E::Store(p, v);
  }
}

template <typename A, typename Extent>
FASTOPS_INLINE PairMask<A> LoadMask(Extent, const uint8_t* p, int64_t n) {
  if constexpr (Extent::kWhole) {
    return PairFromBytes<A>(p);
  } else {
    return PairFromBytesPart<A>(p, n);
  }
}

// The number of elements before the first whole cache line of p, at most n.
template <typename E>
FASTOPS_INLINE int64_t StreamHead(const void* p, int64_t n) {
  const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) % 64);
  const int64_t head = past == 0 ? 0 : (64 - past) / E::kBytes;
  return head < n ? head : n;
}

// Like OverBlocks, but whole blocks are aligned to cache lines of p.
template <typename E, typename F>
FASTOPS_INLINE void OverAlignedBlocks(const void* p, int64_t n, const F& f) {
  int64_t head = StreamHead<E>(p, n);
  int64_t i = 0;
  while (head - i > 0) {
    const int64_t some = head - i < E::kBlock ? head - i : E::kBlock - 1;
    f(Part(), i, some);
    i += some;
  }
  OverBlocks<E::kBlock>(i, n, f);
}

}  // namespace
}  // namespace jax_fastops::cpu::FASTOPS_ISA

#endif  // JAX_FASTOPS_CORE_CPU_SIMD_MATH_H_

// Arithmetic on rows: vectors in pairs, and blocks of elements of every type as such pairs, for the
// instruction set for which a *_simd.cc file is compiled. simd.h has the vectors.
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
//   Keep(bits, v)        the raw elements whose bit is set, else +0; higher bits are ignored
//
// As in simd.h, everything is in the anonymous namespace.
#pragma once

#include "core/cpu/simd.h"

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
  static constexpr int kTerms = 5;
  static constexpr float kQ[kTerms] = {0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558f2p-5f,
                                       0x1.123a2p-7f, 0x1.6a23ccp-10f};
};

template <>
struct ExpOf<double> {
  static constexpr double kLow = -746.0, kHigh = 711.0;
  static constexpr double kInvLn2 = 0x1.71547652b82fep0;
  static constexpr double kLn2High = 0x1.62e42fefap-1, kLn2Low = 0x1.cf79abc9e3b3ap-40;
  static constexpr int kTerms = 10;
  static constexpr double kQ[kTerms] = {
      0x1.000000000000ap-1,  0x1.55555555554f9p-3,  0x1.555555555083dp-5,  0x1.1111111127d10p-7,
      0x1.6c16c18438e14p-10, 0x1.a01a012a0f2d8p-13, 0x1.a01999e1ecbe2p-16, 0x1.71df25b248596p-19,
      0x1.28ad9be8bf84dp-22, 0x1.ad7f410eca90cp-26};
};

// exp(x + rest) for NaN, and for x in a range slightly larger than [kLow, kHigh]. `rest` is a
// rounding error of x.
template <typename A>
FASTOPS_INLINE typename A::Vec ExpInRange(typename A::Vec x, const typename A::Vec* rest) {
  using C = ExpOf<typename A::Scalar>;
  using Vec = typename A::Vec;
  const Vec n = A::RoundToInteger(A::Mul(x, A::Set(C::kInvLn2)));
  Vec r = A::NegMulAdd(n, A::Set(C::kLn2High), x);
  r = A::NegMulAdd(n, A::Set(C::kLn2Low), r);
  if (rest != nullptr) r = A::Add(r, *rest);
  Vec q = A::Set(C::kQ[C::kTerms - 1]);
#pragma GCC unroll 16
  for (int i = C::kTerms - 2; i >= 0; --i) q = A::MulAdd(q, r, A::Set(C::kQ[i]));
  return A::TimesPowerOf2(A::Add(A::Set(1), A::MulAdd(A::Mul(r, r), q, r)), n);
}

// The largest error found (float: every seventh of all floats; double: 10^7 random numbers): 1.01
// ulp for float, 1.03 ulp for double, 0.98 ulp for both without FMA, and 0.77 ulp for subnormal
// results.
template <typename A>
FASTOPS_INLINE typename A::Vec Exp(typename A::Vec x) {
  using C = ExpOf<typename A::Scalar>;
  return ExpInRange<A>(A::Min(A::Set(C::kHigh), A::Max(A::Set(C::kLow), x)), nullptr);
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

// ---- Two vectors --------------------------------------------------------------------------------

template <typename A>
struct Pair {
  typename A::Vec part[2];
};

template <typename A>
struct PairMask {
  typename A::Mask part[2];
};

// Applies f to each half.
template <typename A, typename F, typename... Pairs>
FASTOPS_INLINE Pair<A> Each(const F& f, Pairs... pairs) {
  return {{f(pairs.part[0]...), f(pairs.part[1]...)}};
}

// Defines `name` for pairs as A::name of each half, with one, two or three operands.
#define FASTOPS_PAIRS(Result, name, operands, first, second) \
  template <typename A>                                      \
  FASTOPS_INLINE Result<A> name operands {                   \
    return {{A::name first, A::name second}};                \
  }
#define FASTOPS_PAIRS_1(Result, name) \
  FASTOPS_PAIRS(Result, name, (Pair<A> v), (v.part[0]), (v.part[1]))
#define FASTOPS_PAIRS_2(Result, name)                                         \
  FASTOPS_PAIRS(Result, name, (Pair<A> a, Pair<A> b), (a.part[0], b.part[0]), \
                (a.part[1], b.part[1]))
FASTOPS_PAIRS_2(Pair, Add)
FASTOPS_PAIRS_2(Pair, Sub)
FASTOPS_PAIRS_2(Pair, Mul)
FASTOPS_PAIRS_2(Pair, Max)
FASTOPS_PAIRS_1(PairMask, NotZero)
FASTOPS_PAIRS_1(PairMask, Positive)
FASTOPS_PAIRS_1(PairMask, Finite)
FASTOPS_PAIRS_2(PairMask, Equal)
FASTOPS_PAIRS_2(PairMask, Less)
FASTOPS_PAIRS_2(PairMask, AtLeast)
#undef FASTOPS_PAIRS_1
#undef FASTOPS_PAIRS_2
#undef FASTOPS_PAIRS

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
FASTOPS_INLINE Pair<A> MulAdd(Pair<A> a, Pair<A> b, Pair<A> c) {
  return {{A::MulAdd(a.part[0], b.part[0], c.part[0]), A::MulAdd(a.part[1], b.part[1], c.part[1])}};
}
template <typename A>
FASTOPS_INLINE Pair<A> Exp(Pair<A> x) {
  return {{Exp<A>(x.part[0]), Exp<A>(x.part[1])}};
}
// Scalar, because it is called rarely.
template <typename A>
FASTOPS_INLINE Pair<A> Log(Pair<A> x) {
  typename A::Scalar values[2 * A::kLanes];
  StorePair<A>(values, x);
  for (int i = 0; i < 2 * A::kLanes; ++i) values[i] = Log(values[i]);
  return LoadPair<A>(values);
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
FASTOPS_INLINE uint32_t BitsOfPair(PairMask<A> m) {
  return A::BitsOf(m.part[0]) | A::BitsOf(m.part[1]) << A::kLanes;
}
template <typename A>
FASTOPS_INLINE PairMask<A> PairOfBits(uint32_t bits) {
  return {{A::MaskOf(bits), A::MaskOf(bits >> A::kLanes)}};
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
template <typename Vectors>
struct SameElement {
  using A = Vectors;
  using Raw = Pair<A>;
  static constexpr int kBytes = sizeof(typename A::Scalar), kBlock = 2 * A::kLanes;
  static FASTOPS_INLINE char* Second(const void* p) {
    return const_cast<char*>(static_cast<const char*>(p)) + A::kLanes * kBytes;
  }
  static FASTOPS_INLINE Raw Load(const void* p) { return {{A::Load(p), A::Load(Second(p))}}; }
  static FASTOPS_INLINE void Store(void* p, Raw v) {
    A::Store(p, v.part[0]);
    A::Store(Second(p), v.part[1]);
  }
  static FASTOPS_INLINE void Stream(void* p, Raw v) {
    A::Stream(p, v.part[0]);
    A::Stream(Second(p), v.part[1]);
  }
  static FASTOPS_INLINE Raw LoadPart(const void* p, int64_t n) {
    if constexpr (A::kMaskedMemory) {
      return {{A::LoadPart(p, n), A::LoadPart(Second(p), n - A::kLanes)}};
    } else {
      return LoadPartThroughStack<SameElement>(p, n);
    }
  }
  static FASTOPS_INLINE void StorePart(void* p, Raw v, int64_t n) {
    if constexpr (A::kMaskedMemory) {
      A::StorePart(p, v.part[0], n);
      A::StorePart(Second(p), v.part[1], n - A::kLanes);
    } else {
      StorePartThroughStack<SameElement>(p, v, n);
    }
  }
  static FASTOPS_INLINE Pair<A> Widen(Raw v) { return v; }
  static FASTOPS_INLINE Raw Narrow(Pair<A> v) { return v; }
  static FASTOPS_INLINE Raw Keep(uint32_t bits, Raw v) {
    return Select(PairOfBits<A>(bits), v, SetPair<A>(0));
  }
};

using E32 = SameElement<Floats>;
using E64 = SameElement<Doubles>;

// 16-bit elements. A block is one register.
struct HalfElement {
  using A = Floats;
  using Raw = I16;
  static constexpr int kBytes = 2, kBlock = 2 * A::kLanes;
  static FASTOPS_INLINE Raw Load(const void* p) { return LoadVector<Raw>(p); }
  static FASTOPS_INLINE void Store(void* p, Raw v) { StoreVector(p, v); }
  static FASTOPS_INLINE void Stream(void* p, Raw v) { StreamVector(p, v); }
#if FASTOPS_ISA_LEVEL == 2
  static FASTOPS_INLINE __mmask32 Lanes(int64_t n) {
    return static_cast<__mmask32>((uint64_t{1} << n) - 1);
  }
  static FASTOPS_INLINE Raw LoadPart(const void* p, int64_t n) {
    return (Raw)_mm512_maskz_loadu_epi16(Lanes(n), p);
  }
  static FASTOPS_INLINE void StorePart(void* p, Raw v, int64_t n) {
    _mm512_mask_storeu_epi16(p, Lanes(n), (__m512i)v);
  }
  static FASTOPS_INLINE Raw Keep(uint32_t bits, Raw v) {
    return (Raw)_mm512_maskz_mov_epi16(bits, (__m512i)v);
  }
#else
  static FASTOPS_INLINE Raw LoadPart(const void* p, int64_t n) {
    return LoadPartThroughStack<HalfElement>(p, n);
  }
  static FASTOPS_INLINE void StorePart(void* p, Raw v, int64_t n) {
    StorePartThroughStack<HalfElement>(p, v, n);
  }
  static FASTOPS_INLINE Raw Keep(uint32_t bits, Raw v) {
    Raw lane;
    for (int i = 0; i < kBlock; ++i) lane[i] = static_cast<int16_t>(1 << i);
    return (((Raw{} + static_cast<int16_t>(bits)) & lane) == lane) & v;
  }
  // The lower and the upper half of a block, zero-extended to 32 bits.
  static FASTOPS_INLINE U32 Lower(Raw v) {
#if FASTOPS_ISA_LEVEL == 1
    return (U32)_mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)v));
#elif defined(__SSE2__)
    return (U32)_mm_unpacklo_epi16((__m128i)v, _mm_setzero_si128());
#else
    return Extended(&v);
#endif
  }
  static FASTOPS_INLINE U32 Upper(Raw v) {
#if FASTOPS_ISA_LEVEL == 1
    return (U32)_mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)v, 1));
#elif defined(__SSE2__)
    return (U32)_mm_unpackhi_epi16((__m128i)v, _mm_setzero_si128());
#else
    return Extended(reinterpret_cast<const char*>(&v) + sizeof(v) / 2);
#endif
  }
  // The high halves of the lanes of a, then of b.
  static FASTOPS_INLINE Raw PackHighHalves(U32 a, U32 b) {
#if FASTOPS_ISA_LEVEL == 1
    const __m256i packed = _mm256_packus_epi32((__m256i)(a >> 16), (__m256i)(b >> 16));
    return (Raw)_mm256_permute4x64_epi64(packed, 0xD8);
#elif defined(__SSE2__)
    return (Raw)_mm_packs_epi32((__m128i)((I32)a >> 16), (__m128i)((I32)b >> 16));
#else
    Raw v;
    for (int i = 0; i < A::kLanes; ++i) {
      v[i] = static_cast<int16_t>(a[i] >> 16);
      v[A::kLanes + i] = static_cast<int16_t>(b[i] >> 16);
    }
    return v;
#endif
  }
  static FASTOPS_INLINE U32 Extended(const void* half) {
    typedef uint16_t Half __attribute__((vector_size(kVectorBytes / 2)));
    return __builtin_convertvector(LoadVector<Half>(half), U32);
  }
  // For each lane: a where the condition holds, else b.
  static FASTOPS_INLINE U32 Choose(I32 condition, U32 a, U32 b) {
    return (U32)A::Select((A::Mask)condition, (A::Vec)a, (A::Vec)b);
  }
#endif
};

struct EBF16 : HalfElement {
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
  static FASTOPS_INLINE Pair<A> Widen(Raw v) {
    const __m512i x = (__m512i)v;
    return {
        {(__m512)_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, Spread(0), x),
         (__m512)_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, Spread(16), x) }};
  }
  // Rounds to nearest even. The result is in the high half of each float's bits; the low half is
  // undefined.
  static FASTOPS_INLINE __m512i Round(__m512 f) {
    const __m512i bits = _mm512_castps_si512(f);
    const __m512i up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    const __m512i even = _mm512_mask_sub_epi32(
        up, _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000)), up, _mm512_set1_epi32(-1));
    return _mm512_mask_or_epi32(even, _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q), bits,
                                _mm512_set1_epi32(0x400000));
  }
  static FASTOPS_INLINE Raw Narrow(Pair<A> v) {
    return (Raw)_mm512_permutex2var_epi16(Round(v.part[0]), HighHalves(), Round(v.part[1]));
  }
#else
  static FASTOPS_INLINE Pair<A> Widen(Raw v) {
    return {{(A::Vec)(Lower(v) << 16), (A::Vec)(Upper(v) << 16) }};
  }
  static FASTOPS_INLINE U32 Round(A::Vec f) {
    const U32 bits = (U32)f;
    return Choose((I32)(f == f), bits + ((bits >> 16 & 1u) + 0x7fffu), bits | 0x400000u);
  }
  static FASTOPS_INLINE Raw Narrow(Pair<A> v) {
    return PackHighHalves(Round(v.part[0]), Round(v.part[1]));
  }
#endif
};

struct EF16 : HalfElement {
#if FASTOPS_ISA_LEVEL == 2
  static FASTOPS_INLINE Pair<A> Widen(Raw v) {
    return {
        { _mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)v)),
          _mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)v, 1)) }};
  }
  static FASTOPS_INLINE Raw Narrow(Pair<A> v) {
    return (Raw)_mm512_inserti64x4(
        _mm512_castsi256_si512(_mm512_cvtps_ph(v.part[0], _MM_FROUND_TO_NEAREST_INT)),
        _mm512_cvtps_ph(v.part[1], _MM_FROUND_TO_NEAREST_INT), 1);
  }
#elif FASTOPS_ISA_LEVEL == 1
  static FASTOPS_INLINE Pair<A> Widen(Raw v) {
    return {
        { _mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)v)),
          _mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)v, 1)) }};
  }
  static FASTOPS_INLINE Raw Narrow(Pair<A> v) {
    return (Raw)_mm256_set_m128i(_mm256_cvtps_ph(v.part[1], _MM_FROUND_TO_NEAREST_INT),
                                 _mm256_cvtps_ph(v.part[0], _MM_FROUND_TO_NEAREST_INT));
  }
#else
  // No step reads or produces a subnormal float, which the thread's mode might flush to zero.
  static FASTOPS_INLINE A::Vec WidenHalf(U32 half) {
    const U32 magnitude = half & 0x7fffu;
    const U32 normal = (magnitude << 13) + (112u << 23);
    const U32 special = normal + (112u << 23);  // Inf and NaN
    typedef float Vec __attribute__((vector_size(kVectorBytes)));
    const Vec subnormal = __builtin_convertvector((I32)magnitude, Vec) * 0x1p-24f;
    U32 bits = Choose((I32)magnitude < 0x400, (U32)subnormal, normal);
    bits = Choose((I32)magnitude >= 0x7c00, special, bits);
    return (A::Vec)(bits | (half & 0x8000u) << 16);
  }
  // The result is in the high half of each lane.
  static FASTOPS_INLINE U32 Round(A::Vec f) {
    const U32 bits = (U32)f & 0x7fffffffu;
    const U32 sign = (U32)f & 0x80000000u;
    // Too small for a normal half: adding 1/2 leaves the rounded multiple of 2^-24 in the low bits.
    const U32 subnormal = (U32)((A::Vec)bits + 0.5f) - 0x3f000000u;
    const U32 normal = (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13;
    U32 half = Choose((I32)bits < (113 << 23), subnormal, normal);
    half = Choose((I32)bits >= (143 << 23), U32{} + 0x7c00u, half);
    half = Choose((I32)bits > 0x7f800000, U32{} + 0x7e00u, half);
    return half << 16 | sign;
  }
  static FASTOPS_INLINE Pair<A> Widen(Raw v) {
    return {{WidenHalf(Lower(v)), WidenHalf(Upper(v))}};
  }
  static FASTOPS_INLINE Raw Narrow(Pair<A> v) {
    return PackHighHalves(Round(v.part[0]), Round(v.part[1]));
  }
#endif
};

// A member of a template for every element type, in the order of DType.
#define FASTOPS_EACH_DTYPE(Template, name) \
  {Template<E32>::name, Template<EBF16>::name, Template<EF16>::name, Template<E64>::name}

// ---- Constants from flags -----------------------------------------------------------------------

// Calls f.operator()<flags...>(), so that f is compiled for each combination of the flags.
template <bool... kFlags, typename F>
FASTOPS_INLINE auto WithFlags(const F& f) {
  return f.template operator()<kFlags...>();
}
template <bool... kFlags, typename F, typename... Rest>
FASTOPS_INLINE auto WithFlags(const F& f, bool flag, Rest... rest) {
  return flag ? WithFlags<kFlags..., true>(f, rest...) : WithFlags<kFlags..., false>(f, rest...);
}

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
FASTOPS_INLINE typename E::Raw LoadRaw(Extent, const char* p, int64_t n) {
  if constexpr (Extent::kWhole) {
    return E::Load(p);
  } else {
    return E::LoadPart(p, n);
  }
}
template <typename E, typename Extent>
FASTOPS_INLINE Pair<typename E::A> LoadElements(Extent extent, const char* p, int64_t n) {
  return E::Widen(LoadRaw<E>(extent, p, n));
}

// Elements i to i + n of an array of the element type, or, if `wide`, of the accumulator type.
template <typename E, typename Extent>
FASTOPS_INLINE Pair<typename E::A> LoadEither(Extent extent, const void* p, bool wide, int64_t i,
                                              int64_t n) {
  using Wide = SameElement<typename E::A>;
  const char* const from = static_cast<const char*>(p);
  if (wide) return LoadElements<Wide>(extent, from + i * Wide::kBytes, n);
  return LoadElements<E>(extent, from + i * E::kBytes, n);
}

// Prefetches the block that is `bytes` bytes after p.
template <typename E>
FASTOPS_INLINE void FetchBlock(const char* p, int64_t bytes) {
  FetchAhead(p, bytes);
  if constexpr (E::kBlock * E::kBytes > 64) FetchAhead(p, bytes + 64);
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

// Adds v to elements i to i + n of sums in the accumulator type, or sets these if `first`.
template <typename A, typename Extent>
FASTOPS_INLINE void AddTo(Extent extent, void* sums, int64_t i, int64_t n, Pair<A> v,
                          bool first = false) {
  using Wide = SameElement<A>;
  char* const to = static_cast<char*>(sums) + i * Wide::kBytes;
  if (!first) v = Add(LoadElements<Wide>(extent, to, n), v);
  StoreElements<Wide, false>(extent, to, v, n);
}

template <typename A, typename Extent>
FASTOPS_INLINE PairMask<A> LoadMask(Extent, const uint8_t* p, int64_t n) {
  uint8_t block[2 * A::kLanes] = {};
  if constexpr (!Extent::kWhole) {
    memcpy(block, p, static_cast<size_t>(n));
    p = block;
  }
  return {{A::FromBytes(p), A::FromBytes(p + A::kLanes)}};
}

// Like OverBlocks, but whole blocks are aligned to cache lines of p.
template <typename E, typename F>
FASTOPS_INLINE void OverAlignedBlocks(const void* p, int64_t n, const F& f) {
  const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) % 64);
  const int64_t head = Min(past == 0 ? 0 : (64 - past) / E::kBytes, n);
  int64_t i = 0;
  while (head - i > 0) {
    const int64_t some = head - i < E::kBlock ? head - i : E::kBlock - 1;
    f(Part(), i, some);
    i += some;
  }
  OverBlocks<E::kBlock>(i, n, f);
}

// Over a row whose results are written to p. With kStream, whole blocks are aligned.
template <typename E, bool kStream, typename F>
FASTOPS_INLINE void OverRow(const void* p, int64_t n, const F& f) {
  if constexpr (kStream) {
    OverAlignedBlocks<E>(p, n, f);
  } else {
    OverBlocks<E::kBlock>(0, n, f);
  }
}

// Sums over a row: f(extent, i, count, sums) adds a block. They are first computed per segment of
// kSegment blocks, and then added up: the rounding error grows with the number of successive
// additions. The lanes, which add up separately, reduce it further.
template <int64_t kSegment, typename A, int kCount, typename F>
FASTOPS_INLINE void SumRow(int64_t n, Pair<A> (&totals)[kCount], const F& f) {
  constexpr int kBlock = 2 * A::kLanes;
  for (Pair<A>& total : totals) total = SetPair<A>(0);
  for (int64_t begin = 0; begin < n;) {
    const int64_t end = n - begin > kSegment * kBlock ? begin + kSegment * kBlock : n;
    Pair<A> sums[kCount];
    for (Pair<A>& sum : sums) sum = SetPair<A>(0);
    OverBlocks<kBlock>(begin, end, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      f(extent, i, count, sums);
    });
    for (int k = 0; k < kCount; ++k) totals[k] = Add(totals[k], sums[k]);
    begin = end;
  }
}

}  // namespace
}  // namespace jax_fastops::cpu::FASTOPS_ISA

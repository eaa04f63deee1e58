// Vectors of float and double for the instruction set for which a *_simd.cc file is compiled.
//
// Floats and Doubles describe vectors of one register:
//
//   Scalar, Vec, Mask, kLanes
//   Set, Load, Store, Add, Sub, Mul, Div
//   Stream               to memory aligned to a vector, bypassing the caches if supported
//   MulAdd(a, b, c)      a * b + c, rounded once if the machine has FMA
//   NegMulAdd(a, b, c)   c - a * b, likewise
//   Max(a, b)            b if either is NaN; likewise Min
//   Rsqrt                1 / sqrt(v)
//   Sum, Largest         over the lanes
//   RoundToInteger       for numbers far below 1 / epsilon
//   TimesPowerOf2(v, n)  v * 2^n for an integer n, rounded once
//
//   Less, AtLeast, Equal the lanes where a < b, a >= b, a = b; none if a or b is NaN
//   NotZero(v)           the lanes that are not 0; NaN is not 0
//   Positive(v)          the lanes that are greater than 0 or NaN
//   Finite(v)            the lanes that are not Inf or NaN
//   And(m, n)            the lanes of both
//   Select(m, a, b)      a in the lanes of the mask, else b
//   FirstLanes(n)        the lanes below n, which may be negative or greater than kLanes
//   FromBytes(p)         the lanes whose byte is not 0
//   BitsOf(m)            one bit per lane, lane 0 lowest
//   MaskOf(bits)         the lanes whose bit is set; higher bits are ignored
//   LoadPart, StorePart  the first n lanes, by masked instructions, if kMaskedMemory
//
// Comparisons are done by floating-point instructions, so subnormals count as zero exactly if the
// calling thread is in that mode, as XLA's CPU threads are.
//
// What the compiler's own notation for vectors expresses is written in it: it becomes the same
// instructions as intrinsics. The intrinsics of an operation have the same name in each instruction
// set except for a prefix and a suffix, so overloads on the vector type are made from them by a
// macro.
//
// This header may define things only in the anonymous namespace, and include only C headers: see
// isa.h.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "masks and 16-bit lanes assume it");

#define FASTOPS_INLINE inline __attribute__((always_inline))

// For lambdas that a loop calls for each block.
#define FASTOPS_LAMBDA __attribute__((always_inline))

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

constexpr int kVectorBytes = 16 << FASTOPS_ISA_LEVEL;

// Vectors of 16-bit and of 32-bit integers.
typedef int16_t I16 __attribute__((vector_size(kVectorBytes)));
typedef int32_t I32 __attribute__((vector_size(kVectorBytes)));
typedef uint32_t U32 __attribute__((vector_size(kVectorBytes)));

// Whether norms, softmax and batch norm have second kernels, with streaming stores. Not in the
// baseline set, which is for old machines and for those without such stores: they would be half of
// its code.
constexpr bool kStreams = FASTOPS_ISA_LEVEL > 0;

// Prefetches the cache line `bytes` bytes after p. An address after the end of an array is
// harmless.
template <bool kWrite = false>
FASTOPS_INLINE void FetchAhead(const char* p, int64_t bytes) {
  __builtin_prefetch((const void*)((uintptr_t)p + (uintptr_t)bytes), kWrite ? 1 : 0);
}

FASTOPS_INLINE int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
FASTOPS_INLINE int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }

// The same for all lines of `bytes` bytes that begin there.
template <bool kWrite = false>
FASTOPS_INLINE void FetchRowAhead(const char* p, int64_t ahead, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) FetchAhead<kWrite>(p + i, ahead);
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

// ---- Overloads on the vector type ---------------------------------------------------------------

#if defined(__x86_64__)

#define FASTOPS_VECTOR(V, S, prefix, suffix)                                 \
  FASTOPS_INLINE V Larger(V a, V b) { return prefix##_max_##suffix(a, b); }  \
  FASTOPS_INLINE V Smaller(V a, V b) { return prefix##_min_##suffix(a, b); } \
  FASTOPS_INLINE V SquareRoot(V v) { return prefix##_sqrt_##suffix(v); }     \
  FASTOPS_INLINE void StreamVector(S* p, V v) { prefix##_stream_##suffix(p, v); }
#define FASTOPS_VECTOR_FMA(V, prefix, suffix)                                      \
  FASTOPS_INLINE V Fma(V a, V b, V c) { return prefix##_fmadd_##suffix(a, b, c); } \
  FASTOPS_INLINE V NegFma(V a, V b, V c) { return prefix##_fnmadd_##suffix(a, b, c); }

// f over all lanes: of the halves of a vector, then of the halves of the result, and so on.
template <typename F>
FASTOPS_INLINE float Reduce(__m128 v, const F& f) {
  v = f(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(f(v, _mm_shuffle_ps(v, v, 0x55)));
}
template <typename F>
FASTOPS_INLINE double Reduce(__m128d v, const F& f) {
  return _mm_cvtsd_f64(f(v, _mm_unpackhi_pd(v, v)));
}
FASTOPS_VECTOR(__m128, float, _mm, ps)
FASTOPS_VECTOR(__m128d, double, _mm, pd)
FASTOPS_INLINE void StreamFence() { _mm_sfence(); }

#if FASTOPS_ISA_LEVEL == 0
using FloatVector = __m128;
using DoubleVector = __m128d;
FASTOPS_INLINE void StreamVector(void* p, I16 v) {
  _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)v);
}
#else
template <typename F>
FASTOPS_INLINE float Reduce(__m256 v, const F& f) {
  return Reduce(f(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)), f);
}
template <typename F>
FASTOPS_INLINE double Reduce(__m256d v, const F& f) {
  return Reduce(f(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1)), f);
}
FASTOPS_VECTOR(__m256, float, _mm256, ps)
FASTOPS_VECTOR(__m256d, double, _mm256, pd)
#if FASTOPS_ISA_LEVEL == 1
using FloatVector = __m256;
using DoubleVector = __m256d;
FASTOPS_VECTOR_FMA(__m256, _mm256, ps)
FASTOPS_VECTOR_FMA(__m256d, _mm256, pd)
FASTOPS_INLINE void StreamVector(void* p, I16 v) {
  _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)v);
}
#else
using FloatVector = __m512;
using DoubleVector = __m512d;
FASTOPS_VECTOR(__m512, float, _mm512, ps)
FASTOPS_VECTOR(__m512d, double, _mm512, pd)
FASTOPS_VECTOR_FMA(__m512, _mm512, ps)
FASTOPS_VECTOR_FMA(__m512d, _mm512, pd)
// GCC 12's own casts warn of undefined registers. With a full mask, the masked extraction is equal
// to the plain one.
template <typename F>
FASTOPS_INLINE float Reduce(__m512 v, const F& f) {
  return Reduce(
      f(_mm512_maskz_extractf32x8_ps(0xff, v, 0), _mm512_maskz_extractf32x8_ps(0xff, v, 1)), f);
}
template <typename F>
FASTOPS_INLINE double Reduce(__m512d v, const F& f) {
  return Reduce(
      f(_mm512_maskz_extractf64x4_pd(0xff, v, 0), _mm512_maskz_extractf64x4_pd(0xff, v, 1)), f);
}
FASTOPS_INLINE void StreamVector(void* p, I16 v) {
  _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)v);
}
#endif
#endif

#undef FASTOPS_VECTOR
#undef FASTOPS_VECTOR_FMA

#else  // other machines, such as aarch64: the compiler finds the instructions

typedef float FloatVector __attribute__((vector_size(kVectorBytes)));
typedef double DoubleVector __attribute__((vector_size(kVectorBytes)));

// Also of single elements.
template <typename V>
FASTOPS_INLINE V Larger(V a, V b) {
  return a > b ? a : b;
}
template <typename V>
FASTOPS_INLINE V Smaller(V a, V b) {
  return a < b ? a : b;
}
template <typename V>
FASTOPS_INLINE V SquareRoot(V v) {
  for (unsigned i = 0; i < sizeof(v) / sizeof(v[0]); ++i) {
    if constexpr (sizeof(v[0]) == sizeof(float)) {
      v[i] = __builtin_sqrtf(v[i]);
    } else {
      v[i] = __builtin_sqrt(v[i]);
    }
  }
  return v;
}
template <typename V, typename F>
FASTOPS_INLINE auto Reduce(V v, const F& f) {
  for (unsigned n = sizeof(v) / sizeof(v[0]) / 2; n > 0; n /= 2) {
    for (unsigned i = 0; i < n; ++i) v[i] = f(v[i] + 0, v[i + n] + 0);
  }
  return v[0] + 0;
}
template <typename V>
FASTOPS_INLINE void StreamVector(void* p, V v) {
  StoreVector(p, v);
}
FASTOPS_INLINE void StreamFence() {}

#endif

// ---- Vectors of the accumulator types -----------------------------------------------------------

// A mask has one bit per lane with AVX-512. Otherwise it is a vector of integers as wide as Scalar,
// which are all ones in the lanes of the mask.
struct FloatTypes {
  using Scalar = float;
  using Vec = FloatVector;
#if FASTOPS_ISA_LEVEL == 2
  using Mask = __mmask16;
#else
  using Mask = decltype(Vec{} < Vec{});
#endif
};
struct DoubleTypes {
  using Scalar = double;
  using Vec = DoubleVector;
#if FASTOPS_ISA_LEVEL == 2
  using Mask = __mmask8;
#else
  using Mask = decltype(Vec{} < Vec{});
#endif
};

// Returns the result of an intrinsic, for float or for double.
#define FASTOPS_INTRINSIC(prefix, suffix, ...) \
  if constexpr (kFloat)                        \
    return prefix##_ps##suffix(__VA_ARGS__);   \
  else                                         \
    return prefix##_pd##suffix(__VA_ARGS__)

template <typename Types>
struct Vectors {
  using Scalar = typename Types::Scalar;
  using Vec = typename Types::Vec;
  using Mask = typename Types::Mask;
  static constexpr int kLanes = sizeof(Vec) / sizeof(Scalar);
  static constexpr bool kFloat = sizeof(Scalar) == sizeof(float);

  // Not 0 + x, which is 0 for -0.0.
  static FASTOPS_INLINE Vec Set(Scalar x) { return x - Vec{}; }
  static FASTOPS_INLINE Vec Load(const void* p) { return LoadVector<Vec>(p); }
  static FASTOPS_INLINE void Store(void* p, Vec v) { StoreVector(p, v); }
  static FASTOPS_INLINE void Stream(void* p, Vec v) { StreamVector(static_cast<Scalar*>(p), v); }
  static FASTOPS_INLINE Vec Add(Vec a, Vec b) { return a + b; }
  static FASTOPS_INLINE Vec Sub(Vec a, Vec b) { return a - b; }
  static FASTOPS_INLINE Vec Mul(Vec a, Vec b) { return a * b; }
  static FASTOPS_INLINE Vec Div(Vec a, Vec b) { return a / b; }
  static FASTOPS_INLINE Vec MulAdd(Vec a, Vec b, Vec c) {
#if FASTOPS_ISA_LEVEL > 0
    return Fma(a, b, c);
#elif defined(__aarch64__)
    for (int i = 0; i < kLanes; ++i) {
      c[i] = kFloat ? __builtin_fmaf(a[i], b[i], c[i]) : __builtin_fma(a[i], b[i], c[i]);
    }
    return c;
#else
    return a * b + c;
#endif
  }
  static FASTOPS_INLINE Vec NegMulAdd(Vec a, Vec b, Vec c) {
#if FASTOPS_ISA_LEVEL > 0
    return NegFma(a, b, c);
#elif defined(__aarch64__)
    return MulAdd(-a, b, c);
#else
    return c - a * b;
#endif
  }
  static FASTOPS_INLINE Vec Max(Vec a, Vec b) { return Larger(a, b); }
  static FASTOPS_INLINE Vec Min(Vec a, Vec b) { return Smaller(a, b); }
  static FASTOPS_INLINE Vec Rsqrt(Vec v) { return Set(1) / SquareRoot(v); }
  static FASTOPS_INLINE Scalar Sum(Vec v) {
    return Reduce(v, [](auto a, auto b) FASTOPS_LAMBDA { return a + b; });
  }
  static FASTOPS_INLINE Scalar Largest(Vec v) {
    return Reduce(v, [](auto a, auto b) FASTOPS_LAMBDA { return Larger(a, b); });
  }

#if FASTOPS_ISA_LEVEL == 2

  static constexpr bool kMaskedMemory = true;

  template <int kRelation>
  static FASTOPS_INLINE Mask Compare(Vec a, Vec b) {
    FASTOPS_INTRINSIC(_mm512_cmp, _mask, a, b, kRelation);
  }
  static FASTOPS_INLINE Mask Less(Vec a, Vec b) { return Compare<_CMP_LT_OQ>(a, b); }
  static FASTOPS_INLINE Mask AtLeast(Vec a, Vec b) { return Compare<_CMP_GE_OQ>(a, b); }
  static FASTOPS_INLINE Mask Equal(Vec a, Vec b) { return Compare<_CMP_EQ_OQ>(a, b); }
  static FASTOPS_INLINE Mask NotZero(Vec v) { return Compare<_CMP_NEQ_UQ>(v, Vec{}); }
  static FASTOPS_INLINE Mask Positive(Vec v) { return Compare<_CMP_NLE_UQ>(v, Vec{}); }
  static FASTOPS_INLINE Mask IsSpecial(Vec v) { FASTOPS_INTRINSIC(_mm512_fpclass, _mask, v, 0x99); }
  static FASTOPS_INLINE Mask Finite(Vec v) { return static_cast<Mask>(~IsSpecial(v)); }
  static FASTOPS_INLINE Vec Select(Mask m, Vec a, Vec b) {
    FASTOPS_INTRINSIC(_mm512_mask_blend, , m, b, a);
  }
  static FASTOPS_INLINE Mask FirstLanes(int64_t n) {
    return static_cast<Mask>(n >= kLanes ? ~0 : n <= 0 ? 0 : (1 << n) - 1);
  }
  static FASTOPS_INLINE Mask FromBytes(const uint8_t* p) {
    __m128i bytes;
    if constexpr (kFloat)
      bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    else
      bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return static_cast<Mask>(_mm_test_epi8_mask(bytes, bytes));
  }
  static FASTOPS_INLINE uint32_t BitsOf(Mask m) { return m; }
  static FASTOPS_INLINE Mask MaskOf(uint32_t bits) { return static_cast<Mask>(bits); }
  static FASTOPS_INLINE Vec LoadPart(const void* p, int64_t n) {
    FASTOPS_INTRINSIC(_mm512_maskz_loadu, , FirstLanes(n), p);
  }
  static FASTOPS_INLINE void StorePart(void* p, Vec v, int64_t n) {
    FASTOPS_INTRINSIC(_mm512_mask_storeu, , p, FirstLanes(n), v);
  }
  static FASTOPS_INLINE Vec RoundToInteger(Vec v) { FASTOPS_INTRINSIC(_mm512_roundscale, , v, 8); }
  static FASTOPS_INLINE Vec TimesPowerOf2(Vec v, Vec n) {
    FASTOPS_INTRINSIC(_mm512_scalef, , v, n);
  }

#else

  static FASTOPS_INLINE Mask Less(Vec a, Vec b) { return a < b; }
  static FASTOPS_INLINE Mask AtLeast(Vec a, Vec b) { return a >= b; }
  static FASTOPS_INLINE Mask Equal(Vec a, Vec b) { return a == b; }
  static FASTOPS_INLINE Mask NotZero(Vec v) { return v != Vec{}; }
  static FASTOPS_INLINE Mask Positive(Vec v) { return ~(v <= Vec{}); }
  static FASTOPS_INLINE Mask Finite(Vec v) { return v - v == v - v; }
  static FASTOPS_INLINE Mask FirstLanes(int64_t n) {
    Vec lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = static_cast<Scalar>(i);
    return lane < Set(static_cast<Scalar>(n));
  }
  static FASTOPS_INLINE Mask MaskOf(uint32_t bits) {
    Mask lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = 1 << i;
    return ((Mask{} + bits) & lane) == lane;
  }

  // Adding kRound rounds to an integer, and leaves it, plus the exponent's bias, in the low bits.
  static constexpr int kMantissa = kFloat ? 23 : 52;
  static constexpr Scalar kRound =
      kFloat ? static_cast<Scalar>(0x1.8p23f + 127) : static_cast<Scalar>(0x1.8p52 + 1023);
  // Multiplies in two steps, because 2^n may be out of range. The first step is exact.
  static FASTOPS_INLINE Vec TimesPowerOf2(Vec v, Vec n) {
    const Vec round = Set(kRound), half = n * Set(static_cast<Scalar>(0.5)) + round;
    const Vec rest = n - (half - round) + round;
    return v * (Vec)((Mask)half << kMantissa) * (Vec)((Mask)rest << kMantissa);
  }

#if FASTOPS_ISA_LEVEL == 1

  static constexpr bool kMaskedMemory = true;

  static FASTOPS_INLINE Vec Select(Mask m, Vec a, Vec b) {
    FASTOPS_INTRINSIC(_mm256_blendv, , b, a, (Vec)m);
  }
  static FASTOPS_INLINE Mask FromBytes(const uint8_t* p) {
    if constexpr (kFloat) {
      return (Mask)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))) > 0;
    } else {
      return (Mask)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(LoadVector<int32_t>(p))) > 0;
    }
  }
  static FASTOPS_INLINE int SignBits(Vec v) { FASTOPS_INTRINSIC(_mm256_movemask, , v); }
  static FASTOPS_INLINE uint32_t BitsOf(Mask m) { return static_cast<uint32_t>(SignBits((Vec)m)); }
  static FASTOPS_INLINE Vec LoadPart(const void* p, int64_t n) {
    const auto* from = static_cast<const Scalar*>(p);
    FASTOPS_INTRINSIC(_mm256_maskload, , from, (__m256i)FirstLanes(n));
  }
  static FASTOPS_INLINE void StorePart(void* p, Vec v, int64_t n) {
    auto* to = static_cast<Scalar*>(p);
    FASTOPS_INTRINSIC(_mm256_maskstore, , to, (__m256i)FirstLanes(n), v);
  }
  static FASTOPS_INLINE Vec RoundToInteger(Vec v) { FASTOPS_INTRINSIC(_mm256_round, , v, 8); }

#else

  static constexpr bool kMaskedMemory = false;

  static FASTOPS_INLINE Vec Select(Mask m, Vec a, Vec b) {
    return (Vec)((m & (Mask)a) | (~m & (Mask)b));
  }
  static FASTOPS_INLINE Mask FromBytes(const uint8_t* p) {
    Mask m;
    for (int i = 0; i < kLanes; ++i) m[i] = p[i];
    return m != 0;
  }
  static FASTOPS_INLINE uint32_t BitsOf(Mask m) {
#if defined(__SSE2__)
    FASTOPS_INTRINSIC(_mm_movemask, , (Vec)m);
#else
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(m[i] & 1) << i;
    return bits;
#endif
  }
  static FASTOPS_INLINE Vec RoundToInteger(Vec v) { return v + Set(kRound) - Set(kRound); }

#endif
#endif

  static FASTOPS_INLINE Mask And(Mask m, Mask n) { return static_cast<Mask>(m & n); }
};

#undef FASTOPS_INTRINSIC

using Floats = Vectors<FloatTypes>;
using Doubles = Vectors<DoubleTypes>;

}  // namespace
}  // namespace jax_fastops::cpu::FASTOPS_ISA

// The helpers of blocks.cc. Their data is in the L1 cache.
#include "elementwise/blocks_simd.h"

#include "core/cpu/simd_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

// ---- Broadcast operands -------------------------------------------------------------------------

template <typename T>
void Expand(const void* source, const BlockRows& rows, void* dense) {
  constexpr int64_t kGroup = 16 / static_cast<int64_t>(sizeof(T)), kLine = 4 * kGroup;
  typedef T Values __attribute__((vector_size(16)));
  typedef T Line __attribute__((vector_size(64)));
  const T* from = static_cast<const T*>(source);
  T* to = static_cast<T*>(dense);
  const int64_t inner = rows.inner;
  for (int64_t r = 0; r < rows.rows; ++r, to += inner) {
    const T* p = from + rows.offsets[r];
    int64_t i = 0;
    if (rows.step == 0) {
      const T value = *p;
      const Values values = Values{} + value;
      const Line line = Line{} + value;
      for (; i + kLine <= inner; i += kLine) memcpy(to + i, &line, sizeof(line));
      for (; i + kGroup <= inner; i += kGroup) memcpy(to + i, &values, sizeof(values));
#pragma GCC unroll 1
      for (; i < inner; ++i) to[i] = value;
    } else if (rows.step == 1) {
      for (; i + kLine <= inner; i += kLine) memcpy(to + i, p + i, sizeof(Line));
      for (; i + kGroup <= inner; i += kGroup) memcpy(to + i, p + i, sizeof(Values));
#pragma GCC unroll 1
      for (; i < inner; ++i) to[i] = p[i];
    } else {
#pragma GCC unroll 1
      for (; i < inner; ++i) to[i] = p[i * rows.step];
    }
  }
}

// Permutations, for broadcast operands with short rows. Their cost is per vector, not per row.
template <typename T>
constexpr int kPermuted = FASTOPS_ISA_LEVEL == 2                     ? 64 / sizeof(T)
                          : FASTOPS_ISA_LEVEL == 1 && sizeof(T) == 4 ? 8
                                                                     : 0;
#if FASTOPS_ISA_LEVEL == 0
template <typename T>
constexpr BlockHelpers::Permute* Permute = nullptr;
#else
template <typename T>
void Permute(const void* source, int64_t length, const BlockPermutation& p, int64_t n,
             void* dense) {
  constexpr int kLanes = kPermuted<T>;
  for (int64_t v = 0; v * kLanes < n; ++v) {
    const int64_t left = length - p.bases[v], count = p.counts[v] < left ? p.counts[v] : left;
    const T* const from = static_cast<const T*>(source) + p.bases[v];
    T* const to = static_cast<T*>(dense) + v * kLanes;
    const __m128i* const index = reinterpret_cast<const __m128i*>(p.indices + v * kLanes);
#if FASTOPS_ISA_LEVEL == 1
    if constexpr (sizeof(T) == 4) {
      StoreVector(to, _mm256_permutevar8x32_ps(Floats::LoadPart(from, count),
                                               _mm256_cvtepu8_epi32(_mm_loadl_epi64(index))));
    }
#else
    if constexpr (sizeof(T) == 2) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(index));
      StoreVector(to, _mm512_maskz_permutexvar_epi16(~uint32_t{0}, _mm512_cvtepu8_epi16(bytes),
                                                     (__m512i)EF16::LoadPart(from, count)));
    } else if constexpr (sizeof(T) == 4) {
      StoreVector(to,
                  _mm512_maskz_permutexvar_ps(0xffff, _mm512_cvtepu8_epi32(_mm_loadu_si128(index)),
                                              Floats::LoadPart(from, count)));
    } else {
      StoreVector(to,
                  _mm512_maskz_permutexvar_pd(0xff, _mm512_cvtepu8_epi64(_mm_loadl_epi64(index)),
                                              Doubles::LoadPart(from, count)));
    }
#endif
  }
}
#endif

template <typename T>
void Splat(const void* source, void* values) {
  const T value = *static_cast<const T*>(source);
  T* to = static_cast<T*>(values);
  for (int i = 0; i < kSplatBytes / static_cast<int>(sizeof(T)); ++i) to[i] = value;
}

// ---- Sums ---------------------------------------------------------------------------------------

constexpr int kWide = 8;
typedef double Doubles8 __attribute__((vector_size(8 * kWide)));
template <typename T>
struct Vector8;
template <>
struct Vector8<float> {
  typedef float Type __attribute__((vector_size(4 * kWide)));
};
template <>
struct Vector8<double> {
  typedef Doubles8 Type;
};

template <typename T>
FASTOPS_INLINE void AddWide(const T* values, Doubles8* sums) {
#if FASTOPS_ISA_LEVEL == 2
  // From a vector extension type, GCC would convert the halves separately.
  if constexpr (sizeof(T) == 4) {
    *sums += (Doubles8)_mm512_cvtps_pd(_mm256_loadu_ps(values));
    return;
  }
#endif
  typename Vector8<T>::Type v;
  memcpy(&v, values, sizeof(v));
  *sums += __builtin_convertvector(v, Doubles8);
}

template <typename T>
FASTOPS_INLINE void AddRun(const T* values, int64_t n, double* sums) {
  int64_t i = 0;
  for (; i + kWide <= n; i += kWide) {
    Doubles8 s;
    memcpy(&s, sums + i, sizeof(s));
    AddWide(values + i, &s);
    memcpy(sums + i, &s, sizeof(s));
  }
#pragma GCC unroll 1
  for (; i < n; ++i) sums[i] += static_cast<double>(values[i]);
}

template <typename T>
FASTOPS_INLINE double SumRun(const T* values, int64_t n) {
  double rest = 0;
  int64_t i = 0;
  if (n >= kWide) {
    Doubles8 sum[4] = {};
    if constexpr (sizeof(T) == 4) {
      // Adds four floats before each conversion, which saves three quarters of the conversions.
      typedef T Line __attribute__((vector_size(8 * kWide)));
      for (; i + 8 * kWide <= n; i += 8 * kWide) {
        Line a, b, c, d;
        memcpy(&a, values + i, sizeof(a));
        memcpy(&b, values + i + 2 * kWide, sizeof(b));
        memcpy(&c, values + i + 4 * kWide, sizeof(c));
        memcpy(&d, values + i + 6 * kWide, sizeof(d));
        const Line four = (a + b) + (c + d);
        T parts[2 * kWide];
        memcpy(parts, &four, sizeof(parts));
        AddWide(parts, &sum[0]);
        AddWide(parts + kWide, &sum[1]);
      }
    }
    for (; i + 4 * kWide <= n; i += 4 * kWide) {
      for (int k = 0; k < 4; ++k) AddWide(values + i + k * kWide, &sum[k]);
    }
    for (; i + kWide <= n; i += kWide) AddWide(values + i, &sum[0]);
    const Doubles8 all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    rest = ((all[0] + all[4]) + (all[2] + all[6])) + ((all[1] + all[5]) + (all[3] + all[7]));
  }
#pragma GCC unroll 1
  for (; i < n; ++i) rest += static_cast<double>(values[i]);
  return rest;
}

template <typename T>
void Add(const void* values, int64_t n, double* sums) {
  AddRun(static_cast<const T*>(values), n, sums);
}

template <typename T>
double Sum(const void* values, int64_t n) {
  return SumRun(static_cast<const T*>(values), n);
}

template <typename T>
void AddRows(const void* values, const BlockRows& rows, double* sums) {
  const T* from = static_cast<const T*>(values);
  for (int64_t r = 0; r < rows.rows; ++r, from += rows.inner) {
    if (rows.step == 0) {
      sums[rows.offsets[r]] += SumRun(from, rows.inner);
    } else {
      AddRun(from, rows.inner, sums + rows.offsets[r]);
    }
  }
}

template <typename E>
void Write(const double* sums, int64_t n, void* result) {
  using Scalar = typename E::A::Scalar;
  char* to = static_cast<char*>(result);
  if (n == 1) {
    // Not a masked store: for single values, one after another, it takes 50 ns each on an EPYC.
    alignas(64) char block[E::kBlock * E::kBytes];
    E::Store(block, E::Narrow(SetPair<typename E::A>(static_cast<Scalar>(sums[0]))));
    memcpy(to, block, E::kBytes);
    return;
  }
  OverBlocks<E::kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
    Scalar block[E::kBlock] = {};
    if constexpr (decltype(extent)::kWhole) count = E::kBlock;  // a compile-time constant
    for (int64_t k = 0; k < count; ++k) block[k] = static_cast<Scalar>(sums[i + k]);
    StoreElements<E, false>(extent, to + i * E::kBytes, E::Narrow(LoadPair<typename E::A>(block)),
                            count);
  });
}

}  // namespace

const BlockHelpers block_helpers = {{kPermuted<uint16_t>, kPermuted<uint32_t>, kPermuted<uint64_t>},
                                    {Permute<uint16_t>, Permute<uint32_t>, Permute<uint64_t>},
                                    {Expand<uint16_t>, Expand<uint32_t>, Expand<uint64_t>},
                                    {Splat<uint16_t>, Splat<uint32_t>, Splat<uint64_t>},
                                    {Add<float>, Add<double>},
                                    {Sum<float>, Sum<double>},
                                    {AddRows<float>, AddRows<double>},
                                    {Write<E32>, Write<EBF16>, Write<EF16>, Write<E64>},
                                    StreamFence};

}  // namespace jax_fastops::cpu::FASTOPS_ISA

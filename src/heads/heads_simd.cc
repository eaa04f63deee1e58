// The arithmetic of the head ops: copies rows, and adds a bias that all rows share, or computes
// their sum over the rows. Each pass processes columns of a few registers' width down all rows, so
// the bias or the sums stay in registers. The rest of a row is covered by one more block, which is
// moved back and overlaps the previous one. Rows shorter than a block go through a zeroed block on
// the stack.
#include "heads/heads_simd.h"

#include "core/cpu/simd.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

// ---- Blocks in the type of sums: a block of T as one or two registers ---------------------------
//
//   Wide         the registers
//   Sum          the type of their elements
//   At(i)        the position of element i when the registers are stored in order
//   Widen, Narrow, Add, Load, Store

struct WideF32 {
  using Wide = F32::Vec;
  using Sum = float;
  static constexpr int At(int i) { return i; }
  static FASTOPS_INLINE Wide Widen(F32::Vec x) { return x; }
  static FASTOPS_INLINE Wide Add(Wide a, Wide b) { return F32::Add(a, b); }
  static FASTOPS_INLINE Wide Load(const Sum* p) { return F32::Load(p); }
  static FASTOPS_INLINE void Store(Sum* p, Wide v) { F32::Store(p, v); }
};

struct WideF64 {
  using Wide = F64::Vec;
  using Sum = double;
  static constexpr int At(int i) { return i; }
  static FASTOPS_INLINE Wide Widen(F64::Vec x) { return x; }
  static FASTOPS_INLINE Wide Add(Wide a, Wide b) { return F64::Add(a, b); }
  static FASTOPS_INLINE Wide Load(const Sum* p) { return F64::Load(p); }
  static FASTOPS_INLINE void Store(Sum* p, Wide v) { F64::Store(p, v); }
};

#if FASTOPS_ISA_LEVEL == 2
using Floats = __m512;
FASTOPS_INLINE Floats AddFloats(Floats a, Floats b) { return _mm512_add_ps(a, b); }
FASTOPS_INLINE Floats LoadFloats(const float* p) { return _mm512_loadu_ps(p); }
FASTOPS_INLINE void StoreFloats(float* p, Floats v) { _mm512_storeu_ps(p, v); }
#elif FASTOPS_ISA_LEVEL == 1
using Floats = __m256;
FASTOPS_INLINE Floats AddFloats(Floats a, Floats b) { return _mm256_add_ps(a, b); }
FASTOPS_INLINE Floats LoadFloats(const float* p) { return _mm256_loadu_ps(p); }
FASTOPS_INLINE void StoreFloats(float* p, Floats v) { _mm256_storeu_ps(p, v); }
#else
using Floats = F32x4;
FASTOPS_INLINE Floats AddFloats(Floats a, Floats b) { return a + b; }
FASTOPS_INLINE Floats LoadFloats(const float* p) { return LoadVector<Floats>(p); }
FASTOPS_INLINE void StoreFloats(float* p, Floats v) { StoreVector(p, v); }
#endif
constexpr int kFloats = sizeof(Floats) / sizeof(float);

struct WideHalves {
  struct Wide {
    Floats part[2];
  };
  using Sum = float;
  static FASTOPS_INLINE Wide Add(Wide a, Wide b) {
    return {{AddFloats(a.part[0], b.part[0]), AddFloats(a.part[1], b.part[1])}};
  }
  static FASTOPS_INLINE Wide Load(const Sum* p) {
    return {{LoadFloats(p), LoadFloats(p + kFloats)}};
  }
  static FASTOPS_INLINE void Store(Sum* p, Wide v) {
    StoreFloats(p, v.part[0]);
    StoreFloats(p + kFloats, v.part[1]);
  }
};

struct WideBF16 : WideHalves {
  static constexpr int At(int i) { return i % 2 * kFloats + i / 2; }
  static FASTOPS_INLINE Wide Widen(BF16::Vec x) { return {{BF16::Even(x), BF16::Odd(x)}}; }
  static FASTOPS_INLINE BF16::Vec Narrow(Wide v) {
#if FASTOPS_ISA_LEVEL == 2
    return _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(BF16::Round(v.part[0]), 16),
                                   BF16::Round(v.part[1]));
#elif FASTOPS_ISA_LEVEL == 1
    return _mm256_blend_epi16(_mm256_srli_epi32(BF16::Round(v.part[0]), 16), BF16::Round(v.part[1]),
                              0xAA);
#else
    return (BF16::Vec)(BF16::Round(v.part[0]) >> 16 | (BF16::Round(v.part[1]) & 0xffff0000u));
#endif
  }
};

struct WideF16 : WideHalves {
#if FASTOPS_ISA_LEVEL == 2
  static constexpr int At(int i) { return i; }
  static FASTOPS_INLINE Wide Widen(F16::Vec x) {
    return {
        { _mm512_cvtph_ps(_mm512_castsi512_si256(x)),
          _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)) }};
  }
  static FASTOPS_INLINE F16::Vec Narrow(Wide v) {
    return _mm512_inserti64x4(
        _mm512_castsi256_si512(_mm512_cvtps_ph(v.part[0], _MM_FROUND_TO_NEAREST_INT)),
        _mm512_cvtps_ph(v.part[1], _MM_FROUND_TO_NEAREST_INT), 1);
  }
#elif FASTOPS_ISA_LEVEL == 1
  static constexpr int At(int i) { return i; }
  static FASTOPS_INLINE Wide Widen(F16::Vec x) {
    return {
        { _mm256_cvtph_ps(_mm256_castsi256_si128(x)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)) }};
  }
  static FASTOPS_INLINE F16::Vec Narrow(Wide v) {
    return _mm256_set_m128i(_mm256_cvtps_ph(v.part[1], _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(v.part[0], _MM_FROUND_TO_NEAREST_INT));
  }
#else
  static constexpr int At(int i) { return i % 2 * kFloats + i / 2; }
  static FASTOPS_INLINE Wide Widen(F16::Vec x) {
    return {{F16::Widen((U32x4)x & 0xffffu), F16::Widen((U32x4)x >> 16)}};
  }
  static FASTOPS_INLINE F16::Vec Narrow(Wide v) {
    return (F16::Vec)(F16::Round(v.part[0]) | F16::Round(v.part[1]) << 16);
  }
#endif
};

// ---- The bias -----------------------------------------------------------------------------------

template <typename T>
struct OwnBias {
  using Vec = typename T::Vec;
  static constexpr int kBytes = T::kBytes;
  static FASTOPS_INLINE Vec Load(const char* p) { return T::Load(p); }
  static FASTOPS_INLINE Vec Apply(Vec x, Vec bias) { return T::Add(x, bias); }
};

// The addition is in float32, and the result is rounded once.
template <typename T, typename W>
struct WideBias {
  using Vec = typename W::Wide;
  static constexpr int kBytes = sizeof(typename W::Sum);
  static FASTOPS_INLINE Vec Load(const char* p) {
    typename W::Sum in_order[T::kLanes], moved[T::kLanes];
    memcpy(in_order, p, sizeof(in_order));
    for (int i = 0; i < T::kLanes; ++i) moved[W::At(i)] = in_order[i];
    return W::Load(moved);
  }
  static FASTOPS_INLINE typename T::Vec Apply(typename T::Vec x, Vec bias) {
    return W::Narrow(W::Add(W::Widen(x), bias));
  }
};

// Rows are too far apart for the hardware prefetcher, so the row that comes this many rows later is
// prefetched. A prefetch after the last row is harmless.
constexpr int64_t kAhead = 8;

template <typename T, typename B>
struct AddBias {
  // Processes kBlocks blocks of columns, down all rows.
  template <int kBlocks>
  static FASTOPS_INLINE void Columns(const char* x, int64_t x_stride, const char* bias, char* y,
                                     int64_t y_stride, int64_t rows) {
    typename B::Vec b[kBlocks];
#pragma GCC unroll 4
    for (int k = 0; k < kBlocks; ++k) b[k] = B::Load(bias + k * T::kLanes * B::kBytes);
    const uintptr_t in_ahead = static_cast<uintptr_t>(kAhead * x_stride);
    const uintptr_t out_ahead = static_cast<uintptr_t>(kAhead * y_stride);
    for (int64_t r = 0; r < rows; ++r) {
      for (uintptr_t at = 0; at < kBlocks * T::kLanes * T::kBytes; at += 64) {
        __builtin_prefetch(
            reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(x) + in_ahead + at), 0);
        __builtin_prefetch(
            reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(y) + out_ahead + at), 1);
      }
#pragma GCC unroll 4
      for (int k = 0; k < kBlocks; ++k) {
        const int64_t at = k * T::kLanes * T::kBytes;
        T::Store(y + at, B::Apply(T::Load(x + at), b[k]));
      }
      x += x_stride;
      y += y_stride;
    }
  }

  // n < kLanes
  static void Short(const char* x, int64_t x_stride, const char* bias, char* y, int64_t y_stride,
                    int64_t rows, int64_t n) {
    alignas(64) char block[T::kLanes * 8] = {};
    memcpy(block, bias, static_cast<size_t>(n * B::kBytes));
    const typename B::Vec b = B::Load(block);
    memset(block, 0, sizeof(block));
    for (int64_t r = 0; r < rows; ++r) {
      memcpy(block, x, static_cast<size_t>(n * T::kBytes));
      T::Store(block, B::Apply(T::Load(block), b));
      memcpy(y, block, static_cast<size_t>(n * T::kBytes));
      x += x_stride;
      y += y_stride;
    }
  }

  static void Run(const char* x, int64_t x_stride, const void* bias_data, char* y, int64_t y_stride,
                  int64_t rows, int64_t n) {
    const char* bias = static_cast<const char*>(bias_data);
    if (n < T::kLanes) return Short(x, x_stride, bias, y, y_stride, rows, n);
    int64_t i = 0;
    const auto columns = [&](auto blocks, int64_t at) {
      Columns<decltype(blocks)::kValue>(x + at * T::kBytes, x_stride, bias + at * B::kBytes,
                                        y + at * T::kBytes, y_stride, rows);
    };
    for (; i + 4 * T::kLanes <= n; i += 4 * T::kLanes) columns(Count<4>(), i);
    if (i + 2 * T::kLanes <= n) {
      columns(Count<2>(), i);
      i += 2 * T::kLanes;
    }
    if (i + T::kLanes <= n) {
      columns(Count<1>(), i);
      i += T::kLanes;
    }
    if (i < n) columns(Count<1>(), n - T::kLanes);
  }

  template <int kCount>
  struct Count {
    static constexpr int kValue = kCount;
  };
};

// ---- The sums -----------------------------------------------------------------------------------

template <typename T, typename W>
struct AddRows {
  using Sum = typename W::Sum;

  // Only the last `n` elements of the blocks are new; the others have already been added.
  template <int kBlocks, bool kCopy>
  static FASTOPS_INLINE void Columns(const char* x, int64_t x_stride, char* y, int64_t y_stride,
                                     int64_t rows, Sum* sums, bool first, int64_t n) {
    typename W::Wide total[kBlocks];
    const Sum zero[T::kLanes] = {};
#pragma GCC unroll 4
    for (int k = 0; k < kBlocks; ++k) total[k] = W::Load(zero);
    for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int k = 0; k < kBlocks; ++k) {
        const int64_t at = k * T::kLanes * T::kBytes;
        const typename T::Vec v = T::Load(x + at);
        if constexpr (kCopy) T::Store(y + at, v);
        total[k] = W::Add(total[k], W::Widen(v));
      }
      x += x_stride;
      if constexpr (kCopy) y += y_stride;
    }
    constexpr int kSize = kBlocks * T::kLanes;
    Sum stored[kSize];
#pragma GCC unroll 4
    for (int k = 0; k < kBlocks; ++k) W::Store(stored + k * T::kLanes, total[k]);
    Finish(stored, kSize - static_cast<int>(n), kSize, sums, first);
  }

  // Stores the sums of elements `begin` to `end` of the blocks, where sums[i] belongs to element i.
  // `sums` may be unaligned.
  static FASTOPS_INLINE void Finish(const Sum* stored, int begin, int end, Sum* sums, bool first) {
    for (int i = begin; i < end; ++i) {
      Sum value = stored[i / T::kLanes * T::kLanes + W::At(i % T::kLanes)];
      if (!first) {
        Sum before;
        memcpy(&before, sums + i, sizeof(Sum));
        value += before;
      }
      memcpy(sums + i, &value, sizeof(Sum));
    }
  }

  // n < kLanes
  template <bool kCopy>
  static void Short(const char* x, int64_t x_stride, char* y, int64_t y_stride, int64_t rows,
                    int64_t n, Sum* sums, bool first) {
    alignas(64) char block[T::kLanes * T::kBytes] = {};
    const Sum zero[T::kLanes] = {};
    typename W::Wide total = W::Load(zero);
    for (int64_t r = 0; r < rows; ++r) {
      memcpy(block, x, static_cast<size_t>(n * T::kBytes));
      if constexpr (kCopy) memcpy(y, block, static_cast<size_t>(n * T::kBytes));
      total = W::Add(total, W::Widen(T::Load(block)));
      x += x_stride;
      if constexpr (kCopy) y += y_stride;
    }
    Sum stored[T::kLanes];
    W::Store(stored, total);
    Finish(stored, 0, static_cast<int>(n), sums, first);
  }

  template <bool kCopy>
  static void Rows(const char* x, int64_t x_stride, char* y, int64_t y_stride, int64_t rows,
                   int64_t n, Sum* sums, bool first) {
    constexpr int64_t kLanes = T::kLanes;
    if (n < kLanes) return Short<kCopy>(x, x_stride, y, y_stride, rows, n, sums, first);
    int64_t i = 0;
    const auto to = [&](int64_t at) { return kCopy ? y + at * T::kBytes : nullptr; };
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
      Columns<4, kCopy>(x + i * T::kBytes, x_stride, to(i), y_stride, rows, sums + i, first,
                        4 * kLanes);
    }
    if (i + 2 * kLanes <= n) {
      Columns<2, kCopy>(x + i * T::kBytes, x_stride, to(i), y_stride, rows, sums + i, first,
                        2 * kLanes);
      i += 2 * kLanes;
    }
    if (i + kLanes <= n) {
      Columns<1, kCopy>(x + i * T::kBytes, x_stride, to(i), y_stride, rows, sums + i, first,
                        kLanes);
      i += kLanes;
    }
    if (i < n) {
      const int64_t at = n - kLanes;
      Columns<1, kCopy>(x + at * T::kBytes, x_stride, to(at), y_stride, rows, sums + at, first,
                        n - i);
    }
  }

  static void Run(const char* x, int64_t x_stride, char* y, int64_t y_stride, int64_t rows,
                  int64_t n, void* sums, bool first) {
    if (y == nullptr) {
      Rows<false>(x, x_stride, y, y_stride, rows, n, static_cast<Sum*>(sums), first);
    } else {
      Rows<true>(x, x_stride, y, y_stride, rows, n, static_cast<Sum*>(sums), first);
    }
  }
};

}  // namespace

extern const HeadsKernels heads_kernels;
const HeadsKernels heads_kernels = {
    {AddBias<F32, OwnBias<F32>>::Run, AddBias<BF16, OwnBias<BF16>>::Run,
     AddBias<F16, OwnBias<F16>>::Run, AddBias<F64, OwnBias<F64>>::Run},
    {nullptr, AddBias<BF16, WideBias<BF16, WideBF16>>::Run,
     AddBias<F16, WideBias<F16, WideF16>>::Run, nullptr},
    {AddRows<F32, WideF32>::Run, AddRows<BF16, WideBF16>::Run, AddRows<F16, WideF16>::Run,
     AddRows<F64, WideF64>::Run},
    {F32::kLanes, BF16::kLanes, F16::kLanes, F64::kLanes}};

}  // namespace jax_fastops::cpu::FASTOPS_ISA

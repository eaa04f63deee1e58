// The inner loops of norm.cc.
//
// Forward: a row is read from memory once and stays in the caches for the passes that follow: the
// mean, the sum of the squared deviations from it (never a difference of two large sums), and y.
// Where x, a residual and a bias are added up without being stored, each pass does so again, which
// takes less time than a buffer of any length would.
//
// Backward: a few rows at a time, so that the scale is loaded and the sums over rows are updated
// once for all of them: those pass through the first-level cache, and rows wider than it would wait
// for the second otherwise. One pass takes what dx needs of each row, the other makes dx and adds to
// the sums.
#include "cpu/norm_simd.h"

#include "cpu/simd_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

// Sums are taken over so many blocks at a time, and then added up: their error grows with the
// number of these, which the number of lanes divides once more.
constexpr int64_t kSegmentBlocks = 64;

// Rows that the backward takes at a time: what registers there are for.
constexpr int kRows = FASTOPS_ISA_LEVEL == 2 ? 4 : 2;

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

template <typename E>
struct Norm {
  using A = typename E::A;
  using Scalar = typename A::Scalar;
  using Wide = typename SameTypeOf<A>::Element;
  static constexpr int kBlock = E::kBlock;

  template <typename Extent>
  static FASTOPS_INLINE Pair<A> Parameter(Extent extent, const NormParameter& parameter, int64_t i,
                                          int64_t count) {
    const char* p = static_cast<const char*>(parameter.data);
    if (parameter.wide) return LoadElements<Wide>(extent, p + i * Wide::kBytes, count);
    return LoadElements<E>(extent, p + i * E::kBytes, count);
  }

  // f(extent, i, count) gives what is summed, 0 behind the end of the row.
  template <typename F>
  static FASTOPS_INLINE Scalar SumOverRow(int64_t n, const F& f) {
    Pair<A> total = SetPair<A>(0);
    for (int64_t begin = 0; begin < n;) {
      const int64_t end = n - begin > kSegmentBlocks * kBlock ? begin + kSegmentBlocks * kBlock : n;
      Pair<A> sum = SetPair<A>(0);
      OverBlocks<kBlock>(begin, end, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
        sum = Add(sum, f(extent, i, count));
      });
      total = Add(total, sum);
      begin = end;
    }
    return SumOf(total);
  }

  // What is normalised: x itself, or a sum with it.
  struct Source {
    const char* x;
    const char* residual;
    NormParameter bias;

    bool is_sum() const { return residual != nullptr || bias.data != nullptr; }
  };

  // A block of s as it is stored. kSum: there is something to add.
  template <bool kSum, typename Extent>
  static FASTOPS_INLINE typename E::Raw RawSource(Extent extent, const Source& source, int64_t i,
                                                  int64_t count) {
    const int64_t at = i * E::kBytes;
    if constexpr (!kSum) {
      if constexpr (Extent::kWhole) {
        return E::Load(source.x + at);
      } else {
        return E::LoadPart(source.x + at, count);
      }
    } else {
      Pair<A> s = LoadElements<E>(extent, source.x + at, count);
      if (source.bias.data != nullptr) s = Add(s, Parameter(extent, source.bias, i, count));
      if (source.residual != nullptr) {
        s = Add(s, LoadElements<E>(extent, source.residual + at, count));
      }
      return E::Narrow(s);
    }
  }

  // y from s, with kSum the sum once more.
  template <bool kSum, bool kStream>
  static FASTOPS_INLINE void Store(const Source& source, const NormForwardArrays& arrays, char* y,
                                   int64_t n, Scalar mean, Scalar rstd) {
    const Pair<A> means = SetPair<A>(mean), rstds = SetPair<A>(rstd);
    const auto block = [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      Pair<A> v = E::Widen(RawSource<kSum>(extent, source, i, count));
      v = Mul(Sub(v, means), rstds);
      if (arrays.scale.data != nullptr) v = Mul(v, Parameter(extent, arrays.scale, i, count));
      if (arrays.bias.data != nullptr) v = Add(v, Parameter(extent, arrays.bias, i, count));
      StoreElements<E, kStream>(extent, y + i * E::kBytes, E::Narrow(v), count);
    };
    if constexpr (kStream) {
      OverAlignedBlocks<E>(y, n, block);
    } else {
      OverBlocks<kBlock>(0, n, block);
    }
  }

  template <bool kLayer, bool kSum>
  static FASTOPS_INLINE Scalar FirstSum(const Source& source, char* sum, int64_t n) {
    return SumOverRow(n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const typename E::Raw raw = RawSource<kSum>(extent, source, i, count);
      if (sum != nullptr) StoreElements<E, false>(extent, sum + i * E::kBytes, raw, count);
      const Pair<A> s = E::Widen(raw);
      if constexpr (kLayer) {
        return s;
      } else {
        return Mul(s, s);
      }
    });
  }

  template <bool kSum>
  static FASTOPS_INLINE Scalar SquaresOfDeviations(const Source& source, int64_t n, Scalar mean) {
    const Pair<A> means = SetPair<A>(mean);
    return SumOverRow(n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      Pair<A> d = Sub(E::Widen(RawSource<kSum>(extent, source, i, count)), means);
      if constexpr (!decltype(extent)::kWhole) {
        d = Select(FirstOfPair<A>(count), d, SetPair<A>(0));
      }
      return Mul(d, d);
    });
  }

  template <bool kLayer, bool kStream>
  static void ForwardRows(const NormForwardArrays& arrays, double eps, int64_t rows, int64_t n) {
    const int64_t row_bytes = n * E::kBytes;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = r * row_bytes;
      Source source = {static_cast<const char*>(arrays.x) + at, nullptr, arrays.input_bias};
      if (arrays.residual != nullptr) {
        source.residual = static_cast<const char*>(arrays.residual) + at;
      }
      char* sum = arrays.sum == nullptr ? nullptr : static_cast<char*>(arrays.sum) + at;
      Scalar first;
      if (source.is_sum()) {
        first = FirstSum<kLayer, true>(source, sum, n);
        if (sum != nullptr) source = {sum, nullptr, {}};
      } else {
        first = FirstSum<kLayer, false>(source, sum, n);
      }
      const double count = static_cast<double>(n);
      const Scalar mean = kLayer ? static_cast<Scalar>(static_cast<double>(first) / count) : 0;
      double squares = static_cast<double>(first);
      if constexpr (kLayer) {
        squares = static_cast<double>(source.is_sum() ? SquaresOfDeviations<true>(source, n, mean)
                                                      : SquaresOfDeviations<false>(source, n, mean));
      }
      const Scalar rstd = static_cast<Scalar>(1 / __builtin_sqrt(squares / count + eps));
      if (arrays.mean != nullptr) memcpy(At(arrays.mean, r), &mean, sizeof(mean));
      if (arrays.rstd != nullptr) memcpy(At(arrays.rstd, r), &rstd, sizeof(rstd));
      char* y = static_cast<char*>(arrays.y) + at;
      if (source.is_sum()) {
        Store<true, kStream>(source, arrays, y, n, mean, rstd);
      } else {
        Store<false, kStream>(source, arrays, y, n, mean, rstd);
      }
    }
    if constexpr (kStream) StreamFence();
  }

  static FASTOPS_INLINE char* At(void* p, int64_t i) {
    return static_cast<char*>(p) + i * static_cast<int64_t>(sizeof(Scalar));
  }
  static FASTOPS_INLINE Scalar Read(const void* p, int64_t i) {
    Scalar value;
    memcpy(&value, static_cast<const char*>(p) + i * static_cast<int64_t>(sizeof(Scalar)),
           sizeof(value));
    return value;
  }

  static void Forward(const NormForwardArrays& arrays, NormKind kind, double eps, int64_t rows,
                      int64_t n, bool stream) {
    if (kind == NormKind::kLayer) {
      stream ? ForwardRows<true, true>(arrays, eps, rows, n)
             : ForwardRows<true, false>(arrays, eps, rows, n);
    } else {
      stream ? ForwardRows<false, true>(arrays, eps, rows, n)
             : ForwardRows<false, false>(arrays, eps, rows, n);
    }
  }

  // ---- The gradient ----

  template <typename Extent>
  static FASTOPS_INLINE void AddTo(Extent extent, void* sums, int64_t i, int64_t count, bool first,
                                   Pair<A> v) {
    char* p = static_cast<char*>(sums) + i * Wide::kBytes;
    if (!first) v = Add(LoadElements<Wide>(extent, p, count), v);
    StoreElements<Wide, false>(extent, p, v, count);
  }

  // kCount rows from row `row` on.
  template <bool kLayer, bool kStream, int kCount>
  static FASTOPS_INLINE void Group(const NormBackwardArrays& arrays, int64_t row, int64_t n,
                                   bool first) {
    const int64_t row_bytes = n * E::kBytes;
    const char* dy = static_cast<const char*>(arrays.dy) + row * row_bytes;
    const char* s = static_cast<const char*>(arrays.s) + row * row_bytes;
    Pair<A> mean[kCount], rstd[kCount];
    Scalar g_mean[kCount], gx_mean[kCount];
    for (int k = 0; k < kCount; ++k) {
      if constexpr (kLayer) mean[k] = SetPair<A>(Read(arrays.mean, row + k));
      rstd[k] = SetPair<A>(Read(arrays.rstd, row + k));
    }
    // The sums of g and of g * (s - mean).
    Pair<A> g_total[kCount], gx_total[kCount];
    for (int k = 0; k < kCount; ++k) g_total[k] = gx_total[k] = SetPair<A>(0);
    for (int64_t begin = 0; begin < n;) {
      const int64_t end = n - begin > kSegmentBlocks * kBlock ? begin + kSegmentBlocks * kBlock : n;
      Pair<A> g_sum[kCount], gx_sum[kCount];
      for (int k = 0; k < kCount; ++k) g_sum[k] = gx_sum[k] = SetPair<A>(0);
      OverBlocks<kBlock>(begin, end, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
        Pair<A> scale = SetPair<A>(1);
        if (arrays.scale.data != nullptr) scale = Parameter(extent, arrays.scale, i, count);
#pragma GCC unroll 4
        for (int k = 0; k < kCount; ++k) {
          const int64_t at = k * row_bytes + i * E::kBytes;
          Pair<A> g = LoadElements<E>(extent, dy + at, count);
          if (arrays.scale.data != nullptr) g = Mul(g, scale);
          Pair<A> x = LoadElements<E>(extent, s + at, count);
          if constexpr (kLayer) {
            x = Sub(x, mean[k]);
            g_sum[k] = Add(g_sum[k], g);
          }
          gx_sum[k] = MulAdd(g, x, gx_sum[k]);
        }
      });
      for (int k = 0; k < kCount; ++k) {
        g_total[k] = Add(g_total[k], g_sum[k]);
        gx_total[k] = Add(gx_total[k], gx_sum[k]);
      }
      begin = end;
    }
    for (int k = 0; k < kCount; ++k) {
      g_mean[k] = SumOf(g_total[k]) / static_cast<Scalar>(n);
      gx_mean[k] = SumOf(gx_total[k]) * Read(arrays.rstd, row + k) / static_cast<Scalar>(n);
    }
    Gradient<kLayer, kStream, kCount>(arrays, row, n, first, g_mean, gx_mean);
  }

  template <bool kLayer, bool kStream, int kCount>
  static FASTOPS_INLINE void Gradient(const NormBackwardArrays& arrays, int64_t row, int64_t n,
                                      bool first, const Scalar* g_mean, const Scalar* gx_mean) {
    const int64_t row_bytes = n * E::kBytes;
    const char* dy = static_cast<const char*>(arrays.dy) + row * row_bytes;
    const char* s = static_cast<const char*>(arrays.s) + row * row_bytes;
    const char* dsum = arrays.dsum == nullptr
                           ? nullptr
                           : static_cast<const char*>(arrays.dsum) + row * row_bytes;
    char* dx = static_cast<char*>(arrays.dx) + row * row_bytes;
    Scalar mean[kCount], rstd[kCount];
    for (int k = 0; k < kCount; ++k) {
      mean[k] = kLayer ? Read(arrays.mean, row + k) : 0;
      rstd[k] = Read(arrays.rstd, row + k);
    }
    const auto block = [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      Pair<A> scale = SetPair<A>(1);
      if (arrays.scale.data != nullptr) scale = Parameter(extent, arrays.scale, i, count);
      Pair<A> dscale = SetPair<A>(0), dbias = SetPair<A>(0), dinput = SetPair<A>(0);
#pragma GCC unroll 4
      for (int k = 0; k < kCount; ++k) {
        const int64_t at = k * row_bytes + i * E::kBytes;
        const Pair<A> d = LoadElements<E>(extent, dy + at, count);
        Pair<A> x = LoadElements<E>(extent, s + at, count);
        if constexpr (kLayer) x = Sub(x, SetPair<A>(mean[k]));
        x = Mul(x, SetPair<A>(rstd[k]));
        Pair<A> g = d;
        if (arrays.scale.data != nullptr) g = Mul(g, scale);
        if constexpr (kLayer) g = Sub(g, SetPair<A>(g_mean[k]));
        g = Sub(g, Mul(x, SetPair<A>(gx_mean[k])));
        g = Mul(g, SetPair<A>(rstd[k]));
        if (dsum != nullptr) g = Add(g, LoadElements<E>(extent, dsum + at, count));
        dscale = MulAdd(d, x, dscale);
        dbias = Add(dbias, d);
        dinput = Add(dinput, g);
        StoreElements<E, kStream>(extent, dx + at, E::Narrow(g), count);
      }
      if (arrays.dscale != nullptr) AddTo(extent, arrays.dscale, i, count, first, dscale);
      if (arrays.dbias != nullptr) AddTo(extent, arrays.dbias, i, count, first, dbias);
      if (arrays.dinput_bias != nullptr) AddTo(extent, arrays.dinput_bias, i, count, first, dinput);
    };
    if constexpr (kStream) {
      OverAlignedBlocks<E>(dx, n, block);
    } else {
      OverBlocks<kBlock>(0, n, block);
    }
  }

  template <bool kLayer, bool kStream>
  static void BackwardRows(const NormBackwardArrays& arrays, int64_t rows, int64_t n) {
    int64_t r = 0;
    for (; r + kRows <= rows; r += kRows) {
      Group<kLayer, kStream, kRows>(arrays, r, n, r == 0);
    }
    for (; r < rows; ++r) Group<kLayer, kStream, 1>(arrays, r, n, r == 0);
    if constexpr (kStream) StreamFence();
  }

  static void Backward(const NormBackwardArrays& arrays, NormKind kind, int64_t rows, int64_t n,
                       bool stream) {
    // Rows that are not whole cache lines are not aligned alike.
    stream = stream && n * E::kBytes % 64 == 0;
    if (kind == NormKind::kLayer) {
      stream ? BackwardRows<true, true>(arrays, rows, n)
             : BackwardRows<true, false>(arrays, rows, n);
    } else {
      stream ? BackwardRows<false, true>(arrays, rows, n)
             : BackwardRows<false, false>(arrays, rows, n);
    }
  }
};

}  // namespace

extern const NormKernels norm_kernels;
const NormKernels norm_kernels = {
    {Norm<E32>::Forward, Norm<EBF16>::Forward, Norm<EF16>::Forward, Norm<E64>::Forward},
    {Norm<E32>::Backward, Norm<EBF16>::Backward, Norm<EF16>::Backward, Norm<E64>::Backward}};

}  // namespace jax_fastops::cpu::FASTOPS_ISA

// The inner loops of norm_cpu.cc.
//
// Forward: a row of one block stays in registers. A longer row is read from memory once, and stays
// in the caches for the next passes: the mean, the sum of the squared deviations from the mean
// (never a difference of two large sums), and y. If x, a residual and a bias are added, each pass
// adds them again. This takes less time than a buffer.
//
// Backward: processes a few rows at a time, so that the scale is loaded and the sums over rows are
// updated once for all of them. The scale and the sums go through the L1 cache, and for wide rows
// through the L2 cache. The first pass computes the two means that dx needs for each row, the
// second computes dx and adds to the sums.
//
// Dropout, in the second pass of the backward: the random bits of a piece of a row are drawn into a
// small mask, then used. One row is processed at a time: with two arrays to write, groups of 4 rows
// took up to 1.6 times as long.
#include "norm/norm_simd.h"

#include "core/cpu/block_math.h"
#include "core/cpu/philox_math.h"
#include "core/cpu/pointers.h"
#include "core/cpu/simd_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

// The blocks of a segment of a sum. If one element dominates a row, a running sum that contains it
// loses bits with every addition.
constexpr int64_t kSegmentBlocks = 8;

// The forward processes up to kMaxGroup rows together, but not more than kGroupElements elements,
// unless a single row has more.
constexpr int64_t kMaxGroup = 8, kGroupElements = 4096;

// The elements of a piece of a row, for dropout.
constexpr int64_t kDropPiece = 4096;
constexpr int64_t kDropBytes = kDropPiece / kSeedBlock;

// The number of rows that the backward processes together, limited by the registers.
constexpr int kRows = FASTOPS_ISA_LEVEL == 2 ? 4 : 2;

template <typename E>
struct Norm {
  using A = typename E::A;
  using Scalar = typename A::Scalar;
  static constexpr int kBlock = E::kBlock;

  template <typename Extent>
  static FASTOPS_INLINE Pair<A> Parameter(Extent extent, const NormParameter& parameter, int64_t i,
                                          int64_t count) {
    return LoadEither<E>(extent, parameter.data, parameter.wide, i, count);
  }

  // The input s of the norm: x, or a sum with x.
  struct Source {
    const char* x;
    const char* residual;
    NormParameter bias;

    bool is_sum() const { return residual != nullptr || bias.data != nullptr; }
  };

  // Loads a block of s. kSum: s is a sum, rounded to the element type as it would be when stored.
  template <bool kSum, typename Extent>
  static FASTOPS_INLINE Pair<A> Load(Extent extent, const Source& source, int64_t i,
                                     int64_t count) {
    const int64_t at = i * E::kBytes;
    Pair<A> s = LoadElements<E>(extent, source.x + at, count);
    if constexpr (kSum) {
      if (source.bias.data != nullptr) s = Add(s, Parameter(extent, source.bias, i, count));
      if (source.residual != nullptr) {
        s = Add(s, LoadElements<E>(extent, source.residual + at, count));
      }
      s = E::Widen(E::Narrow(s));
    }
    return s;
  }

  // Computes y from s; with kSum, it computes s again. It also prefetches the next rows, `ahead`
  // bytes later, because memory would otherwise be idle.
  template <bool kSum, bool kStream>
  static FASTOPS_INLINE void Store(const Source& source, const NormForwardArrays& arrays, char* y,
                                   int64_t n, int64_t ahead, Scalar mean, Scalar correction,
                                   Scalar rstd) {
    const Pair<A> means = SetPair<A>(mean), rstds = SetPair<A>(rstd);
    const Pair<A> corrections = SetPair<A>(correction);
    OverRow<E, kStream>(y, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      FetchAhead(source.x + i * E::kBytes, ahead);
      if (source.residual != nullptr) FetchAhead(source.residual + i * E::kBytes, ahead);
      Pair<A> v = Load<kSum>(extent, source, i, count);
      v = Mul(Sub(Sub(v, means), corrections), rstds);
      if (arrays.scale.data != nullptr) v = Mul(v, Parameter(extent, arrays.scale, i, count));
      if (arrays.bias.data != nullptr) v = Add(v, Parameter(extent, arrays.bias, i, count));
      StoreElements<E, kStream>(extent, y + i * E::kBytes, E::Narrow(v), count);
    });
  }

  template <bool kLayer, bool kSum>
  static FASTOPS_INLINE Scalar FirstSum(const Source& source, char* sum, int64_t n) {
    Pair<A> total[1];
    SumRow<kSegmentBlocks>(
        n, total, [&](auto extent, int64_t i, int64_t count, Pair<A>* first) FASTOPS_LAMBDA {
          const Pair<A> s = Load<kSum>(extent, source, i, count);
          if (sum != nullptr) {
            StoreElements<E, false>(extent, sum + i * E::kBytes, E::Narrow(s), count);
          }
          *first = Add(*first, kLayer ? s : Mul(s, s));
        });
    return SumOf(total[0]);
  }

  // The sums of the deviations from the mean, and of their squares. The first is the rounding error
  // of the mean (times n), which it corrects. This matters if the mean is large compared with the
  // deviations.
  struct Deviations {
    double sum, squares;
  };

  template <bool kSum>
  static FASTOPS_INLINE Deviations DeviationsOf(const Source& source, int64_t n, Scalar mean) {
    const Pair<A> means = SetPair<A>(mean);
    Pair<A> totals[2];
    SumRow<kSegmentBlocks>(
        n, totals, [&](auto extent, int64_t i, int64_t count, Pair<A>* sums) FASTOPS_LAMBDA {
          Pair<A> d = Sub(Load<kSum>(extent, source, i, count), means);
          if constexpr (!decltype(extent)::kWhole) {
            d = Select(FirstOfPair<A>(count), d, SetPair<A>(0));
          }
          sums[0] = Add(sums[0], d);
          sums[1] = Add(sums[1], Mul(d, d));
        });
    return {static_cast<double>(SumOf(totals[0])), static_cast<double>(SumOf(totals[1]))};
  }

  static FASTOPS_INLINE bool IsFinite(double x) { return x - x == 0; }

  static FASTOPS_INLINE Source SourceAt(const NormForwardArrays& arrays, int64_t row, int64_t n) {
    const int64_t at = row * n * E::kBytes;
    return {Offset(arrays.x, at), Offset(arrays.residual, at), arrays.input_bias};
  }

  // Subtracts the mean from a block. Lanes after the end of the row stay 0.
  template <typename Extent>
  static FASTOPS_INLINE Pair<A> Centred(Extent, Pair<A> v, Scalar mean, int64_t count) {
    v = Sub(v, SetPair<A>(mean));
    if constexpr (!Extent::kWhole) v = Select(FirstOfPair<A>(count), v, SetPair<A>(0));
    return v;
  }

  // Rows of one block never leave the registers.
  template <bool kLayer, typename Extent>
  static FASTOPS_INLINE void OneBlockRows(Extent extent, const NormForwardArrays& arrays,
                                          double eps, int64_t begin, int64_t end, int64_t n) {
    const double inverse = 1 / static_cast<double>(n);
    for (int64_t row = begin; row < end; ++row) {
      const Source source = SourceAt(arrays, row, n);
      Pair<A> v =
          source.is_sum() ? Load<true>(extent, source, 0, n) : Load<false>(extent, source, 0, n);
      const int64_t at = row * n * E::kBytes;
      if (arrays.sum != nullptr) {
        StoreElements<E, false>(extent, Offset(arrays.sum, at), E::Narrow(v), n);
      }
      if constexpr (kLayer) {
        Scalar mean = static_cast<Scalar>(static_cast<double>(SumOf(v)) * inverse);
        v = Centred(extent, v, mean, n);
        const double rest = static_cast<double>(SumOf(v)) * inverse;
        if (IsFinite(rest)) {
          v = Centred(extent, v, static_cast<Scalar>(rest), n);
          mean += static_cast<Scalar>(rest);
        }
        Put(arrays.mean, row, mean);
      }
      const double variance = static_cast<double>(SumOf(Mul(v, v))) * inverse;
      const Scalar rstd = static_cast<Scalar>(1 / __builtin_sqrt(variance + eps));
      Put(arrays.rstd, row, rstd);
      v = Mul(v, SetPair<A>(rstd));
      if (arrays.scale.data != nullptr) v = Mul(v, Parameter(extent, arrays.scale, 0, n));
      if (arrays.bias.data != nullptr) v = Add(v, Parameter(extent, arrays.bias, 0, n));
      StoreElements<E, false>(extent, Offset(arrays.y, at), E::Narrow(v), n);
    }
  }

  // Short rows are processed in groups, one step at a time for the whole group. A step ends with a
  // horizontal reduction over the lanes of a vector, which takes longer than the rest of a short
  // row. In a group, the reductions of different rows overlap.
  template <bool kLayer, bool kStream>
  static void ForwardRows(const NormForwardArrays& arrays, double eps, int64_t begin, int64_t end,
                          int64_t n) {
    if (n <= kBlock && n > 0) {
      return OverBlocks<kBlock>(0, n, [&](auto extent, int64_t, int64_t) FASTOPS_LAMBDA {
        OneBlockRows<kLayer>(extent, arrays, eps, begin, end, n);
      });
    }
    const int64_t group = Max(1, Min(kMaxGroup, kGroupElements / Max(1, n)));
    const double inverse = 1 / static_cast<double>(n);
    const int64_t ahead = group * n * E::kBytes;
    for (int64_t row = begin; row < end; row += group) {
      const int64_t count = Min(group, end - row);
      Scalar mean[kMaxGroup], correction[kMaxGroup] = {}, rstd[kMaxGroup];
      double squares[kMaxGroup] = {};
      for (int64_t k = 0; k < count; ++k) {
        const Source source = SourceAt(arrays, row + k, n);
        char* const sum = Offset(arrays.sum, (row + k) * n * E::kBytes);
        const Scalar first = source.is_sum() ? FirstSum<kLayer, true>(source, sum, n)
                                             : FirstSum<kLayer, false>(source, sum, n);
        mean[k] = kLayer ? static_cast<Scalar>(static_cast<double>(first) * inverse) : 0;
        squares[k] = static_cast<double>(first);
      }
      for (int64_t k = 0; k < count && kLayer; ++k) {
        const Source source = SourceAt(arrays, row + k, n);
        const Deviations deviations = source.is_sum() ? DeviationsOf<true>(source, n, mean[k])
                                                      : DeviationsOf<false>(source, n, mean[k]);
        squares[k] = deviations.squares;
        const double rest = deviations.sum * inverse;
        if (!IsFinite(rest)) continue;
        correction[k] = static_cast<Scalar>(rest);
        const double excess = deviations.sum * rest;
        if (IsFinite(excess)) squares[k] -= excess;
        if (squares[k] < 0) squares[k] = 0;  // may be negative by rounding
      }
      for (int64_t k = 0; k < kMaxGroup; k += Doubles::kLanes) {
        const Doubles::Vec variance =
            Doubles::Mul(Doubles::Load(squares + k), Doubles::Set(inverse));
        Doubles::Store(squares + k, Doubles::Rsqrt(Doubles::Add(variance, Doubles::Set(eps))));
      }
      for (int64_t k = 0; k < kMaxGroup; ++k) rstd[k] = static_cast<Scalar>(squares[k]);
      for (int64_t k = 0; k < count; ++k) {
        Put(arrays.mean, row + k, mean[k] + correction[k]);
        Put(arrays.rstd, row + k, rstd[k]);
      }
      for (int64_t k = 0; k < count; ++k) {
        const Source source = SourceAt(arrays, row + k, n);
        char* const y = Offset(arrays.y, (row + k) * n * E::kBytes);
        if (source.is_sum()) {
          Store<true, kStream>(source, arrays, y, n, ahead, mean[k], correction[k], rstd[k]);
        } else {
          Store<false, kStream>(source, arrays, y, n, ahead, mean[k], correction[k], rstd[k]);
        }
      }
    }
    if constexpr (kStream) StreamFence();
  }

  // A statistic of a row.
  static FASTOPS_INLINE Scalar Read(const void* p, int64_t row) {
    Scalar value;
    memcpy(&value, Offset(p, row * int64_t{sizeof(Scalar)}), sizeof(value));
    return value;
  }
  static FASTOPS_INLINE void Put(void* p, int64_t row, Scalar value) {
    if (p != nullptr) memcpy(Offset(p, row * int64_t{sizeof(Scalar)}), &value, sizeof(value));
  }

  static void Forward(const NormForwardArrays& arrays, NormKind kind, double eps, int64_t begin,
                      int64_t end, int64_t n, bool stream) {
    WithFlags(
        [&]<bool kLayer, bool kStream>() {
          ForwardRows<kLayer, kStream>(arrays, eps, begin, end, n);
        },
        kind == NormKind::kLayer, kStreams && stream);
  }

  // ---- The gradient ----

  // The cotangent of y: dy, or the sum of the cotangents from two users of y.
  struct Cotangent {
    const char* dy;
    const char* dy2;

    template <typename Extent>
    FASTOPS_INLINE Pair<A> operator()(Extent extent, int64_t at, int64_t count) const {
      const Pair<A> d = LoadElements<E>(extent, dy + at, count);
      if (dy2 == nullptr) return d;
      return E::Widen(E::Narrow(Add(d, LoadElements<E>(extent, dy2 + at, count))));
    }
  };

  // kCount rows, beginning with row `row`; one row if there is dropout.
  template <bool kLayer, bool kStream, int kCount>
  static FASTOPS_INLINE void Group(const NormBackwardArrays& arrays, int64_t row, int64_t n,
                                   bool first) {
    const int64_t row_bytes = n * E::kBytes;
    const Cotangent dy = {Offset(arrays.dy, row * row_bytes), Offset(arrays.dy2, row * row_bytes)};
    const char* const s = Offset(arrays.s, row * row_bytes);
    Pair<A> mean[kCount], rstd[kCount];
    Scalar g_mean[kCount], gx_mean[kCount];
    for (int k = 0; k < kCount; ++k) {
      if constexpr (kLayer) mean[k] = SetPair<A>(Read(arrays.mean, row + k));
      rstd[k] = SetPair<A>(Read(arrays.rstd, row + k));
    }
    // The sums of g * (s - mean), then those of g.
    Pair<A> totals[kLayer ? 2 * kCount : kCount];
    SumRow<kSegmentBlocks>(
        n, totals, [&](auto extent, int64_t i, int64_t count, Pair<A>* sums) FASTOPS_LAMBDA {
          Pair<A> scale = SetPair<A>(1);
          if (arrays.scale.data != nullptr) scale = Parameter(extent, arrays.scale, i, count);
#pragma GCC unroll 4
          for (int k = 0; k < kCount; ++k) {
            const int64_t at = k * row_bytes + i * E::kBytes;
            Pair<A> g = dy(extent, at, count);
            if (arrays.scale.data != nullptr) g = Mul(g, scale);
            Pair<A> x = LoadElements<E>(extent, s + at, count);
            if constexpr (kLayer) {
              x = Sub(x, mean[k]);
              sums[kCount + k] = Add(sums[kCount + k], g);
            }
            sums[k] = MulAdd(g, x, sums[k]);
          }
        });
    for (int k = 0; k < kCount; ++k) {
      if constexpr (kLayer) g_mean[k] = SumOf(totals[kCount + k]) / static_cast<Scalar>(n);
      gx_mean[k] = SumOf(totals[k]) * Read(arrays.rstd, row + k) / static_cast<Scalar>(n);
    }
    Gradient<kLayer, kStream, kCount>(arrays, row, n, first, g_mean, gx_mean);
  }

  template <bool kLayer, bool kStream, int kCount>
  static FASTOPS_INLINE void Gradient(const NormBackwardArrays& arrays, int64_t row, int64_t n,
                                      bool first, const Scalar* g_mean, const Scalar* gx_mean) {
    const int64_t row_bytes = n * E::kBytes;
    const Cotangent dy = {Offset(arrays.dy, row * row_bytes), Offset(arrays.dy2, row * row_bytes)};
    const char* const s = Offset(arrays.s, row * row_bytes);
    const char* const dsum = Offset(arrays.dsum, row * row_bytes);
    char* const dx = Offset(arrays.dx, row * row_bytes);
    [[maybe_unused]] const bool drops = arrays.dropout.drops();
    [[maybe_unused]] char* const dresidual = Offset(arrays.dresidual, row * row_bytes);
    [[maybe_unused]] const Pair<A> factor = SetPair<A>(static_cast<Scalar>(arrays.dropout.scale));
    [[maybe_unused]] uint8_t kept[kDropBytes];
    [[maybe_unused]] int64_t piece = 0;  // its first element
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
        const Pair<A> d = dy(extent, at, count);
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
        if constexpr (kCount == 1) {
          if (drops) {
            if (dresidual != nullptr) {
              StoreElements<E, kStream>(extent, dresidual + at, E::Narrow(g), count);
            }
            const uint32_t bits = BitsAt<E>(extent, kept, i - piece, count);
            g = Select(PairOfBits<A>(bits), Mul(g, factor), SetPair<A>(0));
          }
        }
        dinput = Add(dinput, g);
        StoreElements<E, kStream>(extent, dx + at, E::Narrow(g), count);
      }
      if (arrays.dscale != nullptr) AddTo(extent, arrays.dscale, i, count, dscale, first);
      if (arrays.dbias != nullptr) AddTo(extent, arrays.dbias, i, count, dbias, first);
      if (arrays.dinput_bias != nullptr) {
        AddTo(extent, arrays.dinput_bias, i, count, dinput, first);
      }
    };
    if constexpr (kCount == 1) {
      if (drops) {
        for (; piece < n; piece += kDropPiece) {
          const int64_t end = Min(n, piece + kDropPiece);
          KeptBits(arrays.dropout.seeds.At(row), static_cast<uint32_t>(piece / kSeedBlock),
                   (end - piece + kSeedBlock - 1) / kSeedBlock, arrays.dropout.largest, kept);
          OverBlocks<kBlock>(piece, end, block);
        }
        return;
      }
    }
    OverRow<E, kStream>(dx, n, block);
  }

  template <bool kLayer, bool kStream>
  static void BackwardRows(const NormBackwardArrays& arrays, int64_t begin, int64_t end,
                           int64_t n) {
    const int64_t grouped = !arrays.dropout.drops() ? end - (end - begin) % kRows : begin;
    int64_t r = begin;
    for (; r < grouped; r += kRows) Group<kLayer, kStream, kRows>(arrays, r, n, r == begin);
    for (; r < end; ++r) Group<kLayer, kStream, 1>(arrays, r, n, r == begin);
    if constexpr (kStream) StreamFence();
  }

  static void Backward(const NormBackwardArrays& arrays, NormKind kind, int64_t begin, int64_t end,
                       int64_t n, bool stream) {
    // Unless rows are whole cache lines, the rows of a group have different alignments.
    stream = stream && n * E::kBytes % 64 == 0;
    WithFlags(
        [&]<bool kLayer, bool kStream>() { BackwardRows<kLayer, kStream>(arrays, begin, end, n); },
        kind == NormKind::kLayer, kStreams && stream);
  }

  static constexpr NormKernels kKernels = {Forward, Backward};
};

}  // namespace

const NormKernels norm_kernels[] = FASTOPS_EACH_DTYPE(Norm, kKernels);

}  // namespace jax_fastops::cpu::FASTOPS_ISA

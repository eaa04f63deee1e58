// The inner loops of softmax.cc.
//
// A row of one block stays in registers. A longer row, up to a piece, goes through a buffer of
// accumulators in the L1 cache, in three passes:
// - it is scaled, and its maximum is computed;
// - its elements are replaced by their exponentials, whose sum is computed;
// - it is scaled and written to y.
//
// In the buffer, masked elements and the lanes after the end of the row are -inf: they do not
// affect the maximum, and their exponential is 0. So only the first pass reads the mask. This fails
// if the maximum is infinite or if there is a NaN. Then the sum is NaN, and the row is filled with
// NaN, except for the masked elements.
#include "softmax/softmax_simd.h"

#include "core/cpu/block_math.h"
#include "core/cpu/simd_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

// The blocks of a segment of a sum.
constexpr int64_t kSegmentBlocks = 64;

// The number of one-block rows that fit the registers.
constexpr int kBlockRows = FASTOPS_ISA_LEVEL == 2 ? 4 : 2;

// The maximum number of rows that are processed together.
constexpr int64_t kMaxGroup = 8;

constexpr double kInfinity = __builtin_inf();

template <typename E>
struct Softmax {
  using A = typename E::A;
  using Scalar = typename A::Scalar;
  static constexpr int kBlock = E::kBlock;

  static FASTOPS_INLINE int64_t RoundUp(int64_t n) { return (n + kBlock - 1) / kBlock * kBlock; }
  static FASTOPS_INLINE Scalar MinusInfinity() { return static_cast<Scalar>(-kInfinity); }

  // scale * x, with -inf for masked elements and after the end.
  template <bool kMask, typename Extent>
  static FASTOPS_INLINE Pair<A> Scaled(Extent extent, const char* x, const uint8_t* mask, int64_t i,
                                       int64_t count, Pair<A> scale) {
    Pair<A> z = Mul(LoadElements<E>(extent, x + i * E::kBytes, count), scale);
    if constexpr (kMask) {
      z = Select(LoadMask<A>(extent, mask + i, count), z, SetPair<A>(MinusInfinity()));
    } else if constexpr (!Extent::kWhole) {
      z = Select(FirstOfPair<A>(count), z, SetPair<A>(MinusInfinity()));
    }
    return z;
  }

  // Fills the buffer, in whole blocks, and returns the maximum.
  template <bool kMask>
  static FASTOPS_INLINE Scalar Fill(const char* x, const uint8_t* mask, int64_t n, Scalar scale,
                                    Scalar* buffer) {
    const Pair<A> scales = SetPair<A>(scale);
    Pair<A> most = SetPair<A>(MinusInfinity());
    OverBlocks<kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> z = Scaled<kMask>(extent, x, mask, i, count, scales);
      StorePair<A>(buffer + i, z);
      most = Max(z, most);
    });
    return LargestOf(most);
  }

  // The sum of exp(buffer - shift) over whole blocks.
  template <bool kStore>
  static FASTOPS_INLINE Scalar ExpSum(Scalar* buffer, int64_t n, Scalar shift) {
    const Pair<A> shifts = SetPair<A>(shift);
    Pair<A> total[1];
    SumRow<kSegmentBlocks>(n, total, [&](auto, int64_t i, int64_t, Pair<A>* sum) FASTOPS_LAMBDA {
      const Pair<A> e = Exp(Sub(LoadPair<A>(buffer + i), shifts));
      if constexpr (kStore) StorePair<A>(buffer + i, e);
      *sum = Add(*sum, e);
    });
    return SumOf(total[0]);
  }

  // Fills a row without a proper sum.
  static void FillBad(const uint8_t* mask, char* y, int64_t n, bool log) {
    const Pair<A> nan = SetPair<A>(static_cast<Scalar>(__builtin_nan("")));
    const Pair<A> left_out = SetPair<A>(log ? MinusInfinity() : 0);
    OverBlocks<kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> v =
          mask == nullptr ? nan : Select(LoadMask<A>(extent, mask + i, count), nan, left_out);
      StoreElements<E, false>(extent, y + i * E::kBytes, E::Narrow(v), count);
    });
  }

  static FASTOPS_INLINE bool Proper(double sum) { return sum < kInfinity; }

  template <bool kLog>
  static FASTOPS_INLINE Scalar Factor(Scalar sum) {
    if constexpr (kLog) return Log(sum);
    return 1 / sum;
  }

  // An element of y. With kExp or kLog, v is scale * x, otherwise its exponential.
  template <bool kLog, bool kExp>
  static FASTOPS_INLINE Pair<A> Result(Pair<A> v, Pair<A> shift, Pair<A> factor) {
    if constexpr (kLog) return Sub(Sub(v, shift), factor);
    if constexpr (kExp) v = Exp(Sub(v, shift));
    return Mul(v, factor);
  }

  // Short rows are processed in groups, one step at a time for the whole group. A step ends with a
  // horizontal reduction over the lanes of a vector, which takes longer than the rest of a short
  // row. In a group, the reductions of different rows overlap.
  static FASTOPS_INLINE int64_t GroupOf(int64_t n) {
    const int64_t fit = kSoftmaxPiece / RoundUp(n);
    return fit < kMaxGroup ? fit : kMaxGroup;
  }

  // kCount rows of one block, step by step. They never leave the registers.
  template <bool kMask, int kCount, typename Extent>
  static FASTOPS_INLINE void BlockRows(Extent extent, bool log, Pair<A> scales, const char* x,
                                       const uint8_t* mask, int64_t mask_stride, char* y,
                                       int64_t n) {
    const int64_t row_bytes = n * E::kBytes;
    Pair<A> v[kCount], e[kCount];
    Scalar sum[kCount];
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k) {
      const uint8_t* row_mask = kMask ? mask + k * mask_stride : nullptr;
      v[k] = Scaled<kMask>(extent, x + k * row_bytes, row_mask, 0, n, scales);
    }
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k) v[k] = Sub(v[k], SetPair<A>(LargestOf(v[k])));
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k) e[k] = Exp(v[k]);
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k) sum[k] = SumOf(e[k]);
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k) {
      char* to = y + k * row_bytes;
      if (Proper(sum[k])) {
        const Pair<A> factors = SetPair<A>(log ? Log(sum[k]) : 1 / sum[k]);
        const Pair<A> result = log ? Sub(v[k], factors) : Mul(e[k], factors);
        StoreElements<E, false>(extent, to, E::Narrow(result), n);
      } else {
        FillBad(kMask ? mask + k * mask_stride : nullptr, to, n, log);
      }
    }
  }

  // Rows of at most one block.
  template <bool kMask>
  static void OneBlockRows(const SoftmaxCall& call, const char* x, const uint8_t* mask,
                           int64_t mask_stride, char* y, int64_t rows, int64_t n) {
    const Pair<A> scales = SetPair<A>(static_cast<Scalar>(call.scale));
    OverBlocks<kBlock>(0, n, [&](auto extent, int64_t, int64_t) FASTOPS_LAMBDA {
      const auto some = [&]<int kCount>(int64_t row) FASTOPS_LAMBDA {
        const int64_t at = row * n * E::kBytes;
        BlockRows<kMask, kCount>(extent, call.log, scales, x + at,
                                 kMask ? mask + row * mask_stride : nullptr, mask_stride, y + at,
                                 n);
      };
      int64_t row = 0;
      for (; row + kBlockRows <= rows; row += kBlockRows) {
        some.template operator()<kBlockRows>(row);
      }
      for (; row < rows; ++row) some.template operator()<1>(row);
    });
  }

  template <bool kMask, bool kLog, bool kStream>
  static void SomeRows(const SoftmaxCall& call, const char* x, const uint8_t* mask,
                       int64_t mask_stride, char* y, int64_t rows, int64_t n) {
    // One block longer than a piece: if y is unaligned, the last pass reads whole blocks at any
    // offset.
    alignas(64) Scalar buffer[kSoftmaxPiece + kBlock];
    const Scalar scale = static_cast<Scalar>(call.scale);
    const int64_t stride = RoundUp(n), group = GroupOf(n), row_bytes = n * E::kBytes;
    for (int64_t row = 0; row < rows; row += group) {
      const int64_t count = rows - row < group ? rows - row : group;
      Scalar maximum[kMaxGroup], sum[kMaxGroup];
      for (int64_t k = 0; k < count; ++k) {
        maximum[k] = Fill<kMask>(x + k * row_bytes, mask + (kMask ? k * mask_stride : 0), n, scale,
                                 buffer + k * stride);
      }
      for (int64_t k = 0; k < count; ++k) {
        sum[k] = ExpSum<!kLog>(buffer + k * stride, stride, maximum[k]);
      }
      for (int64_t k = 0; k < count; ++k) {
        const Scalar* from = buffer + k * stride;
        char* to = y + k * row_bytes;
        if (!Proper(sum[k])) {
          FillBad(kMask ? mask + k * mask_stride : nullptr, to, n, kLog);
          continue;
        }
        const Pair<A> shifts = SetPair<A>(maximum[k]);
        const Pair<A> factors = SetPair<A>(Factor<kLog>(sum[k]));
        OverRow<E, kStream>(to, n, [&](auto extent, int64_t i, int64_t part) FASTOPS_LAMBDA {
          const Pair<A> v = Result<kLog, false>(LoadPair<A>(from + i), shifts, factors);
          StoreElements<E, kStream>(extent, to + i * E::kBytes, E::Narrow(v), part);
        });
      }
      x += count * row_bytes;
      y += count * row_bytes;
      if constexpr (kMask) mask += count * mask_stride;
    }
    if constexpr (kStream) StreamFence();
  }

  static void Rows(const SoftmaxCall& call, const char* x, const uint8_t* mask, int64_t mask_stride,
                   char* y, int64_t rows, int64_t n) {
    WithFlags(
        [&]<bool kMask, bool kLog, bool kStream>() {
          if (n <= kBlock) {
            OneBlockRows<kMask>(call, x, mask, mask_stride, y, rows, n);
          } else {
            SomeRows<kMask, kLog, kStream>(call, x, mask, mask_stride, y, rows, n);
          }
        },
        mask != nullptr, call.log, kStreams && call.stream);
  }

  // The statistics of a piece. If no element is above -inf, the sum is 0, or NaN if there is a NaN;
  // other pieces of the row may have greater elements.
  static void Stats(const SoftmaxCall& call, const char* x, const uint8_t* mask, int64_t n,
                    double* maximum, double* sum) {
    alignas(64) Scalar buffer[kSoftmaxPiece];
    const Scalar scale = static_cast<Scalar>(call.scale);
    const Scalar most = WithFlags(
        [&]<bool kMask>() { return Fill<kMask>(x, mask, n, scale, buffer); }, mask != nullptr);
    *maximum = most;
    *sum = ExpSum<false>(buffer, RoundUp(n), most == MinusInfinity() ? 0 : most);
  }

  template <bool kMask, bool kLog, bool kStream>
  static void FinishPiece(const SoftmaxCall& call, const char* x, const uint8_t* mask, char* y,
                          int64_t n, double maximum, double sum) {
    const Pair<A> scales = SetPair<A>(static_cast<Scalar>(call.scale));
    const Pair<A> shifts = SetPair<A>(static_cast<Scalar>(maximum));
    const Pair<A> factors = SetPair<A>(static_cast<Scalar>(kLog ? __builtin_log(sum) : 1 / sum));
    OverRow<E, kStream>(y, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> z = Scaled<kMask>(extent, x, mask, i, count, scales);
      const Pair<A> v = Result<kLog, true>(z, shifts, factors);
      StoreElements<E, kStream>(extent, y + i * E::kBytes, E::Narrow(v), count);
    });
    if constexpr (kStream) StreamFence();
  }

  static void Finish(const SoftmaxCall& call, const char* x, const uint8_t* mask, char* y,
                     int64_t n, double maximum, double sum) {
    if (!Proper(sum) || maximum == -kInfinity) return FillBad(mask, y, n, call.log);
    WithFlags(
        [&]<bool kMask, bool kLog, bool kStream>() {
          FinishPiece<kMask, kLog, kStream>(call, x, mask, y, n, maximum, sum);
        },
        mask != nullptr, call.log, kStreams && call.stream);
  }

  // ---- The gradient of a row ----

  // The contribution of a block to the sum. `kOut`: some elements are masked out, as told by the
  // mask, or by y = 0.
  template <bool kLog, bool kOut>
  static FASTOPS_INLINE Pair<A> Term(Pair<A> y, Pair<A> dy, PairMask<A> keep) {
    Pair<A> term = dy;
    if constexpr (!kLog) term = Mul(dy, y);
    if constexpr (kOut) term = Select(keep, term, SetPair<A>(0));
    return term;
  }

  template <bool kLog, bool kOut>
  static FASTOPS_INLINE Pair<A> Gradient(Pair<A> y, Pair<A> dy, PairMask<A> keep, Pair<A> scale,
                                         Pair<A> sum) {
    Pair<A> dx;
    if constexpr (kLog) {
      dx = Mul(scale, Sub(dy, Mul(Exp(y), sum)));
    } else {
      dx = Mul(scale, Mul(y, Sub(dy, sum)));
    }
    if constexpr (kOut) dx = Select(keep, dx, SetPair<A>(0));
    return dx;
  }

  template <bool kLog, bool kOut, typename Extent>
  static FASTOPS_INLINE PairMask<A> Keep(Extent extent, Pair<A> y, const uint8_t* mask, int64_t i,
                                         int64_t count) {
    if constexpr (kOut && kLog) {
      return LoadMask<A>(extent, mask + i, count);
    } else {
      return NotZero(y);
    }
  }

  template <bool kLog, bool kOut>
  static double SumOfRow(const char* y, const char* dy, const uint8_t* mask, int64_t n) {
    Pair<A> total[1];
    SumRow<kSegmentBlocks>(
        n, total, [&](auto extent, int64_t i, int64_t count, Pair<A>* sum) FASTOPS_LAMBDA {
          const Pair<A> d = LoadElements<E>(extent, dy + i * E::kBytes, count);
          Pair<A> v = d;
          if constexpr (!kLog) v = LoadElements<E>(extent, y + i * E::kBytes, count);
          *sum = Add(*sum, Term<kLog, kOut>(v, d, Keep<kLog, kOut>(extent, v, mask, i, count)));
        });
    return SumOf(total[0]);
  }

  static double BackwardSum(const SoftmaxCall& call, const char* y, const char* dy,
                            const uint8_t* mask, int64_t n) {
    return WithFlags([&]<bool kLog, bool kOut>() { return SumOfRow<kLog, kOut>(y, dy, mask, n); },
                     call.log, call.masked);
  }

  template <bool kLog, bool kOut, bool kStream>
  static void GradientOfRow(const SoftmaxCall& call, const char* y, const char* dy,
                            const uint8_t* mask, char* dx, int64_t n, double sum) {
    const Pair<A> scales = SetPair<A>(static_cast<Scalar>(call.scale));
    const Pair<A> sums = SetPair<A>(static_cast<Scalar>(sum));
    OverRow<E, kStream>(dx, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> v = LoadElements<E>(extent, y + i * E::kBytes, count);
      const Pair<A> d = LoadElements<E>(extent, dy + i * E::kBytes, count);
      const PairMask<A> keep = Keep<kLog, kOut>(extent, v, mask, i, count);
      StoreElements<E, kStream>(extent, dx + i * E::kBytes,
                                E::Narrow(Gradient<kLog, kOut>(v, d, keep, scales, sums)), count);
    });
  }

  template <bool kLog, bool kOut>
  static void OneBlockGradients(const SoftmaxCall& call, const char* y, const char* dy,
                                const uint8_t* mask, int64_t mask_stride, char* dx, int64_t rows,
                                int64_t n) {
    const Pair<A> scales = SetPair<A>(static_cast<Scalar>(call.scale));
    OverBlocks<kBlock>(0, n, [&](auto extent, int64_t, int64_t) FASTOPS_LAMBDA {
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = row * n * E::kBytes;
        const Pair<A> v = LoadElements<E>(extent, y + at, n);
        const Pair<A> d = LoadElements<E>(extent, dy + at, n);
        const PairMask<A> keep = Keep<kLog, kOut>(extent, v, mask, row * mask_stride, n);
        const Pair<A> sum = SetPair<A>(SumOf(Term<kLog, kOut>(v, d, keep)));
        const Pair<A> g = Gradient<kLog, kOut>(v, d, keep, scales, sum);
        StoreElements<E, false>(extent, dx + at, E::Narrow(g), n);
      }
    });
  }

  template <bool kLog, bool kOut, bool kStream>
  static void GradientsOfRows(const SoftmaxCall& call, const char* y, const char* dy,
                              const uint8_t* mask, int64_t mask_stride, char* dx, int64_t rows,
                              int64_t n) {
    const int64_t group = GroupOf(n), row_bytes = n * E::kBytes;
    for (int64_t row = 0; row < rows; row += group) {
      const int64_t count = rows - row < group ? rows - row : group;
      double sum[kMaxGroup];
      const auto mask_of = [&](int64_t k) FASTOPS_LAMBDA {
        return kLog && kOut ? mask + (row + k) * mask_stride : nullptr;
      };
      for (int64_t k = 0; k < count; ++k) {
        const int64_t at = (row + k) * row_bytes;
        sum[k] = SumOfRow<kLog, kOut>(y + at, dy + at, mask_of(k), n);
      }
      for (int64_t k = 0; k < count; ++k) {
        const int64_t at = (row + k) * row_bytes;
        GradientOfRow<kLog, kOut, kStream>(call, y + at, dy + at, mask_of(k), dx + at, n, sum[k]);
      }
    }
    if constexpr (kStream) StreamFence();
  }

  static void BackwardRows(const SoftmaxCall& call, const char* y, const char* dy,
                           const uint8_t* mask, int64_t mask_stride, char* dx, int64_t rows,
                           int64_t n) {
    WithFlags(
        [&]<bool kLog, bool kOut, bool kStream>() {
          if (n <= kBlock) {
            OneBlockGradients<kLog, kOut>(call, y, dy, mask, mask_stride, dx, rows, n);
          } else {
            GradientsOfRows<kLog, kOut, kStream>(call, y, dy, mask, mask_stride, dx, rows, n);
          }
        },
        call.log, call.masked, kStreams && call.stream);
  }

  static void BackwardFinish(const SoftmaxCall& call, const char* y, const char* dy,
                             const uint8_t* mask, char* dx, int64_t n, double sum) {
    WithFlags(
        [&]<bool kLog, bool kOut, bool kStream>() {
          GradientOfRow<kLog, kOut, kStream>(call, y, dy, mask, dx, n, sum);
          if constexpr (kStream) StreamFence();
        },
        call.log, call.masked, kStreams && call.stream);
  }

  // ---- Columns ----

  // Prefetches a later row. The rows of a tile are too far apart for the hardware to do it.
  // Prefetching after the last row does no harm.
  static constexpr int64_t kAhead = 8;

  // Calls block(extent, at, i, count) for the blocks of every row of a tile, where i is the first
  // column, and prefetches later rows of the given arrays.
  struct At {
    int64_t x;       // in bytes
    int64_t mask;    // in elements
    int64_t buffer;  // in elements
  };
  template <typename F>
  static FASTOPS_INLINE void OverTile(const SoftmaxTile& tile, const char* read,
                                      const char* read_too, const char* written, const F& block) {
    const int64_t stride = tile.stride * E::kBytes, bytes = tile.columns * E::kBytes;
    for (int64_t r = 0; r < tile.rows; ++r) {
      const int64_t first = r * stride, ahead = kAhead * stride;
      if (read != nullptr) FetchRowAhead(read + first, ahead, bytes);
      if (read_too != nullptr) FetchRowAhead(read_too + first, ahead, bytes);
      if (written != nullptr) FetchRowAhead<true>(written + first, ahead, bytes);
      OverBlocks<kBlock>(
          0, tile.columns, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
            block(extent,
                  At{first + i * E::kBytes, r * tile.mask_stride + i, r * tile.buffer_stride + i},
                  i, count);
          });
    }
  }

  static void TileMax(const SoftmaxCall& call, const SoftmaxTile& tile, const char* x,
                      void* buffer_data, void* maxima_data) {
    const Pair<A> scales = SetPair<A>(static_cast<Scalar>(call.scale));
    Scalar* buffer = static_cast<Scalar*>(buffer_data);
    Scalar* maxima = static_cast<Scalar*>(maxima_data);
    WithFlags(
        [&]<bool kMask>() {
          OverTile(tile, x, nullptr, nullptr,
                   [&](auto extent, At at, int64_t i, int64_t count) FASTOPS_LAMBDA {
                     const uint8_t* mask = kMask ? tile.mask + at.mask : nullptr;
                     const Pair<A> z = Scaled<kMask>(extent, x + at.x, mask, 0, count, scales);
                     StorePair<A>(buffer + at.buffer, z);
                     StorePair<A>(maxima + i, Max(z, LoadPair<A>(maxima + i)));
                   });
        },
        tile.mask != nullptr);
  }

  static void TileSum(const SoftmaxTile& tile, void* buffer_data, const void* shift_data,
                      void* sums_data, bool store) {
    Scalar* buffer = static_cast<Scalar*>(buffer_data);
    const Scalar* shift = static_cast<const Scalar*>(shift_data);
    Scalar* sums = static_cast<Scalar*>(sums_data);
    alignas(64) Scalar some[kSoftmaxMaxColumns];
    const int64_t width = RoundUp(tile.columns);
    for (int64_t r = 0; r < tile.rows;) {
      const int64_t end = tile.rows - r > kSegmentBlocks ? r + kSegmentBlocks : tile.rows;
      for (int64_t j = 0; j < width; j += kBlock) StorePair<A>(some + j, SetPair<A>(0));
      for (; r < end; ++r) {
        for (int64_t j = 0; j < width; j += kBlock) {
          const Pair<A> e = Exp(Sub(LoadPair<A>(buffer + j), LoadPair<A>(shift + j)));
          if (store) StorePair<A>(buffer + j, e);
          StorePair<A>(some + j, Add(LoadPair<A>(some + j), e));
        }
        buffer += tile.buffer_stride;
      }
      for (int64_t j = 0; j < width; j += kBlock) {
        StorePair<A>(sums + j, Add(LoadPair<A>(sums + j), LoadPair<A>(some + j)));
      }
    }
  }

  // Combines column j of all parts. A part without an element above -inf contributes nothing, but a
  // NaN is kept.
  static void TileCombine(const void* maxima_data, const void* sums_data, int64_t parts,
                          int64_t stride, int64_t columns, void* maximum_data, void* sum_data) {
    const char* maxima = static_cast<const char*>(maxima_data);
    const char* sums = static_cast<const char*>(sums_data);
    char* maximum = static_cast<char*>(maximum_data);
    char* sum = static_cast<char*>(sum_data);
    using S = SameElement<A>;
    const Pair<A> least = SetPair<A>(MinusInfinity());
    OverBlocks<kBlock>(0, columns, [&](auto extent, int64_t j, int64_t count) FASTOPS_LAMBDA {
      Pair<A> most = least;
      for (int64_t p = 0; p < parts; ++p) {
        most = Max(LoadElements<S>(extent, maxima + (p * stride + j) * S::kBytes, count), most);
      }
      Pair<A> total = SetPair<A>(0);
      for (int64_t p = 0; p < parts; ++p) {
        const int64_t at = (p * stride + j) * S::kBytes;
        const Pair<A> m = LoadElements<S>(extent, maxima + at, count);
        const Pair<A> factor = Select(Equal(m, least), SetPair<A>(0), Exp(Sub(m, most)));
        total = Add(total, Mul(LoadElements<S>(extent, sums + at, count), factor));
      }
      StoreElements<S, false>(extent, maximum + j * S::kBytes, most, count);
      StoreElements<S, false>(extent, sum + j * S::kBytes, total, count);
    });
  }

  static bool TileFactors(const SoftmaxCall& call, int64_t columns, const void* maxima_data,
                          void* sums_data) {
    const Scalar* maxima = static_cast<const Scalar*>(maxima_data);
    Scalar* sums = static_cast<Scalar*>(sums_data);
    const Scalar nan = static_cast<Scalar>(__builtin_nan(""));
    int64_t bad = 0;
    for (int64_t j = 0; j < columns; ++j) {
      bad += !(sums[j] < kInfinity && maxima[j] > MinusInfinity());
    }
    // Log returns a number for an improper sum too. So improper sums are marked with 0.
    for (int64_t j = 0; j < columns && bad > 0; ++j) {
      if (!(sums[j] < kInfinity && maxima[j] > MinusInfinity())) sums[j] = 0;
    }
    if (call.log) {
      using S = SameElement<A>;
      char* p = static_cast<char*>(sums_data);
      OverBlocks<kBlock>(0, columns, [&](auto extent, int64_t j, int64_t count) FASTOPS_LAMBDA {
        const Pair<A> sum = LoadElements<S>(extent, p + j * S::kBytes, count);
        const Pair<A> log = Select(NotZero(sum), Log(sum), SetPair<A>(nan));
        StoreElements<S, false>(extent, p + j * S::kBytes, log, count);
      });
    } else {
      for (int64_t j = 0; j < columns; ++j) sums[j] = sums[j] == 0 ? nan : 1 / sums[j];
    }
    return bad == 0;
  }

  // Reads from the buffer, or, with kRedo, from x.
  template <bool kRedo>
  static void TileFinish(const SoftmaxCall& call, const SoftmaxTile& tile, const void* from,
                         const void* shift_data, const void* factor_data, char* y) {
    const Scalar* shift = static_cast<const Scalar*>(shift_data);
    const Scalar* factor = static_cast<const Scalar*>(factor_data);
    const Scalar* buffer = static_cast<const Scalar*>(from);
    const char* x = static_cast<const char*>(from);
    const Pair<A> scales = SetPair<A>(static_cast<Scalar>(call.scale));
    const Pair<A> left_out = SetPair<A>(call.log ? MinusInfinity() : 0);
    WithFlags(
        [&]<bool kMask, bool kLog>() {
          OverTile(tile, kRedo ? x : nullptr, nullptr, y,
                   [&](auto extent, At at, int64_t i, int64_t count) FASTOPS_LAMBDA {
                     Pair<A> v;
                     if constexpr (kRedo) {
                       v = Mul(LoadElements<E>(extent, x + at.x, count), scales);
                     } else {
                       v = LoadPair<A>(buffer + at.buffer);
                     }
                     v = Result<kLog, kRedo>(v, LoadPair<A>(shift + i), LoadPair<A>(factor + i));
                     if constexpr (kMask) {
                       v = Select(LoadMask<A>(extent, tile.mask + at.mask, count), v, left_out);
                     }
                     StoreElements<E, false>(extent, y + at.x, E::Narrow(v), count);
                   });
        },
        tile.mask != nullptr, call.log);
  }

  static void TileBackwardSum(const SoftmaxCall& call, const SoftmaxTile& tile, const char* y,
                              const char* dy, void* sums_data) {
    Scalar* sums = static_cast<Scalar*>(sums_data);
    WithFlags(
        [&]<bool kLog, bool kOut>() {
          OverTile(tile, kLog ? nullptr : y, dy, nullptr,
                   [&](auto extent, At at, int64_t i, int64_t count) FASTOPS_LAMBDA {
                     const Pair<A> d = LoadElements<E>(extent, dy + at.x, count);
                     Pair<A> v = d;
                     if constexpr (!kLog) v = LoadElements<E>(extent, y + at.x, count);
                     const PairMask<A> keep =
                         Keep<kLog, kOut>(extent, v, tile.mask, at.mask, count);
                     const Pair<A> term = Term<kLog, kOut>(v, d, keep);
                     StorePair<A>(sums + i, Add(LoadPair<A>(sums + i), term));
                   });
        },
        call.log, call.masked);
  }

  static void TileBackwardFinish(const SoftmaxCall& call, const SoftmaxTile& tile, const char* y,
                                 const char* dy, const void* sums_data, char* dx) {
    const Scalar* sums = static_cast<const Scalar*>(sums_data);
    const Pair<A> scales = SetPair<A>(static_cast<Scalar>(call.scale));
    WithFlags(
        [&]<bool kLog, bool kOut>() {
          OverTile(
              tile, nullptr, nullptr, dx,
              [&](auto extent, At at, int64_t i, int64_t count) FASTOPS_LAMBDA {
                const Pair<A> v = LoadElements<E>(extent, y + at.x, count);
                const Pair<A> d = LoadElements<E>(extent, dy + at.x, count);
                const PairMask<A> keep = Keep<kLog, kOut>(extent, v, tile.mask, at.mask, count);
                const Pair<A> g = Gradient<kLog, kOut>(v, d, keep, scales, LoadPair<A>(sums + i));
                StoreElements<E, false>(extent, dx + at.x, E::Narrow(g), count);
              });
        },
        call.log, call.masked);
  }

  static constexpr SoftmaxKernels kKernels = {
      {Rows, BackwardRows, Stats, Finish, BackwardSum, BackwardFinish},
      {TileMax, TileSum, TileCombine, TileFactors, TileFinish<false>, TileFinish<true>,
       TileBackwardSum, TileBackwardFinish},
      kBlock};
};

}  // namespace

const SoftmaxKernels softmax_kernels[] = FASTOPS_EACH_DTYPE(Softmax, kKernels);

}  // namespace jax_fastops::cpu::FASTOPS_ISA

// The inner loops of softmax.cc.
//
// A short row goes through a buffer of accumulators that stays in the first-level cache: scaled
// with its maximum taken, then replaced by its exponentials with their sum taken, then scaled into
// y. Elements that the mask leaves out, and lanes behind the end of the row, are -inf in the
// buffer: they lose every maximum and their exponential is 0, so only the first pass looks at the
// mask. Where that fails - the maximum is infinite, or there is a NaN - the sum is NaN, all that
// the mask lets through is NaN, and the row is filled accordingly.
#include "cpu/softmax_simd.h"

#include "cpu/simd_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

// Sums are taken over so many blocks at a time, and then added up: their error grows with the
// number of these, which the number of lanes divides once more.
constexpr int64_t kSegmentBlocks = 64;

constexpr double kInfinity = __builtin_inf();

template <typename E>
struct Softmax {
  using A = typename E::A;
  using Scalar = typename A::Scalar;
  static constexpr int kBlock = E::kBlock;

  static FASTOPS_INLINE int64_t RoundUp(int64_t n) { return (n + kBlock - 1) / kBlock * kBlock; }
  static FASTOPS_INLINE Scalar MinusInfinity() { return static_cast<Scalar>(-kInfinity); }

  // scale * x, -inf for what is masked and behind the end.
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

  // The buffer, in whole blocks, and the maximum.
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
    Pair<A> total = SetPair<A>(0);
    for (int64_t i = 0; i < n;) {
      const int64_t end = n - i > kSegmentBlocks * kBlock ? i + kSegmentBlocks * kBlock : n;
      Pair<A> sum = SetPair<A>(0);
      for (; i < end; i += kBlock) {
        const Pair<A> e = Exp(Sub(LoadPair<A>(buffer + i), shifts));
        if constexpr (kStore) StorePair<A>(buffer + i, e);
        sum = Add(sum, e);
      }
      total = Add(total, sum);
    }
    return SumOf(total);
  }

  // What a row is that has no proper sum.
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

  template <bool kStream, typename F>
  static FASTOPS_INLINE void OverRow(const char* y, int64_t n, const F& f) {
    if constexpr (kStream) {
      OverAlignedBlocks<E>(y, n, f);
    } else {
      OverBlocks<kBlock>(0, n, f);
    }
  }

  template <bool kMask, bool kLog, bool kStream>
  static FASTOPS_INLINE void Row(const char* x, const uint8_t* mask, char* y, int64_t n,
                                 Scalar scale, Scalar* buffer) {
    const Scalar maximum = Fill<kMask>(x, mask, n, scale, buffer);
    const Scalar sum = ExpSum<!kLog>(buffer, RoundUp(n), maximum);
    if (!Proper(sum)) return FillBad(mask, y, n, kLog);
    const Pair<A> shifts = SetPair<A>(maximum);
    const Pair<A> factors = SetPair<A>(Factor<kLog>(sum));
    OverRow<kStream>(y, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      Pair<A> v = LoadPair<A>(buffer + i);
      if constexpr (kLog) {
        v = Sub(Sub(v, shifts), factors);
      } else {
        v = Mul(v, factors);
      }
      StoreElements<E, kStream>(extent, y + i * E::kBytes, E::Narrow(v), count);
    });
  }

  template <bool kLog>
  static FASTOPS_INLINE Scalar Factor(double sum) {
    return static_cast<Scalar>(kLog ? __builtin_log(sum) : 1 / sum);
  }

  template <bool kMask, bool kLog, bool kStream>
  static void SomeRows(const SoftmaxCall& call, const char* x, const uint8_t* mask,
                       int64_t mask_stride, char* y, int64_t rows, int64_t n) {
    // A head of y that is not aligned makes the last pass read whole blocks that begin anywhere.
    alignas(64) Scalar buffer[kSoftmaxPiece + kBlock];
    for (int64_t r = 0; r < rows; ++r) {
      Row<kMask, kLog, kStream>(x, mask, y, n, static_cast<Scalar>(call.scale), buffer);
      x += n * E::kBytes;
      y += n * E::kBytes;
      if constexpr (kMask) mask += mask_stride;
    }
    if constexpr (kStream) StreamFence();
  }

  template <bool kMask>
  static void MaybeMaskedRows(const SoftmaxCall& call, const char* x, const uint8_t* mask,
                              int64_t mask_stride, char* y, int64_t rows, int64_t n) {
    if (call.log && call.stream) {
      SomeRows<kMask, true, true>(call, x, mask, mask_stride, y, rows, n);
    } else if (call.log) {
      SomeRows<kMask, true, false>(call, x, mask, mask_stride, y, rows, n);
    } else if (call.stream) {
      SomeRows<kMask, false, true>(call, x, mask, mask_stride, y, rows, n);
    } else {
      SomeRows<kMask, false, false>(call, x, mask, mask_stride, y, rows, n);
    }
  }

  static void Rows(const SoftmaxCall& call, const void* x, const uint8_t* mask, int64_t mask_stride,
                   void* y, int64_t rows, int64_t n) {
    if (mask == nullptr) {
      MaybeMaskedRows<false>(call, static_cast<const char*>(x), mask, mask_stride,
                             static_cast<char*>(y), rows, n);
    } else {
      MaybeMaskedRows<true>(call, static_cast<const char*>(x), mask, mask_stride,
                            static_cast<char*>(y), rows, n);
    }
  }

  // A piece without anything above -inf may be one of a row that has more: its sum is 0, or NaN if
  // a NaN is in it.
  static void Stats(const SoftmaxCall& call, const void* x, const uint8_t* mask, int64_t n,
                    double* maximum, double* sum) {
    alignas(64) Scalar buffer[kSoftmaxPiece];
    const Scalar scale = static_cast<Scalar>(call.scale);
    const char* from = static_cast<const char*>(x);
    const Scalar most = mask == nullptr ? Fill<false>(from, mask, n, scale, buffer)
                                        : Fill<true>(from, mask, n, scale, buffer);
    *maximum = most;
    *sum = ExpSum<false>(buffer, RoundUp(n), most == MinusInfinity() ? 0 : most);
  }

  template <bool kMask, bool kLog, bool kStream>
  static void FinishPiece(const SoftmaxCall& call, const char* x, const uint8_t* mask, char* y,
                          int64_t n, double maximum, double sum) {
    const Pair<A> scales = SetPair<A>(static_cast<Scalar>(call.scale));
    const Pair<A> shifts = SetPair<A>(static_cast<Scalar>(maximum));
    const Pair<A> factors = SetPair<A>(Factor<kLog>(sum));
    OverRow<kStream>(y, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      Pair<A> v = Sub(Scaled<kMask>(extent, x, mask, i, count, scales), shifts);
      if constexpr (kLog) {
        v = Sub(v, factors);
      } else {
        v = Mul(Exp(v), factors);
      }
      StoreElements<E, kStream>(extent, y + i * E::kBytes, E::Narrow(v), count);
    });
    if constexpr (kStream) StreamFence();
  }

  template <bool kMask, bool kLog>
  static void MaybeStreamPiece(const SoftmaxCall& call, const char* x, const uint8_t* mask, char* y,
                               int64_t n, double maximum, double sum) {
    if (call.stream) {
      FinishPiece<kMask, kLog, true>(call, x, mask, y, n, maximum, sum);
    } else {
      FinishPiece<kMask, kLog, false>(call, x, mask, y, n, maximum, sum);
    }
  }

  static void Finish(const SoftmaxCall& call, const void* x_data, const uint8_t* mask, void* y_data,
                     int64_t n, double maximum, double sum) {
    const char* x = static_cast<const char*>(x_data);
    char* y = static_cast<char*>(y_data);
    if (!Proper(sum) || maximum == -kInfinity) return FillBad(mask, y, n, call.log);
    if (mask == nullptr) {
      call.log ? MaybeStreamPiece<false, true>(call, x, mask, y, n, maximum, sum)
               : MaybeStreamPiece<false, false>(call, x, mask, y, n, maximum, sum);
    } else {
      call.log ? MaybeStreamPiece<true, true>(call, x, mask, y, n, maximum, sum)
               : MaybeStreamPiece<true, false>(call, x, mask, y, n, maximum, sum);
    }
  }

  // ---- The gradient of a row ----

  // What a block adds to the sum. `kOut`: elements are left out, by the mask or as y = 0.
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
    Pair<A> total = SetPair<A>(0);
    for (int64_t begin = 0; begin < n;) {
      const int64_t end = n - begin > kSegmentBlocks * kBlock ? begin + kSegmentBlocks * kBlock : n;
      Pair<A> sum = SetPair<A>(0);
      OverBlocks<kBlock>(begin, end, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
        const Pair<A> d = LoadElements<E>(extent, dy + i * E::kBytes, count);
        Pair<A> v = d;
        if constexpr (!kLog) v = LoadElements<E>(extent, y + i * E::kBytes, count);
        sum = Add(sum, Term<kLog, kOut>(v, d, Keep<kLog, kOut>(extent, v, mask, i, count)));
      });
      total = Add(total, sum);
      begin = end;
    }
    return SumOf(total);
  }

  static double BackwardSum(const SoftmaxCall& call, const void* y_data, const void* dy_data,
                            const uint8_t* mask, int64_t n) {
    const char* y = static_cast<const char*>(y_data);
    const char* dy = static_cast<const char*>(dy_data);
    if (call.log) {
      return call.masked ? SumOfRow<true, true>(y, dy, mask, n)
                         : SumOfRow<true, false>(y, dy, mask, n);
    }
    return call.masked ? SumOfRow<false, true>(y, dy, mask, n)
                       : SumOfRow<false, false>(y, dy, mask, n);
  }

  template <bool kLog, bool kOut, bool kStream>
  static void GradientOfRow(const SoftmaxCall& call, const char* y, const char* dy,
                            const uint8_t* mask, char* dx, int64_t n, double sum) {
    const Pair<A> scales = SetPair<A>(static_cast<Scalar>(call.scale));
    const Pair<A> sums = SetPair<A>(static_cast<Scalar>(sum));
    OverRow<kStream>(dx, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> v = LoadElements<E>(extent, y + i * E::kBytes, count);
      const Pair<A> d = LoadElements<E>(extent, dy + i * E::kBytes, count);
      const PairMask<A> keep = Keep<kLog, kOut>(extent, v, mask, i, count);
      StoreElements<E, kStream>(extent, dx + i * E::kBytes,
                                E::Narrow(Gradient<kLog, kOut>(v, d, keep, scales, sums)), count);
    });
    if constexpr (kStream) StreamFence();
  }

  template <bool kLog, bool kOut>
  static void MaybeStreamGradient(const SoftmaxCall& call, const char* y, const char* dy,
                                  const uint8_t* mask, char* dx, int64_t n, double sum) {
    if (call.stream) {
      GradientOfRow<kLog, kOut, true>(call, y, dy, mask, dx, n, sum);
    } else {
      GradientOfRow<kLog, kOut, false>(call, y, dy, mask, dx, n, sum);
    }
  }

  static void BackwardFinish(const SoftmaxCall& call, const void* y_data, const void* dy_data,
                             const uint8_t* mask, void* dx_data, int64_t n, double sum) {
    const char* y = static_cast<const char*>(y_data);
    const char* dy = static_cast<const char*>(dy_data);
    char* dx = static_cast<char*>(dx_data);
    if (call.log) {
      call.masked ? MaybeStreamGradient<true, true>(call, y, dy, mask, dx, n, sum)
                  : MaybeStreamGradient<true, false>(call, y, dy, mask, dx, n, sum);
    } else {
      call.masked ? MaybeStreamGradient<false, true>(call, y, dy, mask, dx, n, sum)
                  : MaybeStreamGradient<false, false>(call, y, dy, mask, dx, n, sum);
    }
  }

  // ---- Columns ----

  // Rows of a tile are too far apart for the hardware to fetch them in advance. Asking for what is
  // beyond the last row does no harm.
  static constexpr int64_t kAhead = 8;
  static FASTOPS_INLINE void Fetch(const char* row, int64_t stride_bytes, int64_t columns) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(row) + static_cast<uintptr_t>(kAhead) *
                                                                static_cast<uintptr_t>(stride_bytes);
    const uintptr_t bytes = static_cast<uintptr_t>(columns * E::kBytes);
    for (uintptr_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch(reinterpret_cast<const void*>(at + i));
    }
  }

  template <bool kMask>
  static void FillTile(const SoftmaxCall& call, const SoftmaxTile& tile, const char* x,
                       Scalar* buffer, Scalar* maxima) {
    const Pair<A> scales = SetPair<A>(static_cast<Scalar>(call.scale));
    const uint8_t* mask = tile.mask;
    for (int64_t r = 0; r < tile.rows; ++r) {
      Fetch(x, tile.stride * E::kBytes, tile.columns);
      OverBlocks<kBlock>(
          0, tile.columns, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
            const Pair<A> z = Scaled<kMask>(extent, x, mask, i, count, scales);
            StorePair<A>(buffer + i, z);
            StorePair<A>(maxima + i, Max(z, LoadPair<A>(maxima + i)));
          });
      x += tile.stride * E::kBytes;
      buffer += tile.buffer_stride;
      if constexpr (kMask) mask += tile.mask_stride;
    }
  }

  static void TileMax(const SoftmaxCall& call, const SoftmaxTile& tile, const void* x, void* buffer,
                      void* maxima) {
    if (tile.mask == nullptr) {
      FillTile<false>(call, tile, static_cast<const char*>(x), static_cast<Scalar*>(buffer),
                      static_cast<Scalar*>(maxima));
    } else {
      FillTile<true>(call, tile, static_cast<const char*>(x), static_cast<Scalar*>(buffer),
                     static_cast<Scalar*>(maxima));
    }
  }

  template <bool kStore>
  static void SumTile(const SoftmaxTile& tile, Scalar* buffer, const Scalar* shift, Scalar* sums) {
    for (int64_t j = 0; j < tile.columns; j += kBlock) {
      const Pair<A> shifts = LoadPair<A>(shift + j);
      Pair<A> total = LoadPair<A>(sums + j);
      Scalar* p = buffer + j;
      for (int64_t r = 0; r < tile.rows;) {
        const int64_t end = tile.rows - r > kSegmentBlocks ? r + kSegmentBlocks : tile.rows;
        Pair<A> sum = SetPair<A>(0);
        for (; r < end; ++r) {
          const Pair<A> e = Exp(Sub(LoadPair<A>(p), shifts));
          if constexpr (kStore) StorePair<A>(p, e);
          sum = Add(sum, e);
          p += tile.buffer_stride;
        }
        total = Add(total, sum);
      }
      StorePair<A>(sums + j, total);
    }
  }

  static void TileSum(const SoftmaxTile& tile, void* buffer, const void* shift, void* sums,
                      bool store) {
    if (store) {
      SumTile<true>(tile, static_cast<Scalar*>(buffer), static_cast<const Scalar*>(shift),
                    static_cast<Scalar*>(sums));
    } else {
      SumTile<false>(tile, static_cast<Scalar*>(buffer), static_cast<const Scalar*>(shift),
                     static_cast<Scalar*>(sums));
    }
  }

  // From the buffer, or, with kRedo, from x.
  template <bool kMask, bool kLog, bool kRedo>
  static void FinishTile(const SoftmaxCall& call, const SoftmaxTile& tile, const char* from,
                         const Scalar* shift, const Scalar* factor, char* y) {
    const Pair<A> scales = SetPair<A>(static_cast<Scalar>(call.scale));
    const Pair<A> left_out = SetPair<A>(kLog ? MinusInfinity() : 0);
    const uint8_t* mask = tile.mask;
    for (int64_t r = 0; r < tile.rows; ++r) {
      if constexpr (kRedo) Fetch(from, tile.stride * E::kBytes, tile.columns);
      OverBlocks<kBlock>(
          0, tile.columns, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
            Pair<A> v;
            if constexpr (kRedo) {
              v = Mul(LoadElements<E>(extent, from + i * E::kBytes, count), scales);
            } else {
              v = LoadPair<A>(reinterpret_cast<const Scalar*>(from) + i);
            }
            if constexpr (kLog || kRedo) v = Sub(v, LoadPair<A>(shift + i));
            if constexpr (kLog) {
              v = Sub(v, LoadPair<A>(factor + i));
            } else {
              if constexpr (kRedo) v = Exp(v);
              v = Mul(v, LoadPair<A>(factor + i));
            }
            if constexpr (kMask) v = Select(LoadMask<A>(extent, mask + i, count), v, left_out);
            StoreElements<E, false>(extent, y + i * E::kBytes, E::Narrow(v), count);
          });
      from += kRedo ? tile.stride * E::kBytes
                    : tile.buffer_stride * static_cast<int64_t>(sizeof(Scalar));
      y += tile.stride * E::kBytes;
      if constexpr (kMask) mask += tile.mask_stride;
    }
  }

  template <bool kRedo>
  static FASTOPS_INLINE void AnyFinish(const SoftmaxCall& call, const SoftmaxTile& tile,
                                       const void* from_data, const void* shift_data,
                                       const void* factor_data, void* y_data) {
    const char* from = static_cast<const char*>(from_data);
    const Scalar* shift = static_cast<const Scalar*>(shift_data);
    const Scalar* factor = static_cast<const Scalar*>(factor_data);
    char* y = static_cast<char*>(y_data);
    if (tile.mask == nullptr) {
      call.log ? FinishTile<false, true, kRedo>(call, tile, from, shift, factor, y)
               : FinishTile<false, false, kRedo>(call, tile, from, shift, factor, y);
    } else {
      call.log ? FinishTile<true, true, kRedo>(call, tile, from, shift, factor, y)
               : FinishTile<true, false, kRedo>(call, tile, from, shift, factor, y);
    }
  }

  static void TileFinish(const SoftmaxCall& call, const SoftmaxTile& tile, const void* buffer,
                         const void* shift, const void* factor, void* y) {
    AnyFinish<false>(call, tile, buffer, shift, factor, y);
  }

  static void TileRedo(const SoftmaxCall& call, const SoftmaxTile& tile, const void* x,
                       const void* shift, const void* factor, void* y) {
    AnyFinish<true>(call, tile, x, shift, factor, y);
  }

  template <bool kLog, bool kOut>
  static void SumGradients(const SoftmaxTile& tile, const char* y, const char* dy, Scalar* sums) {
    const int64_t stride = tile.stride * E::kBytes;
    const uint8_t* mask = tile.mask;
    for (int64_t r = 0; r < tile.rows; ++r) {
      if constexpr (!kLog) Fetch(y, stride, tile.columns);
      Fetch(dy, stride, tile.columns);
      OverBlocks<kBlock>(
          0, tile.columns, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
            const Pair<A> d = LoadElements<E>(extent, dy + i * E::kBytes, count);
            Pair<A> v = d;
            if constexpr (!kLog) v = LoadElements<E>(extent, y + i * E::kBytes, count);
            const Pair<A> term =
                Term<kLog, kOut>(v, d, Keep<kLog, kOut>(extent, v, mask, i, count));
            StorePair<A>(sums + i, Add(LoadPair<A>(sums + i), term));
          });
      y += stride;
      dy += stride;
      if constexpr (kLog && kOut) mask += tile.mask_stride;
    }
  }

  static void TileBackwardSum(const SoftmaxCall& call, const SoftmaxTile& tile, const void* y_data,
                              const void* dy_data, void* sums_data) {
    const char* y = static_cast<const char*>(y_data);
    const char* dy = static_cast<const char*>(dy_data);
    Scalar* sums = static_cast<Scalar*>(sums_data);
    if (call.log) {
      call.masked ? SumGradients<true, true>(tile, y, dy, sums)
                  : SumGradients<true, false>(tile, y, dy, sums);
    } else {
      call.masked ? SumGradients<false, true>(tile, y, dy, sums)
                  : SumGradients<false, false>(tile, y, dy, sums);
    }
  }

  template <bool kLog, bool kOut>
  static void StoreGradients(const SoftmaxCall& call, const SoftmaxTile& tile, const char* y,
                             const char* dy, const Scalar* sums, char* dx) {
    const Pair<A> scales = SetPair<A>(static_cast<Scalar>(call.scale));
    const int64_t stride = tile.stride * E::kBytes;
    const uint8_t* mask = tile.mask;
    for (int64_t r = 0; r < tile.rows; ++r) {
      OverBlocks<kBlock>(
          0, tile.columns, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
            const Pair<A> v = LoadElements<E>(extent, y + i * E::kBytes, count);
            const Pair<A> d = LoadElements<E>(extent, dy + i * E::kBytes, count);
            const Pair<A> g =
                Gradient<kLog, kOut>(v, d, Keep<kLog, kOut>(extent, v, mask, i, count), scales,
                                     LoadPair<A>(sums + i));
            StoreElements<E, false>(extent, dx + i * E::kBytes, E::Narrow(g), count);
          });
      y += stride;
      dy += stride;
      dx += stride;
      if constexpr (kLog && kOut) mask += tile.mask_stride;
    }
  }

  static void TileBackwardFinish(const SoftmaxCall& call, const SoftmaxTile& tile,
                                 const void* y_data, const void* dy_data, const void* sums_data,
                                 void* dx_data) {
    const char* y = static_cast<const char*>(y_data);
    const char* dy = static_cast<const char*>(dy_data);
    const Scalar* sums = static_cast<const Scalar*>(sums_data);
    char* dx = static_cast<char*>(dx_data);
    if (call.log) {
      call.masked ? StoreGradients<true, true>(call, tile, y, dy, sums, dx)
                  : StoreGradients<true, false>(call, tile, y, dy, sums, dx);
    } else {
      call.masked ? StoreGradients<false, true>(call, tile, y, dy, sums, dx)
                  : StoreGradients<false, false>(call, tile, y, dy, sums, dx);
    }
  }
};

}  // namespace

#define FASTOPS_BY_DTYPE(name) \
  { Softmax<E32>::name, Softmax<EBF16>::name, Softmax<EF16>::name, Softmax<E64>::name }

extern const SoftmaxKernels softmax_kernels;
const SoftmaxKernels softmax_kernels = {FASTOPS_BY_DTYPE(Rows),
                                        FASTOPS_BY_DTYPE(Stats),
                                        FASTOPS_BY_DTYPE(Finish),
                                        FASTOPS_BY_DTYPE(BackwardSum),
                                        FASTOPS_BY_DTYPE(BackwardFinish),
                                        FASTOPS_BY_DTYPE(TileMax),
                                        FASTOPS_BY_DTYPE(TileSum),
                                        FASTOPS_BY_DTYPE(TileFinish),
                                        FASTOPS_BY_DTYPE(TileRedo),
                                        FASTOPS_BY_DTYPE(TileBackwardSum),
                                        FASTOPS_BY_DTYPE(TileBackwardFinish),
                                        FASTOPS_BY_DTYPE(kBlock)};

#undef FASTOPS_BY_DTYPE

}  // namespace jax_fastops::cpu::FASTOPS_ISA

// The inner loops of window_sum.cc. They never subtract, so there is no cancellation.
//
// Rows: along the last axis, the sums of a tile are computed from the sums of shorter windows. The
// sum of 4 * k + r contiguous elements is four sums of k elements, k apart, plus r elements. So a
// window takes as many passes over the tile, which stays in the cache, as its length has digits in
// base 4, and is summed as a tree.
//
// Columns: for other axes, the axis is divided into blocks of one window. A window consists of the
// end of one block and the beginning of the next. Given the sums from each element to the end of
// its block, and from the beginning of the next block to each element, each window sum is one
// addition. Both kinds of sums are computed in chunks. This limits the rounding error and the
// memory: only the chunks' totals of a block are kept, and the sums within a chunk are computed
// when they are needed.
#include "window_sum/window_sum_simd.h"

#include "core/cpu/simd_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

template <typename E>
struct Sums {
  using A = typename E::A;
  using Scalar = typename A::Scalar;
  static constexpr int64_t kBlock = E::kBlock;

  // Converts elements `first` to `first + count` of a line to the accumulator type, with 0 for
  // elements outside of the line.
  static FASTOPS_INLINE void Widen(const WindowSumLines& lines, int64_t first, int64_t count,
                                   Scalar* to) {
    const int64_t begin = Min(Max(-first, 0), count);
    const int64_t end = Max(Min(lines.n * lines.stride - first, count), begin);
    for (int64_t i = 0; i < begin; ++i) to[i] = 0;
    const char* x = lines.x + first * E::kBytes;
    OverBlocks<kBlock>(begin, end, [&](auto extent, int64_t i, int64_t n) FASTOPS_LAMBDA {
      StorePair<A>(to + i, LoadElements<E>(extent, x + i * E::kBytes, n));
    });
    for (int64_t i = end; i < count; ++i) to[i] = 0;
  }

  // Adds up four sums that are k apart, beginning at i, and the kRest elements that follow them.
  template <int kRest>
  static FASTOPS_INLINE Pair<A> Longer(const Scalar* sums, const Scalar* x, int64_t k,
                                       int64_t stride, int64_t i) {
    Pair<A> sum = Add(Add(LoadPair<A>(sums + i), LoadPair<A>(sums + i + k)),
                      Add(LoadPair<A>(sums + i + 2 * k), LoadPair<A>(sums + i + 3 * k)));
    const Scalar* behind = x + i + 4 * k;
    if constexpr (kRest == 1) sum = Add(sum, LoadPair<A>(behind));
    if constexpr (kRest >= 2) {
      Pair<A> rest = Add(LoadPair<A>(behind), LoadPair<A>(behind + stride));
      if constexpr (kRest == 3) rest = Add(rest, LoadPair<A>(behind + 2 * stride));
      sum = Add(sum, rest);
    }
    return sum;
  }

  // `to` may be `sums`: a position is written after all reads of it.
  template <int kRest>
  static void Pass(Scalar* to, const Scalar* sums, const Scalar* x, int64_t k, int64_t stride,
                   int64_t count) {
    for (int64_t i = 0; i < count; i += kBlock) {
      StorePair<A>(to + i, Longer<kRest>(sums, x, k, stride, i));
    }
  }

  template <int kRest>
  static void LastPass(char* y, const Scalar* sums, const Scalar* x, int64_t k, int64_t stride,
                       int64_t count) {
    OverBlocks<kBlock>(0, count, [&](auto extent, int64_t i, int64_t n) FASTOPS_LAMBDA {
      const Pair<A> sum = Longer<kRest>(sums, x, k, stride, i);
      StoreElements<E, false>(extent, y + i * E::kBytes, E::Narrow(sum), n);
    });
  }

  // All lines are adjacent, so they are processed as one line whose windows take every stride-th
  // element.
  static void Rows(const WindowSumLines& lines, void* buffer) {
    const int64_t stride = lines.stride, window = lines.window;
    const int64_t count = (lines.end - lines.begin) * stride;
    const int64_t all = count + (window - 1) * stride;
    Scalar* x = static_cast<Scalar*>(buffer);
    // In whole cache lines, so that `sums` is aligned like x.
    Scalar* const sums = x + ((all + stride) / kWindowSumSlack + 2) * kWindowSumSlack;
    Widen(lines, (lines.begin - lines.pad) * stride, all, x);
    for (int64_t i = all; i < all + kWindowSumSlack; ++i) x[i] = 0;
    char* y = lines.y + lines.begin * stride * E::kBytes;
    int64_t power = 1;
    while (power <= window / 4) power *= 4;
    int64_t k = window / power;  // the first digit of the window in base 4
    const Scalar* from = x;
    if (k > 1) {
      const bool three = k == 3, last = power == 1;
      const auto first = [&](int64_t i) FASTOPS_LAMBDA {
        const Pair<A> two = Add(LoadPair<A>(x + i), LoadPair<A>(x + i + stride));
        return three ? Add(two, LoadPair<A>(x + i + 2 * stride)) : two;
      };
      if (last) {
        OverBlocks<kBlock>(0, count, [&](auto extent, int64_t i, int64_t n) FASTOPS_LAMBDA {
          StoreElements<E, false>(extent, y + i * E::kBytes, E::Narrow(first(i)), n);
        });
        return;
      }
      const int64_t wanted = all - (k - 1) * stride;
      for (int64_t i = 0; i < wanted; i += kBlock) StorePair<A>(sums + i, first(i));
      from = sums;
    }
    while (power > 1) {
      power /= 4;
      const int64_t longer = window / power, rest = longer - 4 * k;
      if (power == 1) {
        auto* pass = rest == 0   ? LastPass<0>
                     : rest == 1 ? LastPass<1>
                     : rest == 2 ? LastPass<2>
                                 : LastPass<3>;
        pass(y, from, x, k * stride, stride, count);
      } else {
        auto* pass = rest == 0 ? Pass<0> : rest == 1 ? Pass<1> : rest == 2 ? Pass<2> : Pass<3>;
        pass(sums, from, x, k * stride, stride, all - (longer - 1) * stride);
        from = sums;
      }
      k = longer;
    }
  }

  // The sum of rows `low` to `high` of x, for `columns` elements beginning with `column`.
  template <typename Extent>
  static FASTOPS_INLINE Pair<A> SumOfRows(Extent extent, const WindowSumLines& lines, int64_t low,
                                          int64_t high, int64_t column, int64_t columns) {
    const int64_t row_bytes = lines.stride * E::kBytes;
    const char* x = lines.x + column * E::kBytes;
    Pair<A> sum = SetPair<A>(0);
    for (int64_t j = Max(low, 0); j < Min(high, lines.n); ++j) {
      sum = Add(sum, LoadElements<E>(extent, x + j * row_bytes, columns));
    }
    return sum;
  }

  // Sums of kWindow rows of x that all exist, over `count` contiguous elements.
  template <int kWindow>
  static void DirectRun(const char* x, char* y, int64_t row_bytes, int64_t count) {
    OverAlignedBlocks<E>(y, count, [&](auto extent, int64_t i, int64_t n) FASTOPS_LAMBDA {
      const char* from = x + i * E::kBytes;
      Pair<A> sum = LoadElements<E>(extent, from, n);
      for (int k = 1; k < kWindow; ++k) {
        sum = Add(sum, LoadElements<E>(extent, from + k * row_bytes, n));
      }
      StoreElements<E, false>(extent, y + i * E::kBytes, E::Narrow(sum), n);
    });
  }

  static void Direct(const WindowSumLines& lines) {
    const int64_t row_bytes = lines.stride * E::kBytes, window = lines.window;
    const int64_t low = Min(Max(lines.begin, lines.pad), lines.end);
    const int64_t high = Max(Min(lines.n + lines.pad - window + 1, lines.end), low);
    const auto ragged = [&](int64_t i) {
      const int64_t first = i - lines.pad;
      OverBlocks<kBlock>(0, lines.columns, [&](auto extent, int64_t c, int64_t n) FASTOPS_LAMBDA {
        const Pair<A> sum = SumOfRows(extent, lines, first, first + window, c, n);
        StoreElements<E, false>(extent, lines.y + i * row_bytes + c * E::kBytes, E::Narrow(sum), n);
      });
    };
    for (int64_t i = lines.begin; i < low; ++i) ragged(i);
    auto* run = window == 3 ? DirectRun<3> : window == 5 ? DirectRun<5> : DirectRun<7>;
    const char* x = lines.x + (low - lines.pad) * row_bytes;
    char* y = lines.y + low * row_bytes;
    if (lines.columns == lines.stride) {
      run(x, y, row_bytes, (high - low) * lines.stride);
    } else {
      for (int64_t i = 0; i < high - low; ++i) {
        run(x + i * row_bytes, y + i * row_bytes, row_bytes, lines.columns);
      }
    }
    for (int64_t i = high; i < lines.end; ++i) ragged(i);
  }

  static void Columns(const WindowSumLines& lines, void* buffer) {
    constexpr int64_t kChunk = kWindowSumRows;
    const int64_t window = lines.window, chunks = (window + kChunk - 1) / kChunk;
    const int64_t width = lines.columns + kWindowSumSlack, row_bytes = lines.stride * E::kBytes;
    Scalar* const ends = static_cast<Scalar*>(buffer);
    Scalar* const before = ends + kChunk * width;
    Scalar* const behind = before + width;
    for (int64_t block = lines.begin; block < lines.end; block += window) {
      const int64_t first = block - lines.pad;
      const int64_t sums = Min(window, lines.end - block);
      OverBlocks<kBlock>(0, lines.columns, [&](auto, int64_t c, int64_t) FASTOPS_LAMBDA {
        StorePair<A>(before + c, SetPair<A>(0));
        StorePair<A>(behind + (chunks - 1) * width + c, SetPair<A>(0));
      });
      for (int64_t k = chunks - 1; k > 0; --k) {
        const int64_t at = first + k * kChunk, end = first + Min((k + 1) * kChunk, window);
        const Scalar* from = behind + k * width;
        Scalar* to = behind + (k - 1) * width;
        OverBlocks<kBlock>(0, lines.columns, [&](auto extent, int64_t c, int64_t n) FASTOPS_LAMBDA {
          StorePair<A>(to + c, Add(LoadPair<A>(from + c), SumOfRows(extent, lines, at, end, c, n)));
        });
      }
      for (int64_t k = 0; k * kChunk < sums; ++k) {
        const int64_t at = k * kChunk, count = Min(kChunk, window - at);
        const int64_t wanted = Min(count, sums - at);
        const int64_t lead = first + at, trail = first + window + at;  // rows of x
        const Scalar* rest = behind + k * width;
        OverBlocks<kBlock>(0, lines.columns, [&](auto extent, int64_t c, int64_t n) FASTOPS_LAMBDA {
          const char* x = lines.x + c * E::kBytes;
          char* y = lines.y + (block + at) * row_bytes + c * E::kBytes;
          const Pair<A> more = LoadPair<A>(rest + c);
          Pair<A> end = SetPair<A>(0);
          for (int64_t i = count - 1; i >= 0; --i) {
            const int64_t j = lead + i;
            if (j >= 0 && j < lines.n) {
              end = Add(end, LoadElements<E>(extent, x + j * row_bytes, n));
            }
            StorePair<A>(ends + i * width + c, Add(more, end));
          }
          const Pair<A> earlier = LoadPair<A>(before + c);
          Pair<A> begin = SetPair<A>(0);
          for (int64_t i = 0; i < count; ++i) {
            if (i < wanted) {
              const Pair<A> sum = Add(LoadPair<A>(ends + i * width + c), Add(earlier, begin));
              StoreElements<E, false>(extent, y + i * row_bytes, E::Narrow(sum), n);
            }
            const int64_t j = trail + i;
            if (j >= 0 && j < lines.n) {
              // Prefetches rows of the next chunk, which are too far apart for the hardware to do
              // it.
              FetchBlock<E>(x + j * row_bytes, kChunk * row_bytes);
              begin = Add(begin, LoadElements<E>(extent, x + j * row_bytes, n));
            }
          }
          StorePair<A>(before + c, Add(earlier, begin));
        });
      }
    }
  }

  static constexpr WindowSumKernels kKernels = {Rows, Direct, Columns};
};

}  // namespace

const WindowSumKernels window_sum_kernels[] = FASTOPS_EACH_DTYPE(Sums, kKernels);

}  // namespace jax_fastops::cpu::FASTOPS_ISA

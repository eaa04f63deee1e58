// The arithmetic of the head ops: copies rows, and adds a bias that all rows share, or computes
// their sum over the rows. Each pass processes columns of a few registers' width down all rows, so
// the bias or the sums stay in registers.
#include "heads/heads_simd.h"

#include "core/cpu/simd_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

// Rows are too far apart for the hardware prefetcher, so the row that comes this many rows later is
// prefetched. A prefetch after the last row is harmless.
constexpr int64_t kAhead = 8;

template <typename E>
struct Heads {
  using A = typename E::A;
  static constexpr int64_t kBlock = E::kBlock;

  // Calls f.operator()<blocks>(extent, i, count) for columns that together are a row. It takes
  // `blocks` blocks beginning with column i, of `count` columns each.
  template <typename F>
  static FASTOPS_INLINE void OverColumns(int64_t n, const F& f) {
    int64_t i = 0;
    for (; i + 4 * kBlock <= n; i += 4 * kBlock) f.template operator()<4>(Whole(), i, kBlock);
    for (; i + 2 * kBlock <= n; i += 2 * kBlock) f.template operator()<2>(Whole(), i, kBlock);
    OverBlocks<kBlock>(i, n, [&](auto extent, int64_t at, int64_t count) FASTOPS_LAMBDA {
      f.template operator()<1>(extent, at, count);
    });
  }

  static void AddBias(const char* x, int64_t x_stride, const void* bias, bool wide, char* y,
                      int64_t y_stride, int64_t rows, int64_t n) {
    OverColumns(n, [&]<int kBlocks>(auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      Pair<A> b[kBlocks];
#pragma GCC unroll 4
      for (int k = 0; k < kBlocks; ++k) {
        b[k] = LoadEither<E>(extent, bias, wide, i + k * kBlock, count);
      }
      const char* from = x + i * E::kBytes;
      char* to = y + i * E::kBytes;
      for (int64_t r = 0; r < rows; ++r, from += x_stride, to += y_stride) {
        FetchRowAhead(from, kAhead * x_stride, kBlocks * kBlock * E::kBytes);
        FetchRowAhead<true>(to, kAhead * y_stride, kBlocks * kBlock * E::kBytes);
#pragma GCC unroll 4
        for (int k = 0; k < kBlocks; ++k) {
          const int64_t at = k * kBlock * E::kBytes;
          const Pair<A> v = Add(LoadElements<E>(extent, from + at, count), b[k]);
          StoreElements<E, false>(extent, to + at, E::Narrow(v), count);
        }
      }
    });
  }

  static void AddRows(const char* x, int64_t x_stride, char* y, int64_t y_stride, int64_t rows,
                      int64_t n, void* sums, bool first) {
    OverColumns(n, [&]<int kBlocks>(auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      Pair<A> total[kBlocks];
#pragma GCC unroll 4
      for (int k = 0; k < kBlocks; ++k) total[k] = SetPair<A>(0);
      for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int k = 0; k < kBlocks; ++k) {
          const int64_t at = (i + k * kBlock) * E::kBytes;
          const typename E::Raw v = LoadRaw<E>(extent, x + r * x_stride + at, count);
          StoreElements<E, false>(extent, y + r * y_stride + at, v, count);
          total[k] = Add(total[k], E::Widen(v));
        }
      }
#pragma GCC unroll 4
      for (int k = 0; k < kBlocks; ++k) {
        AddTo(extent, sums, i + k * kBlock, count, total[k], first);
      }
    });
  }

  static constexpr HeadsKernels kKernels = {AddBias, AddRows};
};

}  // namespace

const HeadsKernels heads_kernels[] = FASTOPS_EACH_DTYPE(Heads, kKernels);

}  // namespace jax_fastops::cpu::FASTOPS_ISA

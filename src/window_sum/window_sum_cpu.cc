// Windowed sums on the CPU: chooses a kernel for the shape, and divides the array into pieces for
// the threads. A piece is a strip of adjacent lines times a run of sums along the axis.
// window_sum_simd.cc has the kernels:
//
// - direct, for windows up to 7: adds up the rows of a window where they are;
// - rows, along the last axis, and for up to 32 adjacent lines and windows up to 2049: sums of a
//   tile in the caches, in a number of passes that is logarithmic in the window;
// - columns, for everything else: a constant number of additions per element, for any window.
#include "window_sum/window_sum.h"

#include <algorithm>
#include <cstring>

#include "core/cpu/buffer.h"
#include "core/cpu/dtype.h"
#include "core/integer.h"
#include "window_sum/window_sum_simd.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(Kernels, window_sum_kernels)

// The kernels for vectors that begin at any address. If the AVX2 kernels are built, these vectors
// have at most 32 bytes: an unaligned vector of 64 bytes always touches two cache lines.
const WindowSumKernels& UnalignedKernels(DType dtype) {
  if (FASTOPS_BUILT_avx2 && ActiveIsa() == Isa::kAvx512) {
    return avx2::window_sum_kernels[static_cast<int>(dtype)];
  }
  return Kernels(dtype);
}

constexpr int64_t kTile = 2048;             // sums per tile; a tile stays in the L1 cache
constexpr int64_t kPassesUpTo = 2049;       // the tile of a longer window does not fit the caches
constexpr int64_t kDirectUpTo = 7;          // rows of windows up to this are added up in place
constexpr int64_t kNarrow = 32;             // the most adjacent lines that are processed as one
constexpr int64_t kStripBytes = 1024;       // of accumulators: one row of a strip
constexpr int64_t kDirectBytes = 64 << 10;  // the rows of a window in a strip

// How an array is divided: into strips of columns, and along the axis into runs of sums.
struct Cut {
  int64_t width;
  int64_t length;
  int64_t buffer;  // accumulators
};

// Calls kernel(lines, buffer) for every piece.
template <typename Scalar, typename Kernel>
void OverPieces(const WindowSumShape& shape, const Cut& cut, int64_t itemsize, const char* x,
                char* y, Executor& executor, const Kernel& kernel) {
  const int64_t m = shape.m();
  const int64_t strips = CeilDiv(shape.inner, cut.width), runs = CeilDiv(m, cut.length);
  ParallelFor(
      executor, shape.outer * runs * strips, 1,
      static_cast<double>(2 * cut.length * cut.width * itemsize), [&](int64_t begin, int64_t end) {
        const Buffer<Scalar> buffer(cut.buffer);
        for (int64_t at = begin; at < end; ++at) {
          const int64_t column = at % strips * cut.width, above = at / strips;
          const int64_t outer = above / runs, first = above % runs * cut.length;
          const WindowSumLines lines = {x + (outer * shape.n * shape.inner + column) * itemsize,
                                        y + (outer * m * shape.inner + column) * itemsize,
                                        shape.n,
                                        shape.pad,
                                        shape.window(),
                                        first,
                                        std::min(m, first + cut.length),
                                        shape.inner,
                                        std::min(cut.width, shape.inner - column)};
          kernel(lines, buffer.begin());
        }
      });
}

// The length of a run, if all runs have about equal lengths of up to `most` sums: a multiple of 64,
// so that runs begin at whole cache lines.
int64_t EqualRuns(int64_t m, int64_t most) {
  return CeilDiv(CeilDiv(m, CeilDiv(m, most)), 64) * 64;
}

template <typename Scalar>
void OverLines(const WindowSumShape& shape, DType dtype, int64_t itemsize, const char* x, char* y,
               Executor& executor) {
  const int64_t m = shape.m(), window = shape.window(), inner = shape.inner;
  const bool aligned = inner * itemsize % 64 == 0;
  const WindowSumKernels& kernels = aligned ? Kernels(dtype) : UnalignedKernels(dtype);
  Cut cut = {inner, m, 0};
  if (window <= kDirectUpTo) {
    cut.width = std::min(inner, kDirectBytes / (window * itemsize));
    cut.length = EqualRuns(m, std::max<int64_t>(64, 8 * kTile / cut.width));
    OverPieces<Scalar>(shape, cut, itemsize, x, y, executor,
                       [&](const WindowSumLines& lines, Scalar*) { kernels.direct(lines); });
    return;
  }
  // A run reads a window of elements before its first sum. Runs are long enough to make that cheap.
  if (inner == 1 || (inner <= kNarrow && window <= kPassesUpTo)) {
    cut.length = EqualRuns(m, std::max(kTile / inner, 2 * window));
    cut.buffer = 2 * ((cut.length + window) * inner + 2 * kWindowSumSlack);
    OverPieces<Scalar>(
        shape, cut, itemsize, x, y, executor,
        [&](const WindowSumLines& lines, Scalar* buffer) { kernels.rows(lines, buffer); });
    return;
  }
  cut.width = std::min<int64_t>(inner, kStripBytes / static_cast<int64_t>(sizeof(Scalar)));
  const int64_t strips = CeilDiv(inner, cut.width);
  const int64_t wanted = CeilDiv(int64_t{4} * executor.threads(), shape.outer * strips);
  const int64_t shortest = std::max<int64_t>(64, 4 * window);
  cut.length = CeilDiv(m, std::max<int64_t>(1, std::min(wanted, m / shortest)));
  cut.buffer =
      (kWindowSumRows + CeilDiv(window, kWindowSumRows) + 2) * (cut.width + kWindowSumSlack);
  OverPieces<Scalar>(
      shape, cut, itemsize, x, y, executor,
      [&](const WindowSumLines& lines, Scalar* buffer) { kernels.columns(lines, buffer); });
}

}  // namespace

void WindowSum(const WindowSumShape& shape, DType dtype, const void* x, void* y,
               void* /*workspace*/, Executor& executor) {
  if (shape.outer * shape.inner == 0 || shape.m() <= 0) return;
  const int64_t itemsize = ItemSize(dtype);
  const char* from = static_cast<const char*>(x);
  char* to = static_cast<char*>(y);
  if (shape.radius == 0) {
    const int64_t bytes = shape.outer * shape.n * shape.inner * itemsize;
    return ParallelFor(executor, bytes, 4096, 2.0, [&](int64_t begin, int64_t end) {
      std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
    });
  }
  WithAccumulator(dtype, [&]<typename Scalar>() {
    OverLines<Scalar>(shape, dtype, itemsize, from, to, executor);
  });
}

}  // namespace jax_fastops::cpu

// Layer norm and RMS norm on the CPU: divides rows between threads.
//
// Rows are independent, and threads take runs of rows. If gradients of parameters are requested,
// threads take whole partial sums instead: one thread computes a partial sum, in the same pass as
// dx, over a set of rows that does not depend on the number of threads. Nothing is added across
// threads.
//
// With dropout, the sum of a few rows is computed first. It is still in the L1 cache when these
// rows are normalized.
#include "norm/norm.h"

#include <algorithm>
#include <cstring>

#include "core/cpu/dtype.h"
#include "core/cpu/pointers.h"
#include "core/cpu/stream.h"
#include "core/philox.h"
#include "dropout/dropout.h"
#include "norm/norm_simd.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(Kernels, norm_kernels)

// With dropout: the elements of the rows whose sums are computed before these rows are normalized.
constexpr int64_t kDropElements = 4096;

}  // namespace

void NormForward(const NormShape& shape, NormKind kind, DType dtype, double eps,
                 const NormForwardArrays& arrays, Executor& executor) {
  const int64_t rows = shape.all_rows(), n = shape.n, row_bytes = n * ItemSize(dtype);
  auto* const kernel = Kernels(dtype).forward;
  const bool drops = arrays.dropout.drops();
  // Without an array for the sum, y holds it before it holds the result.
  const bool stream = ShouldStream(rows * row_bytes) && !(drops && arrays.sum == nullptr);
  void* const s = arrays.sum != nullptr ? arrays.sum : arrays.y;
  NormForwardArrays of_kernel = arrays;
  if (drops) {
    of_kernel.x = s;
    of_kernel.residual = of_kernel.sum = nullptr;
    of_kernel.input_bias = {};
  }
  const int64_t some = drops ? std::max<int64_t>(1, kDropElements / std::max<int64_t>(1, n)) : rows;
  const int moved = 2 + Count(arrays.residual, arrays.sum);
  ParallelFor(executor, rows, 1,
              static_cast<double>(moved * row_bytes + 2 * AccumulatorSize(dtype)),
              [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; row += some) {
                  const int64_t count = std::min(some, end - row), at = row * row_bytes;
                  if (drops) {
                    RowDropout dropout = arrays.dropout;
                    dropout.seeds = dropout.seeds.From(row);
                    const NormParameter& bias = arrays.input_bias;
                    InlineExecutor here;
                    Dropout(dtype,
                            {Offset(arrays.x, at), bias.data, bias.wide,
                             Offset(arrays.residual, at), Offset(s, at)},
                            count, n, dropout, here);
                  }
                  kernel(of_kernel, kind, eps, row, row + count, n, stream);
                }
              });
}

void NormBackward(const NormShape& shape, NormKind kind, DType dtype,
                  const NormBackwardArrays& arrays, Executor& executor) {
  const int64_t rows = shape.all_rows(), n = shape.n, row_bytes = n * ItemSize(dtype);
  auto* const kernel = Kernels(dtype).backward;
  const bool stream =
      ShouldStream(rows * row_bytes) &&
      (!arrays.dropout.drops() || (IsWholeLines(arrays.dx) && IsWholeLines(arrays.dresidual)));
  const int64_t moved = 3 + Count(arrays.dsum, arrays.dy2, arrays.dresidual);
  const double bytes_per_row = static_cast<double>(moved * row_bytes + 2 * AccumulatorSize(dtype));
  const int wanted = Count(arrays.dscale, arrays.dbias, arrays.dinput_bias);
  if (wanted == 0) {
    ParallelFor(executor, rows, 1, bytes_per_row,
                [&](int64_t begin, int64_t end) { kernel(arrays, kind, begin, end, n, stream); });
    return;
  }
  const int64_t sums_bytes = n * AccumulatorSize(dtype), partials = shape.batch * shape.sums;
  if (partials <= 0 || n == 0) return;
  const double bytes_per_partial =
      bytes_per_row * static_cast<double>(rows) / static_cast<double>(partials) +
      static_cast<double>(wanted * sums_bytes);
  ParallelFor(executor, partials, 1, bytes_per_partial, [&](int64_t first, int64_t last) {
    for (int64_t partial = first; partial < last; ++partial) {
      const int64_t group = partial / shape.sums * shape.rows, p = partial % shape.sums;
      // p * rows / sums, without the product, which might overflow.
      const int64_t quotient = shape.rows / shape.sums, remainder = shape.rows % shape.sums;
      const int64_t begin = p * quotient + p * remainder / shape.sums;
      const int64_t end = (p + 1) * quotient + (p + 1) * remainder / shape.sums;
      NormBackwardArrays from = arrays;
      for (void** sums : {&from.dscale, &from.dbias, &from.dinput_bias}) {
        *sums = Offset(*sums, partial * sums_bytes);
        if (begin == end && *sums != nullptr)
          std::memset(*sums, 0, static_cast<size_t>(sums_bytes));
      }
      kernel(from, kind, group + begin, group + end, n, stream);
    }
  });
}

}  // namespace jax_fastops::cpu

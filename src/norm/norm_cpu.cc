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

int64_t AccumulatorSize(DType dtype) { return dtype == DType::kF64 ? 8 : 4; }

// The arrays from a row on.

NormForwardArrays FromRow(const NormForwardArrays& arrays, int64_t row, int64_t row_bytes,
                          int64_t accumulator) {
  NormForwardArrays from = arrays;
  for (const void** p : {&from.x, &from.residual}) *p = Offset(*p, row * row_bytes);
  for (void** p : {&from.y, &from.sum}) *p = Offset(*p, row * row_bytes);
  for (void** p : {&from.mean, &from.rstd}) *p = Offset(*p, row * accumulator);
  from.dropout.seeds = arrays.dropout.seeds.From(row);
  return from;
}

NormBackwardArrays FromRow(const NormBackwardArrays& arrays, int64_t row, int64_t row_bytes,
                           int64_t accumulator) {
  NormBackwardArrays from = arrays;
  for (const void** p : {&from.dy, &from.s, &from.dsum, &from.dy2})
    *p = Offset(*p, row * row_bytes);
  for (const void** p : {&from.mean, &from.rstd}) *p = Offset(*p, row * accumulator);
  for (void** p : {&from.dx, &from.dresidual}) *p = Offset(*p, row * row_bytes);
  from.dropout.seeds = arrays.dropout.seeds.From(row);
  return from;
}

}  // namespace

void NormForward(const NormShape& shape, NormKind kind, DType dtype, double eps,
                 const NormForwardArrays& arrays, Executor& executor) {
  const int64_t rows = shape.all_rows();
  const int64_t row_bytes = shape.n * ItemSize(dtype);
  const int64_t accumulator = AccumulatorSize(dtype);
  auto* kernel = Kernels(dtype).forward;
  const bool drops = arrays.dropout.drops();
  // Without an array for the sum, y holds it before it holds the result.
  const bool stream = ShouldStream(rows * row_bytes) && !(drops && arrays.sum == nullptr);
  const int moved = 2 + Count(arrays.residual, arrays.sum);
  ParallelFor(executor, rows, 1, static_cast<double>(moved * row_bytes + 2 * accumulator),
              [&](int64_t begin, int64_t end) {
                const int64_t some =
                    drops ? std::max<int64_t>(1, kDropElements / std::max<int64_t>(1, shape.n))
                          : end - begin;
                for (int64_t row = begin; row < end; row += some) {
                  const int64_t count = std::min(some, end - row);
                  NormForwardArrays from = FromRow(arrays, row, row_bytes, accumulator);
                  if (drops) {
                    void* const s = from.sum != nullptr ? from.sum : from.y;
                    const NormParameter& bias = from.input_bias;
                    InlineExecutor here;
                    Dropout(dtype, {from.x, bias.data, bias.wide, from.residual, s}, count, shape.n,
                            from.dropout, here);
                    from.x = s;
                    from.residual = from.sum = nullptr;
                    from.input_bias = {};
                  }
                  kernel(from, kind, eps, count, shape.n, stream);
                }
              });
}

void NormBackward(const NormShape& shape, NormKind kind, DType dtype,
                  const NormBackwardArrays& arrays, Executor& executor) {
  const int64_t rows = shape.all_rows();
  const int64_t row_bytes = shape.n * ItemSize(dtype);
  const int64_t accumulator = AccumulatorSize(dtype);
  auto* kernel = Kernels(dtype).backward;
  const bool drops = arrays.dropout.drops();
  const bool stream = ShouldStream(rows * row_bytes) &&
                      (!drops || (IsWholeLines(arrays.dx) && IsWholeLines(arrays.dresidual)));
  const int64_t moved = 3 + Count(arrays.dsum, arrays.dy2, arrays.dresidual);
  const double bytes_per_row = static_cast<double>(moved * row_bytes + 2 * accumulator);
  const int wanted = Count(arrays.dscale, arrays.dbias, arrays.dinput_bias);
  if (wanted == 0) {
    ParallelFor(executor, rows, 1, bytes_per_row, [&](int64_t begin, int64_t end) {
      kernel(FromRow(arrays, begin, row_bytes, accumulator), kind, end - begin, shape.n, stream);
    });
    return;
  }
  const int64_t sums_bytes = shape.n * accumulator;
  const int64_t partials = shape.batch * shape.sums;
  if (partials <= 0 || shape.n == 0) return;
  const double bytes_per_partial =
      bytes_per_row * static_cast<double>(rows) / static_cast<double>(partials) +
      static_cast<double>(wanted * sums_bytes);
  ParallelFor(executor, partials, 1, bytes_per_partial, [&](int64_t first, int64_t last) {
    for (int64_t partial = first; partial < last; ++partial) {
      const int64_t group = partial / shape.sums, p = partial % shape.sums;
      // p * rows / sums, without the product, which might overflow.
      const int64_t quotient = shape.rows / shape.sums, remainder = shape.rows % shape.sums;
      const int64_t begin = p * quotient + p * remainder / shape.sums;
      const int64_t end = (p + 1) * quotient + (p + 1) * remainder / shape.sums;
      NormBackwardArrays from = FromRow(arrays, group * shape.rows + begin, row_bytes, accumulator);
      from.dscale = Offset(arrays.dscale, partial * sums_bytes);
      from.dbias = Offset(arrays.dbias, partial * sums_bytes);
      from.dinput_bias = Offset(arrays.dinput_bias, partial * sums_bytes);
      if (begin == end) {
        void* const all[] = {from.dscale, from.dbias, from.dinput_bias};
        for (void* sums : all) {
          if (sums != nullptr) std::memset(sums, 0, static_cast<size_t>(sums_bytes));
        }
        continue;
      }
      kernel(from, kind, end - begin, shape.n, stream);
    }
  });
}

}  // namespace jax_fastops::cpu

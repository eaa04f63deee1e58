#include <algorithm>

#include "core/cpu/dtype.h"
#include "core/cpu/parallel.h"
#include "core/cpu/pointers.h"
#include "core/integer.h"
#include "dropout/dropout.h"
#include "dropout/dropout_simd.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(KernelOf, dropout_kernels)

}  // namespace

void Dropout(DType dtype, const DropoutArrays& arrays, int64_t rows, int64_t columns,
             const RowDropout& dropout, Executor& executor) {
  if (rows == 0 || columns == 0) return;
  const int64_t size = ItemSize(dtype), pieces = CeilDiv(columns, kDropoutPiece);
  const int64_t bias_size = arrays.wide_bias ? AccumulatorSize(dtype) : size;
  const int64_t moved = 2 + Count(arrays.residual);
  const double bytes = static_cast<double>(moved * size * std::min(columns, kDropoutPiece));
  const DropoutKernel kernel = KernelOf(dtype);
  ParallelFor(executor, rows * pieces, 1, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / pieces, first = i % pieces * kDropoutPiece;
      const int64_t at = (row * columns + first) * size;
      const DropoutPiece piece = {.seed = dropout.seeds.At(row),
                                  .block = static_cast<uint32_t>(first / kSeedBlock),
                                  .n = std::min(columns - first, kDropoutPiece),
                                  .x = Offset(arrays.x, at),
                                  .bias = Offset(arrays.bias, first * bias_size),
                                  .wide_bias = arrays.wide_bias,
                                  .residual = Offset(arrays.residual, at),
                                  .y = Offset(arrays.y, at)};
      kernel(piece, dropout.largest, dropout.scale);
    }
  });
}

}  // namespace jax_fastops::cpu

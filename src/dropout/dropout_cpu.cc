#include <algorithm>

#include "core/cpu/dtype.h"
#include "core/cpu/parallel.h"
#include "core/integer.h"
#include "core/philox.h"
#include "dropout/dropout.h"
#include "dropout/dropout_simd.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(Kernels, dropout_kernels)

}  // namespace

void Dropout(DType dtype, const void* x, const uint32_t* seeds, void* y, int64_t rows,
             int64_t columns, uint32_t largest, double scale, Executor& executor) {
  if (rows == 0 || columns == 0) return;
  const int64_t size = ItemSize(dtype), pieces = CeilDiv(columns, kDropoutPiece);
  const double bytes = static_cast<double>(2 * size * std::min(columns, kDropoutPiece));
  auto* const kernel = Kernels().piece[static_cast<int>(dtype)];
  ParallelFor(executor, rows * pieces, 1, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / pieces, first = i % pieces * kDropoutPiece;
      const int64_t at = (row * columns + first) * size;
      kernel(seeds + row * kSeedWords, static_cast<uint32_t>(first / kSeedBlock),
             std::min(columns - first, kDropoutPiece), largest, scale,
             static_cast<const char*>(x) + at, static_cast<char*>(y) + at);
    }
  });
}

}  // namespace jax_fastops::cpu

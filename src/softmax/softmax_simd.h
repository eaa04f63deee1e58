// The kernels of softmax and log-softmax for one instruction set. isa.h says what this header may
// contain.
#pragma once

#include <stdint.h>

#include "core/cpu/isa.h"
#include "core/dtype.h"
#include "softmax/shape.h"

namespace jax_fastops::cpu {

// The statistics of a row are computed from pieces of at most this many elements.
inline constexpr int64_t kSoftmaxPiece = 4096;
// The maximum number of columns in a tile.
inline constexpr int64_t kSoftmaxMaxColumns = 2048;

// The parameters of a call, for both directions.
struct SoftmaxCall {
  double scale;
  bool log;
  bool masked;  // backward: some elements are masked out
  bool stream;  // store with instructions that bypass the caches
};

// `columns` adjacent columns in each of `rows` rows of an array. Strides are in elements. The mask
// has one byte per element, or is null.
struct SoftmaxTile {
  int64_t rows, columns;
  int64_t stride;
  const uint8_t* mask;
  int64_t mask_stride;
  // The distance of rows in buffers, in accumulators: a multiple of `block`.
  int64_t buffer_stride;
};

// A is the accumulator type: float, or double for double. The maximum and the sum of a row or a
// column are over the elements that are not masked: the maximum of scale * x, and the sum of
// exp(scale * x - maximum). If no element is greater than -inf, the maximum is -inf, and the sum is
// 0, or NaN if there is a NaN.
struct SoftmaxKernels {
  // ---- Rows: contiguous elements ----

  // y = softmax(scale * x) for `rows` contiguous rows of n <= kSoftmaxPiece elements. The rows of
  // the mask are `mask_stride` apart.
  using Rows = void(const SoftmaxCall& call, const char* x, const uint8_t* mask,
                    int64_t mask_stride, char* y, int64_t rows, int64_t n);
  // dx for `rows` contiguous rows of n <= kSoftmaxPiece elements.
  using BackwardRows = void(const SoftmaxCall& call, const char* y, const char* dy,
                            const uint8_t* mask, int64_t mask_stride, char* dx, int64_t rows,
                            int64_t n);
  // The statistics of a piece of a row, n <= kSoftmaxPiece.
  using Stats = void(const SoftmaxCall& call, const char* x, const uint8_t* mask, int64_t n,
                     double* maximum, double* sum);
  // y for any n elements of a row, given the maximum and sum of the row.
  using Finish = void(const SoftmaxCall& call, const char* x, const uint8_t* mask, char* y,
                      int64_t n, double maximum, double sum);
  // The sum that the gradient needs, over n elements, and the gradient, given the sum of the whole
  // row.
  using BackwardSum = double(const SoftmaxCall& call, const char* y, const char* dy,
                             const uint8_t* mask, int64_t n);
  using BackwardFinish = void(const SoftmaxCall& call, const char* y, const char* dy,
                              const uint8_t* mask, char* dx, int64_t n, double sum);

  // ---- Columns ----

  // buffer = scale * x, with -inf for masked elements. maxima[j] becomes the maximum of itself and
  // column j. Both are whole blocks wide, padded with -inf after the last column.
  using TileMax = void(const SoftmaxCall& call, const SoftmaxTile& tile, const char* x,
                       void* buffer, void* maxima);
  // sums[j] += sum of exp(buffer - shift). If `store`, the exponentials replace the buffer. `shift`
  // is the maxima, with 0 in place of -inf.
  using TileSum = void(const SoftmaxTile& tile, void* buffer, const void* shift, void* sums,
                       bool store);
  // Combines the statistics of columns from `parts` parts, which are `stride` apart. The results
  // may overwrite the first part.
  using TileCombine = void(const void* maxima, const void* sums, int64_t parts, int64_t stride,
                           int64_t columns, void* maximum, void* sum);
  // Replaces the sums by the factors for TileFinish: log(sum) or 1 / sum, and NaN for columns
  // without a proper sum. Returns whether all columns have a proper sum.
  using TileFactors = bool(const SoftmaxCall& call, int64_t columns, const void* maxima,
                           void* sums);
  // Computes y from a buffer. With `log`, the buffer is that of TileMax, and y = (buffer - shift) -
  // factor. Otherwise it is that of TileSum, and y = buffer * factor. Applies the mask, if any.
  using TileFinish = void(const SoftmaxCall& call, const SoftmaxTile& tile, const void* buffer,
                          const void* shift, const void* factor, char* y);
  // Computes the same from x.
  using TileRedo = void(const SoftmaxCall& call, const SoftmaxTile& tile, const void* x,
                        const void* shift, const void* factor, char* y);
  // sums[j] += the terms of column j that the gradient needs.
  using TileBackwardSum = void(const SoftmaxCall& call, const SoftmaxTile& tile, const char* y,
                               const char* dy, void* sums);
  using TileBackwardFinish = void(const SoftmaxCall& call, const SoftmaxTile& tile, const char* y,
                                  const char* dy, const void* sums, char* dx);

  // By DType.
  Rows* rows[kNumDTypes];
  BackwardRows* backward_rows[kNumDTypes];
  Stats* stats[kNumDTypes];
  Finish* finish[kNumDTypes];
  BackwardSum* backward_sum[kNumDTypes];
  BackwardFinish* backward_finish[kNumDTypes];
  TileMax* tile_max[kNumDTypes];
  TileSum* tile_sum[kNumDTypes];
  TileCombine* tile_combine[kNumDTypes];
  TileFactors* tile_factors[kNumDTypes];
  TileFinish* tile_finish[kNumDTypes];
  TileRedo* tile_redo[kNumDTypes];
  TileBackwardSum* tile_backward_sum[kNumDTypes];
  TileBackwardFinish* tile_backward_finish[kNumDTypes];
  // Elements per block.
  int block[kNumDTypes];
};
FASTOPS_DECLARE_KERNELS(SoftmaxKernels, softmax_kernels)

}  // namespace jax_fastops::cpu

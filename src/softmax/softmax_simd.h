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
struct SoftmaxRowKernels {
  // y = softmax(scale * x) for `rows` contiguous rows of n <= kSoftmaxPiece elements. The rows of
  // the mask are `mask_stride` apart.
  void (*rows)(const SoftmaxCall& call, const char* x, const uint8_t* mask, int64_t mask_stride,
               char* y, int64_t rows, int64_t n);
  // dx for `rows` contiguous rows of n <= kSoftmaxPiece elements.
  void (*backward_rows)(const SoftmaxCall& call, const char* y, const char* dy, const uint8_t* mask,
                        int64_t mask_stride, char* dx, int64_t rows, int64_t n);
  // The statistics of a piece of a row, n <= kSoftmaxPiece.
  void (*stats)(const SoftmaxCall& call, const char* x, const uint8_t* mask, int64_t n,
                double* maximum, double* sum);
  // y for any n elements of a row, given the maximum and sum of the row.
  void (*finish)(const SoftmaxCall& call, const char* x, const uint8_t* mask, char* y, int64_t n,
                 double maximum, double sum);
  // The sum that the gradient needs, over n elements, and the gradient, given the sum of the whole
  // row.
  double (*backward_sum)(const SoftmaxCall& call, const char* y, const char* dy,
                         const uint8_t* mask, int64_t n);
  void (*backward_finish)(const SoftmaxCall& call, const char* y, const char* dy,
                          const uint8_t* mask, char* dx, int64_t n, double sum);
};

struct SoftmaxTileKernels {
  // buffer = scale * x, with -inf for masked elements. maxima[j] becomes the maximum of itself and
  // column j. Both are whole blocks wide, padded with -inf after the last column.
  void (*tile_max)(const SoftmaxCall& call, const SoftmaxTile& tile, const char* x, void* buffer,
                   void* maxima);
  // sums[j] += sum of exp(buffer - shift). If `store`, the exponentials replace the buffer. `shift`
  // is the maxima, with 0 in place of -inf.
  void (*tile_sum)(const SoftmaxTile& tile, void* buffer, const void* shift, void* sums,
                   bool store);
  // Combines the statistics of columns from `parts` parts, which are `stride` apart. The results
  // may overwrite the first part.
  void (*tile_combine)(const void* maxima, const void* sums, int64_t parts, int64_t stride,
                       int64_t columns, void* maximum, void* sum);
  // Replaces the sums by the factors for tile_finish: log(sum) or 1 / sum, and NaN for columns
  // without a proper sum. Returns whether all columns have a proper sum.
  bool (*tile_factors)(const SoftmaxCall& call, int64_t columns, const void* maxima, void* sums);
  // Computes y from a buffer. With `log`, the buffer is that of tile_max, and y = (buffer - shift)
  // - factor. Otherwise it is that of tile_sum, and y = buffer * factor. Applies the mask, if any.
  void (*tile_finish)(const SoftmaxCall& call, const SoftmaxTile& tile, const void* buffer,
                      const void* shift, const void* factor, char* y);
  // Computes the same from x.
  void (*tile_redo)(const SoftmaxCall& call, const SoftmaxTile& tile, const void* x,
                    const void* shift, const void* factor, char* y);
  // sums[j] += the terms of column j that the gradient needs.
  void (*tile_backward_sum)(const SoftmaxCall& call, const SoftmaxTile& tile, const char* y,
                            const char* dy, void* sums);
  void (*tile_backward_finish)(const SoftmaxCall& call, const SoftmaxTile& tile, const char* y,
                               const char* dy, const void* sums, char* dx);
};

struct SoftmaxKernels : SoftmaxRowKernels, SoftmaxTileKernels {
  int block;  // elements per block
};
FASTOPS_DECLARE_KERNELS(SoftmaxKernels, softmax_kernels[kNumDTypes])

}  // namespace jax_fastops::cpu

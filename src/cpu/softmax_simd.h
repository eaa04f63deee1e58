// The kernels of softmax and log-softmax for one instruction set. Included by the files that are
// compiled several times: see isa.h for what such a header may hold.
#ifndef JAX_FASTOPS_CPU_SOFTMAX_SIMD_H_
#define JAX_FASTOPS_CPU_SOFTMAX_SIMD_H_

#include <stdint.h>

#include "cpu/isa.h"
#include "dtype.h"

namespace jax_fastops::cpu {

// Statistics of a row are taken from pieces of at most this many elements.
inline constexpr int64_t kSoftmaxPiece = 4096;
// Tiles of columns have at most this many.
inline constexpr int64_t kSoftmaxMaxColumns = 2048;

// What both directions need to know of a call.
struct SoftmaxCall {
  double scale;
  bool log;
  bool masked;  // backward: elements are left out
  bool stream;  // write past the caches
};

// Columns of an array, `columns` neighbours in each of `rows` rows. Strides are in elements. The
// mask has a byte for each element, or is null.
struct SoftmaxTile {
  int64_t rows, columns;
  int64_t stride;
  const uint8_t* mask;
  int64_t mask_stride;
  // How far apart rows are in buffers, in accumulators: a multiple of `block`.
  int64_t buffer_stride;
};

// A is the accumulator's type: float, for double double. What ends in a row's or a column's
// maximum and sum is that of exp(scale * x - maximum) over the elements that are not masked. A
// maximum is -inf, with a sum of 0, or NaN, where no element is greater.
struct SoftmaxKernels {
  // ---- Rows of neighbours ----

  // y = softmax(scale * x) of `rows` rows of n <= kSoftmaxPiece elements one after the other; the
  // mask's rows are `mask_stride` apart.
  using Rows = void(const SoftmaxCall& call, const void* x, const uint8_t* mask,
                    int64_t mask_stride, void* y, int64_t rows, int64_t n);
  // dx of `rows` rows of n <= kSoftmaxPiece elements.
  using BackwardRows = void(const SoftmaxCall& call, const void* y, const void* dy,
                            const uint8_t* mask, int64_t mask_stride, void* dx, int64_t rows,
                            int64_t n);
  // Of a piece of a row, n <= kSoftmaxPiece.
  using Stats = void(const SoftmaxCall& call, const void* x, const uint8_t* mask, int64_t n,
                     double* maximum, double* sum);
  // y of any n elements of a row with this maximum and sum.
  using Finish = void(const SoftmaxCall& call, const void* x, const uint8_t* mask, void* y,
                      int64_t n, double maximum, double sum);
  // The sum over n elements that the gradient needs, and the gradient with that of the whole row.
  using BackwardSum = double(const SoftmaxCall& call, const void* y, const void* dy,
                             const uint8_t* mask, int64_t n);
  using BackwardFinish = void(const SoftmaxCall& call, const void* y, const void* dy,
                              const uint8_t* mask, void* dx, int64_t n, double sum);

  // ---- Columns ----

  // buffer = scale * x, -inf where masked; maxima[j] is raised to the greatest of a column. Both
  // are whole blocks wide, with -inf behind the last column.
  using TileMax = void(const SoftmaxCall& call, const SoftmaxTile& tile, const void* x,
                       void* buffer, void* maxima);
  // sums[j] += sum of exp(buffer - maximum), which replaces what is in the buffer if `store`. The
  // columns that `shift` gives differ from the maxima where those are infinite.
  using TileSum = void(const SoftmaxTile& tile, void* buffer, const void* shift, void* sums,
                       bool store);
  // The statistics of columns from those of `parts` parts, `stride` apart; may be done in place.
  using TileCombine = void(const void* maxima, const void* sums, int64_t parts, int64_t stride,
                           int64_t columns, void* maximum, void* sum);
  // Replaces the sums by what TileFinish needs, NaN for columns without a proper sum: whether all
  // columns have one.
  using TileFactors = bool(const SoftmaxCall& call, int64_t columns, const void* maxima,
                           void* sums);
  // y from the buffer of TileMax, with `log`, or else of TileSum: (buffer - shift) - factor, or
  // buffer * factor. The mask, if any, is applied.
  using TileFinish = void(const SoftmaxCall& call, const SoftmaxTile& tile, const void* buffer,
                          const void* shift, const void* factor, void* y);
  // The same from x.
  using TileRedo = void(const SoftmaxCall& call, const SoftmaxTile& tile, const void* x,
                        const void* shift, const void* factor, void* y);
  // sums[j] += what the gradient of a column needs.
  using TileBackwardSum = void(const SoftmaxCall& call, const SoftmaxTile& tile, const void* y,
                               const void* dy, void* sums);
  using TileBackwardFinish = void(const SoftmaxCall& call, const SoftmaxTile& tile, const void* y,
                                  const void* dy, const void* sums, void* dx);

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
  // Elements in a block.
  int block[kNumDTypes];
};
FASTOPS_DECLARE_KERNELS(SoftmaxKernels, softmax_kernels)

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_CPU_SOFTMAX_SIMD_H_

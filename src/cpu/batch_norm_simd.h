// The batch norm kernels of one instruction set. Included by the files that are compiled several
// times: see isa.h for what such a header may hold.
#ifndef JAX_FASTOPS_CPU_BATCH_NORM_SIMD_H_
#define JAX_FASTOPS_CPU_BATCH_NORM_SIMD_H_

#include <stdint.h>

#include "batch_norm_shape.h"
#include "cpu/isa.h"
#include "dtype.h"

namespace jax_fastops::cpu {

// Channels that follow each other at most so far apart are columns; the others are runs. A block of
// registers (kBlock in simd_math.h) has no more elements, so it spans two runs at most.
inline constexpr int64_t kBatchNormRun = 32;

// What is behind the end of a table or a buffer may be read and written for so many accumulators.
// Of an array's group, whole blocks begin at multiples of it.
inline constexpr int64_t kBatchNormSlack = 32;

// A strip of columns: elements first + r * stride + [0, width) of a group, for r in [0, rows), and
// the first `tail` of those of one more row.
struct BatchNormStrip {
  int64_t first;
  int64_t stride;
  int64_t width;
  int64_t rows;
  int64_t tail;
};

// Runs of `channels` neighbours in pieces: `segments` for each run, of `segment` elements but for
// the last. Piece q of channel c is that numbered q % segments of the run that begins with element
// first + q / segments * stride + c * inner of a group, for q in [begin, end).
struct BatchNormRuns {
  int64_t first;
  int64_t stride;
  int64_t channels;
  int64_t inner;
  int64_t segment;
  int64_t segments;
  int64_t begin;
  int64_t end;
};

// By DType where it is an array of function pointers. Arrays are those of one group. Coefficients
// of sums are accumulators, of columns one for each position of the strip, of runs one for each of
// their channels.
struct BatchNormKernels {
  // For each position or channel: the mean, and the sum of the squared deviations from it.
  // Buffers: 3 * (width + slack), or (4 * slack + 1) * channels accumulators.
  using MomentsOfColumns = void(const void* x, const BatchNormStrip& strip, void* buffer,
                                double* mean, double* squares);
  using MomentsOfRuns = void(const void* x, const BatchNormRuns& runs, void* buffer, double* mean,
                             double* squares);
  MomentsOfColumns* moments_of_columns[kNumDTypes];
  MomentsOfRuns* moments_of_runs[kNumDTypes];

  // For each position or channel: sum(g) and sum(g * (x - mean)), and with dx what belongs to it.
  // Coefficients: mean, and with dx its factor. Buffers as above, without the third or the last.
  using SumsOfColumns = void(const BatchNormSumsArrays& arrays, const BatchNormStrip& strip,
                             int64_t mask_bytes, const void* const* coefficients, void* buffer,
                             double* sums, double* products);
  using SumsOfRuns = void(const BatchNormSumsArrays& arrays, const BatchNormRuns& runs,
                          int64_t mask_bytes, const void* const* coefficients, void* buffer,
                          double* sums, double* products);
  SumsOfColumns* sums_of_columns[kNumDTypes];
  SumsOfRuns* sums_of_runs[kNumDTypes];

  // Elements [begin, end) of a group: both are multiples of the slack, or the end is the group's;
  // of columns those of `rows` rows, each `stride` behind the one before, which has to be a
  // multiple of the slack if there are several. Coefficients: of columns for each position from
  // `begin` on; of runs for each channel, all of them. Apply takes mean, factor and bias; Backward
  // mean, factor, slope, average and dmean, for
  // dx = factor * (g - average) + slope * (x - mean) + dmean.
  struct Elements {
    int64_t begin, end;
    int64_t rows, stride;     // of columns
    int64_t channels, inner;  // of runs; inner is 0 for columns
    const void* coefficients[5];
    bool stream;
  };
  using Apply = void(const BatchNormApplyArrays& arrays, bool relu, const Elements& elements);
  using Backward = void(const BatchNormBackwardArrays& arrays, const Elements& elements);
  Apply* apply[kNumDTypes];
  Backward* backward[kNumDTypes];

  // Of channels [begin, end): 1 / sqrt(var + eps) * scale, and what Backward takes. By whether the
  // accumulator is double.
  using Factors = void(const void* var, const void* scale, double eps, int64_t begin, int64_t end,
                       void* factor);
  using Slopes = void(const BatchNormBackwardArrays& arrays, double eps, int64_t channels,
                      int64_t begin, int64_t end, void* factor, void* slope, void* average);
  Factors* factors[2];
  Slopes* slopes[2];

  // Moments of `parts` parts as one, part j of counts[j] elements for each of its means. A channel
  // has `inner` means next to each other in each part; parts are `stride` apart.
  void (*merge_moments)(const double* mean, const double* squares, const double* counts,
                        int64_t parts, int64_t stride, int64_t channels, int64_t inner,
                        double* mean_result, double* squares_result);
  // Sums likewise.
  void (*merge_sums)(const double* sums, int64_t parts, int64_t stride, int64_t channels,
                     int64_t inner, double* result);

  // After streaming stores.
  void (*fence)();
};
FASTOPS_DECLARE_KERNELS(BatchNormKernels, batch_norm_kernels)

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_CPU_BATCH_NORM_SIMD_H_

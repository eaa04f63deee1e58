// The batch norm kernels of one instruction set. isa.h says what this header may contain.
#pragma once

#include <stdint.h>

#include "batch_norm/shape.h"
#include "core/cpu/isa.h"
#include "core/dtype.h"

namespace jax_fastops::cpu {

// If inner is at least this, elements of a channel are processed as runs; otherwise channels are
// columns. A block of registers (kBlock in simd_math.h) is never longer, so it spans at most two
// runs.
inline constexpr int64_t kBatchNormRun = 32;

// Kernels may read and write this many accumulators after the end of a table or a buffer. The
// blocks of a group begin at multiples of it.
inline constexpr int64_t kBatchNormSlack = 32;

// A strip of columns: elements first + r * stride + [0, width) of a group, for r in [0, rows), and
// the first `tail` elements of one more row.
struct BatchNormStrip {
  int64_t first;
  int64_t stride;
  int64_t width;
  int64_t rows;
  int64_t tail;
};

// Runs of `channels` adjacent channels, divided into pieces: `segments` pieces per run, of
// `segment` elements except the last one. Piece q of channel c is number q % segments of the run
// that begins with element first + q / segments * stride + c * inner of a group, for q in [begin,
// end).
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

// Array arguments are those of one group. Coefficients for sums are accumulators: for columns, one
// for each position of the strip; for runs, one for each of their channels.
struct BatchNormKernels {
  // For each position or channel: the mean, and the sum of the squared deviations from it. Buffers:
  // 3 * (width + slack) accumulators, or (4 * slack + 1) * channels.
  void (*moments_of_columns)(const void* x, const BatchNormStrip& strip, void* buffer, double* mean,
                             double* squares);
  void (*moments_of_runs)(const void* x, const BatchNormRuns& runs, void* buffer, double* mean,
                          double* squares);

  // For each position or channel: sum(g) and sum(g * (x - mean)). Also writes dx and dresidual if
  // requested. Coefficients: the mean, and for dx its factor. Buffers: 2 * (width + slack)
  // accumulators, or 4 * slack * channels.
  void (*sums_of_columns)(const BatchNormArrays& arrays, const BatchNormStrip& strip,
                          int64_t mask_bytes, const void* const* coefficients, void* buffer,
                          double* sums, double* products);
  void (*sums_of_runs)(const BatchNormArrays& arrays, const BatchNormRuns& runs, int64_t mask_bytes,
                       const void* const* coefficients, void* buffer, double* sums,
                       double* products);

  // Elements [begin, end) of a group. Both are multiples of the slack, but `end` may also be the
  // end of the group. For columns: the same elements of `rows` rows, which are `stride` apart. If
  // there are several rows, `stride` must be a multiple of the slack. Columns have one coefficient
  // for each position, beginning with `begin`. Runs have one for each channel of the group. Apply
  // takes mean, factor and bias. Backward takes mean, factor, slope, average and dmean, for dx =
  // factor * (g - average) + slope * (x - mean) + dmean.
  struct Elements {
    int64_t begin, end;
    int64_t rows, stride;     // for columns
    int64_t channels, inner;  // for runs; inner is 0 for columns
    const void* coefficients[5];
    bool stream;
  };
  void (*apply)(const BatchNormArrays& arrays, bool relu, const Elements& elements);
  void (*backward)(const BatchNormArrays& arrays, const Elements& elements);

  // Merges the moments of `parts` parts. Each mean of part j has counts[j] elements. In each part,
  // a channel has `inner` contiguous means. Parts are `stride` apart.
  void (*merge_moments)(const double* mean, const double* squares, const double* counts,
                        int64_t parts, int64_t stride, int64_t channels, int64_t inner,
                        double* mean_result, double* squares_result);
  // Merges sums in the same way.
  void (*merge_sums)(const double* sums, int64_t parts, int64_t stride, int64_t channels,
                     int64_t inner, double* result);

  // Must follow streaming stores.
  void (*fence)();
};
FASTOPS_DECLARE_KERNELS(BatchNormKernels, batch_norm_kernels[kNumDTypes])

}  // namespace jax_fastops::cpu

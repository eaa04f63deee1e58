// The windowed sums of one instruction set. Included by the files that are compiled several times:
// see isa.h for what such a header may hold.
#ifndef JAX_FASTOPS_CPU_WINDOW_SUM_SIMD_H_
#define JAX_FASTOPS_CPU_WINDOW_SUM_SIMD_H_

#include <stdint.h>

#include "cpu/isa.h"
#include "dtype.h"

namespace jax_fastops::cpu {

// What is behind the end of a buffer may be read and written for so many accumulators.
inline constexpr int64_t kWindowSumSlack = 64;

// Rows of a column kernel's buffer.
inline constexpr int64_t kWindowSumRows = 16;

// Elements of a long window that are added up by themselves.
inline constexpr int64_t kWindowSumChunk = 256;

// Sums `begin` to `end` along the axis of `columns` neighbouring lines; of one where the axis is
// the last one. x and y point to the lines' first elements; `stride` is how far apart, in elements,
// an index along the axis and the next one are.
struct WindowSumLines {
  const char* x;
  char* y;
  int64_t n;
  int64_t pad;
  int64_t window;
  int64_t begin;
  int64_t end;
  int64_t stride;
  int64_t columns;
};

// By DType. Buffers are of accumulators, and begin with a cache line.
struct WindowSumKernels {
  // Of `stride` lines: all that are next to each other. 2 * ((end - begin + window) * stride +
  // slack).
  using Rows = void(const WindowSumLines& lines, void* buffer);
  // Of one line. 2 * (chunk + slack) + ceil(window / chunk) + 1.
  using LongRows = void(const WindowSumLines& lines, void* buffer);
  // For windows of 3, 5 or 7. No buffer.
  using Direct = void(const WindowSumLines& lines);
  // (kWindowSumRows + ceil(window / kWindowSumRows) + 2) * (columns + slack).
  using Columns = void(const WindowSumLines& lines, void* buffer);
  Rows* rows[kNumDTypes];
  LongRows* long_rows[kNumDTypes];
  Direct* direct[kNumDTypes];
  Columns* columns[kNumDTypes];
};
FASTOPS_DECLARE_KERNELS(WindowSumKernels, window_sum_kernels)

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_CPU_WINDOW_SUM_SIMD_H_

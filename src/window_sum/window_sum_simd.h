// The window sum kernels of one instruction set. isa.h says what this header may contain.
#pragma once

#include <stdint.h>

#include "core/cpu/isa.h"
#include "core/dtype.h"

namespace jax_fastops::cpu {

// Kernels may read and write this many accumulators after the end of a buffer's contents.
inline constexpr int64_t kWindowSumSlack = 64;

// The rows of x that a column kernel sums up separately.
inline constexpr int64_t kWindowSumRows = 16;

// Sums `begin` to `end` along the axis, for `columns` adjacent lines (one line, if the axis is the
// last one). x and y point to the first element of the first line. `stride` is the distance, in
// elements, between consecutive indices along the axis.
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

// Buffers hold accumulators and begin at a cache line; the comments give their sizes.
struct WindowSumKernels {
  // For all `stride` lines at once, which are adjacent. 2 * ((end - begin + window) * stride + 2 *
  // slack).
  void (*rows)(const WindowSumLines& lines, void* buffer);
  // For windows of 3, 5 or 7. No buffer.
  void (*direct)(const WindowSumLines& lines);
  // For `columns` lines. (kWindowSumRows + ceil(window / kWindowSumRows) + 2) * (columns + slack).
  void (*columns)(const WindowSumLines& lines, void* buffer);
};
FASTOPS_DECLARE_KERNELS(WindowSumKernels, window_sum_kernels[kNumDTypes])

}  // namespace jax_fastops::cpu

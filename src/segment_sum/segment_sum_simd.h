// The inner loops of segment_sum_cpu.cc for one instruction set. isa.h says what this header may
// contain.
#pragma once

#include <stdint.h>

#include "core/cpu/isa.h"
#include "core/dtype.h"

namespace jax_fastops::cpu {

// Rows, and the sums of some segments. Steps are in bytes.
struct SegmentSumRows {
  const char* x;
  int64_t rows, x_step, n;
  const int32_t* ids;
  int64_t id_step;  // in elements
  char* sums;       // of the segment `first`
  int64_t sums_step, first, segments;
};

// Sums have the accumulator's type.
struct SegmentSumKernels {
  void (*add)(const SegmentSumRows& p);                 // adds each row to its sum
  void (*round)(const char* sums, int64_t n, char* y);  // y = sums
};
FASTOPS_DECLARE_KERNELS(SegmentSumKernels, segment_sum_kernels[kNumDTypes])

}  // namespace jax_fastops::cpu

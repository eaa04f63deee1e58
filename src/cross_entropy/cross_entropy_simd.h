// The inner loops of cross_entropy_cpu.cc for one instruction set. isa.h says what this header may
// contain.
#pragma once

#include <stdint.h>

#include "core/cpu/isa.h"
#include "core/dtype.h"

namespace jax_fastops::cpu {

// The statistics of a row of logits.
struct CrossEntropyStatistics {
  double top;         // the largest element
  double sum;         // of exp(x - top)
  double above_mean;  // top - mean(x), only with smoothing
  double at_label;    // x[label], or NaN
};

// The gradient of a row is scale * exp(x - top - log_sum) - all, less `label_too` at the label.
struct CrossEntropyGradient {
  double top, log_sum;
  double scale, all, label_too;
  bool stream;  // store with instructions that bypass the caches
};

// For one row of n > 0 elements and a label that is not negative.
struct CrossEntropyKernels {
  void (*forward)(const char* x, int64_t n, int64_t label, bool smooth,
                  CrossEntropyStatistics* found);
  void (*backward)(const CrossEntropyGradient& gradient, const char* x, int64_t n, int64_t label,
                   char* dx);
};
FASTOPS_DECLARE_KERNELS(CrossEntropyKernels, cross_entropy_kernels[kNumDTypes])

}  // namespace jax_fastops::cpu

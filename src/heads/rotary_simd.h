// The kernels of rotary.h for one head of one token and one instruction set. isa.h says what this
// header may contain.
#pragma once

#include <stdint.h>

#include "core/cpu/isa.h"
#include "core/dtype.h"

namespace jax_fastops::cpu {

// Everything begins at the head. Null: absent.
struct RotaryHead {
  const char *x, *bias, *scale, *cos, *sin;
  char* y;  // backward: only read
  char* dx;
  char *bias_sums, *scale_sums;  // added to
  bool wide_bias, wide_scale, interleaved;
  int64_t size, pairs;
  double eps;
};

struct RotaryKernels {
  void (*forward)(const RotaryHead& head);
  void (*backward)(const RotaryHead& head);
};
FASTOPS_DECLARE_KERNELS(RotaryKernels, rotary_kernels[kNumDTypes])

}  // namespace jax_fastops::cpu

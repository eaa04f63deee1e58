// The inner loops of group_norm_cpu.cc for one instruction set. isa.h says what this header may
// contain.
#pragma once

#include <stdint.h>

#include "core/activation.h"
#include "core/cpu/isa.h"
#include "core/dtype.h"

namespace jax_fastops::cpu {

// Some groups of a sample. Arrays begin at its first element.
struct GroupNormSet {
  int64_t groups, group_channels, positions;
  // Elements between neighboring channels and positions. One of them is 1.
  int64_t channel_step, position_step;
  const char *x = nullptr, *residual = nullptr, *dy = nullptr;
  char *y = nullptr, *sum = nullptr, *dx = nullptr;
  // Row r of the coefficients of channels, in the accumulator's type, is r * groups *
  // group_channels numbers after the first one.
  const void* coefficients;
  double* sums;   // two of each channel
  double* bases;  // of each group

  int64_t channels() const { return groups * group_channels; }
};

// The rows of coefficients. The forward has the first three, where kFactor is rstd * scale.
enum GroupNormRow { kMean, kFactor, kBias, kRstd, kByG, kByX, kConstant, kGroupNormRows };

using GroupNormKernel = void (*)(const GroupNormSet& set);
struct GroupNormPasses {
  GroupNormKernel forward;   // y
  GroupNormKernel backward;  // the sums of g and of g * xhat; or dx, if that is not null
};
FASTOPS_DECLARE_KERNELS(GroupNormPasses, group_norm_active[kNumActivations][kNumDTypes])
// Without activation, and the sums of x + residual - base and of their squares, for a base of each
// group that is also a result.
struct GroupNormKernels {
  GroupNormPasses plain;
  GroupNormKernel deviations;
  // n elements in the accumulator's type.
  void (*widen)(const void* from, int64_t n, void* to);
};
FASTOPS_DECLARE_KERNELS(GroupNormKernels, group_norm_kernels[kNumDTypes])

}  // namespace jax_fastops::cpu

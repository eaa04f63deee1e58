// The kernels of layer norm and RMS norm for one instruction set. isa.h says what this header may
// contain.
#pragma once

#include <stdint.h>

#include "core/cpu/isa.h"
#include "core/dtype.h"
#include "norm/shape.h"

namespace jax_fastops::cpu {

// Both take rows [begin, end) of the arrays, of n elements each.
struct NormKernels {
  // Computes y, and the other outputs that are not null. `stream`: stores of y bypass the caches.
  void (*forward)(const NormForwardArrays& arrays, NormKind kind, double eps, int64_t begin,
                  int64_t end, int64_t n, bool stream);
  // Computes dx, and, if requested, the sums over these rows, which are [n] and overwritten. With
  // dropout, `stream` requires that dx and dresidual are aligned to 64 bytes.
  void (*backward)(const NormBackwardArrays& arrays, NormKind kind, int64_t begin, int64_t end,
                   int64_t n, bool stream);
};
FASTOPS_DECLARE_KERNELS(NormKernels, norm_kernels[kNumDTypes])

}  // namespace jax_fastops::cpu

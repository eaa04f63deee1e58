// The kernels of layer norm and RMS norm for one instruction set. isa.h says what this header may
// contain.
#pragma once

#include <stdint.h>

#include "core/cpu/isa.h"
#include "core/dtype.h"
#include "norm/shape.h"

namespace jax_fastops::cpu {

struct NormKernels {
  // Computes y, and the other outputs that are not null, for `rows` rows of n elements. The arrays
  // begin at the first of these rows; parameters are passed as a whole. `stream`: stores of y
  // bypass the caches.
  void (*forward)(const NormForwardArrays& arrays, NormKind kind, double eps, int64_t rows,
                  int64_t n, bool stream);
  // Computes dx for `rows` rows, and, if requested, the sums over these rows. The sums are
  // overwritten. With dropout, `stream` requires that dx and dresidual are aligned to 64 bytes.
  void (*backward)(const NormBackwardArrays& arrays, NormKind kind, int64_t rows, int64_t n,
                   bool stream);
};
FASTOPS_DECLARE_KERNELS(NormKernels, norm_kernels[kNumDTypes])

}  // namespace jax_fastops::cpu

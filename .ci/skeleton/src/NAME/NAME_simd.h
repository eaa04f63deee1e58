// The NAME kernels of one instruction set. isa.h says what this header may contain.
#pragma once

#include <stdint.h>

#include "core/cpu/isa.h"
#include "core/dtype.h"

namespace jax_fastops::cpu {

// One function for each DType: what NAME.h says.
struct NameKernels {
  using Run = void(const char* x, char* y, int64_t n);
  Run* run[kNumDTypes];
};
FASTOPS_DECLARE_KERNELS(NameKernels, NAME_kernels)

}  // namespace jax_fastops::cpu

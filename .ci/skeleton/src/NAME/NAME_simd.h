// The NAME kernels of one instruction set. isa.h says what this header may contain.
#pragma once

#include <stdint.h>

#include "core/cpu/isa.h"
#include "core/dtype.h"

namespace jax_fastops::cpu {

// What NAME.h says.
using NameKernel = void (*)(const char* x, char* y, int64_t n);
FASTOPS_DECLARE_KERNELS(NameKernel, NAME_kernels[kNumDTypes])

}  // namespace jax_fastops::cpu

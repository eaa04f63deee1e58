// The kernels of lerp for one instruction set. Included by the files that are compiled several
// times: see isa.h for what such a header may hold.
#ifndef JAX_FASTOPS_CPU_LERP_SIMD_H_
#define JAX_FASTOPS_CPU_LERP_SIMD_H_

#include "cpu/blocks_simd.h"

namespace jax_fastops::cpu {

// By DType.
struct LerpKernels {
  BlockKernel* forward[kNumDTypes];   // start, end, weight; the result
  BlockKernel* backward[kNumDTypes];  // dy, start, end, weight; their gradients
};
FASTOPS_DECLARE_KERNELS(LerpKernels, lerp_kernels)

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_CPU_LERP_SIMD_H_

// The kernels of lerp for one instruction set. This header is included by the files that are
// compiled several times; isa.h says what such a header may contain.
#ifndef JAX_FASTOPS_ELEMENTWISE_LERP_SIMD_H_
#define JAX_FASTOPS_ELEMENTWISE_LERP_SIMD_H_

#include "elementwise/blocks_simd.h"

namespace jax_fastops::cpu {

// Kernels by DType. The comments give the inputs; the outputs.
struct LerpKernels {
  BlockKernel* forward[kNumDTypes];   // start, end, weight; the result
  BlockKernel* backward[kNumDTypes];  // dy, start, end, weight; their gradients
};
FASTOPS_DECLARE_KERNELS(LerpKernels, lerp_kernels)

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_ELEMENTWISE_LERP_SIMD_H_

// The kernels of the element-wise ops for one instruction set. isa.h says what this header may
// contain.
#pragma once

#include "core/activation.h"
#include "elementwise/blocks_simd.h"

namespace jax_fastops::cpu {

// Kernels by DType. The comments give the inputs; the outputs.
struct LerpKernels {
  BlockKernel* forward[kNumDTypes];   // start, end, weight; the result
  BlockKernel* backward[kNumDTypes];  // dy, start, end, weight; their gradients
};
FASTOPS_DECLARE_KERNELS(LerpKernels, lerp_kernels)

// Kernels by Activation and DType. The comments give the inputs; the outputs.
struct BiasActKernels {
  // x, bias; the result, and for relu the mask. For relu, bias and mask may be absent.
  BlockKernel* forward[kNumActivations][kNumDTypes];
  // dy, x, bias (for relu: dy, the mask); dx, dbias.
  BlockKernel* backward[kNumActivations][kNumDTypes];
};
FASTOPS_DECLARE_KERNELS(BiasActKernels, bias_act_kernels)
// forward: gate, up; the result. backward: dy, gate, up; dgate, dup.
FASTOPS_DECLARE_KERNELS(BiasActKernels, gated_act_kernels)

}  // namespace jax_fastops::cpu

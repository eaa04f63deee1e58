// The kernels of the element-wise ops for one instruction set. isa.h says what this header may
// contain.
#pragma once

#include "core/activation.h"
#include "elementwise/blocks_simd.h"

namespace jax_fastops::cpu {

struct ElementwiseKernels {
  BlockKernel *forward, *backward;
};

// The comments give the inputs; the outputs.

// forward: start, end, weight; the result. backward: dy, start, end, weight; their gradients.
FASTOPS_DECLARE_KERNELS(ElementwiseKernels, lerp_kernels[kNumDTypes])
// forward: x, bias; the result, and for relu the mask. For relu, bias and mask may be absent.
// backward: dy, x, bias (for relu: dy, the mask); dx, dbias.
FASTOPS_DECLARE_KERNELS(ElementwiseKernels, bias_act_kernels[kNumActivations][kNumDTypes])
// forward: gate, up; the result. backward: dy, gate, up; dgate, dup.
FASTOPS_DECLARE_KERNELS(ElementwiseKernels, gated_act_kernels[kNumActivations][kNumDTypes])

}  // namespace jax_fastops::cpu

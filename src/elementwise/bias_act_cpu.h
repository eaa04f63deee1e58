// bias_act on the CPU.
#ifndef JAX_FASTOPS_ELEMENTWISE_BIAS_ACT_CPU_H_
#define JAX_FASTOPS_ELEMENTWISE_BIAS_ACT_CPU_H_

#include <cstdint>

#include "core/cpu/parallel.h"
#include "core/dtype.h"
#include "elementwise/broadcast.h"
#include "elementwise/elementwise.h"

namespace jax_fastops::cpu {

// out = act(x + bias). Arrays of `shape`: x, bias, and for relu with a mask also the mask, whose
// strides count bits. `mask` is null if it is not requested. Bit i of a byte is set if element i of
// its eight elements is greater than 0. Unused bits at the end of a row are 0.
void BiasActForward(const BroadcastShape& shape, DType dtype, Activation activation,
                    const Operand operands[2], void* out, uint8_t* mask, Executor& executor);

// Arrays of `shape`: x, bias, dx, dbias. A gradient that is not requested has the result's strides.
void BiasActBackward(const BroadcastShape& shape, DType dtype, Activation activation,
                     const void* dy, const Operand operands[2], const Gradient gradients[2],
                     SumWorkspace workspace, Executor& executor);

// Arrays of `shape`: the mask, dx, dbias. The cotangent is selected by the mask, never multiplied.
void BiasReluBackward(const BroadcastShape& shape, DType dtype, const void* dy, const uint8_t* mask,
                      const Gradient gradients[2], SumWorkspace workspace, Executor& executor);

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_ELEMENTWISE_BIAS_ACT_CPU_H_

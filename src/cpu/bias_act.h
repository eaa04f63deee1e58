// bias_act on the CPU: cpu/bias_act.cc.
#ifndef JAX_FASTOPS_CPU_BIAS_ACT_H_
#define JAX_FASTOPS_CPU_BIAS_ACT_H_

#include <cstdint>

#include "broadcast.h"
#include "cpu/parallel.h"
#include "dtype.h"
#include "elementwise.h"

namespace jax_fastops::cpu {

// out = act(x + bias). Arrays of `shape`: x, bias; for relu with a mask, the mask too, whose
// strides count bits. `mask` is null where it is not wanted; bit i of a byte is set where element i
// of its eight is greater than 0, and unused bits at the end of a row are 0.
void BiasActForward(const BroadcastShape& shape, DType dtype, Activation activation,
                    const Operand operands[2], void* out, uint8_t* mask, Executor& executor);

// Arrays of `shape`: x, bias, dx, dbias; the strides of one that is not wanted are the result's.
void BiasActBackward(const BroadcastShape& shape, DType dtype, Activation activation,
                     const void* dy, const Operand operands[2], const Gradient gradients[2],
                     SumWorkspace workspace, Executor& executor);

// Arrays of `shape`: the mask, dx, dbias. The cotangent is selected by the mask, never multiplied.
void BiasReluBackward(const BroadcastShape& shape, DType dtype, const void* dy, const uint8_t* mask,
                      const Gradient gradients[2], SumWorkspace workspace, Executor& executor);

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_CPU_BIAS_ACT_H_

// lerp on the CPU.
#ifndef JAX_FASTOPS_ELEMENTWISE_LERP_CPU_H_
#define JAX_FASTOPS_ELEMENTWISE_LERP_CPU_H_

#include "core/cpu/parallel.h"
#include "core/dtype.h"
#include "elementwise/broadcast.h"
#include "elementwise/elementwise.h"

namespace jax_fastops::cpu {

// out = start + weight * (end - start). Arrays of `shape`: start, end, weight.
void LerpForward(const BroadcastShape& shape, DType dtype, const Operand operands[3], void* out,
                 Executor& executor);

// Arrays of `shape`: start, end, weight, and their gradients. A gradient that is not requested has
// the result's strides.
void LerpBackward(const BroadcastShape& shape, DType dtype, const void* dy,
                  const Operand operands[3], const Gradient gradients[3], SumWorkspace workspace,
                  Executor& executor);

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_ELEMENTWISE_LERP_CPU_H_

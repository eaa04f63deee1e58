// Layer norm and RMS norm on the CPU. norm/shape.h defines them. Workspaces are not used.
#ifndef JAX_FASTOPS_NORM_NORM_CPU_H_
#define JAX_FASTOPS_NORM_NORM_CPU_H_

#include "core/cpu/parallel.h"
#include "core/dtype.h"
#include "norm/shape.h"

namespace jax_fastops::cpu {

void NormForward(const NormShape& shape, NormKind kind, DType dtype, double eps,
                 const NormForwardArrays& arrays, Executor& executor);

void NormBackward(const NormShape& shape, NormKind kind, DType dtype,
                  const NormBackwardArrays& arrays, Executor& executor);

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_NORM_NORM_CPU_H_

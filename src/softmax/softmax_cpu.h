// Softmax and log-softmax on the CPU. softmax/softmax_cuda.h defines what is computed.
#ifndef JAX_FASTOPS_SOFTMAX_SOFTMAX_CPU_H_
#define JAX_FASTOPS_SOFTMAX_SOFTMAX_CPU_H_

#include "core/cpu/parallel.h"
#include "core/dtype.h"
#include "softmax/shape.h"

namespace jax_fastops::cpu {

void SoftmaxForward(const SoftmaxShape& shape, const SoftmaxMask& mask, DType dtype, bool log,
                    double scale, const void* x, void* y, Executor& executor);

void SoftmaxBackward(const SoftmaxShape& shape, bool masked, const SoftmaxMask& mask, DType dtype,
                     bool log, double scale, const void* y, const void* dy, void* dx,
                     Executor& executor);

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_SOFTMAX_SOFTMAX_CPU_H_

// Softmax and log-softmax on the CPU. cuda/softmax.h defines what is computed.
#ifndef JAX_FASTOPS_CPU_SOFTMAX_H_
#define JAX_FASTOPS_CPU_SOFTMAX_H_

#include "cpu/parallel.h"
#include "dtype.h"
#include "softmax_shape.h"

namespace jax_fastops::cpu {

void SoftmaxForward(const SoftmaxShape& shape, const SoftmaxMask& mask, DType dtype, bool log,
                    double scale, const void* x, void* y, Executor& executor);

void SoftmaxBackward(const SoftmaxShape& shape, bool masked, const SoftmaxMask& mask, DType dtype,
                     bool log, double scale, const void* y, const void* dy, void* dx,
                     Executor& executor);

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_CPU_SOFTMAX_H_

// Windowed sums on the CPU. window_sum/shape.h defines them.
#ifndef JAX_FASTOPS_WINDOW_SUM_WINDOW_SUM_CPU_H_
#define JAX_FASTOPS_WINDOW_SUM_WINDOW_SUM_CPU_H_

#include "core/cpu/parallel.h"
#include "core/dtype.h"
#include "window_sum/shape.h"

namespace jax_fastops::cpu {

void WindowSum(const WindowSumShape& shape, DType dtype, const void* x, void* y,
               Executor& executor);

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_WINDOW_SUM_WINDOW_SUM_CPU_H_

// Windowed sums on the CPU. window_sum_shape.h defines them.
#ifndef JAX_FASTOPS_CPU_WINDOW_SUM_H_
#define JAX_FASTOPS_CPU_WINDOW_SUM_H_

#include "cpu/parallel.h"
#include "dtype.h"
#include "window_sum_shape.h"

namespace jax_fastops::cpu {

void WindowSum(const WindowSumShape& shape, DType dtype, const void* x, void* y,
               Executor& executor);

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_CPU_WINDOW_SUM_H_

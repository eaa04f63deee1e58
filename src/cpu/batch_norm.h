// Batch norm on the CPU. batch_norm_shape.h defines what is computed.
#ifndef JAX_FASTOPS_CPU_BATCH_NORM_H_
#define JAX_FASTOPS_CPU_BATCH_NORM_H_

#include "batch_norm_shape.h"
#include "cpu/parallel.h"
#include "dtype.h"

namespace jax_fastops::cpu {

void BatchNormStatistics(const BatchNormShape& shape, DType dtype,
                         const BatchNormStatisticsArrays& arrays, Executor& executor);

void BatchNormApply(const BatchNormShape& shape, DType dtype, double eps, bool relu,
                    const BatchNormApplyArrays& arrays, Executor& executor);

void BatchNormSums(const BatchNormShape& shape, DType dtype, double eps,
                   const BatchNormSumsArrays& arrays, Executor& executor);

void BatchNormBackward(const BatchNormShape& shape, DType dtype, double eps,
                       const BatchNormBackwardArrays& arrays, Executor& executor);

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_CPU_BATCH_NORM_H_

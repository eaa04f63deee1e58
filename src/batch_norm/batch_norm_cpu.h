// Batch norm on the CPU. batch_norm/shape.h defines what is computed.
#ifndef JAX_FASTOPS_BATCH_NORM_BATCH_NORM_CPU_H_
#define JAX_FASTOPS_BATCH_NORM_BATCH_NORM_CPU_H_

#include "batch_norm/shape.h"
#include "core/cpu/parallel.h"
#include "core/dtype.h"

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

#endif  // JAX_FASTOPS_BATCH_NORM_BATCH_NORM_CPU_H_

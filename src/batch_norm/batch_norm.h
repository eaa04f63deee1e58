// Batch norm on raw pointers. batch_norm/shape.h defines what is computed.
//
// Results are the same bits in every run. Pointers need only the alignment of an element; outputs
// must not overlap inputs. Empty arrays succeed and nothing is written. Some CUDA kernels are
// programmatic dependent launches: they may start while the preceding kernel of the stream still
// runs, and wait for it themselves (core/cuda/dependent.cuh).
#ifndef JAX_FASTOPS_BATCH_NORM_BATCH_NORM_H_
#define JAX_FASTOPS_BATCH_NORM_BATCH_NORM_H_

#include "batch_norm/shape.h"
#include "core/backend.h"
#include "core/dtype.h"

namespace jax_fastops::FASTOPS_BACKEND {

Status BatchNormForward(const BatchNormShape& shape, DType dtype, double eps, bool relu,
                        const BatchNormForwardArrays& arrays, Queue queue);

Status BatchNormStatistics(const BatchNormShape& shape, DType dtype,
                           const BatchNormStatisticsArrays& arrays, Queue queue);

Status BatchNormApply(const BatchNormShape& shape, DType dtype, double eps, bool relu,
                      const BatchNormApplyArrays& arrays, Queue queue);

Status BatchNormSums(const BatchNormShape& shape, DType dtype, double eps,
                     const BatchNormSumsArrays& arrays, Queue queue);

Status BatchNormBackward(const BatchNormShape& shape, DType dtype, double eps,
                         const BatchNormBackwardArrays& arrays, Queue queue);

Status BatchNormGradient(const BatchNormShape& shape, DType dtype, double eps,
                         const BatchNormGradientArrays& arrays, Queue queue);

// CUDA only: each loads the kernels of its function on the current device.
Status LoadBatchNormForwardKernels();
Status LoadBatchNormStatisticsKernels();
Status LoadBatchNormApplyKernels();
Status LoadBatchNormSumsKernels();
Status LoadBatchNormBackwardKernels();
Status LoadBatchNormGradientKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND

#endif  // JAX_FASTOPS_BATCH_NORM_BATCH_NORM_H_

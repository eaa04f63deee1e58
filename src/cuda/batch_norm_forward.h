// The whole forward of a batch norm in one kernel, for arrays that stay on the chip.
#ifndef JAX_FASTOPS_CUDA_BATCH_NORM_FORWARD_H_
#define JAX_FASTOPS_CUDA_BATCH_NORM_FORWARD_H_

#include <cuda_runtime_api.h>

#include "batch_norm_shape.h"
#include "dtype.h"

namespace jax_fastops::cuda {

// What BatchNormStatistics and BatchNormApply do: one cooperative launch where that pays and all
// arrays begin at 16 bytes, those two otherwise, and for double. y and the mask are
// BatchNormApply's of the statistics, bit for bit; these are as exact as BatchNormStatistics', but
// added up in another order.
cudaError_t BatchNormForward(const BatchNormShape& shape, DType dtype, double eps, bool relu,
                             const BatchNormForwardArrays& arrays, cudaStream_t stream);

// Loads every kernel into the current device.
cudaError_t LoadBatchNormForwardKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CUDA_BATCH_NORM_FORWARD_H_

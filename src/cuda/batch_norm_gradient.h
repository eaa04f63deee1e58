// The whole backward of a batch norm in one kernel, for arrays that stay on the chip.
#ifndef JAX_FASTOPS_CUDA_BATCH_NORM_GRADIENT_H_
#define JAX_FASTOPS_CUDA_BATCH_NORM_GRADIENT_H_

#include <cuda_runtime_api.h>

#include "batch_norm_shape.h"
#include "dtype.h"

namespace jax_fastops::cuda {

// What BatchNormSums and BatchNormBackward do: one cooperative launch where that pays and all
// arrays begin at 16 bytes, those two otherwise, and for double. dx is BatchNormBackward's of the
// sums, bit for bit; these are as exact as BatchNormSums', but added up in another order.
cudaError_t BatchNormGradient(const BatchNormShape& shape, DType dtype, double eps,
                              const BatchNormGradientArrays& arrays, cudaStream_t stream);

// Loads every kernel into the current device.
cudaError_t LoadBatchNormGradientKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CUDA_BATCH_NORM_GRADIENT_H_

// The backward of a batch norm in one kernel that keeps the arrays on the chip.
#ifndef JAX_FASTOPS_BATCH_NORM_GRADIENT_H_
#define JAX_FASTOPS_BATCH_NORM_GRADIENT_H_

#include <cuda_runtime_api.h>

#include "batch_norm/shape.h"
#include "core/dtype.h"

namespace jax_fastops::cuda {

// Computes what BatchNormSums and BatchNormBackward compute. It takes a single cooperative launch
// where that is faster and all arrays are aligned to 16 bytes. Otherwise, and always for double, it
// calls those two functions. Given the same sums, dx is bitwise equal to that of BatchNormBackward.
// The sums are as accurate as those of BatchNormSums, but added in a different order.
cudaError_t BatchNormGradient(const BatchNormShape& shape, DType dtype, double eps,
                              const BatchNormGradientArrays& arrays, cudaStream_t stream);

// Loads all kernels that BatchNormGradient may launch on the current device.
cudaError_t LoadBatchNormGradientKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_BATCH_NORM_GRADIENT_H_

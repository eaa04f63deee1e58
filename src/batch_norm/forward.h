// The forward of a batch norm in one kernel that keeps the array on the chip.
#ifndef JAX_FASTOPS_BATCH_NORM_FORWARD_H_
#define JAX_FASTOPS_BATCH_NORM_FORWARD_H_

#include <cuda_runtime_api.h>

#include "batch_norm/shape.h"
#include "core/dtype.h"

namespace jax_fastops::cuda {

// Computes what BatchNormStatistics and BatchNormApply compute. It takes a single cooperative
// launch where that is faster and all arrays are aligned to 16 bytes. Otherwise, and always for
// double, it calls those two functions. Given the same statistics, y and the mask are bitwise equal
// to those of BatchNormApply. The statistics are as accurate as those of BatchNormStatistics, but
// summed in a different order.
cudaError_t BatchNormForward(const BatchNormShape& shape, DType dtype, double eps, bool relu,
                             const BatchNormForwardArrays& arrays, cudaStream_t stream);

// Loads all kernels that BatchNormForward may launch on the current device.
cudaError_t LoadBatchNormForwardKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_BATCH_NORM_FORWARD_H_

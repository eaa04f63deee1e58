// Batch norm on raw device pointers; batch_norm_shape.h says what is computed.
//
// Every function enqueues kernels on `stream` and returns what the launch returned. None allocates
// or synchronises, so all may be captured into a CUDA graph, once their kernels were loaded into
// the device. Some kernels are launched before the one ahead of them is done, whichever that is,
// and wait for it by themselves: see batch_norm_launch.cuh. Two runs give the same bits. Pointers
// need no more alignment than an element does; outputs must not overlap inputs. Sizes of zero
// succeed and write nothing.
#ifndef JAX_FASTOPS_CUDA_BATCH_NORM_H_
#define JAX_FASTOPS_CUDA_BATCH_NORM_H_

#include <cuda_runtime_api.h>

#include "batch_norm_shape.h"
#include "dtype.h"

namespace jax_fastops::cuda {

cudaError_t BatchNormStatistics(const BatchNormShape& shape, DType dtype,
                                const BatchNormStatisticsArrays& arrays, cudaStream_t stream);

cudaError_t BatchNormApply(const BatchNormShape& shape, DType dtype, double eps, bool relu,
                           const BatchNormApplyArrays& arrays, cudaStream_t stream);

cudaError_t BatchNormSums(const BatchNormShape& shape, DType dtype, double eps,
                          const BatchNormSumsArrays& arrays, cudaStream_t stream);

cudaError_t BatchNormBackward(const BatchNormShape& shape, DType dtype, double eps,
                              const BatchNormBackwardArrays& arrays, cudaStream_t stream);

// Load every kernel of each into the current device.
cudaError_t LoadBatchNormStatisticsKernels();
cudaError_t LoadBatchNormApplyKernels();
cudaError_t LoadBatchNormSumsKernels();
cudaError_t LoadBatchNormBackwardKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CUDA_BATCH_NORM_H_

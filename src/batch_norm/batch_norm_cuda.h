// Batch norm on raw device pointers. batch_norm/shape.h defines what is computed.
//
// Every function enqueues kernels on `stream` and returns the result of the launches. The functions
// do not allocate or synchronize. Once their kernels are loaded on the device, they may be captured
// into a CUDA graph. Some kernels are programmatic dependent launches: they may start while the
// preceding kernel of the stream still runs, and wait for it themselves (batch_norm_launch.cuh).
// Results are the same bits in every run. Pointers need only the alignment of an element; outputs
// must not overlap inputs. Empty arrays succeed and nothing is written.
#ifndef JAX_FASTOPS_BATCH_NORM_BATCH_NORM_CUDA_H_
#define JAX_FASTOPS_BATCH_NORM_BATCH_NORM_CUDA_H_

#include <cuda_runtime_api.h>

#include "batch_norm/shape.h"
#include "core/dtype.h"

namespace jax_fastops::cuda {

cudaError_t BatchNormStatistics(const BatchNormShape& shape, DType dtype,
                                const BatchNormStatisticsArrays& arrays, cudaStream_t stream);

cudaError_t BatchNormApply(const BatchNormShape& shape, DType dtype, double eps, bool relu,
                           const BatchNormApplyArrays& arrays, cudaStream_t stream);

cudaError_t BatchNormSums(const BatchNormShape& shape, DType dtype, double eps,
                          const BatchNormSumsArrays& arrays, cudaStream_t stream);

cudaError_t BatchNormBackward(const BatchNormShape& shape, DType dtype, double eps,
                              const BatchNormBackwardArrays& arrays, cudaStream_t stream);

// Each loads all kernels of its function on the current device.
cudaError_t LoadBatchNormStatisticsKernels();
cudaError_t LoadBatchNormApplyKernels();
cudaError_t LoadBatchNormSumsKernels();
cudaError_t LoadBatchNormBackwardKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_BATCH_NORM_BATCH_NORM_CUDA_H_

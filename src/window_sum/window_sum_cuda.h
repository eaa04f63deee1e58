// Window sums on raw device pointers. window_sum/shape.h defines them.
//
// Sums are computed in float (double for double) and rounded once. Nothing is subtracted, so a NaN
// or an infinity reaches only the windows that contain it, and the error of a sum does not depend
// on its position.
//
// Enqueues kernels on `stream` and returns the result of the launches. It does not allocate or
// synchronize. Once LoadWindowSumKernels has run on the device, it may be captured into a CUDA
// graph. Sizes of zero succeed without a launch. Pointers need only the alignment of an element; x,
// y and the workspace must not overlap.
#ifndef JAX_FASTOPS_WINDOW_SUM_WINDOW_SUM_CUDA_H_
#define JAX_FASTOPS_WINDOW_SUM_WINDOW_SUM_CUDA_H_

#include <cuda_runtime_api.h>

#include "core/dtype.h"
#include "window_sum/shape.h"

namespace jax_fastops::cuda {

// `workspace`: outer * ceil(n / 8) * inner accumulators, uninitialized. Null is always valid, but
// makes long windows over long axes slow.
cudaError_t WindowSum(const WindowSumShape& shape, DType dtype, const void* x, void* y,
                      void* workspace, cudaStream_t stream);

// Loads all kernels of this header on the current device, and sets the attributes that launches
// need.
cudaError_t LoadWindowSumKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_WINDOW_SUM_WINDOW_SUM_CUDA_H_

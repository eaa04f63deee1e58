// Windowed sums on raw device pointers; window_sum_shape.h says what is computed.
//
// Sums are made in float, for double in double, and rounded once. Nothing is ever subtracted: a NaN
// or an infinity reaches just the windows that contain it, and the error of a sum does not depend
// on where in the array it is.
//
// Enqueues kernels on `stream` and returns what the launches returned. Neither allocates nor
// synchronises, so it may be captured into a CUDA graph, once LoadWindowSumKernels has run on the
// device. Sizes of zero succeed without a launch. Pointers need no more alignment than an element
// does; x, y and the workspace must not overlap.
#ifndef JAX_FASTOPS_CUDA_WINDOW_SUM_H_
#define JAX_FASTOPS_CUDA_WINDOW_SUM_H_

#include <cuda_runtime_api.h>

#include "dtype.h"
#include "window_sum_shape.h"

namespace jax_fastops::cuda {

// `workspace`: outer * ceil(n / 8) * inner accumulators, not initialised. Null is always valid;
// long windows over long axes are slow then.
cudaError_t WindowSum(const WindowSumShape& shape, DType dtype, const void* x, void* y,
                      void* workspace, cudaStream_t stream);

// Loads every kernel of the above into the current device, and sets the attributes that launches
// need.
cudaError_t LoadWindowSumKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CUDA_WINDOW_SUM_H_

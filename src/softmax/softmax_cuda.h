// Softmax and log-softmax on raw device pointers.
//
// Every function enqueues kernels (and at most one memset) on `stream` and returns the result of
// the launches. The functions do not allocate or synchronize. Once LoadSoftmaxKernels has run on
// the device, they may be captured into a CUDA graph. Empty arrays succeed without a launch.
// Pointers need only the alignment of an element; outputs must not overlap inputs.
//
// If rows are longer than kSoftmaxWorkspace, the caller passes an uninitialized workspace of ceil(n
// / 1024) elements per row, of the accumulator's type (double for double, otherwise float).
#ifndef JAX_FASTOPS_SOFTMAX_SOFTMAX_CUDA_H_
#define JAX_FASTOPS_SOFTMAX_SOFTMAX_CUDA_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"
#include "softmax/shape.h"

namespace jax_fastops::cuda {

inline constexpr int64_t kSoftmaxWorkspace = 16384;

// y = softmax(scale * x) along n, or its logarithm if `log`. Elements that the mask excludes do not
// count, whatever their value. Their y is 0, or -inf if `log`. The special cases are those of
// jax.nn. A row that the mask excludes as a whole is 0 (-inf). A row whose maximum is +inf or -inf,
// or that contains a NaN, is NaN wherever the mask is true.
cudaError_t SoftmaxForward(const SoftmaxShape& shape, const SoftmaxMask& mask, DType dtype,
                           bool log, double scale, const void* x, void* y, void* workspace,
                           cudaStream_t stream);

// dx from y and dy. Without a mask:
//   softmax      dx = scale * y * (dy - sum(dy * y))
//   log_softmax  dx = scale * (dy - exp(y) * sum(dy))
// With a mask the excluded elements take no part in the sums, and their dx is 0 whatever dy is
// there, including Inf and NaN. For softmax the excluded elements are those with y = 0 (`masked` is
// true and the mask is not read); for log_softmax the mask itself is read.
cudaError_t SoftmaxBackward(const SoftmaxShape& shape, bool masked, const SoftmaxMask& mask,
                            DType dtype, bool log, double scale, const void* y, const void* dy,
                            void* dx, void* workspace, cudaStream_t stream);

// Loads all kernels of this header on the current device, and sets the function attributes that
// launches need.
cudaError_t LoadSoftmaxKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_SOFTMAX_SOFTMAX_CUDA_H_

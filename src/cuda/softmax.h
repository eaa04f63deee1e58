// Softmax and log-softmax on raw device pointers.
//
// Every function enqueues kernels (and at most a memset) on `stream` and returns what the launch
// returned. None allocates or synchronises, so all may be captured into a CUDA graph, once
// LoadSoftmaxKernels has run on the device. Sizes of zero succeed without a launch. Pointers need
// no more alignment than an element does; outputs must not overlap inputs.
//
// Rows longer than kSoftmaxWorkspace come with a workspace of ceil(n / 1024) elements of the
// accumulator's type (float, for double double) for each row, not initialised.
#ifndef JAX_FASTOPS_CUDA_SOFTMAX_H_
#define JAX_FASTOPS_CUDA_SOFTMAX_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dtype.h"
#include "softmax_shape.h"

namespace jax_fastops::cuda {

inline constexpr int64_t kSoftmaxWorkspace = 16384;

// y = softmax(scale * x) along n; with `log`, its logarithm. Elements that the mask leaves out do
// not count, whatever they are; their y is 0, with `log` -inf. As in jax.nn: a row that the mask
// leaves out whole is 0 (-inf), and a row whose maximum is +inf, or -inf, or that has a NaN, is
// NaN where the mask lets through.
cudaError_t SoftmaxForward(const SoftmaxShape& shape, const SoftmaxMask& mask, DType dtype,
                           bool log, double scale, const void* x, void* y, void* workspace,
                           cudaStream_t stream);

// dx from y and dy, without the mask:
//   softmax      dx = scale * y * (dy - sum(dy * y))
//   log_softmax  dx = scale * (dy - exp(y) * sum(dy))
// With a mask the left-out elements take no part in the sums and get dx = 0, whatever dy is there,
// Inf and NaN included. For softmax those are taken to be the ones with y = 0 (`masked` true, no
// mask read); for log_softmax the mask itself says it.
cudaError_t SoftmaxBackward(const SoftmaxShape& shape, bool masked, const SoftmaxMask& mask,
                            DType dtype, bool log, double scale, const void* y, const void* dy,
                            void* dx, void* workspace, cudaStream_t stream);

// Loads every kernel above into the current device, and sets the attributes that launches need.
cudaError_t LoadSoftmaxKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CUDA_SOFTMAX_H_

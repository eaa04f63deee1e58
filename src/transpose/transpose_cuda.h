// Transposition of dense arrays on raw device pointers: any rank, any permutation, any element of
// 1, 2, 4, 8 or 16 bytes.
//
// Enqueues at most one kernel on `stream` and returns the result of the launch. It does not
// allocate or synchronize. Once LoadTransposeKernels has run on the device, it may be captured into
// a CUDA graph. Empty arrays succeed without a launch. Pointers need only the alignment of an
// element; x and y must not overlap.
#ifndef JAX_FASTOPS_TRANSPOSE_TRANSPOSE_CUDA_H_
#define JAX_FASTOPS_TRANSPOSE_TRANSPOSE_CUDA_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_fastops::cuda {

// y[i0, i1, ...] = x[...], where dimension i of y is dimension axes[i] of x. `dims` are those of x.
cudaError_t Transpose(const void* x, void* y, const int64_t* dims, const int* axes, int rank,
                      int64_t itemsize, cudaStream_t stream);

// Loads all kernels of this header on the current device. Otherwise the CUDA runtime loads a kernel
// at its first launch, which fails while a stream is captured. After the first call on a device it
// returns immediately.
cudaError_t LoadTransposeKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_TRANSPOSE_TRANSPOSE_CUDA_H_

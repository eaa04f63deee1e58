// What softmax.cu has of the files that hold the kernels.
#ifndef JAX_FASTOPS_CUDA_SOFTMAX_RUN_H_
#define JAX_FASTOPS_CUDA_SOFTMAX_RUN_H_

#include <cuda_runtime_api.h>

#include "cuda/softmax_math.cuh"
#include "dtype.h"

namespace jax_fastops::cuda::softmax {

// The shared memory of a block, so that three share an SM of an H100, so that two do, and so that
// it is alone.
inline constexpr int kThirdOfShared = 72 << 10;
inline constexpr int kHalfOfShared = 108 << 10;
inline constexpr int kMostOfShared = 132 << 10;

// What of the device matters here.
struct Limits {
  int processors = 0;
  int shared_bytes = 0;  // of a block, at most
  int cluster = 1;       // blocks, at most
};

// Those of the current device; as set by LoadSoftmaxKernels.
cudaError_t GetLimits(Limits* limits);

// Both for one direction.
template <bool kGrad>
cudaError_t LoadKernels();
template <bool kGrad>
cudaError_t Run(const Params& params, DType dtype, bool log, void* workspace, cudaStream_t stream);

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_CUDA_SOFTMAX_RUN_H_

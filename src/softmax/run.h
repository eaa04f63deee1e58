// The interface between softmax.cu and the two files that instantiate the kernels.
#ifndef JAX_FASTOPS_SOFTMAX_RUN_H_
#define JAX_FASTOPS_SOFTMAX_RUN_H_

#include <cuda_runtime_api.h>

#include "core/dtype.h"
#include "softmax/math.cuh"

namespace jax_fastops::cuda::softmax {

// Shared memory per block with which three blocks, two blocks, or one block fit on an SM of an
// H100.
inline constexpr int kThirdOfShared = 72 << 10;
inline constexpr int kHalfOfShared = 108 << 10;
inline constexpr int kMostOfShared = 132 << 10;

// The limits of a device that matter here.
struct Limits {
  int processors = 0;
  int shared_bytes = 0;  // most per block
  int cluster = 1;       // most blocks per cluster
};

// The limits of the current device. The first call on a device determines them; LoadSoftmaxKernels
// makes that call.
cudaError_t GetLimits(Limits* limits);

// One instance of each for the forward and one for the backward.
template <bool kGrad>
cudaError_t LoadKernels();
template <bool kGrad>
cudaError_t Run(const Params& params, DType dtype, bool log, void* workspace, cudaStream_t stream);

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_RUN_H_

// Instantiates the backward kernels of softmax and log-softmax.
#include "softmax/launch.cuh"

namespace jax_fastops::cuda::softmax {

template cudaError_t LoadKernels<true>();
template cudaError_t Run<true>(const Params&, DType, bool, void*, cudaStream_t);

}  // namespace jax_fastops::cuda::softmax

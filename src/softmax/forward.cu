// Instantiates the forward kernels of softmax and log-softmax.
#include "softmax/launch.cuh"

namespace jax_fastops::cuda::softmax {

template cudaError_t LoadKernels<false>();
template cudaError_t Run<false>(const Params&, DType, bool, void*, cudaStream_t);

}  // namespace jax_fastops::cuda::softmax

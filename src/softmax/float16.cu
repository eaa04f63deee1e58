// Instantiates the kernels of softmax and log_softmax for float16.
#include "softmax/launch.cuh"

namespace jax_fastops::cuda::softmax {

template cudaError_t Run<__half, false>(const Arguments&, cudaStream_t);
template cudaError_t Run<__half, true>(const Arguments&, cudaStream_t);

}  // namespace jax_fastops::cuda::softmax

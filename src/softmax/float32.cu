// Instantiates the kernels of softmax and log_softmax for float32.
#include "softmax/launch.cuh"

namespace jax_fastops::cuda::softmax {

template cudaError_t Run<float, false>(const Arguments&, cudaStream_t);
template cudaError_t Run<float, true>(const Arguments&, cudaStream_t);

}  // namespace jax_fastops::cuda::softmax

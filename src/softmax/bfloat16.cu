// Instantiates the kernels of softmax and log_softmax for bfloat16.
#include "softmax/launch.cuh"

namespace jax_fastops::cuda::softmax {

template cudaError_t Run<__nv_bfloat16, false>(const Arguments&, cudaStream_t);
template cudaError_t Run<__nv_bfloat16, true>(const Arguments&, cudaStream_t);

}  // namespace jax_fastops::cuda::softmax

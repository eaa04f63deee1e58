// Instantiates the kernels of softmax and log_softmax for float64.
#include "softmax/launch.cuh"

namespace jax_fastops::cuda::softmax {

template cudaError_t Run<double, false>(const Arguments&, cudaStream_t);
template cudaError_t Run<double, true>(const Arguments&, cudaStream_t);

}  // namespace jax_fastops::cuda::softmax

// Instantiates the kernels of softmax and log_softmax for float64.
#include "softmax/launch.cuh"

namespace jax_fastops::cuda::softmax {

template cudaError_t Run<double, false>(const Plan&, const Params&, void*, cudaStream_t);
template cudaError_t Run<double, true>(const Plan&, const Params&, void*, cudaStream_t);

}  // namespace jax_fastops::cuda::softmax

// The kernels of bias_act for gelu_exact. elementwise/bias_act.cu describes them.
#include "elementwise/bias_act_of.cuh"

namespace jax_fastops::cuda {

FASTOPS_INSTANTIATE_BIAS_ACT(GeluExact);

}  // namespace jax_fastops::cuda

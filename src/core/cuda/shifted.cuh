// A former place of vec.cuh.
#ifndef JAX_FASTOPS_CORE_CUDA_SHIFTED_CUH_
#define JAX_FASTOPS_CORE_CUDA_SHIFTED_CUH_

#include "core/cuda/vec.cuh"

#endif  // JAX_FASTOPS_CORE_CUDA_SHIFTED_CUH_

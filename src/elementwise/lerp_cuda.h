// The launchers under their former header.
#ifndef JAX_FASTOPS_ELEMENTWISE_LERP_CUDA_H_
#define JAX_FASTOPS_ELEMENTWISE_LERP_CUDA_H_

#include "elementwise/lerp.h"

#endif  // JAX_FASTOPS_ELEMENTWISE_LERP_CUDA_H_

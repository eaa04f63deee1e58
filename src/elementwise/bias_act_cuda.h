// The launchers under their former header.
#ifndef JAX_FASTOPS_ELEMENTWISE_BIAS_ACT_CUDA_H_
#define JAX_FASTOPS_ELEMENTWISE_BIAS_ACT_CUDA_H_

#include "elementwise/bias_act.h"

#endif  // JAX_FASTOPS_ELEMENTWISE_BIAS_ACT_CUDA_H_

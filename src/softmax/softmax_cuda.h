// The launchers under their former header.
#ifndef JAX_FASTOPS_SOFTMAX_SOFTMAX_CUDA_H_
#define JAX_FASTOPS_SOFTMAX_SOFTMAX_CUDA_H_

#include "softmax/softmax.h"

#endif  // JAX_FASTOPS_SOFTMAX_SOFTMAX_CUDA_H_

// The launchers under their former header.
#ifndef JAX_FASTOPS_NORM_NORM_CUDA_H_
#define JAX_FASTOPS_NORM_NORM_CUDA_H_

#include "norm/norm.h"

#endif  // JAX_FASTOPS_NORM_NORM_CUDA_H_

// The launchers under their former header.
#ifndef JAX_FASTOPS_HEADS_HEADS_CUDA_H_
#define JAX_FASTOPS_HEADS_HEADS_CUDA_H_

#include "heads/heads.h"

#endif  // JAX_FASTOPS_HEADS_HEADS_CUDA_H_

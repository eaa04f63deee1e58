// The launchers under their former header.
#ifndef JAX_FASTOPS_WINDOW_SUM_WINDOW_SUM_CUDA_H_
#define JAX_FASTOPS_WINDOW_SUM_WINDOW_SUM_CUDA_H_

#include "window_sum/window_sum.h"

#endif  // JAX_FASTOPS_WINDOW_SUM_WINDOW_SUM_CUDA_H_

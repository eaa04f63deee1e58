// Layer norm and RMS norm, with the residual and input bias that are added before them, on raw
// pointers. norm/shape.h defines them.
//
// Empty arrays succeed; if there are no rows, the partial sums are set to zero. Pointers need only
// the alignment of an element; outputs must not overlap inputs.
#pragma once

#include "core/backend.h"
#include "core/dtype.h"
#include "norm/shape.h"

namespace jax_fastops::FASTOPS_BACKEND {

Status NormForward(const NormShape& shape, NormKind kind, DType dtype, double eps,
                   const NormForwardArrays& arrays, Queue queue);

Status NormBackward(const NormShape& shape, NormKind kind, DType dtype,
                    const NormBackwardArrays& arrays, Queue queue);

// CUDA only: load the kernels of the forward and of the backward on the current device.
Status LoadNormForwardKernels();
Status LoadNormBackwardKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND

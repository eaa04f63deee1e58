// lerp on raw pointers. Arrays have the strides that `shape` lists, in the order given.
#ifndef JAX_FASTOPS_ELEMENTWISE_LERP_H_
#define JAX_FASTOPS_ELEMENTWISE_LERP_H_

#include "core/backend.h"
#include "core/broadcast.h"
#include "core/dtype.h"

namespace jax_fastops::FASTOPS_BACKEND {

// out = start + weight * (end - start). Arrays of `shape`: start, end, weight.
Status LerpForward(const BroadcastShape& shape, DType dtype, const Operand operands[3], void* out,
                   Queue queue);

// Arrays of `shape`: start, end, weight, and their gradients. A gradient that is not requested has
// the result's strides.
Status LerpBackward(const BroadcastShape& shape, DType dtype, const void* dy,
                    const Operand operands[3], const Gradient gradients[3], SumWorkspace workspace,
                    Queue queue);

// CUDA only: loads the kernels on the current device.
Status LoadLerpKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND

#endif  // JAX_FASTOPS_ELEMENTWISE_LERP_H_

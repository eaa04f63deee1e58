// lerp, bias_act and gated_act on raw pointers. The arrays of the first two have the strides that
// `shape` lists, in the order given. A gradient that is not requested has the result's strides.
#pragma once

#include <cstdint>

#include "core/activation.h"
#include "core/backend.h"
#include "core/broadcast.h"
#include "core/dtype.h"

namespace jax_fastops {

// Rows of n elements. Those of the gate, of the other operand and of their gradients are `pitch`
// elements apart: n, or 2 n if they are the halves of one array. The others are dense.
struct GatedShape {
  int64_t rows = 1, n = 1, pitch = 1;
};

}  // namespace jax_fastops

namespace jax_fastops::FASTOPS_BACKEND {

// out = start + weight * (end - start). Arrays of `shape`: start, end, weight.
Status LerpForward(const BroadcastShape& shape, DType dtype, const Operand operands[3], void* out,
                   Queue queue);

// Arrays of `shape`: start, end, weight, and their gradients.
Status LerpBackward(const BroadcastShape& shape, DType dtype, const void* dy,
                    const Operand operands[3], const Gradient gradients[3], SumWorkspace workspace,
                    Queue queue);

// out = act(x + bias). For relu, `bias` may be null. Arrays of `shape`: x, bias, and for relu with
// a mask also the mask, whose strides count bits. `mask` is null if it is not requested. Bit i of a
// byte is set if element i of its eight elements is greater than 0. Unused bits at the end of a row
// are 0.
Status BiasActForward(const BroadcastShape& shape, DType dtype, Activation activation,
                      const Operand operands[2], void* out, uint8_t* mask, Queue queue);

// Arrays of `shape`: x, bias, dx, dbias.
Status BiasActBackward(const BroadcastShape& shape, DType dtype, Activation activation,
                       const void* dy, const Operand operands[2], const Gradient gradients[2],
                       SumWorkspace workspace, Queue queue);

// Arrays of `shape`: the mask, dx, dbias. The cotangent is selected by the mask, never multiplied.
// One of the gradients is requested.
Status BiasReluBackward(const BroadcastShape& shape, DType dtype, const void* dy,
                        const uint8_t* mask, const Gradient gradients[2], SumWorkspace workspace,
                        Queue queue);

// y = act(gate) * up.
Status GatedActForward(const GatedShape& shape, DType dtype, Activation activation,
                       const char* gate, const char* up, char* y, Queue queue);

// dgate = dy * up * act'(gate) and dup = dy * act(gate). Null: not requested.
Status GatedActBackward(const GatedShape& shape, DType dtype, Activation activation, const char* dy,
                        const char* gate, const char* up, char* dgate, char* dup, Queue queue);

// CUDA only: load the kernels on the current device.
Status LoadLerpKernels();
Status LoadBiasActKernels();
Status LoadGatedActKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND

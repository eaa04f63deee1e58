// The dropout kernels of one instruction set. isa.h says what this header may contain.
#pragma once

#include <stdint.h>

#include "core/cpu/isa.h"
#include "core/dtype.h"
#include "core/philox.h"

namespace jax_fastops::cpu {

// The most elements of a row that a kernel takes at once. Their mask is in the first-level cache.
inline constexpr int64_t kDropoutPiece = 4096;

// A piece of a row. It begins with a whole block of the row.
struct DropoutPiece {
  PhiloxWords seed;
  uint32_t block;
  int64_t n;
  const char* x;
  const char* bias;  // null: absent
  bool wide_bias;
  const char* residual;  // null: absent
  char* y;
};

// What dropout.h says, for a piece.
using DropoutKernel = void (*)(const DropoutPiece& piece, uint32_t largest, double scale);
FASTOPS_DECLARE_KERNELS(DropoutKernel, dropout_kernels[kNumDTypes])

}  // namespace jax_fastops::cpu

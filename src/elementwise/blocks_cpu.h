// The element-wise engine: one pass of a kernel over operands that are broadcast against each
// other. It also sums gradients over the dimensions along which an operand is broadcast. A new op
// consists of a kernel for dense blocks (blocks_simd.h) and a list of its arrays.
#pragma once

#include <span>

#include "core/broadcast.h"
#include "core/cpu/parallel.h"
#include "core/dtype.h"
#include "elementwise/blocks_simd.h"

namespace jax_fastops::cpu {

inline constexpr int kMaxInputs = 4, kMaxOutputs = 3;
// Instead of the number of an array in the shape: the array has the result's shape.
inline constexpr int kResult = -1;

enum class Storage : uint8_t { kElement, kWide, kBits };

// An input, whose strides may have gaps, or an output, which is null if it is not requested: along
// dimensions of stride 0, the engine sums what the kernel writes.
struct BlockOperand {
  void* data;
  int array = kResult;
  Storage storage = Storage::kElement;
};

inline BlockOperand Input(const void* data) { return {const_cast<void*>(data)}; }
inline BlockOperand Input(const Operand& operand, int array) {
  return {const_cast<void*>(operand.data), array,
          operand.wide ? Storage::kWide : Storage::kElement};
}
inline BlockOperand Output(const Gradient& gradient, int array) {
  return {gradient.data, array, gradient.wide ? Storage::kWide : Storage::kElement};
}

// Calls the kernel on blocks that together cover the result. It gets a null pointer for an input
// that is null. Two calls with the same shape and the same number of threads give the same bits.
void RunBlocks(const BroadcastShape& shape, DType dtype, std::span<const BlockOperand> in,
               std::span<const BlockOperand> out, BlockKernel* kernel, Executor& executor);

}  // namespace jax_fastops::cpu

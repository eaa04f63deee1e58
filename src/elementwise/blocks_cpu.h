// The element-wise engine: one pass of a kernel over operands that are broadcast against each
// other. It also sums gradients over the dimensions along which an operand is broadcast. A new op
// consists of a kernel for dense blocks (blocks_simd.h) and a list of its arrays.
#pragma once

#include "core/broadcast.h"
#include "core/cpu/parallel.h"
#include "core/dtype.h"
#include "elementwise/blocks_simd.h"

namespace jax_fastops::cpu {

inline constexpr int kMaxInputs = 4, kMaxOutputs = 3;
// Instead of the number of an array in the shape: the array has the result's shape.
inline constexpr int kResult = -1;

enum class Storage : uint8_t { kElement, kWide, kBits };

struct InputArray {
  const void* data = nullptr;
  int array = kResult;  // its strides may have gaps
  Storage storage = Storage::kElement;
};

struct OutputArray {
  void* data = nullptr;  // null: not requested
  int array = kResult;   // along dimensions of stride 0, the engine sums what the kernel writes
  Storage storage = Storage::kElement;
};

inline Storage StorageOf(bool wide) { return wide ? Storage::kWide : Storage::kElement; }
inline InputArray Input(const Operand& operand, int array) {
  return {operand.data, array, StorageOf(operand.wide)};
}
inline OutputArray Output(const Gradient& gradient, int array) {
  return {gradient.data, array, StorageOf(gradient.wide)};
}

// Calls the kernel on blocks that together cover the result. Two calls with the same shape and the
// same number of threads give the same bits.
void RunBlocks(const BroadcastShape& shape, DType dtype, const InputArray* in, int inputs,
               const OutputArray* out, int outputs, BlockKernel* kernel, Executor& executor);

}  // namespace jax_fastops::cpu

// bias_act on the CPU: forward and backward are each one pass of the element-wise engine
// (blocks.cc).
#include "elementwise/bias_act.h"

#include "elementwise/bias_act_simd.h"
#include "elementwise/blocks_cpu.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(Kernels, bias_act_kernels)

}  // namespace

void BiasActForward(const BroadcastShape& shape, DType dtype, Activation activation,
                    const Operand operands[2], void* out, uint8_t* mask, Executor& executor) {
  const InputArray in[] = {Input(operands[0], 0), Input(operands[1], 1)};
  const OutputArray results[] = {{out, kResult, Storage::kElement}, {mask, 2, Storage::kBits}};
  const bool has_mask = activation == Activation::kRelu && mask != nullptr;
  // Without a bias or a mask, the kernel gets a null pointer.
  RunBlocks(shape, dtype, in, operands[1].data != nullptr ? 2 : 1, results, has_mask ? 2 : 1,
            Kernels().forward[static_cast<int>(activation)][static_cast<int>(dtype)], executor);
}

void BiasActBackward(const BroadcastShape& shape, DType dtype, Activation activation,
                     const void* dy, const Operand operands[2], const Gradient gradients[2],
                     SumWorkspace, Executor& executor) {
  const InputArray in[] = {
      {dy, kResult, Storage::kElement}, Input(operands[0], 0), Input(operands[1], 1)};
  const OutputArray out[] = {Output(gradients[0], 2), Output(gradients[1], 3)};
  RunBlocks(shape, dtype, in, 3, out, 2,
            Kernels().backward[static_cast<int>(activation)][static_cast<int>(dtype)], executor);
}

void BiasReluBackward(const BroadcastShape& shape, DType dtype, const void* dy, const uint8_t* mask,
                      const Gradient gradients[2], SumWorkspace, Executor& executor) {
  const InputArray in[] = {{dy, kResult, Storage::kElement}, {mask, 0, Storage::kBits}};
  const OutputArray out[] = {Output(gradients[0], 1), Output(gradients[1], 2)};
  RunBlocks(shape, dtype, in, 2, out, 2,
            Kernels().backward[static_cast<int>(Activation::kRelu)][static_cast<int>(dtype)],
            executor);
}

}  // namespace jax_fastops::cpu

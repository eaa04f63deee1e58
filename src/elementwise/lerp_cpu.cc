// lerp on the CPU: forward and backward are each one pass of the element-wise engine (blocks.cc).
#include "elementwise/lerp.h"

#include "elementwise/blocks_cpu.h"
#include "elementwise/lerp_simd.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(Kernels, lerp_kernels)

}  // namespace

void LerpForward(const BroadcastShape& shape, DType dtype, const Operand operands[3], void* out,
                 Executor& executor) {
  InputArray in[3];
  for (int i = 0; i < 3; ++i) in[i] = Input(operands[i], i);
  const OutputArray result = {out, kResult, Storage::kElement};
  RunBlocks(shape, dtype, in, 3, &result, 1, Kernels().forward[static_cast<int>(dtype)], executor);
}

void LerpBackward(const BroadcastShape& shape, DType dtype, const void* dy,
                  const Operand operands[3], const Gradient gradients[3], SumWorkspace,
                  Executor& executor) {
  InputArray in[4] = {{dy, kResult, Storage::kElement}};
  OutputArray out[3];
  for (int i = 0; i < 3; ++i) {
    in[i + 1] = Input(operands[i], i);
    out[i] = Output(gradients[i], 3 + i);
  }
  RunBlocks(shape, dtype, in, 4, out, 3, Kernels().backward[static_cast<int>(dtype)], executor);
}

}  // namespace jax_fastops::cpu

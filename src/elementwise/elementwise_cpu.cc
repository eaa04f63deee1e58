// The launchers of the element-wise ops on the CPU. lerp and bias_act are each one pass of the
// element-wise engine (blocks_cpu.cc). gated_act takes blocks of a row, each by one kernel.
#include "elementwise/elementwise.h"

#include <algorithm>

#include "core/cpu/parallel.h"
#include "core/integer.h"
#include "elementwise/blocks_cpu.h"
#include "elementwise/elementwise_simd.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(LerpOf, lerp_kernels)
FASTOPS_DEFINE_TABLE(BiasActs, bias_act_kernels)
FASTOPS_DEFINE_TABLE(GatedActs, gated_act_kernels)

const ElementwiseKernels& Of(const ElementwiseKernels (&table)[kNumActivations][kNumDTypes],
                             Activation activation, DType dtype) {
  return table[static_cast<int>(activation)][static_cast<int>(dtype)];
}

struct Array {
  const char* data;
  bool dense;  // rows of the result's pitch, not of the operands'
};

// Calls the kernel on the elements of every row. Two dense operands are one row, cut into blocks.
void Run(const GatedShape& shape, DType dtype, BlockKernel* kernel, const Array* in, int inputs,
         const Array* out, int outputs, Executor& executor) {
  constexpr int64_t kBlock = 4096;
  const bool flat = shape.pitch == shape.n;
  const int64_t total = shape.rows * shape.n, itemsize = DTypeSize(dtype);
  const int64_t line = flat ? kBlock : shape.n, pitch = flat ? kBlock : shape.pitch;
  if (total == 0) return;
  const double bytes = static_cast<double>((inputs + outputs) * line * itemsize);
  ParallelFor(executor, CeilDiv(total, line), 1, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto block = [&](const Array& array) {
        BlockArray found;
        const int64_t offset = i * (array.dense ? line : pitch) * itemsize;
        if (array.data != nullptr) found.data = const_cast<char*>(array.data) + offset;
        return found;
      };
      BlockArray from[3], to[2];
      std::transform(in, in + inputs, from, block);
      std::transform(out, out + outputs, to, block);
      kernel(std::min(line, total - i * line), from, to);
    }
  });
}

}  // namespace

void LerpForward(const BroadcastShape& shape, DType dtype, const Operand operands[3], void* out,
                 Executor& executor) {
  const BlockOperand in[] = {Input(operands[0], 0), Input(operands[1], 1), Input(operands[2], 2)};
  const BlockOperand result[] = {{out}};
  RunBlocks(shape, dtype, in, result, LerpOf(dtype).forward, executor);
}

void LerpBackward(const BroadcastShape& shape, DType dtype, const void* dy,
                  const Operand operands[3], const Gradient gradients[3], SumWorkspace,
                  Executor& executor) {
  const BlockOperand in[] = {Input(dy), Input(operands[0], 0), Input(operands[1], 1),
                             Input(operands[2], 2)};
  const BlockOperand out[] = {Output(gradients[0], 3), Output(gradients[1], 4),
                              Output(gradients[2], 5)};
  RunBlocks(shape, dtype, in, out, LerpOf(dtype).backward, executor);
}

void BiasActForward(const BroadcastShape& shape, DType dtype, Activation activation,
                    const Operand operands[2], void* out, uint8_t* mask, Executor& executor) {
  const BlockOperand in[] = {Input(operands[0], 0), Input(operands[1], 1)};
  const BlockOperand results[] = {{out}, {mask, mask == nullptr ? kResult : 2, Storage::kBits}};
  RunBlocks(shape, dtype, in, results, Of(BiasActs(), activation, dtype).forward, executor);
}

void BiasActBackward(const BroadcastShape& shape, DType dtype, Activation activation,
                     const void* dy, const Operand operands[2], const Gradient gradients[2],
                     SumWorkspace, Executor& executor) {
  const BlockOperand in[] = {Input(dy), Input(operands[0], 0), Input(operands[1], 1)};
  const BlockOperand out[] = {Output(gradients[0], 2), Output(gradients[1], 3)};
  RunBlocks(shape, dtype, in, out, Of(BiasActs(), activation, dtype).backward, executor);
}

void BiasReluBackward(const BroadcastShape& shape, DType dtype, const void* dy, const uint8_t* mask,
                      const Gradient gradients[2], SumWorkspace, Executor& executor) {
  const BlockOperand in[] = {Input(dy), {const_cast<uint8_t*>(mask), 0, Storage::kBits}};
  const BlockOperand out[] = {Output(gradients[0], 1), Output(gradients[1], 2)};
  RunBlocks(shape, dtype, in, out, Of(BiasActs(), Activation::kRelu, dtype).backward, executor);
}

void GatedActForward(const GatedShape& shape, DType dtype, Activation activation, const char* gate,
                     const char* up, char* y, Executor& executor) {
  const Array in[] = {{gate, false}, {up, false}}, out[] = {{y, true}};
  Run(shape, dtype, Of(GatedActs(), activation, dtype).forward, in, 2, out, 1, executor);
}

void GatedActBackward(const GatedShape& shape, DType dtype, Activation activation, const char* dy,
                      const char* gate, const char* up, char* dgate, char* dup,
                      Executor& executor) {
  const Array in[] = {{dy, true}, {gate, false}, {up, false}};
  const Array out[] = {{dgate, false}, {dup, false}};
  Run(shape, dtype, Of(GatedActs(), activation, dtype).backward, in, 3, out, 2, executor);
}

}  // namespace jax_fastops::cpu

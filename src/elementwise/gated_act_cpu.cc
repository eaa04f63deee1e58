// gated_act on the CPU: blocks of a row, each by one kernel of the active instruction set.
#include <algorithm>

#include "core/cpu/parallel.h"
#include "core/integer.h"
#include "elementwise/bias_act.h"
#include "elementwise/bias_act_simd.h"

namespace jax_fastops::cpu {
namespace {

const BiasActKernels& Kernels() {
  static const BiasActKernels& kernels = FASTOPS_KERNELS(gated_act_kernels);
  return kernels;
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

void GatedActForward(const GatedShape& shape, DType dtype, Activation activation, const char* gate,
                     const char* up, char* y, Executor& executor) {
  const Array in[] = {{gate, false}, {up, false}}, out[] = {{y, true}};
  Run(shape, dtype, Kernels().forward[static_cast<int>(activation)][static_cast<int>(dtype)], in, 2,
      out, 1, executor);
}

void GatedActBackward(const GatedShape& shape, DType dtype, Activation activation, const char* dy,
                      const char* gate, const char* up, char* dgate, char* dup,
                      Executor& executor) {
  const Array in[] = {{dy, true}, {gate, false}, {up, false}};
  const Array out[] = {{dgate, false}, {dup, false}};
  Run(shape, dtype, Kernels().backward[static_cast<int>(activation)][static_cast<int>(dtype)], in,
      3, out, 2, executor);
}

}  // namespace jax_fastops::cpu

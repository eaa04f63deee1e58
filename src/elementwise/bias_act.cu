// act(x + bias) and its gradients in one pass: dx = dy * act'(x + bias), and dbias, the sum of dx
// over the dimensions in which the bias is broadcast. For relu the backward reads a bit per element
// instead of x.
//
// The sum and the activation are computed in float32 (float64 for float64), without rounding in
// between. core/cuda/elements.cuh, core/cuda/row_elements.cuh and core/cuda/elements_sums.cuh read
// and sum the arrays, and elementwise/bias_relu.cuh writes the bits. The smooth activations are a
// run-time switch of the same kernels: it is the same for all threads.
//
// Source: FasterTransformer, add_bias_act.
#include "elementwise/elementwise.h"

#include <utility>

#include "core/cuda/activation.cuh"
#include "core/cuda/elements.cuh"
#include "core/cuda/elements_sums.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/row_elements.cuh"
#include "elementwise/bias_relu.cuh"
#include "elementwise/relu_select.cuh"

namespace jax_fastops::cuda {
namespace {

// x is full, and the bias any. Rows are the most common.
using BiasSets = std::integer_sequence<int, RowClasses(RowClass::kFull, RowClass::kRow),
                                       RowClasses(RowClass::kFull, RowClass::kColumn),
                                       RowClasses(RowClass::kFull, RowClass::kFull)>;
using MaskSets = std::integer_sequence<int, RowClasses(RowClass::kFull, RowClass::kRow),
                                       RowClasses(RowClass::kFull, RowClass::kColumn)>;

template <Activation kActivation>
struct BiasActOf {
  template <typename T>
  static __device__ __forceinline__ void Apply(const ComputeType<T> (&x)[2],
                                               ComputeType<T> (&y)[1]) {
    y[0] = ActivatedSum<kActivation, T>(x[0], x[1]);
  }

  template <typename T>
  static __device__ __forceinline__ void Gradients(ComputeType<T> dy, const ComputeType<T> (&x)[2],
                                                   ComputeType<T> (&g)[2]) {
    using M = ActivationMath<T>;
    g[0] = g[1] = Pull<M, FormulaOf<kActivation, M>>(x[0] + x[1], dy);
  }
};

struct BiasAct {
  using Family = BiasActKernels;
  using SumsSets = BiasSets;
  static constexpr int kIn = 2, kWords = 4;
  // The bias has an element per position in a row, or one per row.
  using RowSets = std::integer_sequence<int, 0, 2>;
  using RaggedSets = std::integer_sequence<int, 0, 2>;
  static constexpr int kOperands = 2;
  static constexpr int kGradients = 2;
  static constexpr bool kMayBeWide = true;
  static constexpr bool kBits = false;
  static constexpr bool kMayBeStrided = false, kSymmetric = false;

  Activation activation;

  template <typename Visit>
  __device__ __forceinline__ void Choose(const Visit& visit) const {
    ForActivation(activation, [&](auto known) { visit(BiasActOf<known.value>()); });
  }

  static void Needed(const bool*, bool* needed) { needed[0] = needed[1] = true; }
};

struct SelectByMask {
  using Family = BiasActKernels;
  using SumsSets = MaskSets;
  static constexpr int kOperands = 1;
  static constexpr int kGradients = 2;
  static constexpr bool kMayBeWide = false;
  static constexpr bool kBits = true;
  static constexpr bool kMayBeStrided = false, kSymmetric = false;

  template <typename Visit>
  __device__ __forceinline__ void Choose(const Visit& visit) const {
    visit(*this);
  }

  template <typename T>
  static __device__ __forceinline__ void Gradients(ComputeType<T> dy, const ComputeType<T> (&x)[1],
                                                   ComputeType<T> (&g)[2]) {
    g[0] = g[1] = x[0] != ComputeType<T>(0) ? dy : ComputeType<T>(0);
  }

  static void Needed(const bool*, bool* needed) { needed[0] = true; }
};

}  // namespace

cudaError_t LoadBiasActKernels() {
  const cudaError_t error = LoadKernels<BiasActKernels>();
  return error == cudaSuccess ? LoadKernels<GradientSumsKernels>() : error;
}

cudaError_t BiasActForward(const BroadcastShape& shape, DType dtype, Activation activation,
                           const Operand operands[2], void* out, uint8_t* mask,
                           cudaStream_t stream) {
  if (activation == Activation::kRelu) {
    return BiasReluForward(shape, dtype, operands, out, mask, stream);
  }
  const BiasAct f{activation};
  return IsRowElements(shape, dtype, operands, out)
             ? RowElements(f, shape, dtype, operands, out, stream)
             : Elements(f, shape, dtype, operands, out, stream);
}

cudaError_t BiasActBackward(const BroadcastShape& shape, DType dtype, Activation activation,
                            const void* dy, const Operand operands[2], const Gradient gradients[2],
                            SumWorkspace workspace, cudaStream_t stream) {
  // relu has BiasReluBackward, which takes a mask, and no x.
  if (activation == Activation::kRelu) return cudaErrorInvalidValue;
  return BackwardWithSums(BiasAct{activation}, shape, dtype, dy, operands, gradients, workspace,
                          stream);
}

cudaError_t BiasReluBackward(const BroadcastShape& shape, DType dtype, const void* dy,
                             const uint8_t* mask, const Gradient gradients[2],
                             SumWorkspace workspace, cudaStream_t stream) {
  if (gradients[1].data == nullptr) {
    const ReluMask layout = bias_relu::MaskOf(shape, 0, const_cast<uint8_t*>(mask));
    return relu_select::ReluSelect<BiasActKernels>(shape.elements(), dtype, dy, layout,
                                                   gradients[0].data, stream);
  }
  const Operand bits[1] = {{mask, false}};
  return BackwardWithSums(SelectByMask(), shape, dtype, dy, bits, gradients, workspace, stream);
}

}  // namespace jax_fastops::cuda

// act(x + bias) and its gradients in one pass: dx = dy * act'(x + bias), and dbias, the sum of dx
// over the dimensions in which the bias is broadcast. For relu the backward reads a bit per element
// instead of x.
//
// The sum and the activation are computed in float32 (float64 for float64), without rounding in
// between. elementwise/forward.cuh and elementwise/backward.cuh read and sum the arrays,
// and elementwise/bias_relu.cuh writes the bits.
//
// Source: FasterTransformer, add_bias_act.
#include "elementwise/bias_act.h"

#include "core/cuda/launch.h"
#include "elementwise/backward.cuh"
#include "elementwise/bias_act_of.h"
#include "elementwise/bias_relu.cuh"

namespace jax_fastops::cuda {
namespace {

struct SelectByMask {
  using Family = BiasActKernels;
  static constexpr int kOperands = 1;
  static constexpr int kGradients = 2;
  static constexpr bool kMayBeWide = false;
  static constexpr bool kBits = true;
  static constexpr bool kFirstIsFull = true;
  static constexpr bool kShortUnits = true;

  using BackwardKinds = BiasKinds;
  using RowsKinds = BiasRowsKinds;

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
  return error == cudaSuccess ? LoadKernels<FinishKernels>() : error;
}

cudaError_t BiasActForward(const BroadcastShape& shape, DType dtype, Activation activation,
                           const Operand operands[2], void* out, uint8_t* mask,
                           cudaStream_t stream) {
  switch (activation) {
    case Activation::kGelu:
      return BiasActForwardOf<Gelu>(shape, dtype, operands, out, stream);
    case Activation::kGeluExact:
      return BiasActForwardOf<GeluExact>(shape, dtype, operands, out, stream);
    case Activation::kSilu:
      return BiasActForwardOf<Silu>(shape, dtype, operands, out, stream);
    case Activation::kRelu:
      return BiasReluForward(shape, dtype, operands, out, mask, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t BiasActBackward(const BroadcastShape& shape, DType dtype, Activation activation,
                            const void* dy, const Operand operands[2], const Gradient gradients[2],
                            SumWorkspace workspace, cudaStream_t stream) {
  switch (activation) {
    case Activation::kGelu:
      return BiasActBackwardOf<Gelu>(shape, dtype, dy, operands, gradients, workspace, stream);
    case Activation::kGeluExact:
      return BiasActBackwardOf<GeluExact>(shape, dtype, dy, operands, gradients, workspace, stream);
    case Activation::kSilu:
      return BiasActBackwardOf<Silu>(shape, dtype, dy, operands, gradients, workspace, stream);
    case Activation::kRelu:  // BiasReluBackward: it has a mask, and no x
      break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t BiasReluBackward(const BroadcastShape& shape, DType dtype, const void* dy,
                             const uint8_t* mask, const Gradient gradients[2],
                             SumWorkspace workspace, cudaStream_t stream) {
  const Operand bits[1] = {{mask, false}};
  return ElementwiseBackward<SelectByMask>(shape, dtype, dy, bits, gradients, workspace, stream);
}

}  // namespace jax_fastops::cuda

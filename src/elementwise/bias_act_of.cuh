// Definitions for elementwise/bias_act_of.h, which the source file of each activation instantiates.
#ifndef JAX_FASTOPS_ELEMENTWISE_BIAS_ACT_OF_CUH_
#define JAX_FASTOPS_ELEMENTWISE_BIAS_ACT_OF_CUH_

#include "elementwise/activation.cuh"
#include "elementwise/backward.cuh"
#include "elementwise/bias_act_of.h"
#include "elementwise/forward.cuh"

namespace jax_fastops::cuda {

template <typename Act>
struct BiasAct {
  using Family = BiasActKernels;
  static constexpr int kOperands = 2;
  static constexpr int kGradients = 2;
  static constexpr bool kMayBeWide = true;
  static constexpr bool kBits = false;
  static constexpr bool kFirstIsFull = true;
  static constexpr bool kShortUnits = true;

  // A bias of one element per unit is common in rows, as the bias of channels that come first.
  static constexpr bool HasForward(ForwardKind kind, int ones, bool wide) {
    if (kind == ForwardKind::kFlat) return ones == 0 && !wide;
    return ones == 0 || (ones == 2 && !wide);
  }
  using BackwardKinds = BiasKinds;
  using RowsKinds = BiasRowsKinds;

  template <typename T>
  static __device__ __forceinline__ ComputeType<T> Value(const ComputeType<T> (&x)[2]) {
    return Act::template Value<T>(x[0] + x[1]);
  }

  template <typename T>
  static __device__ __forceinline__ void Gradients(ComputeType<T> dy, const ComputeType<T> (&x)[2],
                                                   ComputeType<T> (&g)[2]) {
    g[0] = g[1] = dy * Act::template Derivative<T>(x[0] + x[1]);
  }

  static void Needed(const bool*, bool* needed) { needed[0] = needed[1] = true; }
};

template <typename Act>
cudaError_t BiasActForwardOf(const BroadcastShape& shape, DType dtype, const Operand operands[2],
                             void* out, cudaStream_t stream) {
  return ElementwiseForward<BiasAct<Act>>(shape, dtype, operands, out, stream);
}

template <typename Act>
cudaError_t BiasActBackwardOf(const BroadcastShape& shape, DType dtype, const void* dy,
                              const Operand operands[2], const Gradient gradients[2],
                              SumWorkspace workspace, cudaStream_t stream) {
  return ElementwiseBackward<BiasAct<Act>>(shape, dtype, dy, operands, gradients, workspace,
                                           stream);
}

// Instantiates the launchers of an activation. Used once, in the source file of that activation.
#define FASTOPS_INSTANTIATE_BIAS_ACT(Act)                                                        \
  template cudaError_t BiasActForwardOf<Act>(const BroadcastShape&, DType, const Operand[2],     \
                                             void*, cudaStream_t);                               \
  template cudaError_t BiasActBackwardOf<Act>(const BroadcastShape&, DType, const void*,         \
                                              const Operand[2], const Gradient[2], SumWorkspace, \
                                              cudaStream_t)

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_BIAS_ACT_OF_CUH_

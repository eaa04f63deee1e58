// gated_act: y = act(gate) * up, and the gradients dgate = dy * up * act'(gate), dup = dy *
// act(gate), on the loop of core/cuda/flat_elements.cuh.
//
// A pure element-wise pass, bound by memory. Two operands are one long row. The halves of one array
// are rows of n elements, 2 n apart. The activation is a run-time switch: it is the same for all
// threads, and costs nothing next to the memory accesses.
#include "core/cuda/activation.cuh"
#include "core/cuda/flat_elements.cuh"
#include "core/cuda/launch.h"
#include "elementwise/elementwise.h"

namespace jax_fastops::cuda {
namespace {

struct GatedActKernels;

// Inputs: gate, up; in the backward dy, gate, up.
template <Activation kActivation, bool kBackward>
struct GatedActOf {
  template <typename T>
  static __device__ __forceinline__ void Apply(const ComputeType<T> (&x)[kBackward ? 3 : 2],
                                               ComputeType<T> (&y)[kBackward ? 2 : 1]) {
    using M = ActivationMath<T>;
    using F = FormulaOf<kActivation, M>;
    if constexpr (kBackward) {
      y[0] = Pull<M, F>(x[1], x[0] * x[2]);
      y[1] = x[0] * F::Value(x[1]);
    } else {
      y[0] = F::Value(x[0]) * x[1];
    }
  }
};

template <bool kBackward>
struct GatedAct {
  using Family = GatedActKernels;
  static constexpr int kIn = kBackward ? 3 : 2, kOut = kBackward ? 2 : 1, kWords = 2;
  // gate, up, and their gradients.
  static constexpr int kPitched = kBackward ? 0b11110 : 0b011;

  Activation activation;

  template <typename Visit>
  __device__ __forceinline__ void Choose(const Visit& visit) const {
    ForActivation(activation, [&](auto known) { visit(GatedActOf<known.value, kBackward>()); });
  }
};

}  // namespace

cudaError_t GatedActForward(const GatedShape& shape, DType dtype, Activation activation,
                            const char* gate, const char* up, char* y, cudaStream_t stream) {
  const void* const inputs[] = {gate, up};
  void* const outputs[] = {y};
  return PitchedElements(GatedAct<false>{activation}, shape.rows, shape.n, shape.pitch, dtype,
                         inputs, outputs, stream);
}

cudaError_t GatedActBackward(const GatedShape& shape, DType dtype, Activation activation,
                             const char* dy, const char* gate, const char* up, char* dgate,
                             char* dup, cudaStream_t stream) {
  const void* const inputs[] = {dy, gate, up};
  void* const outputs[] = {dgate, dup};
  return PitchedElements(GatedAct<true>{activation}, shape.rows, shape.n, shape.pitch, dtype,
                         inputs, outputs, stream);
}

cudaError_t LoadGatedActKernels() { return LoadKernels<GatedActKernels>(); }

}  // namespace jax_fastops::cuda

// lerp: start + weight * (end - start) over operands that are broadcast against each other, and its
// gradients
//
//   dstart = dy * (1 - weight),  dend = dy * weight,  dweight = dy * (end - start),
//
// each summed over the dimensions along which its operand is broadcast. The kernels are in
// core/cuda/elements.cuh and core/cuda/elements_sums.cuh.
//
// Source: Paddle, lerp.
#include "elementwise/elementwise.h"

#include <utility>

#include "core/cuda/elements.cuh"
#include "core/cuda/elements_sums.cuh"
#include "core/cuda/launch.h"

namespace jax_fastops::cuda {
namespace {

struct Lerp {
  using Family = Lerp;
  static constexpr int kIn = 3, kWords = 4;
  static constexpr int kOperands = 3;
  static constexpr int kGradients = 3;
  static constexpr bool kMayBeWide = false;
  static constexpr bool kBits = false;
  static constexpr bool kMayBeStrided = true, kSymmetric = true;

  // The sets that are common in models, and those of the benchmark; 4 is a weight for each row.
  using RowSets = std::integer_sequence<int, kAnySet, 0, 1, 2, 4, 5>;
  using RaggedSets = std::integer_sequence<int, kAnySet, 0, 4>;

  using SumsSets =
      std::integer_sequence<int, RowClasses(RowClass::kFull, RowClass::kFull, RowClass::kFull),
                            RowClasses(RowClass::kFull, RowClass::kFull, RowClass::kRow),
                            RowClasses(RowClass::kFull, RowClass::kFull, RowClass::kColumn),
                            RowClasses(RowClass::kRow, RowClass::kFull, RowClass::kColumn),
                            RowClasses(RowClass::kColumn, RowClass::kFull, RowClass::kColumn),
                            RowClasses(RowClass::kRow, RowClass::kColumn, RowClass::kFull)>;

  bool swapped = false;  // the first operand is `end`
  void Swap() { swapped = !swapped; }

  template <typename Visit>
  __device__ __forceinline__ void Choose(const Visit& visit) const {
    visit(*this);
  }

  // Computed from the nearer end, so that a weight of 0 or 1 gives exactly that end. The end is
  // selected, because adding 0 may turn -0 into +0. If the distance is not finite, the formula is
  // used as written above, and gives the same NaN.
  template <typename T>
  static __device__ __forceinline__ void Apply(const ComputeType<T> (&x)[3],
                                               ComputeType<T> (&y)[1]) {
    using C = ComputeType<T>;
    const C distance = x[1] - x[0], weight = x[2];
    // These values depend only on the weight. The compiler hoists them if one weight serves many.
    const bool from_start = weight < C(0.5);
    const C way = from_start ? weight : weight - C(1);
    const C near = from_start ? x[0] : x[1];
    const C value = way == C(0) ? near : fma(way, distance, near);
    y[0] = fabs(distance) < C(INFINITY) ? value : fma(weight, distance, x[0]);
  }

  template <typename T>
  __device__ __forceinline__ void Gradients(ComputeType<T> dy, const ComputeType<T> (&x)[3],
                                            ComputeType<T> (&g)[3]) const {
    using C = ComputeType<T>;
    const C of_start = dy * (C(1) - x[2]), of_end = dy * x[2];
    g[0] = swapped ? of_end : of_start;
    g[1] = swapped ? of_start : of_end;
    g[2] = dy * (swapped ? x[0] - x[1] : x[1] - x[0]);
  }

  static void Needed(const bool* wanted, bool* needed) {
    needed[0] = needed[1] = wanted[2];
    needed[2] = wanted[0] || wanted[1];
  }
};

}  // namespace

cudaError_t LoadLerpKernels() {
  const cudaError_t error = LoadKernels<Lerp>();
  return error == cudaSuccess ? LoadKernels<GradientSumsKernels>() : error;
}

cudaError_t LerpForward(const BroadcastShape& shape, DType dtype, const Operand operands[3],
                        void* out, cudaStream_t stream) {
  return Elements(Lerp(), shape, dtype, operands, out, stream);
}

cudaError_t LerpBackward(const BroadcastShape& shape, DType dtype, const void* dy,
                         const Operand operands[3], const Gradient gradients[3],
                         SumWorkspace workspace, cudaStream_t stream) {
  return BackwardWithSums(Lerp(), shape, dtype, dy, operands, gradients, workspace, stream);
}

}  // namespace jax_fastops::cuda

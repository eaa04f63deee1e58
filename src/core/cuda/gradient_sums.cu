// The second kernel of an element-wise backward: adds up the partial sums of a gradient.
//
// A 64-bit division takes about a hundred instructions, but few if both numbers have 32 bits: the
// compiler adds that test to each.
#include "core/cuda/gradient_sums.h"

#include "core/cuda/partial_sums.cuh"
#include "core/cuda/vec.cuh"

namespace jax_fastops::cuda {
namespace {

// `A` is the accumulator type.
template <typename A>
struct GradientSums {
  using Value = A;
  static constexpr int kValues = 1;
  static constexpr int kPlans = kMaxGradients;

  FinishSum sum[kMaxGradients];
  DType dtype;  // of gradients that are not wide

  struct Terms {
    const A* parts;
    int64_t step;

    __device__ __forceinline__ int64_t At(uint32_t term) const { return term * step; }
    __device__ __forceinline__ void Load(int64_t at, A (&values)[1]) const {
      values[0] = parts[at];
    }
  };

  __device__ __forceinline__ Terms TermsOf(int64_t set, int64_t result) const {
    const FinishSum& of = sum[set];
    const int64_t outer = result / of.kept[2], column = result - outer * of.kept[2];
    const int64_t plane = outer / of.kept[1], row = outer - plane * of.kept[1];
    const int64_t first = plane * of.step[0] + row * of.step[1] + column * of.step[2];
    return {static_cast<const A*>(of.parts) + first, of.term_step};
  }

  __device__ __forceinline__ void Write(int64_t set, int64_t result, const A (&sums)[1], int writer,
                                        int) const {
    if (writer != 0) return;
    const FinishSum& of = sum[set];
    const int64_t outer = result / of.kept[2], plane = outer / of.kept[1];
    int64_t at = result - outer * of.kept[2];
    const int64_t index[2] = {plane, outer - plane * of.kept[1]};
    for (int i = 0; i < 2; ++i) {
      int64_t rest = index[i];
      for (int d = of.rank[i] - 1; d >= 0; --d) {
        const int64_t next = d > 0 ? rest / of.size[i][d] : 0;
        at += (rest - next * of.size[i][d]) * of.stride[i][d];
        rest = next;
      }
    }
    if (of.wide || sizeof(A) == 8 || dtype == DType::kF32) {
      static_cast<A*>(of.out)[at] = sums[0];
    } else if (dtype == DType::kBF16) {
      static_cast<__nv_bfloat16*>(of.out)[at] = FromCompute<__nv_bfloat16>(sums[0]);
    } else {
      static_cast<__half*>(of.out)[at] = FromCompute<__half>(sums[0]);
    }
  }
};

}  // namespace

cudaError_t SumsToFinish::Launch(DType dtype, cudaStream_t stream) const {
  const auto launch = [&]<typename A>(GradientSums<A> sums) {
    SumsShape shapes[kMaxGradients];
    for (int s = 0; s < count_; ++s) {
      sums.sum[s] = sum_[s];
      shapes[s] = {sum_[s].kept[0] * sum_[s].kept[1] * sum_[s].kept[2], sum_[s].terms};
    }
    sums.dtype = dtype;
    return FinishSums<GradientSumsKernels>(sums, count_, shapes, stream);
  };
  return dtype == DType::kF64 ? launch(GradientSums<double>{}) : launch(GradientSums<float>{});
}

}  // namespace jax_fastops::cuda

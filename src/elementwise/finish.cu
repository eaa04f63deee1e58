// The second kernel of an element-wise backward: adds up the partial sums of a gradient.
//
// A 64-bit division takes about a hundred instructions, but few if both numbers have 32 bits: the
// compiler adds that test to each.
#include "elementwise/finish.h"

#include "core/cuda/partial_sums.cuh"
#include "core/cuda/unit.cuh"

namespace jax_fastops::cuda {
namespace {

// `A` is the accumulator type.
template <typename A>
struct GradientSums {
  using Value = A;
  static constexpr int kValues = 1;
  static constexpr int kPlans = kMaxSums;

  FinishSum sum[kMaxSums];
  DType dtype;  // of gradients that are not wide

  struct Terms {
    const A* parts;
    const FinishSum& sum;

    __device__ __forceinline__ int64_t At(uint32_t term) const {
      const uint32_t inner = static_cast<uint32_t>(sum.added[2]);
      const uint32_t middle = static_cast<uint32_t>(sum.added[1]);
      if (middle * inner == 1) return term * sum.step[0];
      const uint32_t outer = term / inner;
      return outer / middle * sum.step[0] + outer % middle * sum.step[1] + term % inner;
    }
    __device__ __forceinline__ void Load(int64_t at, A (&values)[1]) const {
      values[0] = parts[at];
    }
  };

  __device__ __forceinline__ Terms TermsOf(int64_t set, int64_t result) const {
    const FinishSum& of = sum[set];
    const int64_t ab = result / of.kept[2], c = result - ab * of.kept[2];
    const int64_t a = ab / of.kept[1], b = ab - a * of.kept[1];
    return {static_cast<const A*>(of.parts) + a * of.step[0] + b * of.step[1] + c, of};
  }

  __device__ __forceinline__ void Write(int64_t set, int64_t result, const A (&sums)[1], int writer,
                                        int) const {
    if (writer != 0) return;
    const FinishSum& of = sum[set];
    const int64_t ab = result / of.kept[2], a = ab / of.kept[1];
    int64_t place = result - ab * of.kept[2];
    const auto add_places = [&](int64_t rest, int rank, const int64_t* sizes,
                                const int64_t* strides) {
      for (int d = rank - 1; d >= 0; --d) {
        const int64_t next = d > 0 ? rest / sizes[d] : 0;
        place += (rest - next * sizes[d]) * strides[d];
        rest = next;
      }
    };
    add_places(a, of.rank_a, of.size_a, of.stride_a);
    add_places(ab - a * of.kept[1], of.rank_b, of.size_b, of.stride_b);
    if (of.wide || sizeof(A) == 8 || dtype == DType::kF32) {
      static_cast<A*>(of.out)[place] = sums[0];
    } else if (dtype == DType::kBF16) {
      static_cast<__nv_bfloat16*>(of.out)[place] = FromCompute<__nv_bfloat16>(sums[0]);
    } else {
      static_cast<__half*>(of.out)[place] = FromCompute<__half>(sums[0]);
    }
  }
};

}  // namespace

cudaError_t SumsToFinish::Launch(DType dtype, cudaStream_t stream) const {
  const auto launch = [&]<typename A>(GradientSums<A> sums) {
    SumsShape shapes[kMaxSums];
    for (int s = 0; s < count_; ++s) {
      sums.sum[s] = sum_[s];
      shapes[s] = {sum_[s].results(), sum_[s].terms()};
    }
    sums.dtype = dtype;
    return FinishSums<FinishKernels>(sums, count_, shapes, stream);
  };
  return dtype == DType::kF64 ? launch(GradientSums<double>{}) : launch(GradientSums<float>{});
}

}  // namespace jax_fastops::cuda

// Sums of deviations from a shift that follows the mean, which batch_norm_statistics.cu explains.
#ifndef JAX_FASTOPS_CUDA_BATCH_NORM_DEVIATIONS_CUH_
#define JAX_FASTOPS_CUDA_BATCH_NORM_DEVIATIONS_CUH_

#include "cuda/batch_norm_fold.cuh"
#include "cuda/batch_norm_geometry.cuh"
#include "cuda/batch_norm_units.cuh"
#include "cuda/packed.cuh"

namespace jax_fastops::cuda::batch_norm {

// Sums of deviations of one channel's values from a shift.
//
// With a value that is not finite the sum must become what it would without the shift; the sum of
// the squares is not finite then.
template <typename A>
struct Deviations {
  A shift = 0;
  A sum = 0;
  A squares = 0;

  __device__ __forceinline__ void Begin(A value) { shift = isfinite(value) ? value : A(0); }

  __device__ __forceinline__ void Add(A value) {
    const A deviation = value - shift;
    sum += deviation;
    squares = fma(deviation, deviation, squares);
  }

  // From now on from the mean of the `n` so far, or from near it: what the sums are is exact but
  // for their own rounding.
  __device__ __forceinline__ void Shift(A n, A inverse_n) {
    const A moved = shift + sum * inverse_n;
    const A d = moved - shift;
    if (!isfinite(squares)) return;
    squares = max(fma(d, fma(n, d, A(-2) * sum), squares), A(0));
    sum = fma(-n, d, sum);
    shift = moved;
  }

  // The sum of `n` values, less `base`, and that of their squares. If only squares overflow, it is
  // infinite.
  __device__ __forceinline__ Pair<double> Result(double n, double base) const {
    const double d = static_cast<double>(shift) - base;
    Pair<double> sums;
    sums.value[0] = fma(n, d, static_cast<double>(sum));
    sums.value[1] = fma(d, fma(n, d, 2 * static_cast<double>(sum)), static_cast<double>(squares));
    return sums;
  }
};

// Adds the group's cut unit to what the thread that has it has added of the other ones. `x` is the
// group.
template <typename T>
__device__ __forceinline__ void AddCut(const Geometry& g, const Share& share, const T* x,
                                       Deviations<ComputeType<T>> (&deviations)[kUnit]) {
  if (share.cut > 0) {
    const UnitBits<T> unit = LoadCutUnit(x + g.group_size - share.cut, share.cut);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (i >= share.cut) continue;
      const ComputeType<T> value = ToCompute(unit[i]);
      if (share.count == 0) deviations[i].Begin(value);
      deviations[i].Add(value);
    }
  }
}

}  // namespace jax_fastops::cuda::batch_norm

#endif  // JAX_FASTOPS_CUDA_BATCH_NORM_DEVIATIONS_CUH_

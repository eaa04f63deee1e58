// Sums of deviations from a shift that follows the mean. statistics.cu explains the method.
#pragma once

#include "batch_norm/fold.cuh"
#include "batch_norm/geometry.cuh"
#include "batch_norm/units.cuh"
#include "core/cuda/vec.cuh"

namespace jax_fastops::cuda::batch_norm {

// Sums of the deviations of one channel's values from a shift.
//
// If a value is not finite, the sum must become what it would be without a shift. The sum of
// squares is not finite in that case, which is how the code detects it.
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

  // Moves the shift to the mean of the `n` values so far, or close to it. The sums are converted
  // exactly, except for rounding, wherever the new shift lies.
  __device__ __forceinline__ void Shift(A n, A inverse_n) {
    const A moved = shift + sum * inverse_n;
    const A d = moved - shift;
    if (!isfinite(squares)) return;
    squares = max(fma(d, fma(n, d, A(-2) * sum), squares), A(0));
    sum = fma(-n, d, sum);
    shift = moved;
  }

  // The sum of the `n` values minus `base`, and the sum of their squares. If only the squares
  // overflow, the second sum is infinite.
  __device__ __forceinline__ Pair<double> Result(double n, double base) const {
    const double d = static_cast<double>(shift) - base;
    Pair<double> sums;
    sums.value[0] = fma(n, d, static_cast<double>(sum));
    sums.value[1] = fma(d, fma(n, d, 2 * static_cast<double>(sum)), static_cast<double>(squares));
    return sums;
  }
};

// Adds the group's cut unit to the sums of the thread that has it. `x` points to the group.
template <typename T>
__device__ __forceinline__ void AddCut(const Geometry& g, const Share& share, const T* x,
                                       Deviations<ComputeType<T>> (&deviations)[kUnit]) {
  if (share.cut > 0) {
    const UnitVec<T> unit = LoadCutUnit(x + g.group_size - share.cut, share.cut);
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

// Mean and variance of every channel, in one pass that is bound by reading x.
//
// A sum of squares minus the square of the sum cancels where the mean is large. So each thread sums
// deviations, from a shift that is its channel's first value and then, whenever it has four times
// as many values, their mean so far: the shift stays so near the mean that nothing of importance
// cancels, without a second pass and without a division for each value. From there on there are
// means and sums of squared deviations, merged by Chan's formula, first in the block, then by a
// second kernel. Merging takes differences of means; so that these are not those of rounded large
// numbers, one of the channel's values is left off all its means until the end.
#include <cstdint>
#include <cstring>

#include "cuda/batch_norm.h"
#include "cuda/batch_norm_fold.cuh"
#include "cuda/batch_norm_geometry.cuh"
#include "cuda/batch_norm_units.cuh"
#include "cuda/load_kernels.h"
#include "cuda/packed.cuh"

namespace jax_fastops::cuda {
namespace {

using namespace batch_norm;  // NOLINT: this file is a part of it

// What is left off a channel's means: the one in the middle of three of its values.
template <typename T>
__device__ __forceinline__ T BaseOf(T a, T b, T c) {
  using A = ComputeType<T>;
  const A x = ToCompute(a), y = ToCompute(b), z = ToCompute(c);
  const A middle = max(min(x, y), min(max(x, y), z));
  return FromCompute<T>(isfinite(middle) ? middle : A(0));
}

struct Params {
  Geometry geometry;
  const void* x;
  void* workspace;
  int64_t workspace_size;
};

// Sums of deviations of one channel's values from a shift.
//
// With a value that is not finite the sum must become what it would without the shift, and the
// squares' sum NaN, also if only the latter overflows.
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

  __device__ __forceinline__ Moments<A> Result(A n, A inverse_n, A base) const {
    Moments<A> moments;
    if (n == 0) return moments;
    const A mean = sum * inverse_n;
    moments.value[0] = n;
    moments.value[1] = (shift - base) + mean;
    moments.value[2] = isfinite(squares) ? max(fma(-sum, mean, squares), A(0))
                       : isfinite(sum)   ? squares
                                         : A(NAN);
    return moments;
  }
};

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor<T>)
    StatisticsKernel(const __grid_constant__ Params p) {
  using A = ComputeType<T>;
  constexpr int kRows = kInFlight<T, 1>;
  __shared__ FoldBuffer<Moments<A>> buffer;

  const Geometry& g = p.geometry;
  const Place place = PlaceOf(g, blockIdx.x);
  const Share share = ShareOf(g, place, threadIdx.x);
  const T* const x = static_cast<const T*>(p.x) + place.group * g.group_size;

  Deviations<A> deviations[kUnit];
  UnitBits<T> bases = {};
  const auto begin = [&](const UnitBits<T>& unit) {
    if (share.count == 0 && share.cut == 0) return;
    const UnitChannels channels(g, place, share, false);
    UnitBits<T> samples[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) samples[i] = channels.LoadSample<kAligned>(g, x + g.samples[i]);
    T middles[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i)
      middles[i] = BaseOf(samples[0][i], samples[1][i], samples[2][i]);
    memcpy(bases.words, middles, sizeof(middles));
    if (share.count == 0) return;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) deviations[i].Begin(ToCompute(unit[i]));
  };
  int added = 0, shift_at = 4;
  Sweep<kRows, UnitBits<T>>(
      share.count, share.first, share.stride,
      [&](int64_t element) { return LoadUnit<T, kAligned>(x + element); }, begin,
      [&](const UnitBits<T>& unit, int64_t) {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) deviations[i].Add(ToCompute(unit[i]));
      },
      [&] {
        added += kRows;
        if (added < shift_at) return;
        const A n = static_cast<A>(added), inverse_n = FastQuotient(A(1), n);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) deviations[i].Shift(n, inverse_n);
        shift_at = added * 4;
      });
  if (share.cut > 0) {
    const UnitBits<T> unit = LoadCutUnit(x + g.group_size - share.cut, share.cut);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (i >= share.cut) continue;
      const A value = ToCompute(unit[i]);
      if (share.count == 0) deviations[i].Begin(value);
      deviations[i].Add(value);
    }
  }

  Moments<A> moments[kUnit];
  const A inverse[2] = {A(1) / static_cast<A>(share.count), A(1) / static_cast<A>(share.count + 1)};
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    const bool more = i < share.cut;
    moments[i] = deviations[i].Result(static_cast<A>(share.count + more),
                                      more ? inverse[1] : inverse[0], ToCompute(bases[i]));
  }
  Fold(g, place, moments, buffer, static_cast<A*>(p.workspace) + place.group * p.workspace_size);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    FinishStatisticsKernel(const __grid_constant__ Finish f) {
  using A = ComputeType<T>;
  FinishChannels<Moments<A>>(f, [&](int64_t group, int64_t channel, const Moments<A>& moments) {
    const Geometry& g = f.geometry;
    const T* const x = static_cast<const T*>(f.x) + group * g.group_size + channel * g.inner;
    const T base = BaseOf(x[g.samples[0]], x[g.samples[1]], x[g.samples[2]]);
    const int64_t at = group * f.out_stride + channel;
    static_cast<A*>(f.out[0])[at] = ToCompute(base) + moments.value[1];
    static_cast<A*>(f.out[1])[at] = moments.value[2] / static_cast<A>(f.n);
  });
}

struct Kernels {
  void (*statistics)(Params);
  void (*finish)(Finish);
  int resident;
};

template <typename T>
Kernels KernelsFor(bool aligned) {
  return {aligned ? StatisticsKernel<T, true> : StatisticsKernel<T, false>,
          FinishStatisticsKernel<T>, kBlocksPerProcessor<T>};
}

Kernels KernelsOf(DType dtype, bool aligned) {
  switch (dtype) {
    case DType::kF32:
      return KernelsFor<float>(aligned);
    case DType::kBF16:
      return KernelsFor<__nv_bfloat16>(aligned);
    case DType::kF16:
      return KernelsFor<__half>(aligned);
    case DType::kF64:
      return KernelsFor<double>(aligned);
  }
  return {};
}

}  // namespace

cudaError_t BatchNormStatistics(const BatchNormShape& shape, DType dtype,
                                const BatchNormStatisticsArrays& arrays, cudaStream_t stream) {
  if (IsEmpty(shape)) return cudaSuccess;
  const Kernels kernels = KernelsOf(dtype, AreGroupsAligned(shape, DTypeSize(dtype), arrays.x));
  int processors;
  const cudaError_t error = GetProcessors(&processors);
  if (error != cudaSuccess) return error;

  Params params;
  params.x = arrays.x;
  params.workspace = arrays.workspace;
  params.workspace_size = arrays.workspace_size;
  const BlockWish wish = {int64_t{processors} * kernels.resident, 3, arrays.workspace_size / 3};
  Finish finish;
  unsigned finish_blocks;
  if (!MakeGeometry(shape, wish, &params.geometry) ||
      !MakeFinish(shape, params.geometry, arrays.workspace, arrays.workspace_size, &finish,
                  &finish_blocks)) {
    return cudaErrorInvalidConfiguration;
  }
  finish.x = arrays.x;
  finish.out[0] = arrays.mean;
  finish.out[1] = arrays.var;
  finish.out_stride = shape.channels;
  kernels.statistics<<<BlocksOf(shape, params.geometry), kThreads, 0, stream>>>(params);
  kernels.finish<<<finish_blocks, kThreads, 0, stream>>>(finish);
  return cudaGetLastError();
}

cudaError_t LoadBatchNormStatisticsKernels() {
  static KernelLoader loader;
  return loader.Load([](const auto& load) {
    for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
      for (const bool aligned : {false, true}) {
        const Kernels kernels = KernelsOf(static_cast<DType>(dtype), aligned);
        load(reinterpret_cast<const void*>(kernels.statistics));
        load(reinterpret_cast<const void*>(kernels.finish));
      }
    }
  });
}

}  // namespace jax_fastops::cuda

// Mean and variance of every channel, in one pass that is bound by reading x.
//
// The sum of squares minus the square of the sum cancels if the mean is large. So each thread sums
// deviations from a shift. The shift starts as the first value of the channel. Whenever the number
// of values has grown by a factor of about four, the shift moves to their mean so far. It stays so
// close to the mean that nothing significant cancels. There is no second pass, and no division per
// value. After that, the sums of float values and of their squares are converted to double, which
// has enough digits for the remaining cancellation. The partial sums of the threads are simply
// added, first within the block, then by a second kernel. Inputs of type double have no wider type;
// for them one value of the channel is subtracted first.
#include <cstdint>

#include "batch_norm/batch_norm.h"
#include "batch_norm/deviations.cuh"
#include "batch_norm/fold.cuh"
#include "batch_norm/geometry.cuh"
#include "batch_norm/units.cuh"
#include "core/cuda/load_kernels.h"
#include "core/cuda/packed.cuh"

namespace jax_fastops::cuda {
namespace {

using namespace batch_norm;  // NOLINT: this file is a part of it

// The base that is subtracted from a channel's values: 0, or for double the median of three of the
// values. `x` points to the group.
template <typename T>
__device__ __forceinline__ double BaseOf(const Geometry& g, const T* x, int64_t channel) {
  if constexpr (sizeof(T) < 8) {
    return 0;
  } else {
    const int64_t outer = g.group_size / (g.channels * g.inner);
    double value[3];
    for (int i = 0; i < 3; ++i) {
      value[i] = x[(i * (outer - 1) / 2 * g.channels + channel) * g.inner + i * (g.inner - 1) / 2];
    }
    const double middle = max(min(value[0], value[1]), min(max(value[0], value[1]), value[2]));
    return isfinite(middle) ? middle : 0;
  }
}

struct Params {
  Geometry geometry;
  const void* x;
  void* workspace;
  int64_t workspace_size;
};

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor<T>)
    StatisticsKernel(const __grid_constant__ Params p) {
  using A = ComputeType<T>;
  constexpr int kRows = kInFlight<T, 1>;
  __shared__ FoldBuffer<double> buffer;

  LetDependentsStart();
  const Geometry& g = p.geometry;
  const Place place = PlaceOf(g, blockIdx.x);
  const Share share = ShareOf(g, place, threadIdx.x);
  const T* const x = static_cast<const T*>(p.x) + place.group * g.group_size;

  Deviations<A> deviations[kUnit];
  const auto begin = [&](const UnitBits<T>& unit) {
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
        const A n = static_cast<A>(added), inverse_n = A(1) / n;
#pragma unroll
        for (int i = 0; i < kUnit; ++i) deviations[i].Shift(n, inverse_n);
        shift_at = added * 4;
      });
  AddCut(g, share, x, deviations);

  double bases[kUnit] = {};
  if (sizeof(T) == 8 && (share.count > 0 || share.cut > 0)) {
    UnitChannels(g, place, share, false)
        .Gather([&](int64_t channel) { return BaseOf(g, x, channel); }, bases);
  }
  Pair<double> sums[kUnit];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    const int n = share.count + (i < share.cut);
    if (n > 0) sums[i] = deviations[i].Result(n, bases[i]);
  }
  Fold(g, place, sums, buffer,
       reinterpret_cast<double*>(static_cast<A*>(p.workspace) + place.group * p.workspace_size));
}

template <typename T>
__global__ void __launch_bounds__(kMaxFinishThreads)
    FinishStatisticsKernel(const __grid_constant__ Finish f) {
  using A = ComputeType<T>;
  FinishChannels<A, double>(f, [&](int64_t group, int64_t channel, const double (&sums)[2]) {
    const Geometry& g = f.geometry;
    const double base = BaseOf(g, static_cast<const T*>(f.x) + group * g.group_size, channel);
    const int64_t at = group * f.out_stride + channel;
    const double mean = sums[0] / f.n, var = sums[1] / f.n - mean * mean;
    static_cast<A*>(f.out[0])[at] = static_cast<A>(base + mean);
    static_cast<A*>(f.out[1])[at] = static_cast<A>(var < 0 ? 0 : var);
  });
}

using Kernels = SumKernels<Params>;

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
  Params params;
  params.x = arrays.x;
  params.workspace = arrays.workspace;
  params.workspace_size = arrays.workspace_size;
  const int64_t pairs =
      arrays.workspace_size / (dtype == DType::kF64 ? 2 : 2 * sizeof(double) / sizeof(float));
  Finish finish;
  finish.x = arrays.x;
  finish.out[0] = arrays.mean;
  finish.out[1] = arrays.var;
  finish.out_stride = shape.channels;
  return LaunchSums(shape, kernels, arrays.workspace, arrays.workspace_size, pairs, &params,
                    &finish, stream);
}

cudaError_t LoadBatchNormStatisticsKernels() {
  static KernelLoader loader;
  return loader.Load([](const auto& load) {
    for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
      for (const bool aligned : {false, true}) {
        const Kernels kernels = KernelsOf(static_cast<DType>(dtype), aligned);
        load(reinterpret_cast<const void*>(kernels.sum));
        load(reinterpret_cast<const void*>(kernels.finish));
      }
    }
  });
}

}  // namespace jax_fastops::cuda

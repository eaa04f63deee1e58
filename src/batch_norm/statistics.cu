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
#include "core/cuda/dependent.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/vec.cuh"

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
  DType dtype;
};

template <typename T, bool kAligned>
__device__ __forceinline__ void Statistics(const Params& p, FoldBuffer<double>& buffer) {
  using A = ComputeType<T>;
  constexpr int kRows = kInFlight<T, 1>;

  LetDependentsStart();
  const Geometry& g = p.geometry;
  const Place place = PlaceOf(g, blockIdx.x);
  const Share share = ShareOf(g, place, threadIdx.x);
  const T* const x = static_cast<const T*>(p.x) + place.group * g.group_size;

  Deviations<A> deviations[kUnit];
  const auto begin = [&](const UnitVec<T>& unit) {
    if (share.count == 0) return;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) deviations[i].Begin(ToCompute(unit[i]));
  };
  int added = 0, shift_at = 4;
  Sweep<kRows, UnitVec<T>>(
      share.count, share.first, share.stride,
      [&](int64_t element) { return LoadUnit<T, kAligned>(x + element); }, begin,
      [&](const UnitVec<T>& unit, int64_t) {
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

template <typename A, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor<A>)
    StatisticsKernel(const __grid_constant__ Params p) {
  __shared__ FoldBuffer<double> buffer;
  ForTypesOf<A>(p.dtype, [&]<typename T>(TypeTag<T>) { Statistics<T, kAligned>(p, buffer); });
}

// `A` is the accumulator type. Only double has a base that is not 0.
template <typename A>
struct MomentSums : ChannelSums<A, double> {
  __device__ __forceinline__ void Write(int64_t group, int64_t channel, const double (&sums)[2],
                                        int writer, int) const {
    if (writer != 0) return;
    const Finish& f = this->f;
    const Geometry& g = f.geometry;
    double base = 0;
    if constexpr (sizeof(A) == 8) {
      base = BaseOf(g, static_cast<const A*>(f.x) + group * g.group_size, channel);
    }
    const int64_t at = group * f.out_stride + channel;
    const double mean = sums[0] / f.n, var = sums[1] / f.n - mean * mean;
    static_cast<A*>(f.out[0])[at] = static_cast<A>(base + mean);
    static_cast<A*>(f.out[1])[at] = static_cast<A>(var < 0 ? 0 : var);
  }
};

}  // namespace

cudaError_t BatchNormStatistics(const BatchNormCall& call, cudaStream_t stream) {
  if (IsEmpty(call.shape)) return cudaSuccess;
  Params params = {{}, call.x, call.workspace, call.workspace_size, call.dtype};
  const bool aligned = AreGroupsAligned(call, call.x);
  return ForDType(call.dtype, [&]<typename T>(TypeTag<T>) {
    using A = ComputeType<T>;
    constexpr bool kAligned = sizeof(T) < 8;  // double has only the kernel for any address
    const auto sum = aligned ? KernelOf<BatchNormKernels, StatisticsKernel<A, kAligned>>()
                             : KernelOf<BatchNormKernels, StatisticsKernel<A, false>>();
    MomentSums<A> sums;
    sums.f.x = call.x;
    sums.f.out[0] = call.mean;
    sums.f.out[1] = call.var;
    sums.f.out_stride = call.shape.channels;
    return LaunchSums(call, sum, kBlocksPerProcessor<T>,
                      call.workspace_size * sizeof(A) / (2 * sizeof(double)), &params, sums,
                      stream);
  });
}

}  // namespace jax_fastops::cuda

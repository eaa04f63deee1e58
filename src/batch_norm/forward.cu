// The forward of a batch norm: one cooperative kernel, or the kernel of the statistics and the one
// that applies them.
//
// The cooperative kernel computes the statistics and normalizes x, and between these two passes
// keeps x on the chip. batch_norm/resident.cuh describes the method.
#include <cstdint>
#include <type_traits>

#include "batch_norm/batch_norm.h"
#include "batch_norm/resident.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/packed.cuh"
#include "core/cuda/relu_of.cuh"

namespace jax_fastops::cuda {

struct BatchNormForwardKernels;  // the list of kernels

namespace {

using namespace batch_norm;  // NOLINT: this file is a part of it

using Params = ResidentParams<BatchNormForwardArrays>;

// sum / n. All blocks wait for this result, and a division would take most of that time. One
// correction step makes the product as accurate.
__device__ __forceinline__ double Average(double sum, double n, double inverse_n) {
  const double quotient = sum * inverse_n;
  return isfinite(quotient) ? fma(fma(-quotient, n, sum), inverse_n, quotient) : quotient;
}

// The parameters of a thread's channels, and y.
template <typename T, bool kResidual>
struct Normalization {
  using A = ComputeType<T>;

  A mean[kUnit], factor[kUnit], bias[kUnit];
  bool relu;
  uint8_t* mask;  // of the group, or null

  // The unit of the result. Elements at `size` and after get no mask bit.
  __device__ __forceinline__ UnitBits<T> operator()(const UnitBits<T>& unit,
                                                    const UnitBits<T>& residual, int64_t element,
                                                    int size) const {
    A values[kUnit];
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      values[i] = fma(ToCompute(unit[i]) - mean[i], factor[i], bias[i]);
      if constexpr (kResidual) values[i] += ToCompute(residual[i]);
      if (values[i] > 0) bits |= 1u << i;
    }
    if (mask != nullptr) mask[element >> 3] = static_cast<uint8_t>(bits & 0xffu >> (kUnit - size));
    if (relu) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) values[i] = ReluOf(values[i]);
    }
    return RoundUnit<T>(values);
  }
};

template <typename T, bool kResidual>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    ForwardKernel(const __grid_constant__ Params p) {
  using A = ComputeType<T>;
  using Units = Resident<T, 1, false>;
  using Unit = typename Units::Loaded;
  extern __shared__ uint4 shared[];

  const Geometry& g = p.finish.geometry;
  const Place place = PlaceOf(g, blockIdx.x);
  const Share share = ShareOf(g, place, threadIdx.x);
  const int64_t group = place.group * g.group_size;
  const T* const x[1] = {PartOf<T>(p.arrays.x, group)};
  const T* const residual = PartOf<T>(p.arrays.residual, group);
  T* const y = PartOf<T>(p.arrays.y, group);
  const UnitChannels channels(g, place, share, p.aligned_parameters);

  auto& buffer = *reinterpret_cast<FoldBuffer<double>*>(shared);
  Units units(g, share, x, nullptr, nullptr, p.slots, shared + FoldBytes(8) / 16);
  const bool together = units.together();
  units.Start();

  // First pass: the sums.
  const GridTotals<A, double> totals(p, place, buffer);
  {
    UnitDeviations<A> deviations;
    if (share.count > 0) deviations.Begin(units.first().of[0]);
    int shift_at = 4;
    units.FirstPass([&](const Unit& unit) { deviations.Add(unit.of[0]); },
                    [&](int added) {
                      if (added < shift_at) return;
                      deviations.Shift(added);
                      shift_at = 4 * added;
                    });
    deviations.AddCut(g, share, x[0]);
    Pair<double> sums[kUnit];
    deviations.Result(share, {}, sums);
    totals.Write(sums);
  }

  // Second pass. Loads that do not need the statistics are issued before the grid barrier.
  Normalization<T, kResidual> normalize;
  normalize.relu = p.relu;
  normalize.mask = PartOf<uint8_t>(p.arrays.mask, place.group * p.mask_bytes);
  const auto find = [&] {
    A scale[kUnit];
    totals.Find(
        [&](int64_t, int64_t, const double (&sums)[2], A(&values)[2]) {
          const double mean = Average(sums[0], p.finish.n, p.inverse_n);
          const double var = Average(sums[1], p.finish.n, p.inverse_n) - mean * mean;
          values[0] = static_cast<A>(mean);
          values[1] = static_cast<A>(var < 0 ? 0 : var);
        },
        [&] {
          channels.LoadOr(static_cast<const A*>(p.arrays.scale), A(1), scale);
          channels.LoadOr(static_cast<const A*>(p.arrays.bias), A(0), normalize.bias);
        });
    if (share.count == 0 && share.cut == 0) return;
    totals.Load(channels, share, normalize.mean, normalize.factor);
    const A eps = static_cast<A>(p.eps);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      normalize.factor[i] = InverseRoot(normalize.factor[i] + eps) * scale[i];
    }
  };
  units.template SecondPass<kInFlight<T, kResidual ? 2 : 1>>(
      find,
      [&](int64_t element) {
        if constexpr (kResidual) return LoadUnit<T, true>(residual + element);
        return UnitBits<T>{};
      },
      [&](const Unit& unit, const UnitBits<T>& other, int64_t element, auto) {
        StoreResident(y + element, normalize(unit.of[0], other, element, kUnit), together);
      });
  if (share.cut > 0) {
    const int64_t element = g.group_size - share.cut;
    UnitBits<T> other;
    if constexpr (kResidual) other = LoadCutUnit(residual + element, share.cut);
    const UnitBits<T> result = normalize(units.LoadCut().of[0], other, element, share.cut);
    StoreCutUnit(y + element, result, share.cut);
  }
}

}  // namespace

cudaError_t BatchNormForward(const BatchNormShape& shape, DType dtype, double eps, bool relu,
                             const BatchNormForwardArrays& arrays, cudaStream_t stream) {
  if (IsEmpty(shape)) return cudaSuccess;
  const bool residual = arrays.residual != nullptr;
  ResidentDevice device;
  cudaError_t error = GetResidentDevice(&device);
  if (error != cudaSuccess) return error;
  ResidentPlan plan;
  if (AreGroupsAligned(shape, DTypeSize(dtype), arrays.x, arrays.residual, arrays.y) &&
      PlanForward(shape, static_cast<int>(DTypeSize(dtype)), residual, device,
                  arrays.workspace_size, &plan)) {
    plan.finish.out[0] = arrays.mean;
    plan.finish.out[1] = arrays.var;
    plan.finish.out_stride = shape.channels;
    Params params;
    params.eps = eps;
    params.relu = relu;
    params.aligned_parameters = AreAligned(arrays.mean, arrays.var, arrays.scale, arrays.bias);
    error = ForDType(dtype, [&](auto tag) {
      using T = typename decltype(tag)::Type;
      using Kernels = BatchNormForwardKernels;
      if constexpr (sizeof(T) == 8) {
        return cudaErrorInvalidValue;  // there is no plan
      } else {
        const auto kernel = residual ? KernelOf<Kernels, ForwardKernel<T, true>>()
                                     : KernelOf<Kernels, ForwardKernel<T, false>>();
        return LaunchResident(kernel, shape, plan, arrays, &params, stream);
      }
    });
    // If the device is shared, it may have less room than its attributes say. Use the separate
    // kernels then.
    if (error != cudaErrorCooperativeLaunchTooLarge) return error;
  }
  error = BatchNormStatistics(shape, dtype, arrays.statistics(), stream);
  if (error != cudaSuccess) return error;
  return BatchNormApply(shape, dtype, eps, relu, arrays.apply(), stream);
}

cudaError_t LoadBatchNormForwardKernels() {
  cudaError_t error = LoadKernels<BatchNormForwardKernels>();
  if (error == cudaSuccess) error = LoadBatchNormStatisticsKernels();
  if (error == cudaSuccess) error = LoadBatchNormApplyKernels();
  return error;
}

}  // namespace jax_fastops::cuda

// The backward of a batch norm for one cotangent: one cooperative kernel, or the kernel of the sums
// and the one that computes dx.
//
// The cooperative kernel computes the sums and then dx, and between these two passes keeps x and dy
// on the chip. batch_norm/resident.cuh describes the method.
#include <cstdint>
#include <type_traits>

#include "batch_norm/batch_norm.h"
#include "batch_norm/resident.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/packed.cuh"

namespace jax_fastops::cuda {

struct BatchNormGradientKernels;  // the list of kernels

namespace {

using namespace batch_norm;  // NOLINT: this file is a part of it

using Params = ResidentParams<BatchNormGradientArrays>;

// dx from the three factors of each of a thread's channels, as in BackwardKernel.
template <typename T>
struct Derivative {
  using A = ComputeType<T>;

  A mean[kUnit], a[kUnit], b[kUnit], c[kUnit];

  // All parameters are loaded together, so that across the grid barrier the registers are free for
  // x and dy.
  __device__ __forceinline__ void Load(const Params& p, const GridTotals<A, A>& totals,
                                       const UnitChannels& channels, const Share& share) {
    const A eps = static_cast<A>(p.eps);
    A var[kUnit], more[kUnit];
    totals.Load(channels, share, c, b);
    channels.Load(static_cast<const A*>(p.arrays.mean), mean);
    channels.Load(static_cast<const A*>(p.arrays.var), var);
    channels.LoadOr(static_cast<const A*>(p.arrays.scale), A(1), a);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      var[i] += eps;
      a[i] *= InverseRoot(var[i]);
    }
    channels.LoadOr(static_cast<const A*>(p.arrays.dvar), A(0), more);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) b[i] = fma(A(2), more[i], -(a[i] * b[i] / var[i]));
    channels.LoadOr(static_cast<const A*>(p.arrays.dmean), A(0), more);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) c[i] = fma(-a[i], c[i], more[i]);
  }

  __device__ __forceinline__ UnitBits<T> operator()(const UnitBits<T>& x,
                                                    const UnitBits<T>& g) const {
    A values[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const A sum = fma(ToCompute(x[i]) - mean[i], b[i], c[i]);
      values[i] = fma(a[i], ToCompute(g[i]), sum);
    }
    return RoundUnit<T>(values);
  }
};

template <typename T, bool kMask>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    GradientKernel(const __grid_constant__ Params p) {
  using A = ComputeType<T>;
  using Units = Resident<T, 2, kMask>;
  using Unit = typename Units::Loaded;  // x and dy
  extern __shared__ uint4 shared[];

  const Geometry& g = p.finish.geometry;
  const Place place = PlaceOf(g, blockIdx.x);
  const Share share = ShareOf(g, place, threadIdx.x);
  const int64_t group = place.group * g.group_size;
  const T* const arrays[2] = {PartOf<T>(p.arrays.x, group), PartOf<T>(p.arrays.dy, group)};
  T* const dx = PartOf<T>(p.arrays.dx, group);
  const uint8_t* const mask =
      kMask ? PartOf<uint8_t>(p.arrays.mask, place.group * p.mask_bytes) : nullptr;
  const UnitChannels channels(g, place, share, p.aligned_parameters);

  auto& buffer = *reinterpret_cast<FoldBuffer<A>*>(shared);
  Units units(g, share, arrays, mask, p.mask_end, p.slots, shared + FoldBytes(sizeof(A)) / 16);
  const bool together = units.together();
  units.Start();
  const auto select = [&](const Unit& unit) {
    return kMask ? SelectUnit(unit.bits, unit.of[1]) : unit.of[1];
  };

  // First pass: the sums.
  const GridTotals<A, A> totals(p, place, buffer);
  Derivative<T> derivative;
  {
    A mean[kUnit];
    if (share.count > 0 || share.cut > 0) channels.Load(static_cast<const A*>(p.arrays.mean), mean);
    Pair<A> sums[kUnit];
    // Skip the elements after a cut. Their dy is 0, but their x is padding and their mean may be
    // infinite, so the product could be NaN.
    const auto add = [&](const UnitBits<T>& x, const UnitBits<T>& selected, int size) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if (i >= size) continue;
        const A value = ToCompute(selected[i]);
        sums[i].value[0] += value;
        sums[i].value[1] = fma(value, ToCompute(x[i]) - mean[i], sums[i].value[1]);
      }
    };
    units.FirstPass(
        [&](Unit& unit) {
          unit.of[1] = select(unit);
          add(unit.of[0], unit.of[1], kUnit);
        },
        [](int) {});
    if (share.cut > 0) {
      const Unit last = units.LoadCut();
      add(last.of[0], select(last), share.cut);
    }
    totals.Write(sums);
  }

  // Second pass. Loads that do not need the sums are issued before the grid barrier.
  struct Nothing {};
  units.template SecondPass<kInFlight<T, 2>>(
      [&] {
        totals.Find(
            [&](int64_t, int64_t, const A(&sums)[2], A(&values)[2]) {
#pragma unroll
              for (int i = 0; i < 2; ++i) values[i] = sums[i] / static_cast<A>(p.finish.n);
            },
            [] {});
        if (share.count > 0 || share.cut > 0) derivative.Load(p, totals, channels, share);
      },
      [](int64_t) { return Nothing(); },
      [&](const Unit& unit, Nothing, int64_t element, auto kept) {
        const UnitBits<T> selected = kept ? unit.of[1] : select(unit);
        StoreResident(dx + element, derivative(unit.of[0], selected), together);
      });
  if (share.cut > 0) {
    const Unit last = units.LoadCut();
    StoreCutUnit(dx + g.group_size - share.cut, derivative(last.of[0], select(last)), share.cut);
  }
}

}  // namespace

cudaError_t BatchNormGradient(const BatchNormShape& shape, DType dtype, double eps,
                              const BatchNormGradientArrays& arrays, cudaStream_t stream) {
  if (IsEmpty(shape)) return cudaSuccess;
  const bool mask = arrays.mask != nullptr;
  ResidentDevice device;
  cudaError_t error = GetResidentDevice(&device);
  if (error != cudaSuccess) return error;
  ResidentPlan plan;
  if (AreGroupsAligned(shape, DTypeSize(dtype), arrays.x, arrays.dy, arrays.dx) &&
      IsAligned(arrays.mask) &&
      PlanGradient(shape, static_cast<int>(DTypeSize(dtype)), mask, device, arrays.workspace_size,
                   &plan)) {
    Params params;
    params.eps = eps;
    params.relu = false;
    params.aligned_parameters =
        AreAligned(arrays.mean, arrays.var, arrays.scale, arrays.sums, arrays.dmean, arrays.dvar);
    error = ForDType(dtype, [&](auto tag) {
      using T = typename decltype(tag)::Type;
      using Kernels = BatchNormGradientKernels;
      if constexpr (sizeof(T) == 8) {
        return cudaErrorInvalidValue;  // there is no plan
      } else {
        plan.finish.out[0] = arrays.sums;
        plan.finish.out[1] = static_cast<ComputeType<T>*>(arrays.sums) + shape.channels;
        plan.finish.out_stride = 2 * shape.channels;
        const auto kernel = mask ? KernelOf<Kernels, GradientKernel<T, true>>()
                                 : KernelOf<Kernels, GradientKernel<T, false>>();
        return LaunchResident(kernel, shape, plan, arrays, &params, stream);
      }
    });
    // If the device is shared, it may have less room than its attributes say. Use the separate
    // kernels then.
    if (error != cudaErrorCooperativeLaunchTooLarge) return error;
  }
  error = BatchNormSums(shape, dtype, eps, arrays.of_sums(), stream);
  if (error != cudaSuccess) return error;
  return BatchNormBackward(shape, dtype, eps, arrays.of_dx(), stream);
}

cudaError_t LoadBatchNormGradientKernels() {
  cudaError_t error = LoadKernels<BatchNormGradientKernels>();
  if (error == cudaSuccess) error = LoadBatchNormSumsKernels();
  if (error == cudaSuccess) error = LoadBatchNormBackwardKernels();
  return error;
}

}  // namespace jax_fastops::cuda

// Normalizes x, and applies scale, bias, residual and ReLU with its mask. Bound by the bytes of its
// arrays.
//
// The kernel processes the array from its end. The statistics kernel has read x in ascending order,
// so the end of x is still in L2. The mean is subtracted first rather than folded into the bias: if
// the mean is large, the folded form would cancel.
#include <cstdint>

#include "batch_norm/batch_norm.h"
#include "batch_norm/geometry.cuh"
#include "batch_norm/units.cuh"
#include "core/cuda/dependent.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/vec.cuh"

namespace jax_fastops::cuda {

namespace {

using namespace batch_norm;  // NOLINT: this file is a part of it

// Without kResidual there is no residual. With it there is one, or, in the kernel for any address,
// there may be one.
template <typename T, bool kAligned, bool kResidual>
__device__ __forceinline__ void Apply(const ElementParams& p) {
  using A = ComputeType<T>;
  constexpr int kArrays = kResidual ? 2 : 1, kRows = kInFlight<T, kArrays>;

  const Geometry& g = p.geometry;
  const Place place = PlaceOf(g, blockIdx.x);
  const Share share = ShareOf(g, place, threadIdx.x);
  const int64_t group = place.group * g.group_size;
  const T* const x = PartOf<const T>(p.call.x, group);
  const T* const residual = PartOf<const T>(p.call.residual, group);
  T* const y = PartOf<T>(p.call.y, group);
  uint8_t* const mask = PartOf<uint8_t>(p.call.mask, place.group * p.mask_bytes);
  const bool add = kResidual && (kAligned || residual != nullptr);
  AwaitPredecessors();
  if (share.count == 0 && share.cut == 0) return;

  A mean[kUnit], factor[kUnit], bias[kUnit];
  struct Loaded {
    UnitVec<T> x;
    UnitVec<T> residual;
  };
  const auto apply = [&](const Loaded& loaded, int64_t element, int size) {
    return ApplyUnit(loaded.x, add, loaded.residual, mean, factor, bias, p.call.relu, mask, element,
                     size);
  };

  SweepBack<kRows, Loaded>(
      share,
      [&](int64_t element) {
        Loaded loaded;
        loaded.x = LoadUnit<T, kAligned>(x + element);
        if (add) loaded.residual = LoadUnit<T, kAligned>(residual + element);
        return loaded;
      },
      [&](const Loaded&) {
        const UnitChannels channels(g, place, share, p.aligned_parameters);
        const A eps = static_cast<A>(p.call.eps);
        A scale[kUnit];
        channels.Load(static_cast<const A*>(p.call.mean), mean);
        channels.Load(static_cast<const A*>(p.call.var), factor);
        channels.LoadOr(static_cast<const A*>(p.call.scale), A(1), scale);
        channels.LoadOr(static_cast<const A*>(p.call.bias), A(0), bias);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) factor[i] = FastReciprocalRoot(factor[i] + eps) * scale[i];
      },
      [&](const Loaded& loaded, int64_t element) {
        StoreUnit<T, kAligned>(y + element, apply(loaded, element, kUnit));
      });
  if (share.cut > 0) {
    const int64_t element = g.group_size - share.cut;
    Loaded loaded;
    loaded.x = LoadCutUnit(x + element, share.cut);
    if (add) loaded.residual = LoadCutUnit(residual + element, share.cut);
    StoreCutUnit(y + element, apply(loaded, element, share.cut), share.cut);
  }
}

template <typename A, bool kAligned, bool kResidual>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor<A>)
    ApplyKernel(const __grid_constant__ ElementParams p) {
  ForTypesOf<A>(p.call.dtype, [&]<typename T>(TypeTag<T>) { Apply<T, kAligned, kResidual>(p); });
}

}  // namespace

cudaError_t BatchNormApply(const BatchNormCall& call, cudaStream_t stream) {
  if (IsEmpty(call.shape)) return cudaSuccess;
  ElementParams params = {
      {}, call, AreAligned(call.mean, call.var, call.scale, call.bias), call.shape.mask_bytes()};
  const bool aligned = AreGroupsAligned(call, call.x, call.residual, call.y);
  return ForDType(call.dtype, [&]<typename T>(TypeTag<T>) {
    using A = ComputeType<T>;
    auto kernel = KernelOf<BatchNormKernels, ApplyKernel<A, false, true>>();
    if constexpr (sizeof(T) < 8) {  // double has only the general kernel
      if (aligned) {
        kernel = call.residual != nullptr
                     ? KernelOf<BatchNormKernels, ApplyKernel<A, true, true>>()
                     : KernelOf<BatchNormKernels, ApplyKernel<A, true, false>>();
      }
    }
    return LaunchMap(kernel, kBlocksPerProcessor<T>, &params, stream);
  });
}

}  // namespace jax_fastops::cuda

// The sums of the backward pass for every channel: the sum of g and the sum of g * (x - mean),
// where g is the cotangent after the mask of the ReLU. The same pass writes g, if it is requested.
// It also writes dx if the statistics were given, because dx does not depend on the sums then. The
// kernel is bound by the bytes of its arrays. Threads sum their channels in registers, blocks sum
// their threads in shared memory, and a second kernel sums the blocks.
#include <cstdint>

#include "batch_norm/batch_norm.h"
#include "batch_norm/fold.cuh"
#include "batch_norm/geometry.cuh"
#include "batch_norm/units.cuh"
#include "core/cuda/load_kernels.h"
#include "core/cuda/packed.cuh"

namespace jax_fastops::cuda {
namespace {

using namespace batch_norm;  // NOLINT: this file is a part of it

struct Params {
  Geometry geometry;
  BatchNormSumsArrays arrays;
  double eps;
  bool aligned_parameters;
  int64_t mask_bytes;  // of a group
};

template <typename T, bool kAligned, bool kDx, bool kDy2>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor<T>)
    SumsKernel(const __grid_constant__ Params p) {
  using A = ComputeType<T>;
  constexpr int kArrays = kDy2 ? 3 : 2, kRows = kInFlight<T, kArrays>;
  __shared__ FoldBuffer<A> buffer;

  LetDependentsStart();
  const Geometry& g = p.geometry;
  const Place place = PlaceOf(g, blockIdx.x);
  const Share share = ShareOf(g, place, threadIdx.x);
  const int64_t group = place.group * g.group_size;
  const T* const x = PartOf<T>(p.arrays.x, group);
  const T* const dy = PartOf<T>(p.arrays.dy, group);
  const T* const dy2 = PartOf<T>(p.arrays.dy2, group);
  const uint8_t* const mask = PartOf<uint8_t>(p.arrays.mask, place.group * p.mask_bytes);
  T* const dx = PartOf<T>(p.arrays.dx, group);
  T* const dresidual = PartOf<T>(p.arrays.dresidual, group);

  Pair<A> sums[kUnit];
  A mean[kUnit], factor[kDx ? kUnit : 1];
  struct Loaded {
    UnitBits<T> x;
    UnitBits<T> g;
    UnitBits<T> g2;
    uint32_t bits;
  };
  const auto select = [&](const Loaded& loaded) {
    if constexpr (kDy2) return SelectUnit(loaded.bits, AddUnits(loaded.g, loaded.g2));
    return SelectUnit(loaded.bits, loaded.g);
  };
  // Skip the elements after a cut. Their dy is 0, but their x is padding and their mean may be
  // infinite, so the product could be NaN.
  const auto add = [&](const Loaded& loaded, const UnitBits<T>& selected, int size) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (i >= size) continue;
      const A value = ToCompute(selected[i]);
      sums[i].value[0] += value;
      sums[i].value[1] = fma(value, ToCompute(loaded.x[i]) - mean[i], sums[i].value[1]);
    }
  };
  const auto gradient = [&](const UnitBits<T>& selected) {
    A values[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) values[i] = ToCompute(selected[i]) * factor[kDx ? i : 0];
    return RoundUnit<T>(values);
  };

  Sweep<kRows, Loaded>(
      share.count, share.first, share.stride,
      [&](int64_t element) {
        Loaded loaded;
        loaded.bits = MaskByte(mask, element);
        loaded.x = LoadUnit<T, kAligned>(x + element);
        loaded.g = LoadUnit<T, kAligned>(dy + element);
        if constexpr (kDy2) loaded.g2 = LoadUnit<T, kAligned>(dy2 + element);
        return loaded;
      },
      [&](const Loaded&) {
        if (share.count == 0 && share.cut == 0) return;
        const UnitChannels channels(g, place, share, p.aligned_parameters);
        channels.Load(static_cast<const A*>(p.arrays.mean), mean);
        if constexpr (kDx) {
          const A eps = static_cast<A>(p.eps);
          A scale[kUnit];
          channels.Load(static_cast<const A*>(p.arrays.var), factor);
          channels.LoadOr(static_cast<const A*>(p.arrays.scale), A(1), scale);
#pragma unroll
          for (int i = 0; i < kUnit; ++i) factor[i] = InverseRoot(factor[i] + eps) * scale[i];
        }
      },
      [&](const Loaded& loaded, int64_t element) {
        const UnitBits<T> selected = select(loaded);
        add(loaded, selected, kUnit);
        // If dx is not computed here, the next kernel computes it and reads dresidual, so keep it
        // in L2.
        if (dresidual != nullptr) StoreUnit<T, kAligned, !kDx>(dresidual + element, selected);
        if constexpr (kDx) StoreUnit<T, kAligned>(dx + element, gradient(selected));
      },
      [] {});
  if (share.cut > 0) {
    const int64_t element = g.group_size - share.cut;
    Loaded loaded;
    loaded.bits = MaskByte(mask, element);
    loaded.x = LoadCutUnit(x + element, share.cut);
    loaded.g = LoadCutUnit(dy + element, share.cut);
    if constexpr (kDy2) loaded.g2 = LoadCutUnit(dy2 + element, share.cut);
    const UnitBits<T> selected = select(loaded);
    add(loaded, selected, share.cut);
    if (dresidual != nullptr) StoreCutUnit(dresidual + element, selected, share.cut);
    if constexpr (kDx) StoreCutUnit(dx + element, gradient(selected), share.cut);
  }
  Fold(g, place, sums, buffer,
       static_cast<A*>(p.arrays.workspace) + place.group * p.arrays.workspace_size);
}

template <typename A>
__global__ void __launch_bounds__(kMaxFinishThreads)
    FinishSumsKernel(const __grid_constant__ Finish f) {
  FinishChannels<A, A>(f, [&](int64_t group, int64_t channel, const A(&sums)[2]) {
    A* const out = static_cast<A*>(f.out[0]) + group * f.out_stride + channel;
    out[0] = sums[0] / static_cast<A>(f.n);
    out[f.geometry.channels] = sums[1] / static_cast<A>(f.n);
  });
}

using Kernels = SumKernels<Params>;

template <typename T, bool kAligned>
auto SumsKernelFor(bool dx, bool dy2) {
  if (dx) return dy2 ? SumsKernel<T, kAligned, true, true> : SumsKernel<T, kAligned, true, false>;
  return dy2 ? SumsKernel<T, kAligned, false, true> : SumsKernel<T, kAligned, false, false>;
}

template <typename T>
Kernels KernelsFor(bool aligned, bool dx, bool dy2) {
  return {aligned ? SumsKernelFor<T, true>(dx, dy2) : SumsKernelFor<T, false>(dx, dy2),
          FinishSumsKernel<ComputeType<T>>, kBlocksPerProcessor<T>};
}

Kernels KernelsOf(DType dtype, bool aligned, bool dx, bool dy2) {
  switch (dtype) {
    case DType::kF32:
      return KernelsFor<float>(aligned, dx, dy2);
    case DType::kBF16:
      return KernelsFor<__nv_bfloat16>(aligned, dx, dy2);
    case DType::kF16:
      return KernelsFor<__half>(aligned, dx, dy2);
    case DType::kF64:
      return KernelsFor<double>(aligned, dx, dy2);
  }
  return {};
}

}  // namespace

cudaError_t BatchNormSums(const BatchNormShape& shape, DType dtype, double eps,
                          const BatchNormSumsArrays& arrays, cudaStream_t stream) {
  if (IsEmpty(shape)) return cudaSuccess;
  const bool aligned = AreGroupsAligned(shape, DTypeSize(dtype), arrays.x, arrays.dy, arrays.dy2,
                                        arrays.dx, arrays.dresidual);
  const Kernels kernels = KernelsOf(dtype, aligned, arrays.dx != nullptr, arrays.dy2 != nullptr);
  Params params;
  params.arrays = arrays;
  params.eps = eps;
  params.aligned_parameters =
      IsAligned(arrays.mean) && IsAligned(arrays.var) && IsAligned(arrays.scale);
  params.mask_bytes = shape.mask_bytes();
  Finish finish;
  finish.x = nullptr;
  finish.out[0] = arrays.sums;
  finish.out[1] = nullptr;
  finish.out_stride = 2 * shape.channels;
  return LaunchSums(shape, kernels, arrays.workspace, arrays.workspace_size,
                    arrays.workspace_size / 2, &params, &finish, stream);
}

cudaError_t LoadBatchNormSumsKernels() {
  static KernelLoader loader;
  return loader.Load([](const auto& load) {
    for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
      for (const bool aligned : {false, true}) {
        for (const bool dx : {false, true}) {
          for (const bool dy2 : {false, true}) {
            const Kernels kernels = KernelsOf(static_cast<DType>(dtype), aligned, dx, dy2);
            load(reinterpret_cast<const void*>(kernels.sum));
            load(reinterpret_cast<const void*>(kernels.finish));
          }
        }
      }
    }
  });
}

}  // namespace jax_fastops::cuda

// The sums of the backward pass: of g and of g * (x - mean), for every channel; and where the
// statistics were given, so that dx does not depend on the sums, dx in the same pass. Bound by its
// arrays' bytes. Threads sum their channels in registers, blocks in shared memory, and a second
// kernel over the blocks.
#include <cstdint>

#include "cuda/batch_norm.h"
#include "cuda/batch_norm_fold.cuh"
#include "cuda/batch_norm_geometry.cuh"
#include "cuda/batch_norm_units.cuh"
#include "cuda/load_kernels.h"
#include "cuda/packed.cuh"

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

template <typename T, bool kAligned, bool kDx>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor<T>)
    SumsKernel(const __grid_constant__ Params p) {
  using A = ComputeType<T>;
  constexpr int kRows = kInFlight<T, 2>;
  __shared__ FoldBuffer<A> buffer;

  const Geometry& g = p.geometry;
  const Place place = PlaceOf(g, blockIdx.x);
  const Share share = ShareOf(g, place, threadIdx.x);
  const int64_t group = place.group * g.group_size;
  const T* const x = static_cast<const T*>(p.arrays.x) + group;
  const T* const dy = static_cast<const T*>(p.arrays.dy) + group;
  const uint8_t* const mask =
      p.arrays.mask == nullptr
          ? nullptr
          : static_cast<const uint8_t*>(p.arrays.mask) + place.group * p.mask_bytes;
  T* const dx = kDx ? static_cast<T*>(p.arrays.dx) + group : nullptr;
  T* const dresidual =
      !kDx || p.arrays.dresidual == nullptr ? nullptr : static_cast<T*>(p.arrays.dresidual) + group;

  Pair<A> sums[kUnit];
  A mean[kUnit], factor[kDx ? kUnit : 1];
  struct Loaded {
    UnitBits<T> x;
    UnitBits<T> g;
    uint32_t bits;
  };
  // Elements behind a cut are 0 in dy, but their x is made up, and their mean may be infinite.
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
        const UnitBits<T> selected = SelectUnit(loaded.bits, loaded.g);
        add(loaded, selected, kUnit);
        if constexpr (kDx) {
          if (dresidual != nullptr) StoreUnit<T, kAligned>(dresidual + element, selected);
          StoreUnit<T, kAligned>(dx + element, gradient(selected));
        }
      },
      [] {});
  if (share.cut > 0) {
    const int64_t element = g.group_size - share.cut;
    Loaded loaded;
    loaded.bits = MaskByte(mask, element);
    loaded.x = LoadCutUnit(x + element, share.cut);
    loaded.g = LoadCutUnit(dy + element, share.cut);
    const UnitBits<T> selected = SelectUnit(loaded.bits, loaded.g);
    add(loaded, selected, share.cut);
    if constexpr (kDx) {
      if (dresidual != nullptr) StoreCutUnit(dresidual + element, selected, share.cut);
      StoreCutUnit(dx + element, gradient(selected), share.cut);
    }
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

struct Kernels {
  void (*sums)(Params);
  void (*finish)(Finish);
  int resident;
};

template <typename T>
Kernels KernelsFor(bool aligned, bool dx) {
  Kernels kernels = {nullptr, FinishSumsKernel<ComputeType<T>>, kBlocksPerProcessor<T>};
  if (dx) {
    kernels.sums = aligned ? SumsKernel<T, true, true> : SumsKernel<T, false, true>;
  } else {
    kernels.sums = aligned ? SumsKernel<T, true, false> : SumsKernel<T, false, false>;
  }
  return kernels;
}

Kernels KernelsOf(DType dtype, bool aligned, bool dx) {
  switch (dtype) {
    case DType::kF32:
      return KernelsFor<float>(aligned, dx);
    case DType::kBF16:
      return KernelsFor<__nv_bfloat16>(aligned, dx);
    case DType::kF16:
      return KernelsFor<__half>(aligned, dx);
    case DType::kF64:
      return KernelsFor<double>(aligned, dx);
  }
  return {};
}

}  // namespace

cudaError_t BatchNormSums(const BatchNormShape& shape, DType dtype, double eps,
                          const BatchNormSumsArrays& arrays, cudaStream_t stream) {
  if (IsEmpty(shape)) return cudaSuccess;
  const bool aligned =
      AreGroupsAligned(shape, DTypeSize(dtype), arrays.x, arrays.dy, arrays.dx, arrays.dresidual);
  const Kernels kernels = KernelsOf(dtype, aligned, arrays.dx != nullptr);
  int processors;
  const cudaError_t error = GetProcessors(&processors);
  if (error != cudaSuccess) return error;

  Params params;
  params.arrays = arrays;
  params.eps = eps;
  params.aligned_parameters =
      IsAligned(arrays.mean) && IsAligned(arrays.var) && IsAligned(arrays.scale);
  params.mask_bytes = shape.mask_bytes();
  const BlockWish wish = {int64_t{processors} * kernels.resident, 3, arrays.workspace_size / 2};
  Finish finish;
  unsigned finish_blocks;
  if (!MakeGeometry(shape, wish, &params.geometry) ||
      !MakeFinish(shape, params.geometry, arrays.workspace, arrays.workspace_size, &finish,
                  &finish_blocks)) {
    return cudaErrorInvalidConfiguration;
  }
  finish.x = nullptr;
  finish.out[0] = arrays.sums;
  finish.out[1] = nullptr;
  finish.out_stride = 2 * shape.channels;
  kernels.sums<<<BlocksOf(shape, params.geometry), kThreads, 0, stream>>>(params);
  kernels.finish<<<finish_blocks, finish.threads(), 0, stream>>>(finish);
  return cudaGetLastError();
}

cudaError_t LoadBatchNormSumsKernels() {
  static KernelLoader loader;
  return loader.Load([](const auto& load) {
    for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
      for (const bool aligned : {false, true}) {
        for (const bool dx : {false, true}) {
          const Kernels kernels = KernelsOf(static_cast<DType>(dtype), aligned, dx);
          load(reinterpret_cast<const void*>(kernels.sums));
          load(reinterpret_cast<const void*>(kernels.finish));
        }
      }
    }
  });
}

}  // namespace jax_fastops::cuda

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
#include "core/cuda/dependent.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/vec.cuh"

namespace jax_fastops::cuda {

namespace {

using namespace batch_norm;  // NOLINT: this file is a part of it

// Without kDx there is no dx, and without kDy2 no dy2. With them there is one, or, in the kernel
// for any address, there may be one.
template <typename T, bool kAligned, bool kDx, bool kDy2>
__device__ __forceinline__ void Sums(const ElementParams& p, FoldBuffer<ComputeType<T>>& buffer) {
  using A = ComputeType<T>;
  constexpr int kArrays = kDy2 ? 3 : 2, kRows = kInFlight<T, kArrays>;

  LetDependentsStart();
  const Geometry& g = p.geometry;
  const Place place = PlaceOf(g, blockIdx.x);
  const Share share = ShareOf(g, place, threadIdx.x);
  const int64_t group = place.group * g.group_size;
  const T* const x = PartOf<const T>(p.call.x, group);
  const T* const dy = PartOf<const T>(p.call.dy, group);
  const T* const dy2 = PartOf<const T>(p.call.dy2, group);
  const uint8_t* const mask = PartOf<const uint8_t>(p.call.mask, place.group * p.mask_bytes);
  T* const dx = PartOf<T>(p.call.dx, group);
  T* const dresidual = PartOf<T>(p.call.dresidual, group);

  const bool add_dy2 = kDy2 && (kAligned || dy2 != nullptr);
  const bool write_dx = kDx && (kAligned || dx != nullptr);

  Pair<A> sums[kUnit];
  A mean[kUnit], factor[kDx ? kUnit : 1];
  struct Loaded {
    UnitVec<T> x;
    UnitVec<T> g;
    UnitVec<T> g2;
    uint32_t bits;
  };
  const auto select = [&](const Loaded& loaded) {
    return (add_dy2 ? AddUnits<T>(loaded.g, loaded.g2) : loaded.g).Select(loaded.bits);
  };
  const auto gradient = [&](const UnitVec<T>& selected) {
    A values[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) values[i] = ToCompute(selected[i]) * factor[kDx ? i : 0];
    return UnitVec<T>::Packed(values);
  };

  Sweep<kRows, Loaded>(
      share.count, share.first, share.stride,
      [&](int64_t element) {
        Loaded loaded;
        loaded.bits = MaskByte(mask, element);
        loaded.x = LoadUnit<T, kAligned>(x + element);
        loaded.g = LoadUnit<T, kAligned>(dy + element);
        if (add_dy2) loaded.g2 = LoadUnit<T, kAligned>(dy2 + element);
        return loaded;
      },
      [&](const Loaded&) {
        if (share.count == 0 && share.cut == 0) return;
        const UnitChannels channels(g, place, share, p.aligned_parameters);
        channels.Load(static_cast<const A*>(p.call.mean), mean);
        if (write_dx) {
          const A eps = static_cast<A>(p.call.eps);
          A scale[kUnit], var[kUnit];
          channels.Load(static_cast<const A*>(p.call.var), var);
          channels.LoadOr(static_cast<const A*>(p.call.scale), A(1), scale);
#pragma unroll
          for (int i = 0; i < kUnit; ++i)
            factor[kDx ? i : 0] = FastReciprocalRoot(var[i] + eps) * scale[i];
        }
      },
      [&](const Loaded& loaded, int64_t element) {
        const UnitVec<T> selected = select(loaded);
        AddProducts(selected, loaded.x, mean, kUnit, sums);
        // If dx is not computed here, the next kernel computes it and reads dresidual, so keep it
        // in L2.
        if (dresidual != nullptr) StoreUnit<T, kAligned, !kDx>(dresidual + element, selected);
        if (write_dx) StoreUnit<T, kAligned>(dx + element, gradient(selected));
      },
      [] {});
  if (share.cut > 0) {
    const int64_t element = g.group_size - share.cut;
    Loaded loaded;
    loaded.bits = MaskByte(mask, element);
    loaded.x = LoadCutUnit(x + element, share.cut);
    loaded.g = LoadCutUnit(dy + element, share.cut);
    if (add_dy2) loaded.g2 = LoadCutUnit(dy2 + element, share.cut);
    const UnitVec<T> selected = select(loaded);
    AddProducts(selected, loaded.x, mean, share.cut, sums);
    if (dresidual != nullptr) StoreCutUnit(dresidual + element, selected, share.cut);
    if (write_dx) StoreCutUnit(dx + element, gradient(selected), share.cut);
  }
  Fold(g, place, sums, buffer,
       static_cast<A*>(p.call.workspace) + place.group * p.call.workspace_size);
}

template <typename A, bool kAligned, bool kDx, bool kDy2>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor<A>)
    SumsKernel(const __grid_constant__ ElementParams p) {
  __shared__ FoldBuffer<A> buffer;
  ForTypesOf<A>(p.call.dtype,
                [&]<typename T>(TypeTag<T>) { Sums<T, kAligned, kDx, kDy2>(p, buffer); });
}

template <typename A>
struct GradientSums : ChannelSums<A, A> {
  __device__ __forceinline__ void Write(int64_t group, int64_t channel, const A (&sums)[2],
                                        int writer, int) const {
    if (writer != 0) return;
    A* const out = static_cast<A*>(this->f.out[0]) + group * this->f.out_stride + channel;
    out[0] = sums[0] / static_cast<A>(this->f.n);
    out[this->f.geometry.channels] = sums[1] / static_cast<A>(this->f.n);
  }
};

}  // namespace

cudaError_t BatchNormSums(const BatchNormCall& call, cudaStream_t stream) {
  if (IsEmpty(call.shape)) return cudaSuccess;
  ElementParams params = {
      {}, call, AreAligned(call.mean, call.var, call.scale), call.shape.mask_bytes()};
  const bool aligned = AreGroupsAligned(call, call.x, call.dy, call.dy2, call.dx, call.dresidual);
  const bool dx = call.dx != nullptr, dy2 = call.dy2 != nullptr;
  return ForDType(call.dtype, [&]<typename T>(TypeTag<T>) {
    using A = ComputeType<T>;
    // The kernel for any address and any of the arrays. No op calls for both dx and dy2.
    auto sum = KernelOf<BatchNormKernels, SumsKernel<A, false, true, true>>();
    if constexpr (sizeof(T) < 8) {
      if (aligned && !(dx && dy2)) {
        sum = dx    ? KernelOf<BatchNormKernels, SumsKernel<A, true, true, false>>()
              : dy2 ? KernelOf<BatchNormKernels, SumsKernel<A, true, false, true>>()
                    : KernelOf<BatchNormKernels, SumsKernel<A, true, false, false>>();
      }
    }
    GradientSums<A> sums;
    sums.f.x = nullptr;
    sums.f.out[0] = call.sums;
    sums.f.out[1] = nullptr;
    sums.f.out_stride = 2 * call.shape.channels;
    return LaunchSums(call, sum, kBlocksPerProcessor<T>, call.workspace_size / 2, &params, sums,
                      stream);
  });
}

}  // namespace jax_fastops::cuda

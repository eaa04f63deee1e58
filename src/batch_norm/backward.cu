// The gradient of x, given the sums. Bound by the bytes of its arrays. As in the forward, the
// kernel processes the arrays from their end, because the kernel that computes the sums has read x
// and dy in ascending order.
//
// Each channel has three factors:
//   dx = a * g + b * (x - mean) + c,  a = rsqrt(var + eps) * scale,
//   b = 2 * dvar - a * sums[1] / (var + eps),  c = dmean - a * sums[0]
// The form a * (g - sums[0]) needs 8 more registers, which cost about a tenth of the speed.
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

// Two blocks per SM whose threads load twice as far ahead are 1 to 2% faster than three, because
// the factors of the channels then stay in registers.
constexpr int kBlocks = 2;
template <typename T>
constexpr int kAhead = (sizeof(T) == 8 ? 1 : 2) * kInFlight<T, 2>;

template <typename T, bool kAligned>
__device__ __forceinline__ void Backward(const ElementParams& p) {
  using A = ComputeType<T>;
  constexpr int kRows = kAhead<T>;

  const Geometry& g = p.geometry;
  const Place place = PlaceOf(g, blockIdx.x);
  const Share share = ShareOf(g, place, threadIdx.x);
  const int64_t group = place.group * g.group_size;
  const T* const x = PartOf<const T>(p.call.x, group);
  const T* const dy = PartOf<const T>(p.call.dy, group);
  T* const dx = PartOf<T>(p.call.dx, group);
  const uint8_t* const mask = PartOf<const uint8_t>(p.call.mask, place.group * p.mask_bytes);
  AwaitPredecessors();
  if (share.count == 0 && share.cut == 0) return;

  A mean[kUnit], a[kUnit], b[kUnit], c[kUnit];
  struct Loaded {
    UnitVec<T> x;
    UnitVec<T> g;
    uint32_t bits;
  };
  const auto gradient = [&](const Loaded& loaded) {
    return GradientUnit(loaded.x, loaded.g.Select(loaded.bits), mean, a, b, c);
  };

  SweepBack<kRows, Loaded>(
      share,
      [&](int64_t element) {
        Loaded loaded;
        loaded.bits = MaskByte(mask, element);
        loaded.x = LoadUnit<T, kAligned>(x + element);
        loaded.g = LoadUnit<T, kAligned>(dy + element);
        return loaded;
      },
      [&](const Loaded&) {
        const UnitChannels channels(g, place, share, p.aligned_parameters);
        const int64_t sums_offset = place.group * g.channels;  // two per channel: Load adds as much
        const A* const sums = static_cast<const A*>(p.call.sums) + sums_offset;
        const A eps = static_cast<A>(p.call.eps);
        A var[kUnit], scale[kUnit];
        channels.Load(static_cast<const A*>(p.call.mean), mean);
        channels.Load(static_cast<const A*>(p.call.var), var);
        channels.LoadOr(static_cast<const A*>(p.call.scale), A(1), scale);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
          var[i] += eps;
          a[i] = FastReciprocalRoot(var[i]) * scale[i];
        }
        channels.Load(sums + g.channels, b);
        channels.Load(sums, c);
        A more[kUnit];
        channels.LoadOr(static_cast<const A*>(p.call.dvar), A(0), more);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) b[i] = fma(A(2), more[i], -(a[i] * b[i] / var[i]));
        channels.LoadOr(static_cast<const A*>(p.call.dmean), A(0), more);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) c[i] = fma(-a[i], c[i], more[i]);
      },
      [&](const Loaded& loaded, int64_t element) {
        StoreUnit<T, kAligned>(dx + element, gradient(loaded));
      });
  if (share.cut > 0) {
    const int64_t element = g.group_size - share.cut;
    Loaded loaded;
    loaded.bits = MaskByte(mask, element);
    loaded.x = LoadCutUnit(x + element, share.cut);
    loaded.g = LoadCutUnit(dy + element, share.cut);
    StoreCutUnit(dx + element, gradient(loaded), share.cut);
  }
}

template <typename A, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocks)
    BackwardKernel(const __grid_constant__ ElementParams p) {
  ForTypesOf<A>(p.call.dtype, [&]<typename T>(TypeTag<T>) { Backward<T, kAligned>(p); });
}

}  // namespace

cudaError_t BatchNormBackward(const BatchNormCall& call, cudaStream_t stream) {
  if (IsEmpty(call.shape)) return cudaSuccess;
  ElementParams params = {
      {},
      call,
      AreAligned(call.mean, call.var, call.scale, call.sums, call.dmean, call.dvar),
      call.shape.mask_bytes()};
  const bool aligned = AreGroupsAligned(call, call.x, call.dy, call.dx);
  return ForDType(call.dtype, [&]<typename T>(TypeTag<T>) {
    using A = ComputeType<T>;
    constexpr bool kAligned = sizeof(T) < 8;  // double has only the kernel for any address
    const auto kernel = aligned ? KernelOf<BatchNormKernels, BackwardKernel<A, kAligned>>()
                                : KernelOf<BatchNormKernels, BackwardKernel<A, false>>();
    return LaunchMap(kernel, kBlocks, &params, stream);
  });
}

}  // namespace jax_fastops::cuda

// dx = dy where a bit of the mask is set, and +0 elsewhere: the backward of a ReLU without sums.
//
// It only moves bits, in the tiles and chunks of core/cuda/relu_tiles.cuh. The loads of the mask
// are issued first, because everything else depends on them. This is a selection, not a product,
// because an element may be infinite or NaN.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "core/alignment.h"
#include "core/cuda/bitmask.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/relu_tiles.cuh"
#include "core/cuda/vec.cuh"
#include "core/dtype.h"

namespace jax_fastops::cuda::relu_select {

struct Params {
  const void* dy;
  void* dx;
  int64_t size;  // elements
  int64_t mask_bytes;
  ReluMask mask;
};

// U is the unsigned integer type of the element's size.
template <typename U>
__device__ __forceinline__ Unit<U> Select(uint32_t bits, Unit<U> x) {
  if constexpr (sizeof(U) == 2) {
    Unit<uint32_t> pairs = Reinterpret<uint32_t>(x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(bits & 1u << 2 * i)) pairs[i] &= 0xffff0000u;
      if (!(bits & 2u << 2 * i)) pairs[i] &= 0x0000ffffu;
    }
    return Reinterpret<U>(pairs);
  } else {
#pragma unroll
    for (int i = 0; i < x.kSize; ++i) x[i] = bits & 1u << i ? x[i] : U{0};
    return x;
  }
}

template <typename U>
__device__ __forceinline__ void SelectChunk(const Params& p, int64_t begin) {
  const int lane = threadIdx.x % kWarpSize;
  const U* dy = static_cast<const U*>(p.dy) + begin + lane;
  U* dx = static_cast<U*>(p.dx) + begin + lane;
  const int count = static_cast<int>(min(p.size - begin, int64_t{kReluChunk}));
  const int rest = count - lane;

  U values[kReluTogether];
#pragma unroll
  for (int k = 0; k < kReluTogether; ++k) {
    values[k] = k * kWarpSize < rest ? dy[k * kWarpSize] : U{0};
  }
  const uint32_t word = LoadMaskWord(p.mask.layout, p.mask.data, p.mask_bytes, begin, count);
#pragma unroll
  for (int k = 0; k < kReluTogether; ++k) {
    const U value = BitOfRow(word, k) ? values[k] : U{0};
    if (k * kWarpSize < rest) dx[k * kWarpSize] = value;
  }
}

template <typename U, bool kRagged>
__device__ __forceinline__ void SelectTile(const Params& p, int64_t begin) {
  constexpr int kField = Unit<U>::kSize;
  constexpr int kLoads = 32 / kField;
  constexpr int kStride = kField * kWarpSize;
  static_assert(kReluWords<U> * kLoads == kReluTogether);

  const int lane = threadIdx.x % kWarpSize;
  const U* dy = static_cast<const U*>(p.dy) + begin + lane * kField;
  U* dx = static_cast<U*>(p.dx) + begin + lane * kField;

  uint32_t words[kReluWords<U>];
  if constexpr (!kRagged) {
    const uint32_t* mask = reinterpret_cast<const uint32_t*>(p.mask.data + begin / 8);
#pragma unroll
    for (int i = 0; i < kReluWords<U>; ++i) {
      words[i] = mask[i * kWarpSize + WordOfLane<kField>(lane)];
    }
  }
  Unit<U> values[kReluTogether];
#pragma unroll
  for (int k = 0; k < kReluTogether; ++k) values[k] = LoadWord(dy + k * kStride);
#pragma unroll
  for (int i = 0; i < kReluWords<U>; ++i) {
    if constexpr (kRagged) {
      words[i] =
          LoadMaskFields<kField>(p.mask.layout, p.mask.data, p.mask_bytes, begin + i * kMaskTile);
    } else {
      words[i] = TransposeFields<kField>(words[i]);
    }
  }
#pragma unroll
  for (int k = 0; k < kReluTogether; ++k) {
    const uint32_t bits = words[k / kLoads] >> k % kLoads * kField;
    StoreWord(dx + k * kStride, Select(bits, values[k]));
  }
}

template <typename U, bool kRagged>
__global__ void __launch_bounds__(kReluThreads) SelectKernel(const Params p) {
  ForEachReluTile<kReluTile<U>>(
      p.size, [&](int64_t begin) { SelectTile<U, kRagged>(p, begin); },
      [&](int64_t begin) { SelectChunk<U>(p, begin); });
}

struct SelectChunks {
  static constexpr int kBlocks = 6;
  Params p;

  template <typename T>
  __device__ __forceinline__ void Run() const {
    using U = std::conditional_t<sizeof(T) == 2, uint16_t,
                                 std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
    const int64_t begin = ReluWarp() * kReluChunk;
    if (begin < p.size) SelectChunk<U>(p, begin);
  }
};

// The arrays have `size` elements of `dtype`.
template <typename Family>
cudaError_t ReluSelect(int64_t size, DType dtype, const void* dy, const ReluMask& mask, void* dx,
                       cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  const int64_t columns = static_cast<int64_t>(mask.layout.columns);
  const Params params = {dy, dx, size, size / columns * static_cast<int64_t>(mask.layout.row_bytes),
                         mask};
  const size_t bytes = DTypeSize(dtype);
  if (CommonAlignment({dy, dx}) < 16 || bytes == 8) {
    return LaunchAnyType<Family, kReluThreads>(dtype, ReluGrid(size, 0), stream,
                                               SelectChunks{params});
  }
  const auto launch = [&]<typename U>(U) {
    const auto kernel = mask.ragged ? KernelOf<Family, SelectKernel<U, true>>()
                                    : KernelOf<Family, SelectKernel<U, false>>();
    return Launch(kernel, ReluGrid(size, kReluTile<U>), stream, params);
  };
  return bytes == 2 ? launch(uint16_t{}) : launch(uint32_t{});
}

}  // namespace jax_fastops::cuda::relu_select

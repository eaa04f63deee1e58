// The second kernel of an element-wise backward: adds up the partial sums of a gradient, in an
// order that depends only on the shape.
//
// There are few partial sums, so the kernel is bound by latency and by index arithmetic. A 64-bit
// division costs about a hundred instructions, and took the kernel from 3 to 20 microseconds. So
// indices have 32 bits if they fit.
#ifndef JAX_FASTOPS_ELEMENTWISE_FINISH_CUH_
#define JAX_FASTOPS_ELEMENTWISE_FINISH_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "core/cuda/unit.cuh"
#include "elementwise/broadcast.h"
#include "elementwise/plan.h"

namespace jax_fastops::cuda {

struct FinishSum {
  const void* parts;
  void* out;
  bool wide;
  // Along A, B and the innermost dimension: the number of kept and of added elements, one of which
  // is 1. `step` is the stride of the partial sums.
  int64_t kept[3], added[3], step[3];
  // The dimensions of A and B in the gradient.
  int rank_a, rank_b;
  int64_t size_a[kMaxBroadcastRank], size_b[kMaxBroadcastRank];
  int64_t stride_a[kMaxBroadcastRank], stride_b[kMaxBroadcastRank];
  bool small;  // less than 2^31 partial sums
  int width;   // elements of the gradient that a block sums: 1, 32 or 256

  int64_t elements() const { return kept[0] * kept[1] * kept[2]; }
  int64_t terms() const { return added[0] * added[1] * added[2]; }
};

struct FinishParams {
  FinishSum sum[kMaxSums];
};

template <typename T, typename Index>
__device__ __forceinline__ void Finish(const FinishSum& sum, ComputeType<T>* exchange) {
  using C = ComputeType<T>;
  const int width = sum.width, share = kBoxThreads / width;
  const Index kept[3] = {static_cast<Index>(sum.kept[0]), static_cast<Index>(sum.kept[1]),
                         static_cast<Index>(sum.kept[2])};
  const Index total = kept[0] * kept[1] * kept[2];
  const Index index = static_cast<Index>(blockIdx.x) * width + threadIdx.x % width;
  const Index c = index % kept[2], ab = index / kept[2];
  const Index b = ab % kept[1], a = ab / kept[1];

  C value = C(0);
  if (index < total) {
    const C* const parts = static_cast<const C*>(sum.parts) + a * sum.step[0] * (kept[0] > 1) +
                           b * sum.step[1] * (kept[1] > 1) + c * (kept[2] > 1);
    // At most one term per group of lanes of the first kernel, so 32 bits are enough.
    const uint32_t inner = static_cast<uint32_t>(sum.added[2]);
    const uint32_t middle = static_cast<uint32_t>(sum.added[1]);
    const uint32_t count = static_cast<uint32_t>(sum.added[0]) * middle * inner;
    const uint32_t first = threadIdx.x / width;
    if (middle * inner == 1) {
#pragma unroll 4
      for (uint32_t i = first; i < count; i += share) value += parts[i * sum.step[0]];
    } else {
#pragma unroll 4
      for (uint32_t i = first; i < count; i += share) {
        const uint32_t outer = i / inner;
        value += parts[outer / middle * sum.step[0] + outer % middle * sum.step[1] + i % inner];
      }
    }
  }
  exchange[threadIdx.x] = value;
  __syncthreads();
  for (int step = share / 2; step > 0; step /= 2) {
    if (static_cast<int>(threadIdx.x) / width < step) {
      exchange[threadIdx.x] += exchange[threadIdx.x + step * width];
    }
    __syncthreads();
  }
  if (static_cast<int>(threadIdx.x) >= width || index >= total) return;
  int64_t place = c;
  const auto add_places = [&](Index rest, int rank, const int64_t* sizes, const int64_t* strides) {
    for (int d = rank - 1; d >= 0; --d) {
      Index digit = rest;
      if (d > 0) {
        const Index size = static_cast<Index>(sizes[d]);
        rest /= size;
        digit -= rest * size;
      }
      place += digit * strides[d];
    }
  };
  add_places(a, sum.rank_a, sum.size_a, sum.stride_a);
  add_places(b, sum.rank_b, sum.size_b, sum.stride_b);
  if (sum.wide) {
    static_cast<C*>(sum.out)[place] = exchange[threadIdx.x];
  } else {
    static_cast<T*>(sum.out)[place] = FromCompute<T>(exchange[threadIdx.x]);
  }
}

template <typename T>
__global__ __launch_bounds__(kBoxThreads) void FinishSumsKernel(
    const __grid_constant__ FinishParams p) {
  __shared__ ComputeType<T> exchange[kBoxThreads];
  const FinishSum& sum = p.sum[blockIdx.y];
  if (int64_t{blockIdx.x} * sum.width >= sum.kept[0] * sum.kept[1] * sum.kept[2]) return;
  if (sum.small) {
    Finish<T, uint32_t>(sum, exchange);
  } else {
    Finish<T, uint64_t>(sum, exchange);
  }
}

// The sums of one pass that the second kernel finishes.
class SumsToFinish {
 public:
  // Adds a sum. The caller fills in everything except `small` and `width`.
  FinishSum& Add() { return params_.sum[count_++]; }

  // Adds a sum over the planes of partial sums [planes][sizes][inner]. `strides` are the gradient's
  // strides along `sizes`.
  void AddPlanes(const void* parts, int64_t planes, const int64_t (&sizes)[2],
                 const int64_t (&strides)[2], int64_t inner, void* out, bool wide) {
    FinishSum& sum = Add();
    const int64_t kept = sizes[0] * sizes[1];
    sum.parts = parts;
    sum.out = out;
    sum.wide = wide;
    const int64_t all_kept[3] = {1, kept, inner}, all_added[3] = {planes, 1, 1};
    const int64_t steps[3] = {kept * inner, inner, 1};
    for (int i = 0; i < 3; ++i) {
      sum.kept[i] = all_kept[i];
      sum.added[i] = all_added[i];
      sum.step[i] = steps[i];
    }
    sum.rank_a = 0;
    sum.rank_b = 2;
    for (int d = 0; d < 2; ++d) {
      sum.size_b[d] = sizes[d];
      sum.stride_b[d] = strides[d];
    }
  }

  // `kernel` is FinishSumsKernel<T> as instantiated in the caller's source file: each file has its
  // own copy of the kernel, and loads that copy.
  cudaError_t Launch(void (*kernel)(FinishParams), cudaStream_t stream) {
    if (count_ == 0) return cudaSuccess;
    int64_t widest = 0;
    for (int s = 0; s < count_; ++s) {
      FinishSum& sum = params_.sum[s];
      const int64_t elements = sum.elements(), terms = sum.terms();
      sum.small = elements * terms < int64_t{1} << 31;
      sum.width = terms <= 4 ? 256 : elements >= 2048 || terms < 64 ? 32 : 1;
      widest = std::max(widest, (elements + sum.width - 1) / sum.width);
    }
    const dim3 blocks(static_cast<unsigned>(widest), count_);
    kernel<<<blocks, kBoxThreads, 0, stream>>>(params_);
    return cudaGetLastError();
  }

 private:
  FinishParams params_{};
  int count_ = 0;
};

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_FINISH_CUH_

// The second kernel of an element-wise backward: adds up the partial sums of a gradient, in an
// order that depends only on the shape.
//
// There are few partial sums, so the kernel is bound by latency and by index arithmetic. A 64-bit
// division costs about a hundred instructions, and took the kernel from 3 to 20 microseconds. So
// indices have 32 bits if they fit.
#include "elementwise/finish.h"

#include <algorithm>

#include "core/cuda/launch.h"
#include "core/cuda/unit.cuh"
#include "core/integer.h"

namespace jax_fastops::cuda {
namespace {

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

}  // namespace

template <typename T>
cudaError_t SumsToFinish::Launch(cudaStream_t stream) {
  if (count_ == 0) return cudaSuccess;
  int64_t widest = 0;
  for (int s = 0; s < count_; ++s) {
    FinishSum& sum = params_.sum[s];
    const int64_t elements = sum.elements(), terms = sum.terms();
    sum.small = elements * terms < int64_t{1} << 31;
    sum.width = terms <= 4 ? 256 : elements >= 2048 || terms < 64 ? 32 : 1;
    widest = std::max(widest, CeilDiv(elements, sum.width));
  }
  const LaunchConfig config = {
      .grid = dim3(static_cast<unsigned>(widest), static_cast<unsigned>(count_)),
      .block = dim3(kBoxThreads)};
  return cuda::Launch(KernelOf<FinishKernels, FinishSumsKernel<T>>(), config, stream, params_);
}

template cudaError_t SumsToFinish::Launch<float>(cudaStream_t);
template cudaError_t SumsToFinish::Launch<__nv_bfloat16>(cudaStream_t);
template cudaError_t SumsToFinish::Launch<__half>(cudaStream_t);
template cudaError_t SumsToFinish::Launch<double>(cudaStream_t);

}  // namespace jax_fastops::cuda

// Adds up the partial sums of an element-wise backward, in an order that depends only on the shape.
//
// There are few partial sums, so the kernel is bound by latency and by index arithmetic. A 64-bit
// division costs about a hundred instructions, and took the kernel from 3 to 20 microseconds. So
// indices have 32 bits if they fit.
#include "elementwise/finish.h"

#include <algorithm>

#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/packed.cuh"
#include "core/integer.h"

namespace jax_fastops::cuda {
namespace {

struct Finish;

constexpr int kThreads = 256;

struct FinishParams {
  FinishSum sum[kMaxSums];
  bool small[kMaxSums];  // less than 2^31 partial sums
  int width[kMaxSums];   // elements of the gradient that a block sums: 1, 32 or 256
};

// The offset of an index of some dimensions. Adds a second array's offset to `*other`.
template <typename Index>
__device__ __forceinline__ int64_t OffsetOf(Index index, int rank, const int64_t* sizes,
                                            const int64_t* strides, const int64_t* other_strides,
                                            int64_t* other) {
  int64_t offset = 0;
#pragma unroll 1
  for (int d = rank - 1; d >= 0; --d) {
    Index digit = index;
    if (d > 0) {
      const Index size = static_cast<Index>(sizes[d]);
      index /= size;
      digit -= index * size;
    }
    offset += digit * strides[d];
    if (other != nullptr) *other += digit * other_strides[d];
  }
  return offset;
}

template <typename T, typename Index>
__device__ __forceinline__ void AddUp(const FinishSum& sum, int width, ComputeType<T>* exchange) {
  using C = ComputeType<T>;
  const FinishPlan& plan = sum.plan;
  const int share = kThreads / width;
  const Index index = static_cast<Index>(blockIdx.x) * width + threadIdx.x % width;
  const bool live = index < static_cast<Index>(plan.elements);
  int64_t place = 0;
  C value = C(0);
  if (live) {
    const C* const parts =
        static_cast<const C*>(sum.parts) +
        OffsetOf(index, plan.kept, plan.kept_size, plan.kept_stride, plan.out_stride, &place);
    const Index count = static_cast<Index>(plan.terms), first = threadIdx.x / width;
    if (plan.added == 1) {
      const int64_t stride = plan.added_stride[0];
#pragma unroll 8
      for (Index i = first; i < count; i += share) value += parts[i * stride];
    } else {
#pragma unroll 2
      for (Index i = first; i < count; i += share) {
        value +=
            parts[OffsetOf(i, plan.added, plan.added_size, plan.added_stride, nullptr, nullptr)];
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
  if (static_cast<int>(threadIdx.x) >= width || !live) return;
  if (sum.wide) {
    static_cast<C*>(sum.out)[place] = exchange[threadIdx.x];
  } else {
    static_cast<T*>(sum.out)[place] = FromCompute<T>(exchange[threadIdx.x]);
  }
}

template <typename T>
__global__ __launch_bounds__(kThreads) void FinishSumsKernel(
    const __grid_constant__ FinishParams p) {
  __shared__ ComputeType<T> exchange[kThreads];
  const FinishSum& sum = p.sum[blockIdx.y];
  const int width = p.width[blockIdx.y];
  if (int64_t{blockIdx.x} * width >= sum.plan.elements) return;
  if (p.small[blockIdx.y]) {
    AddUp<T, uint32_t>(sum, width, exchange);
  } else {
    AddUp<T, uint64_t>(sum, width, exchange);
  }
}

}  // namespace

cudaError_t LoadFinishKernels() { return LoadKernels<Finish>(); }

cudaError_t FinishSums(const FinishSum* sums, int count, DType dtype, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  FinishParams p{};
  int64_t blocks = 0;
  for (int s = 0; s < count; ++s) {
    p.sum[s] = sums[s];
    const int64_t elements = sums[s].plan.elements, terms = sums[s].plan.terms;
    p.small[s] = elements * terms < int64_t{1} << 31;
    p.width[s] = terms <= 4 ? 256 : elements >= 2048 || terms < 64 ? 32 : 1;
    blocks = std::max(blocks, CeilDiv(elements, p.width[s]));
  }
  const LaunchConfig config = {
      .grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(count)),
      .block = dim3(kThreads)};
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    return Launch(KernelOf<Finish, FinishSumsKernel<T>>(), config, stream, p);
  });
}

}  // namespace jax_fastops::cuda

// A group of threads that holds one row of an array: a part of a warp, a warp, or a block. Each
// thread keeps a few of the row's elements in registers. Row-wise kernels build on the reductions
// over such a group. cluster_sum.cuh has sums over a cluster of blocks.
//
// Every thread of a group gets the same result, bit for bit: all threads add the same partial
// values in an order that does not depend on the thread. No atomics are used, so the results are
// the same in every run.
#ifndef JAX_FASTOPS_CORE_CUDA_ROW_GROUP_CUH_
#define JAX_FASTOPS_CORE_CUDA_ROW_GROUP_CUH_

#include <cmath>

namespace jax_fastops::cuda {

struct Sum {
  template <typename A>
  static __device__ __forceinline__ A Identity() {
    return A(0);
  }
  template <typename A>
  __device__ __forceinline__ A operator()(A a, A b) const {
    return a + b;
  }
};

// Ignores NaN. Callers must propagate NaN through the values that they compute from the elements.
struct Max {
  template <typename A>
  static __device__ __forceinline__ A Identity() {
    return A(-INFINITY);
  }
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ __forceinline__ double operator()(double a, double b) const { return fmax(a, b); }
};

// kThreads is the number of threads of the group in one block. Up to 32 it is a power of two, and a
// warp has 32 / kThreads groups; above 32 it is a multiple of 32 and the size of the block.
template <int kThreads>
class RowGroup {
  static constexpr bool kPowerOfTwo = (kThreads & (kThreads - 1)) == 0;
  static_assert(kThreads <= 32 ? kPowerOfTwo : kThreads % 32 == 0 && kThreads <= 1024);
  static constexpr int kWarps = kThreads < 32 ? 1 : kThreads / 32;
  static constexpr bool kShuffles = kThreads <= 32;  // the group is within a warp

 public:
  static constexpr int kSize = kThreads;

  // Shared memory through which warps exchange up to kMost values at once. It is double-buffered,
  // which saves a barrier: a warp that is ahead writes one half while the others still read the
  // other half. Groups within a warp do not use it.
  template <typename A, int kMost>
  struct Scratch {
    A values[kShuffles ? 1 : 2][kMost][kWarps];
  };

  // This thread's index among the kSize threads of its row.
  static __device__ __forceinline__ int Rank() {
    return kShuffles ? threadIdx.x % kThreads : threadIdx.x;
  }

  // Reduces each of `values` over the group. All threads of the group must call it, and so must the
  // other groups of the same warp, because the shuffles take full warps. `phase` is a per-thread
  // variable that starts at 0.
  template <typename Op, typename A, int kCount, int kMost>
  static __device__ __forceinline__ void AllReduce(Op op, A (&values)[kCount],
                                                   Scratch<A, kMost>& scratch, int& phase) {
    static_assert(kCount <= kMost);
#pragma unroll
    for (int lanes = (kThreads < 32 ? kThreads : 32) / 2; lanes > 0; lanes /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[i] = op(values[i], __shfl_xor_sync(0xffffffffu, values[i], lanes));
      }
    }
    if constexpr (!kShuffles) {
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) scratch.values[phase][i][warp] = values[i];
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        A value = lane < kWarps ? scratch.values[phase][i][lane] : Op::template Identity<A>();
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) {
          value = op(value, __shfl_xor_sync(0xffffffffu, value, lanes));
        }
        values[i] = value;
      }
      phase ^= 1;
    }
  }
};

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CORE_CUDA_ROW_GROUP_CUH_

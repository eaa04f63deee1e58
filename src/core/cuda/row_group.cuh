// A group of threads that holds one row of an array: a part of a warp, a warp, a block, or a
// cluster of blocks (sm_90 and later). Each thread keeps a few of the row's elements in registers.
// Row-wise kernels build on the reductions over such a group.
//
// Every thread of a group gets the same result, bit for bit: all threads add the same partial
// values in an order that does not depend on the thread. No atomics are used, so the results are
// the same in every run.
#ifndef JAX_FASTOPS_CORE_CUDA_ROW_GROUP_CUH_
#define JAX_FASTOPS_CORE_CUDA_ROW_GROUP_CUH_

#include <cooperative_groups.h>

#include <cstdint>

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
// kCluster is the number of blocks in a group. Above 1 the threads of a group are those of whole
// blocks.
template <int kThreads, int kCluster = 1>
class RowGroup {
  static constexpr bool kPowerOfTwo = (kThreads & (kThreads - 1)) == 0;
  static_assert(kThreads <= 32 ? kPowerOfTwo : kThreads % 32 == 0 && kThreads <= 1024);
  static_assert(kCluster == 1 || kThreads >= 32);
  static constexpr int kWarps = kThreads < 32 ? 1 : kThreads / 32;
  static constexpr bool kShuffles = kThreads <= 32 && kCluster == 1;  // the group is within a warp

 public:
  static constexpr int kSize = kThreads * kCluster;

  // Shared memory through which warps exchange up to kMost values at once. It is double-buffered,
  // which saves a barrier: a warp that is ahead writes one half while the others still read the
  // other half. In a cluster it must be at the same address in every block. Groups within a warp do
  // not use it.
  template <typename A, int kMost>
  struct Scratch {
    A values[kShuffles ? 1 : 2][kMost][kShuffles ? 1 : kWarps * kCluster];
  };

  // This thread's index among the kSize threads of its row.
  static __device__ __forceinline__ int Rank() {
    if constexpr (kThreads <= 32 && kCluster == 1) return threadIdx.x % kThreads;
    return BlockRank() * kThreads + threadIdx.x;
  }

  static __device__ __forceinline__ int BlockRank() {
    if constexpr (kCluster == 1) {
      return 0;
    } else {
      uint32_t rank;
      asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
      return static_cast<int>(rank);
    }
  }

  // Reduces each of `values` over the group. All threads of the group must call it, and so must the
  // other groups of the same warp, because the shuffles take full warps. `phase` is a per-thread
  // variable that starts at 0. In a cluster, the first call must follow a cluster barrier (see
  // Begin); later calls need none.
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
      if constexpr (kCluster == 1) {
        if (lane == 0) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) scratch.values[phase][i][warp] = values[i];
        }
        __syncthreads();
      } else {
        if (lane < kCluster) {
          const int slot = BlockRank() * kWarps + warp;
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            *InBlock(&scratch.values[phase][i][slot], lane) = values[i];
          }
        }
        SyncCluster();
      }
      constexpr int kSlots = kWarps * kCluster;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        A value = lane < kSlots ? scratch.values[phase][i][lane] : Op::template Identity<A>();
#pragma unroll
        for (int slot = 32; slot < kSlots; slot += 32) {
          if (slot + lane < kSlots) value = op(value, scratch.values[phase][i][slot + lane]);
        }
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) {
          value = op(value, __shfl_xor_sync(0xffffffffu, value, lanes));
        }
        values[i] = value;
      }
      phase ^= 1;
    }
  }

  // Call before the first reduction of a kernel. A block must not write into the shared memory of a
  // block that has not started yet.
  static __device__ __forceinline__ void Begin() {
    if constexpr (kCluster > 1) SyncCluster();
  }

 private:
  // Clusters need sm_90. For older architectures the headers do not declare these functions.
  static __device__ __forceinline__ void SyncCluster() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    cooperative_groups::this_cluster().sync();
#endif
  }

  // Maps `p`, in this block's shared memory, to the same place in block `rank` of the cluster.
  template <typename A>
  static __device__ __forceinline__ A* InBlock(A* p, [[maybe_unused]] int rank) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    return cooperative_groups::this_cluster().map_shared_rank(p, rank);
#else
    return p;
#endif
  }
};

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CORE_CUDA_ROW_GROUP_CUH_

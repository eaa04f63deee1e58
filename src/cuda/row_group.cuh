// The threads that hold one row of an array together, and what they compute of it as one: a part of
// a warp, a warp, a block, or a cluster of blocks (from sm_90 on), each thread with a few of the
// row's elements in registers. This is the core that every row-wise kernel shares.
//
// Reductions come out the same in every thread, to the bit: all of them add the same partial values
// in an order that does not depend on the thread. They take no atomics, so that two runs are equal.
#ifndef JAX_FASTOPS_CUDA_ROW_GROUP_CUH_
#define JAX_FASTOPS_CUDA_ROW_GROUP_CUH_

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

// Ignores NaN: what is computed from the elements themselves has to carry it.
struct Max {
  template <typename A>
  static __device__ __forceinline__ A Identity() {
    return A(-INFINITY);
  }
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ __forceinline__ double operator()(double a, double b) const { return fmax(a, b); }
};

// kThreads: a power of two up to 32, of which a warp then has several groups; or a multiple of 32,
// the whole block. kCluster: how many blocks make a group; only with whole blocks.
template <int kThreads, int kCluster = 1>
class RowGroup {
  static constexpr bool kPowerOfTwo = (kThreads & (kThreads - 1)) == 0;
  static_assert(kThreads <= 32 ? kPowerOfTwo : kThreads % 32 == 0 && kThreads <= 1024);
  static_assert(kCluster == 1 || kThreads >= 32);
  static constexpr int kWarps = kThreads < 32 ? 1 : kThreads / 32;
  static constexpr bool kShuffles = kThreads <= 32 && kCluster == 1;  // shuffles are enough

 public:
  static constexpr int kSize = kThreads * kCluster;

  // What warps tell each other, of up to kMost values at once. Two of everything: a warp that is
  // ahead writes into one while the others still read the other, which saves a barrier. In shared
  // memory, at the same place in every block of a cluster. None for a group within a warp.
  template <typename A, int kMost>
  struct Scratch {
    A values[kShuffles ? 1 : 2][kMost][kShuffles ? 1 : kWarps * kCluster];
  };

  // This thread's place among the kSize of its row.
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

  // Reduces each of `values` over the group. All threads of the group call it alike; those of a
  // warp together, other groups of the warp included. `phase` is a variable of the thread, 0 at
  // first. Only the first of these calls in a cluster needs a barrier of the cluster before it, so
  // that every block has begun (see Begin).
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

  // Before the first reduction of a kernel: no block writes into another that has not begun.
  static __device__ __forceinline__ void Begin() {
    if constexpr (kCluster > 1) SyncCluster();
  }

 private:
  // Older devices have no clusters, and their headers no names for them.
  static __device__ __forceinline__ void SyncCluster() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    cooperative_groups::this_cluster().sync();
#endif
  }

  // Where `p`, in this block's shared memory, is in that of another block of the cluster.
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

#endif  // JAX_FASTOPS_CUDA_ROW_GROUP_CUH_

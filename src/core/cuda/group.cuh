// Groups of threads that reduce one row of an array: a part of a warp, a block, or the blocks of a
// cluster. The size of a `Group` is known at run time, that of a `RowGroup` when it is compiled.
//
// Every thread of a group gets the same result, bit for bit: all threads add the same partial
// values in an order that does not depend on the thread. No atomics are used, so the results are
// the same in every run.
#ifndef JAX_FASTOPS_CORE_CUDA_GROUP_CUH_
#define JAX_FASTOPS_CORE_CUDA_GROUP_CUH_

#include <cmath>

#include "core/cuda/cluster_sum.cuh"

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

// Reduces each value over `width` neighboring lanes, a power of two.
template <typename Op, typename A, int kCount>
__device__ __forceinline__ void Butterfly(Op op, A (&values)[kCount], int width) {
  for (int step = width / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = op(values[i], __shfl_xor_sync(0xffffffffu, values[i], step));
    }
  }
}

// The lanes of a row: `lanes` of each block, a power of two up to 32 or the size of the block, and
// all blocks of the cluster if the launch has clusters. kValues are reduced at once.
template <typename A, int kValues>
struct Group {
  // In shared memory.
  struct Scratch {
    A warps[kValues][32];
    A blocks[kValues][16];
  };

  Scratch* scratch;  // one for each reduction; unused if a row is within a warp
  int lanes;
  int turn = 0;  // counts the reductions

  // All threads call it, before AllReduce.
  __device__ __forceinline__ void Begin() const {
    if constexpr (kHopper) {
      if (BlocksOfCluster() > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");
    }
  }

  // Calls stage(values, width), which reduces the values over `width` neighboring lanes, for the
  // lanes of a warp, then for what the warps have, then for what the blocks have. Every thread gets
  // the result. All threads call it.
  template <typename Stage>
  __device__ __forceinline__ void AllReduce(const Stage& stage, A (&values)[kValues]) {
    stage(values, min(lanes, 32));
    if (lanes <= 32) return;
    const bool is_first = turn == 0;
    Scratch& now = scratch[turn++];
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) now.warps[i][threadIdx.x / 32] = values[i];
    }
    __syncthreads();
    Gather(stage, values, now.warps, lanes / 32);
    if constexpr (kHopper) {
      const int blocks = BlocksOfCluster();
      if (blocks == 1) return;
      // All blocks run, so their shared memory may be written.
      if (is_first) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
      if (static_cast<int>(threadIdx.x) < blocks) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          uint32_t to = SharedAddress(&now.blocks[i][BlockOfCluster()]);
          asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(to) : "r"(threadIdx.x));
          if constexpr (sizeof(A) == 4) {
            asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(values[i]) : "memory");
          } else {
            asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(to), "d"(values[i]) : "memory");
          }
        }
      }
      asm volatile(
          "barrier.cluster.arrive.release.aligned;\n"
          "barrier.cluster.wait.acquire.aligned;" ::
              : "memory");
      Gather(stage, values, now.blocks, blocks);
    }
  }

  // Reduces each value by the same operation.
  template <typename Op>
  __device__ __forceinline__ void All(Op op, A (&values)[kValues]) {
    AllReduce([&](A(&own)[kValues], int width) { Butterfly(op, own, width); }, values);
  }

 private:
  // Every `count` lanes, a power of two, reduce the same values in the same order.
  template <typename Stage, int kSize>
  static __device__ __forceinline__ void Gather(const Stage& stage, A (&values)[kValues],
                                                const A (&from)[kValues][kSize], int count) {
    const int lane = threadIdx.x & (count - 1);
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = from[i][lane];
    stage(values, count);
  }
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

#endif  // JAX_FASTOPS_CORE_CUDA_GROUP_CUH_

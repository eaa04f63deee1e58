// Groups of threads that reduce one row of an array: a part of a warp, some warps of a block, a
// block, or the blocks of a cluster. The size of a `Group` is known at run time, that of a
// `RowGroup` and of the block of a `ClusterSum` when it is compiled.
//
// Every thread of a group gets the same result, bit for bit: all threads add the same partial
// values in an order that does not depend on the thread. No atomics are used, so the results are
// the same in every run.
#pragma once

#include <cooperative_groups.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/cuda/async_copy.cuh"

namespace jax_fastops::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kFullWarp = 0xffffffffu;

// The warp's index in its block. The shuffle tells the compiler that the value is the same in all
// lanes. Branches on it leave the warp converged, and the compiler need not handle divergence in
// the shuffles that follow.
__device__ __forceinline__ int WarpIndex() {
  return __shfl_sync(kFullWarp, threadIdx.x / kWarpSize, 0);
}

// This block's index in its cluster, and the number of blocks of a cluster. Without clusters each
// block is a cluster.
__device__ __forceinline__ int BlockOfCluster() {
  uint32_t rank = 0;
  if constexpr (kHopper) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ __forceinline__ int BlocksOfCluster() {
  uint32_t blocks = 1;
  if constexpr (kHopper) asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return static_cast<int>(blocks);
}

// This cluster's index in the launch.
__device__ __forceinline__ uint32_t ClusterIndex() {
  uint32_t index = blockIdx.x;
  if constexpr (kHopper) asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}

// The address of `p`, which is in this block's shared memory, in block `block` of the cluster.
__device__ __forceinline__ uint32_t AddressInBlock(const void* p, [[maybe_unused]] int block) {
  uint32_t address = SharedAddress(p);
  if constexpr (kHopper) {
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(block));
  }
  return address;
}

// What `p`, which is in this block's shared memory, is in block `block` of the cluster.
template <typename T>
__device__ __forceinline__ const T* InBlock(const T* p, [[maybe_unused]] int block) {
  if constexpr (kHopper) asm("mapa.u64 %0, %0, %1;" : "+l"(p) : "r"(block));
  return p;
}

// Stores a value of 4 or 8 bytes at `to`, and counts its bytes on `barrier` when it is there. Both
// are addresses in the shared memory of a block of the cluster. Only for launches with clusters.
template <typename A>
__device__ __forceinline__ void SendToBlock([[maybe_unused]] uint32_t to, [[maybe_unused]] A value,
                                            [[maybe_unused]] uint32_t barrier) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if constexpr (sizeof(A) == 4) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
        "r"(__float_as_uint(static_cast<float>(value))), "r"(barrier)
        : "memory");
  } else {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
        "l"(__double_as_longlong(value)), "r"(barrier)
        : "memory");
  }
#endif
}

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

// Reduces each value over `width` neighboring lanes, or over every from-th one of them; both are
// powers of two. All lanes of the warp call it.
template <typename Op, typename A, int kCount>
__device__ __forceinline__ void Butterfly(Op op, A (&values)[kCount], int width, int from = 1) {
  for (int step = width / 2; step >= from; step /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = op(values[i], __shfl_xor_sync(kFullWarp, values[i], step));
    }
  }
}

// The value of the lane whose index is this one's, exclusive or `mask`. The size of V is a multiple
// of 4 bytes. All lanes of the warp call it.
template <typename V>
__device__ __forceinline__ V Exchange(const V& value, int mask) {
  uint32_t words[sizeof(V) / 4];
  memcpy(words, &value, sizeof(V));
#pragma unroll
  for (uint32_t& word : words) word = __shfl_xor_sync(kFullWarp, word, mask);
  V result;
  memcpy(&result, words, sizeof(V));
  return result;
}

// Whether all lanes of the warp have the same value, and whether `condition` holds in all of them.
template <typename V>
__device__ __forceinline__ bool IsSameInWarp(V value) {
  return __all_sync(kFullWarp, value == __shfl_sync(kFullWarp, value, 0));
}
__device__ __forceinline__ bool HoldsInWarp(bool condition) {
  return __all_sync(kFullWarp, condition);
}

// The lanes of the warp, as bits, in which `condition` holds.
__device__ __forceinline__ uint32_t LanesWhere(bool condition) {
  return __ballot_sync(kFullWarp, condition);
}

// Replaces `before` by its sum over the lanes of a group before this one, and `after` by its sum
// over those after it. A group has `lanes` lanes, `step` apart; this one has index `rank`. All
// lanes of the warp call it.
template <typename A, int kCount>
__device__ __forceinline__ void SumOthers(A (&before)[kCount], A (&after)[kCount], int rank,
                                          int lanes, int step = 1) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const A from_before = __shfl_up_sync(kFullWarp, before[i], step);
    const A from_after = __shfl_down_sync(kFullWarp, after[i], step);
    before[i] = rank > 0 ? from_before : A(0);
    after[i] = rank + 1 < lanes ? from_after : A(0);
  }
  for (int apart = 1; apart < lanes; apart *= 2) {
    const bool has_before = rank >= apart, has_after = rank + apart < lanes;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const A from_before = __shfl_up_sync(kFullWarp, before[i], apart * step);
      const A from_after = __shfl_down_sync(kFullWarp, after[i], apart * step);
      if (has_before) before[i] += from_before;
      if (has_after) after[i] += from_after;
    }
  }
}

// Reduces each value over `threads` neighboring threads of a block of kWarps warps; both are powers
// of two. All threads of the block call it. `scratch` is in shared memory; a barrier must come
// before it is used again.
template <typename Op, typename A, int kCount, int kWarps>
__device__ __forceinline__ void ReduceNeighbors(Op op, A (&values)[kCount], int threads,
                                                A (&scratch)[kCount][kWarps]) {
  Butterfly(op, values, min(threads, kWarpSize));
  if (threads <= kWarpSize) return;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize, warps = threads / kWarpSize;
  if (threadIdx.x % kWarpSize == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scratch[i][warp] = values[i];
  }
  __syncthreads();
  const int other = (warp & ~(warps - 1)) | (threadIdx.x & (warps - 1));
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = scratch[i][other];
  Butterfly(op, values, warps);
}

// Waits for all threads of a cooperative launch, or of the cluster.
__device__ __forceinline__ void AwaitGrid() { cooperative_groups::this_grid().sync(); }
__device__ __forceinline__ void AwaitCluster() {
  if constexpr (kHopper) {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
  }
}
// A block whose shared memory others read stays until all have read it: all threads of the cluster
// call the first one after their last access, and the second one before they exit.
__device__ __forceinline__ void EndClusterReads() {
  if constexpr (kHopper) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void AwaitClusterReads() {
  if constexpr (kHopper) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// A barrier that no data needs: it keeps the warps of a block close together, for what they find in
// caches. All threads of the block call it.
__device__ __forceinline__ void KeepWarpsTogether() { __syncthreads(); }

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
          const uint32_t to = AddressInBlock(&now.blocks[i][BlockOfCluster()], threadIdx.x);
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
// warp has 32 / kThreads groups; above 32 it is a multiple of 32, and a block has kGroups groups.
template <int kThreads, int kGroups = 1>
class RowGroup {
  static constexpr bool kPowerOfTwo = (kThreads & (kThreads - 1)) == 0;
  static_assert(kThreads <= 32 ? kPowerOfTwo : kThreads % 32 == 0 && kThreads * kGroups <= 1024);
  static constexpr int kWarps = kThreads < 32 ? 1 : kThreads / 32;
  static constexpr bool kShuffles = kThreads <= 32;           // the group is within a warp
  static constexpr bool kShared = !kShuffles && kGroups > 1;  // the block has other groups
  static_assert(!kShared || kGroups < 16, "a block has 16 named barriers");

 public:
  static constexpr int kSize = kThreads;

  // Shared memory through which warps exchange up to kMost values at once. It is double-buffered,
  // which saves a barrier: a warp that is ahead writes one half while the others still read the
  // other half. Groups within a warp do not use it.
  template <typename A, int kMost>
  struct Scratch {
    A values[kShared ? kGroups : 1][kShuffles ? 1 : 2][kMost][kWarps];
  };

  // This thread's index among the kSize threads of its row.
  static __device__ __forceinline__ int Rank() {
    return kShuffles || kShared ? threadIdx.x % kThreads : threadIdx.x;
  }

  // A barrier of the threads of the group, and of the other groups of its warp.
  static __device__ __forceinline__ void Sync() {
    if constexpr (kShuffles) {
      __syncwarp();
    } else if constexpr (kShared) {  // barrier 0 is that of __syncthreads
      asm volatile("barrier.sync %0, %1;" ::"r"(threadIdx.x / kThreads + 1), "n"(kThreads)
                   : "memory");
    } else {
      __syncthreads();
    }
  }

  // Reduces each of `values` over the group. All threads of the group must call it, and so must the
  // other groups of the same warp, because the shuffles take full warps. `phase` is a per-thread
  // variable that starts at 0.
  template <typename Op, typename A, int kCount, int kMost>
  static __device__ __forceinline__ void AllReduce(Op op, A (&values)[kCount],
                                                   Scratch<A, kMost>& scratch, int& phase) {
    static_assert(kCount <= kMost);
    Butterfly(op, values, kThreads < 32 ? kThreads : 32);
    if constexpr (kShuffles) return;
    auto& all = scratch.values[kShared ? threadIdx.x / kThreads : 0][phase];
    const int warp = Rank() / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) all[i][warp] = values[i];
    }
    Sync();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kShared) {  // few warps
        values[i] = all[i][0];
#pragma unroll
        for (int other = 1; other < kWarps; ++other) values[i] = op(values[i], all[i][other]);
      } else {
        A value[1] = {lane < kWarps ? all[i][lane] : Op::template Identity<A>()};
        Butterfly(op, value, 32);
        values[i] = value[0];
      }
    }
    phase ^= 1;
  }
};

// Sums over a cluster of blocks (compute capability 9.0 and later), without a cluster barrier.
//
// Each warp sends its sums to all blocks by asynchronous stores, which complete on an mbarrier of
// the receiving block. A cluster barrier would make all earlier writes visible, so every row would
// wait until the results of the row before it are written. A launch without clusters must not
// execute these stores. There the warps of a block exchange their sums by plain stores.
//
// In shared memory, at the same address in every block. kMost is the most values that are summed at
// once; a block has kWarps warps, and a cluster up to kMaxBlocks blocks. Every thread gets the same
// sums, bit for bit, and the same in every run. kMayBeAlone: a launch may have no clusters.
template <typename A, int kMost, int kWarps, int kMaxBlocks, bool kMayBeAlone = true>
struct ClusterSum {
  // Double-buffered. A block that is ahead may send for the next call. It sends for the call after
  // that only when it has received the sums of all warps for the next call, and each warp sends
  // these after it has read the values of this call.
  Barrier complete[2];
  A values[2][kMost][kWarps * kMaxBlocks];

  // All threads of the cluster call this before the first sum. It has the effect of a barrier of
  // the cluster.
  __device__ __forceinline__ void Begin() {
    if (threadIdx.x < 2) complete[threadIdx.x].Init(1);
    Barrier::PublishInit();
    if (kMayBeAlone && BlocksOfCluster() == 1) return __syncthreads();
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    cooperative_groups::this_cluster().sync();
#endif
  }

  // Sums each of `sums` over all threads of the cluster, which all call this. `phase` is a variable
  // of each thread that starts at 0, and counts the calls.
  template <int kCount>
  __device__ __forceinline__ void AllReduce(A (&sums)[kCount], int& phase) {
    static_assert(kCount <= kMost && kMaxBlocks <= 32);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = phase & 1;
    const int blocks = BlocksOfCluster(), slots = kWarps * blocks;
    const bool alone = kMayBeAlone && blocks == 1;
    if (!alone && threadIdx.x == 0) {
      complete[half].ArriveAndExpect(kCount * slots * static_cast<int>(sizeof(A)));
    }
    Butterfly(Sum(), sums, 32);
    if (alone) {
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) values[half][i][warp] = sums[i];
      }
      __syncthreads();
    } else if (lane < blocks) {
      const uint32_t barrier = AddressInBlock(&complete[half], lane);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        SendToBlock(AddressInBlock(&values[half][i][BlockOfCluster() * kWarps + warp], lane),
                    sums[i], barrier);
      }
    }
    if (!alone) complete[half].Wait(phase >> 1 & 1);
    ++phase;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      A sum[1] = {lane < slots ? values[half][i][lane] : A(0)};
#pragma unroll
      for (int slot = 32; slot < kWarps * kMaxBlocks; slot += 32) {
        if (slot + lane < slots) sum[0] += values[half][i][slot + lane];
      }
      Butterfly(Sum(), sum, 32);
      sums[i] = sum[0];
    }
  }
};

}  // namespace jax_fastops::cuda

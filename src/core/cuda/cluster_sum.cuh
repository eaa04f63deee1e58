// Sums over a cluster of blocks (compute capability 9.0 and later), without a cluster barrier.
//
// Each warp sends its sums to all blocks by asynchronous stores, which complete on an mbarrier of
// the receiving block. A cluster barrier would make all earlier writes visible, so every row would
// wait until the results of the row before it are written. A launch without clusters must not
// execute these stores. There the warps of a block exchange their sums by plain stores.
#ifndef JAX_FASTOPS_CORE_CUDA_CLUSTER_SUM_CUH_
#define JAX_FASTOPS_CORE_CUDA_CLUSTER_SUM_CUH_

#include <cooperative_groups.h>

#include <cstdint>

#include "core/cuda/async_copy.cuh"

namespace jax_fastops::cuda {

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
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], lanes);
    }
    if (alone) {
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) values[half][i][warp] = sums[i];
      }
      __syncthreads();
    } else if (lane < blocks) {
      const uint32_t barrier = InBlock(&complete[half], lane);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        Send(InBlock(&values[half][i][BlockOfCluster() * kWarps + warp], lane), sums[i], barrier);
      }
    }
    if (!alone) complete[half].Wait(phase >> 1 & 1);
    ++phase;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      A sum = lane < slots ? values[half][i][lane] : A(0);
#pragma unroll
      for (int slot = 32; slot < kWarps * kMaxBlocks; slot += 32) {
        if (slot + lane < slots) sum += values[half][i][slot + lane];
      }
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
      }
      sums[i] = sum;
    }
  }

 private:
  // The address of `p`, which is in this block's shared memory, in block `block` of the cluster.
  static __device__ __forceinline__ uint32_t InBlock(const void* p, [[maybe_unused]] int block) {
    uint32_t address = SharedAddress(p);
    if constexpr (kHopper) {
      asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(block));
    }
    return address;
  }

  static __device__ __forceinline__ void Send([[maybe_unused]] uint32_t to, [[maybe_unused]] A sum,
                                              [[maybe_unused]] uint32_t barrier) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (sizeof(A) == 4) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
          "r"(__float_as_uint(static_cast<float>(sum))), "r"(barrier)
          : "memory");
    } else {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
          "l"(__double_as_longlong(sum)), "r"(barrier)
          : "memory");
    }
#endif
  }
};

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CORE_CUDA_CLUSTER_SUM_CUH_

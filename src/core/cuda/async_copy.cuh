// Asynchronous copies from global to shared memory, and the barriers on which they complete.
//
// cp.async (every supported architecture) copies 4, 8 or 16 bytes per thread, and a thread waits
// for its own groups of copies. Bulk copies (compute capability 9.0 and later) are issued by one
// thread for many bytes, and complete on a Barrier.
#pragma once

#include <cstdint>

namespace jax_fastops::cuda {

// Whether the code that is being compiled may use clusters, bulk copies and dependent launches.
constexpr bool kHopper =
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    true;
#else
    false;
#endif

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

#define FASTOPS_COPY(form, operand)                                                   \
  asm volatile("cp.async." form                                                       \
               :                                                                      \
               : "r"(SharedAddress(to)), "l"(__cvta_generic_to_global(from)), operand \
               : "memory")

// Starts to copy kBytes (4, 8 or 16) that are aligned to as many. With kBypassL1, 16 bytes leave L1
// as it is.
template <int kBytes, bool kBypassL1 = false>
__device__ __forceinline__ void CopyAsync(void* to, const void* from) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBypassL1) {
    static_assert(kBytes == 16);
    FASTOPS_COPY("cg.shared.global [%0], [%1], %2;", "n"(kBytes));
  } else {
    FASTOPS_COPY("ca.shared.global [%0], [%1], %2;", "n"(kBytes));
  }
}

// 16 bytes that leave L1 as it is, or zeros, for which nothing is read.
__device__ __forceinline__ void CopyAsyncOrZero(bool copy, void* to, const void* from) {
  FASTOPS_COPY("cg.shared.global [%0], [%1], 16, %2;", "r"(copy ? 16 : 0));
}

// 16 bytes, with a cache policy for L2 from createpolicy.
template <bool kBypassL1>
__device__ __forceinline__ void CopyAsync16(void* to, const void* from, uint64_t policy) {
  if constexpr (kBypassL1) {
    FASTOPS_COPY("cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;", "l"(policy));
  } else {
    FASTOPS_COPY("ca.shared.global.L2::cache_hint [%0], [%1], 16, %2;", "l"(policy));
  }
}

#undef FASTOPS_COPY

// The copies that this thread has started since the last call are a group.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the last kPending groups of this thread have arrived.
template <int kPending>
__device__ __forceinline__ void AwaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits until all copies of this thread have arrived.
__device__ __forceinline__ void AwaitAllCopies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Waits for all threads of the block and, with kCopies, for all of their copies.
template <bool kCopies>
__device__ __forceinline__ void AwaitBlock() {
  if constexpr (kCopies) AwaitAllCopies();
  __syncthreads();
}

// Waits until kThreads threads, in whole warps, have arrived at a barrier of the block: 1 to 15.
template <int kThreads>
__device__ __forceinline__ void AwaitThreads(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Arrives there without waiting.
template <int kThreads>
__device__ __forceinline__ void ArriveAmongThreads(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Waits for all lanes of the warp.
__device__ __forceinline__ void AwaitWarp() { __syncwarp(); }

// Starts to load the bytes at `p` into the L2 cache.
__device__ __forceinline__ void PrefetchToL2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

// An mbarrier in shared memory, on which bulk copies and stores from other blocks complete.
struct Barrier {
  uint64_t bits;

  __device__ __forceinline__ void Init(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(SharedAddress(this)), "r"(arrivals)
                 : "memory");
  }
  // Call between the initializations and the block's barrier that follows them.
  static __device__ __forceinline__ void PublishInit() {
    if constexpr (kHopper) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __device__ __forceinline__ void Arrive() {
    asm volatile(
        "{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(SharedAddress(this))
        : "memory");
  }
  __device__ __forceinline__ void ArriveAndExpect([[maybe_unused]] int bytes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(
            SharedAddress(this)),
        "r"(bytes)
        : "memory");
#endif
  }
  // Arrives when the copies of this thread that are now under way (cp.async) have arrived.
  __device__ __forceinline__ void ArriveAfterCopies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(SharedAddress(this))
                 : "memory");
  }
#define FASTOPS_WAIT(form)                                       \
  asm volatile("{ .reg .pred done; mbarrier." form               \
               ".b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }" \
               : "=r"(done)                                      \
               : "r"(SharedAddress(this)), "r"(parity)           \
               : "memory")
  // With kInBlock, no other block of the cluster has written what is waited for.
  template <bool kInBlock = false>
  __device__ __forceinline__ void Wait(int parity) {
    uint32_t done;
    do {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
      if constexpr (kInBlock) {
        FASTOPS_WAIT("try_wait.parity.shared::cta");
      } else {
        FASTOPS_WAIT("try_wait.parity.acquire.cluster.shared::cta");
      }
#else
      FASTOPS_WAIT("test_wait.parity.shared");
#endif
    } while (done == 0);
  }
#undef FASTOPS_WAIT
};

}  // namespace jax_fastops::cuda

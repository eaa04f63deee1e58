// Counters in global memory by which the blocks of a launch wait for each other.
//
// What the threads of a block wrote before a barrier of the block is visible after the counter is
// changed by one of them, to all threads that meet in a barrier after one of them has read it.
#ifndef JAX_FASTOPS_CORE_CUDA_COUNTERS_CUH_
#define JAX_FASTOPS_CORE_CUDA_COUNTERS_CUH_

#include <cstdint>

namespace jax_fastops::cuda {

__device__ __forceinline__ void CountRelease(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(__cvta_generic_to_global(counter))
               : "memory");
}

// Returns the count before.
__device__ __forceinline__ uint32_t CountAcquireRelease(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return before;
}

__device__ __forceinline__ uint32_t ReadAcquire(const uint32_t* counter) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return value;
}

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CORE_CUDA_COUNTERS_CUH_

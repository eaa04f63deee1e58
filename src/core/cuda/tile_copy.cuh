// Copies of whole tiles by one thread, which the hardware addresses by a description of the matrix
// (tensor_map.h). Only for compute capability 9.0 and later.
#pragma once

#include <cuda.h>

#include "core/cuda/async_copy.cuh"

namespace jax_fastops::cuda {

// Starts to copy the tile whose first element is in this row and column. Its bytes count on
// `barrier`, also those outside of the matrix.
__device__ __forceinline__ void CopyTile([[maybe_unused]] void* to,
                                         [[maybe_unused]] const CUtensorMap& from,
                                         [[maybe_unused]] int row, [[maybe_unused]] int column,
                                         [[maybe_unused]] Barrier* barrier) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(SharedAddress(to)),
      "l"(&from), "r"(column), "r"(row), "r"(SharedAddress(barrier))
      : "memory");
#endif
}

// Starts to write a tile, as a group of stores of this thread.
__device__ __forceinline__ void StoreTile([[maybe_unused]] const CUtensorMap& to,
                                          [[maybe_unused]] int row, [[maybe_unused]] int column,
                                          [[maybe_unused]] const void* from) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
      "cp.async.bulk.commit_group;" ::"l"(&to),
      "r"(column), "r"(row), "r"(SharedAddress(from))
      : "memory");
#endif
}

// Waits until all but the last kPending groups of stores of this thread have read shared memory.
template <int kPending>
__device__ __forceinline__ void AwaitReadsOfStores() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#endif
}

// Waits until all stores of this thread are complete.
__device__ __forceinline__ void AwaitStores() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

}  // namespace jax_fastops::cuda

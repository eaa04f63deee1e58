// Programmatic dependent launch (LaunchConfig::dependent), on the device's side.
//
// A dependent starts while the preceding kernel in the stream still runs, which shortens the gap
// between the two. All threads of a dependent call AwaitPredecessors before they access memory. The
// call waits until the preceding kernel is complete and its writes are visible. Every dependent
// waits in this way, so everything that came earlier is complete too.
#pragma once

#include <cuda_runtime.h>

namespace jax_fastops::cuda {

// Allows the next kernel to launch once all blocks of this one have called it or have exited. All
// blocks are resident by then, so the next kernel's blocks take no space that this kernel still
// needs.
__device__ __forceinline__ void LetDependentsStart() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ __forceinline__ void AwaitPredecessors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

}  // namespace jax_fastops::cuda

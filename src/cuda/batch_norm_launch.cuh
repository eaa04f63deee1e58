// How batch norm's kernels are launched, and follow each other in a stream.
//
// From compute capability 9.0 on a kernel can be a *dependent* of the one before it, whichever that
// is (programmatic dependent launch): it is launched while that one still runs, so that the gap
// between them is short. All threads of a dependent call AwaitPredecessors before they touch
// memory. That waits until the kernel before is complete and what it wrote is visible; and since
// every dependent waits, so is whatever came before that one.
#ifndef JAX_FASTOPS_CUDA_BATCH_NORM_LAUNCH_CUH_
#define JAX_FASTOPS_CUDA_BATCH_NORM_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <limits>

#include "cuda/batch_norm_geometry.cuh"
#include "cuda/batch_norm_units.cuh"

namespace jax_fastops::cuda::batch_norm {

// The kernel behind this one may be launched from when all blocks have come here or are done. Its
// blocks take no room that one of this kernel's still waits for.
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

// -------------------------------------------------------------------------------------------------
// Host

// Whether kernels may be dependents on the current device. What counts is not the device but what
// the kernel was compiled for: code for an older one, compiled anew for this one, does not wait.
// Drivers before that of CUDA 12.3 cannot capture a dependent into a graph. All of batch norm's
// kernels are compiled alike: whichever is asked for first answers for all.
inline cudaError_t CanDepend(const void* kernel, bool* can) {
  constexpr uint8_t kUnknown = 0, kNo = 1, kYes = 2;
  constexpr int kMaxDevices = 256;
  static std::atomic<uint8_t> known[kMaxDevices];
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  uint8_t answer = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : kUnknown;
  if (answer == kUnknown) {
    int driver;
    error = cudaDriverGetVersion(&driver);
    if (error != cudaSuccess) return error;
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
    answer = driver >= 12030 && attributes.ptxVersion >= 90 ? kYes : kNo;
    if (device < kMaxDevices) known[device].store(answer, std::memory_order_relaxed);
  }
  *can = answer == kYes;
  return cudaSuccess;
}

// Launches a kernel that calls AwaitPredecessors.
template <typename Params>
cudaError_t LaunchDependent(void (*kernel)(Params), const Params& params, unsigned blocks,
                            int threads, cudaStream_t stream) {
  bool dependent;
  const cudaError_t error = CanDepend(reinterpret_cast<const void*>(kernel), &dependent);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  static_cast<void>(cudaLaunchKernelEx(&config, kernel, params));
  return cudaGetLastError();  // and take it back, as elsewhere
}

// Launches a kernel without sums; it is a dependent. A processor runs `resident` of its blocks at
// once. `params` has all but the geometry.
template <typename Params>
cudaError_t LaunchMap(const BatchNormShape& shape, void (*kernel)(Params), int resident,
                      Params* params, cudaStream_t stream) {
  int processors;
  const cudaError_t error = GetProcessors(&processors);
  if (error != cudaSuccess) return error;
  const BlockWish wish = {int64_t{processors} * resident, 2, std::numeric_limits<int64_t>::max()};
  if (!MakeGeometry(shape, wish, &params->geometry)) return cudaErrorInvalidConfiguration;
  return LaunchDependent(kernel, *params, BlocksOf(shape, params->geometry), kThreads, stream);
}

}  // namespace jax_fastops::cuda::batch_norm

#endif  // JAX_FASTOPS_CUDA_BATCH_NORM_LAUNCH_CUH_

// Launches of the batch norm kernels, and how they follow each other in a stream.
//
// On compute capability 9.0 and later, a kernel can be launched as a *dependent* of the preceding
// kernel in the stream, whichever that is (programmatic dependent launch). It starts while the
// preceding kernel still runs, which shortens the gap between the two. All threads of a dependent
// call AwaitPredecessors before they access memory. The call waits until the preceding kernel is
// complete and its writes are visible. Every dependent waits in this way, so everything that came
// earlier is complete too.
#ifndef JAX_FASTOPS_BATCH_NORM_LAUNCH_CUH_
#define JAX_FASTOPS_BATCH_NORM_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <limits>

#include "batch_norm/geometry.cuh"
#include "batch_norm/units.cuh"

namespace jax_fastops::cuda::batch_norm {

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

// -------------------------------------------------------------------------------------------------
// Host

// Whether kernels may be launched as dependents on the current device. This depends on the
// architecture that the kernel was compiled for, not on the device: PTX of an older architecture,
// compiled just in time for a newer device, does not wait. Drivers older than CUDA 12.3 cannot
// capture a dependent launch into a graph. All batch norm kernels are compiled for the same
// architectures, so the first kernel that is asked about answers for all.
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
  return cudaGetLastError();  // also clears the error
}

// Launches an elementwise kernel (one without sums) as a dependent. An SM runs `resident` of its
// blocks at once. The caller sets everything in `params` except the geometry.
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

#endif  // JAX_FASTOPS_BATCH_NORM_LAUNCH_CUH_

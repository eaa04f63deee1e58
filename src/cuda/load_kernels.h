// Loading kernels ahead of their first launch. The CUDA runtime otherwise loads a kernel when it is
// first launched, which fails while a stream is being captured.
#ifndef JAX_FASTOPS_CUDA_LOAD_KERNELS_H_
#define JAX_FASTOPS_CUDA_LOAD_KERNELS_H_

#include <cuda_runtime_api.h>

#include <atomic>

namespace jax_fastops::cuda {

// Of one family of kernels, as a static variable.
class KernelLoader {
 public:
  // Loads into the current device what `visit` hands to the function that it is called with;
  // null stands for no kernel. After the first call on a device it costs nothing.
  template <typename Visit>
  cudaError_t Load(const Visit& visit) {
    int device;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    if (device < kMaxDevices && loaded_[device].load(std::memory_order_acquire)) return cudaSuccess;
    visit([&error](const void* kernel) {
      if (kernel == nullptr || error != cudaSuccess) return;
      // Asking for a kernel's attributes is what makes the runtime load it.
      cudaFuncAttributes attributes;
      error = cudaFuncGetAttributes(&attributes, kernel);
    });
    if (error != cudaSuccess) return error;
    // Two threads that get here at once have both loaded everything: harmless.
    if (device < kMaxDevices) loaded_[device].store(true, std::memory_order_release);
    return cudaSuccess;
  }

 private:
  static constexpr int kMaxDevices = 256;

  std::atomic<bool> loaded_[kMaxDevices] = {};
};

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CUDA_LOAD_KERNELS_H_

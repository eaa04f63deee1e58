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
  // What a family hands its kernels to. The first error is kept.
  class Loading {
   public:
    Loading() = default;
    // A copy would keep its errors to itself.
    Loading(const Loading&) = delete;
    Loading& operator=(const Loading&) = delete;

    // Loads a kernel; null stands for none.
    void operator()(const void* kernel) const {
      if (kernel == nullptr || error_ != cudaSuccess) return;
      // Asking for a kernel's attributes is what makes the runtime load it.
      cudaFuncAttributes attributes;
      error_ = cudaFuncGetAttributes(&attributes, kernel);
    }

    // Takes the outcome of whatever else a launch needs, such as setting an attribute.
    void Check(cudaError_t outcome) const {
      if (error_ == cudaSuccess) error_ = outcome;
    }

    cudaError_t error() const { return error_; }
    bool failed() const { return error_ != cudaSuccess; }

   private:
    // Mutable: families take what they are handed by constant reference.
    mutable cudaError_t error_ = cudaSuccess;
  };

  // Calls `visit` with a Loading for the current device. Once that has succeeded on a device, a
  // call there costs nothing.
  template <typename Visit>
  cudaError_t Load(const Visit& visit) {
    int device;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    if (device < kMaxDevices && loaded_[device].load(std::memory_order_acquire)) return cudaSuccess;
    const Loading loading{};
    visit(loading);
    if (loading.failed()) {
      // Reported here, not a second time by the next launch.
      cudaGetLastError();
      return loading.error();
    }
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

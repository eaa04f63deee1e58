// Loads kernels before their first launch. By default the CUDA runtime loads a kernel when it is
// first launched, which fails while a stream is being captured.
#ifndef JAX_FASTOPS_CORE_CUDA_LOAD_KERNELS_H_
#define JAX_FASTOPS_CORE_CUDA_LOAD_KERNELS_H_

#include <cuda_runtime_api.h>

#include <atomic>

namespace jax_fastops::cuda {

// One static instance for each family of kernels.
class KernelLoader {
 public:
  // The object to which a family passes its kernels. It keeps the first error.
  class Loading {
   public:
    Loading() = default;
    // Errors recorded in a copy would be lost.
    Loading(const Loading&) = delete;
    Loading& operator=(const Loading&) = delete;

    // Loads a kernel. Null is ignored.
    void operator()(const void* kernel) const {
      if (kernel == nullptr || error_ != cudaSuccess) return;
      // Querying a kernel's attributes makes the runtime load it.
      cudaFuncAttributes attributes;
      error_ = cudaFuncGetAttributes(&attributes, kernel);
    }

    // Records the result of other preparations for a launch, such as setting a function attribute.
    void Check(cudaError_t outcome) const {
      if (error_ == cudaSuccess) error_ = outcome;
    }

    cudaError_t error() const { return error_; }
    bool failed() const { return error_ != cudaSuccess; }

   private:
    // Mutable because families receive this object by constant reference.
    mutable cudaError_t error_ = cudaSuccess;
  };

  // Calls `visit` with a Loading for the current device. After the first success on a device,
  // further calls there return immediately.
  template <typename Visit>
  cudaError_t Load(const Visit& visit) {
    int device;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    if (device < kMaxDevices && loaded_[device].load(std::memory_order_acquire)) return cudaSuccess;
    const Loading loading{};
    visit(loading);
    if (loading.failed()) {
      // Clear the error: it is reported here, and the next launch must not report it again.
      cudaGetLastError();
      return loading.error();
    }
    // Two threads that arrive here at the same time have both loaded everything, which is harmless.
    if (device < kMaxDevices) loaded_[device].store(true, std::memory_order_release);
    return cudaSuccess;
  }

 private:
  static constexpr int kMaxDevices = 256;

  std::atomic<bool> loaded_[kMaxDevices] = {};
};

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CORE_CUDA_LOAD_KERNELS_H_

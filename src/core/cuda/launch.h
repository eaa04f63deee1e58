// Launches of kernels: what the device offers, loading, and launches of every form.
//
// Kernels are loaded before a graph is captured, because the CUDA runtime cannot load them then. So
// every kernel is named through KernelOf, which enters it in its family's list, and the initialize
// stage of a family's handlers calls LoadKernels:
//
//   struct Norm;  // the family, declared in its namespace
//   auto kernel = KernelOf<Norm, NormKernel<T, 4>>();
//   return Launch(kernel, {.grid = grid, .block = dim3(256)}, stream, params);
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace jax_fastops::cuda {

// -------------------------------------------------------------------------------------------------
// The device

struct Device {
  int processors = 1;            // SMs
  int shared_per_block = 0;      // bytes of shared memory that one block may use, at most
  int shared_per_processor = 0;  // bytes of shared memory of an SM
  // The loaded code uses clusters: it was compiled for compute capability 9.0 or later. This
  // depends on the code, not only on the device, which can also run code of older architectures.
  bool clusters = false;
  // Kernels may be launched as dependents (LaunchConfig::dependent). This needs the same code, and
  // a driver that can capture such launches (CUDA 12.3).
  bool dependents = false;
  // The device runs cooperative kernels.
  bool cooperative = false;
};

// Sets `*device` to what the current device offers. Reads it once per device.
cudaError_t CurrentDevice(Device* device);

// -------------------------------------------------------------------------------------------------
// Loading

// An entry of a family's list of kernels.
struct KernelEntry {
  const void* kernel;
  const KernelEntry* next;
};

namespace internal {

template <typename Family>
struct KernelList {
  static inline const KernelEntry* first = nullptr;
};

// The number of kernels in all lists.
inline int registered_kernels = 0;

template <typename Family, auto kKernel>
struct Registered {
  static const KernelEntry* Register() {
    ++registered_kernels;
    static const KernelEntry entry = {reinterpret_cast<const void*>(kKernel),
                                      KernelList<Family>::first};
    KernelList<Family>::first = &entry;
    return &entry;
  }
  static inline const KernelEntry* const entry = Register();
};

cudaError_t LoadKernels(const KernelEntry* first);

}  // namespace internal

// The kernel, which becomes part of the family's list because this function is instantiated.
template <typename Family, auto kKernel>
auto KernelOf() {
  static_cast<void>(&internal::Registered<Family, kKernel>::entry);
  return kKernel;
}

// What a function finds out about the current device, which it is called for once per device. One
// static instance for each function.
template <typename T>
class PerDevice {
 public:
  // Sets `*value` to what find(&value) has set it to. An error is returned, and not remembered.
  template <typename Find>
  cudaError_t Get(T* value, const Find& find) {
    int device;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    Slot* const slot = device < kMaxDevices ? &slots_[device] : nullptr;
    if (slot != nullptr && slot->state.load(std::memory_order_acquire) == kKnown) {
      *value = slot->value;
      return cudaSuccess;
    }
    error = find(value);
    // The error is reported here. The next launch must not report it again.
    if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
    int unknown = kUnknown;
    // Two threads that arrive here at the same time have both found the same; one of them stores
    // it.
    if (error == cudaSuccess && slot != nullptr &&
        slot->state.compare_exchange_strong(unknown, kStoring)) {
      slot->value = *value;
      slot->state.store(kKnown, std::memory_order_release);
    }
    return error;
  }

 private:
  static constexpr int kMaxDevices = 256;
  enum State { kUnknown, kStoring, kKnown };
  struct Slot {
    std::atomic<int> state = kUnknown;
    T value{};
  };
  Slot slots_[kMaxDevices];
};

// Loads the kernels of a family on the current device. Allows each of them all of the shared memory
// that a block may use, and clusters of more than eight blocks. Further calls on the same device
// return immediately.
template <typename Family>
cudaError_t LoadKernels() {
  static PerDevice<bool> loaded;
  bool done;
  return loaded.Get(&done, [](bool* now) {
    *now = true;
    return internal::LoadKernels(internal::KernelList<Family>::first);
  });
}

// -------------------------------------------------------------------------------------------------
// Launching

struct LaunchConfig {
  dim3 grid = dim3(1);
  dim3 block = dim3(1);
  size_t shared = 0;         // bytes of dynamic shared memory
  int cluster = 1;           // blocks in a cluster, along x
  bool cooperative = false;  // all blocks run at once, so that they can wait for each other
  // The kernel may start while the preceding kernel in the stream still runs. All of its threads
  // call AwaitPredecessors before they access memory. Ignored if the device does not offer it.
  bool dependent = false;
};

// A grid along x. A launch of more blocks than it may have fails.
inline LaunchConfig Grid(int64_t blocks, int threads, int64_t shared = 0, int cluster = 1) {
  return {.grid = dim3(blocks > 0x7fffffff ? 0 : static_cast<unsigned>(blocks)),
          .block = dim3(static_cast<unsigned>(threads)),
          .shared = static_cast<size_t>(shared),
          .cluster = cluster};
}

namespace internal {
cudaError_t Launch(const void* kernel, const LaunchConfig& config, cudaStream_t stream,
                   void** arguments);
}

// Enqueues a kernel. Returns the error of the launch, and clears it, so that the next launch does
// not report it.
template <typename... Params>
cudaError_t Launch(void (*kernel)(Params...), const LaunchConfig& config, cudaStream_t stream,
                   const std::decay_t<Params>&... params) {
  void* arguments[] = {const_cast<void*>(static_cast<const void*>(&params))...};
  return internal::Launch(reinterpret_cast<const void*>(kernel), config, stream, arguments);
}

// Sets `*blocks` to the number of blocks of such a launch that the current device runs at once; 0
// if it cannot run one. The grid does not matter.
cudaError_t ResidentBlocks(const void* kernel, const LaunchConfig& config, int* blocks);

// The most blocks, a power of two up to `most`, that a cluster of such a launch may have on the
// current device, whose kernels are loaded; 1 if it has no clusters.
int LargestCluster(const void* kernel, LaunchConfig config, int most);

}  // namespace jax_fastops::cuda

#include "core/cuda/launch.h"

#include <algorithm>

namespace jax_fastops::cuda {
namespace {

// Tells for which architectures this library's kernels were compiled.
__global__ void ProbeKernel() {}

cudaError_t FindDevice(Device* device) {
  int id, driver;
  cudaError_t error = cudaGetDevice(&id);
  if (error == cudaSuccess) error = cudaDriverGetVersion(&driver);
  const auto read = [&](cudaDeviceAttr attribute) {
    int value = 0;
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, id);
    return value;
  };
  device->processors = read(cudaDevAttrMultiProcessorCount);
  device->shared_per_block = read(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  device->shared_per_processor = read(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  device->cooperative = read(cudaDevAttrCooperativeLaunch) != 0;
  cudaFuncAttributes probe;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&probe, ProbeKernel);
  if (error != cudaSuccess) return error;
  // PTX of an older architecture, compiled just in time for a newer device, has neither.
  device->clusters = std::min(probe.ptxVersion, probe.binaryVersion) >= 90;
  device->dependents = probe.ptxVersion >= 90 && driver >= 12030;
  return cudaSuccess;
}

// The launch as the runtime takes it. `attributes` has room for three.
cudaLaunchConfig_t ConfigOf(const LaunchConfig& from, cudaStream_t stream,
                            cudaLaunchAttribute* attributes) {
  cudaLaunchConfig_t config = {};
  config.gridDim = from.grid;
  config.blockDim = from.block;
  config.dynamicSmemBytes = from.shared;
  config.stream = stream;
  config.attrs = attributes;
  const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    attributes[config.numAttrs].id = id;
    return attributes[config.numAttrs++].val;
  };
  if (from.cluster > 1) {
    auto& dim = add(cudaLaunchAttributeClusterDimension).clusterDim;
    dim.x = static_cast<unsigned>(from.cluster);
    dim.y = dim.z = 1;
  }
  if (from.cooperative) add(cudaLaunchAttributeCooperative).cooperative = 1;
  if (from.dependent) {
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed =
        1;
  }
  return config;
}

}  // namespace

cudaError_t CurrentDevice(Device* device) {
  static PerDevice<Device> devices;
  return devices.Get(device, FindDevice);
}

cudaError_t ResidentBlocks(const void* kernel, const LaunchConfig& config, int* blocks) {
  cudaError_t error;
  if (config.cluster > 1) {
    cudaLaunchAttribute attributes[3];
    const cudaLaunchConfig_t launch = ConfigOf(config, nullptr, attributes);
    error = cudaOccupancyMaxActiveClusters(blocks, kernel, &launch);
    *blocks *= config.cluster;
  } else {
    Device device;
    error = CurrentDevice(&device);
    if (error != cudaSuccess) return error;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks, kernel, static_cast<int>(config.block.x), config.shared);
    *blocks *= device.processors;
  }
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return error;
}

int LargestCluster(const void* kernel, LaunchConfig config, int most) {
  Device device;
  int largest = 1;
  if (CurrentDevice(&device) != cudaSuccess || !device.clusters) return largest;
  for (int size = 2; size <= most; size *= 2) {
    config.grid = dim3(static_cast<unsigned>(size));
    config.cluster = size;
    int blocks = 0;
    // A size that the device does not support is not an error.
    if (ResidentBlocks(kernel, config, &blocks) != cudaSuccess || blocks == 0) break;
    largest = size;
  }
  return largest;
}

namespace internal {

cudaError_t LoadKernels(const KernelEntry* first) {
  Device device;
  cudaError_t error = CurrentDevice(&device);
  for (const KernelEntry* entry = first; entry != nullptr && error == cudaSuccess;
       entry = entry->next) {
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, entry->kernel);  // loads the kernel
    if (error != cudaSuccess) break;
    const int shared = device.shared_per_block - static_cast<int>(attributes.sharedSizeBytes);
    error =
        cudaFuncSetAttribute(entry->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error == cudaSuccess && device.clusters) {
      error =
          cudaFuncSetAttribute(entry->kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
  }
  return error;
}

cudaError_t Launch(const void* kernel, const LaunchConfig& config, cudaStream_t stream,
                   void** arguments) {
  LaunchConfig allowed = config;
  if (config.dependent) {
    Device device;
    const cudaError_t error = CurrentDevice(&device);
    if (error != cudaSuccess) return error;
    allowed.dependent = device.dependents;
  }
  cudaLaunchAttribute attributes[3] = {};
  const cudaLaunchConfig_t launch = ConfigOf(allowed, stream, attributes);
  static_cast<void>(cudaLaunchKernelExC(&launch, kernel, arguments));
  return cudaGetLastError();
}

}  // namespace internal
}  // namespace jax_fastops::cuda

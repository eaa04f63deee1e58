// The public functions of softmax and log-softmax. softmax_rows.cuh and softmax_gang.cuh have the
// kernels along the minor axis, softmax_columns.cuh and softmax_column_registers.cuh those along
// any other axis. softmax_launch.cuh selects between them.
#include "softmax/softmax_cuda.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "core/fast_divide.h"
#include "softmax/run.h"

namespace jax_fastops::cuda {
namespace softmax {
namespace {

// Represents the cluster kernels in queries for the largest possible cluster.
__global__ void __launch_bounds__(512) ClusterProbe() {}

// The largest cluster that fits on the device at least once.
int LargestCluster(int shared_bytes) {
  const auto set = [](cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute(ClusterProbe, attribute, value) == cudaSuccess;
  };
  int largest = 1;
  if (set(cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) &&
      set(cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) {
    for (unsigned size = 2; size <= 16; size *= 2) {
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3(size);
      config.blockDim = dim3(512);
      config.dynamicSmemBytes = shared_bytes;
      cudaLaunchAttribute attribute = {};
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {size, 1, 1};
      config.attrs = &attribute;
      config.numAttrs = 1;
      int clusters = 0;
      if (cudaOccupancyMaxActiveClusters(&clusters, ClusterProbe, &config) != cudaSuccess ||
          clusters == 0) {
        break;
      }
      largest = static_cast<int>(size);
    }
  }
  cudaGetLastError();  // an unsupported size is not an error here
  return largest;
}

cudaError_t FindLimits(int device, Limits* limits) {
  // Code that was compiled for older architectures does not use clusters.
  cudaFuncAttributes probe;
  cudaError_t error = cudaFuncGetAttributes(&probe, ClusterProbe);
  if (error != cudaSuccess) return error;
  const bool clusters = std::min(probe.ptxVersion, probe.binaryVersion) >= 90;
  error = cudaDeviceGetAttribute(&limits->processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&limits->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                 device);
  if (error != cudaSuccess) return error;
  limits->shared_bytes -= 2048;  // static shared memory of the kernels, and the system's part
  limits->cluster = clusters ? LargestCluster(std::min(limits->shared_bytes, kMostOfShared)) : 1;
  return cudaSuccess;
}

}  // namespace

cudaError_t GetLimits(Limits* limits) {
  constexpr int kMaxDevices = 256;
  static std::atomic<int> known[kMaxDevices];
  static Limits of[kMaxDevices];
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < kMaxDevices && known[device].load(std::memory_order_acquire) == 2) {
    *limits = of[device];
    return cudaSuccess;
  }
  error = FindLimits(device, limits);
  int unknown = 0;
  if (error == cudaSuccess && device < kMaxDevices &&
      known[device].compare_exchange_strong(unknown, 1)) {
    of[device] = *limits;
    known[device].store(2, std::memory_order_release);
  }
  return error;
}

namespace {

// Sizes may be 0 if the array is empty.
MaskDivisors Divisors(const MaskIndex& index) {
  MaskDivisors divisors;
  divisors.rank = index.rank;
  int64_t count = 1;
  for (int i = 0; i < index.rank; ++i) {
    count *= index.size[i];
    divisors.size[i] = std::max<int64_t>(1, index.size[i]);
    divisors.stride[i] = index.stride[i];
  }
  divisors.narrow = count <= std::numeric_limits<int32_t>::max();
  for (int i = 0; i < index.rank && divisors.narrow; ++i) {
    divisors.divisor[i] = FastDivisor(static_cast<uint32_t>(divisors.size[i]));
  }
  return divisors;
}

Params MakeParams(SoftmaxShape shape, const SoftmaxMask& mask, double scale) {
  Params p = {};
  p.outer = shape.outer;
  p.n = shape.n;
  p.inner = shape.inner;
  p.scale = scale;
  p.mask = mask.data;
  if (mask.data != nullptr) {
    p.mask_stride = mask.stride;
    p.mask_outer = Divisors(mask.outer);
    p.mask_inner = Divisors(mask.inner);
  }
  return p;
}

}  // namespace
}  // namespace softmax

cudaError_t SoftmaxForward(const SoftmaxShape& shape, const SoftmaxMask& mask, DType dtype,
                           bool log, double scale, const void* x, void* y, void* workspace,
                           cudaStream_t stream) {
  softmax::Params p = softmax::MakeParams(shape, mask, scale);
  // Test the scale in the type of the computation: a float64 scale may round to 0 in float32.
  p.zero_scale = dtype == DType::kF64 ? scale == 0 : static_cast<float>(scale) == 0;
  if (p.zero_scale) p.scale = 1;
  p.a = x;
  p.out = y;
  return softmax::Run<false>(p, dtype, log, workspace, stream);
}

cudaError_t SoftmaxBackward(const SoftmaxShape& shape, bool masked, const SoftmaxMask& mask,
                            DType dtype, bool log, double scale, const void* y, const void* dy,
                            void* dx, void* workspace, cudaStream_t stream) {
  softmax::Params p = softmax::MakeParams(shape, log ? mask : SoftmaxMask(), scale);
  p.skip_zeros = masked && !log;
  p.a = y;
  p.b = dy;
  p.out = dx;
  return softmax::Run<true>(p, dtype, log, workspace, stream);
}

cudaError_t LoadSoftmaxKernels() {
  const cudaError_t error = softmax::LoadKernels<false>();
  return error != cudaSuccess ? error : softmax::LoadKernels<true>();
}

}  // namespace jax_fastops::cuda

// Which batch norms take the resident kernel, and how it is built.
#include "cuda/batch_norm_forward.h"

#include <atomic>
#include <cstdint>

#include "cuda/batch_norm.h"
#include "cuda/batch_norm_resident.cuh"

namespace jax_fastops::cuda {
namespace {

using namespace batch_norm;  // NOLINT: this file is a part of it

using Config = ResidentConfig<2, 8, 2>;

template <typename T>
const void* KernelFor(bool residual) {
  return residual ? reinterpret_cast<const void*>(ResidentKernel<T, true, Config>)
                  : reinterpret_cast<const void*>(ResidentKernel<T, false, Config>);
}

const void* KernelOf(DType dtype, bool residual) {
  switch (dtype) {
    case DType::kF32:
      return KernelFor<float>(residual);
    case DType::kBF16:
      return KernelFor<__nv_bfloat16>(residual);
    case DType::kF16:
      return KernelFor<__half>(residual);
    case DType::kF64:
      break;
  }
  return nullptr;
}

bool MakePlan(const BatchNormShape& shape, DType dtype, const ResidentDevice& device,
              int64_t workspace_size, ResidentPlan* plan) {
  switch (dtype) {
    case DType::kF32:
      return MakeResidentPlan<float, Config>(shape, device, workspace_size, plan);
    case DType::kBF16:
      return MakeResidentPlan<__nv_bfloat16, Config>(shape, device, workspace_size, plan);
    case DType::kF16:
      return MakeResidentPlan<__half, Config>(shape, device, workspace_size, plan);
    case DType::kF64:
      break;
  }
  return false;
}

// What the current device offers, 0 processors if it cannot run the kernels. Prepares all of them
// when it is first asked about a device.
cudaError_t Prepare(ResidentDevice* offer) {
  constexpr int kMaxDevices = 256;
  static std::atomic<uint64_t> known[kMaxDevices];  // 0: not yet
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const bool kept = device < kMaxDevices;
  uint64_t packed = kept ? known[device].load(std::memory_order_acquire) : 0;
  if (packed == 0) {
    *offer = {};
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const bool residual : {false, true}) {
        error = PrepareResident(KernelOf(dtype, residual), Config::kBlocks, offer);
        if (error == cudaErrorNotSupported) *offer = {};
        if (error != cudaSuccess) break;
      }
      if (error != cudaSuccess) break;
    }
    if (error != cudaSuccess && error != cudaErrorNotSupported) return error;
    packed = uint64_t{1} << 63 | uint64_t{static_cast<uint32_t>(offer->processors)} << 32 |
             static_cast<uint32_t>(offer->shared_bytes);
    // Two threads that get here at once have both prepared everything: harmless.
    if (kept) known[device].store(packed, std::memory_order_release);
  }
  offer->processors = static_cast<int>(packed >> 32 & 0x7fffffff);
  offer->shared_bytes = static_cast<int>(packed & 0xffffffff);
  return cudaSuccess;
}

// Whether one launch can do it, and was measured to be faster than three; then its plan.
bool Pays(const BatchNormShape& shape, DType dtype, bool residual, const ResidentDevice& device,
          int64_t workspace_size, ResidentPlan* plan) {
  // Of less than that the barriers are the longest part.
  constexpr int64_t kLeastBytes = 4 << 20;
  const int64_t bytes = shape.groups * shape.group_size() * static_cast<int64_t>(DTypeSize(dtype));
  // Where many blocks are idle, as few rows of NCHW may leave them, the others do not ask for
  // enough of a residual.
  return bytes >= kLeastBytes && device.processors > 0 &&
         MakePlan(shape, dtype, device, workspace_size, plan) &&
         plan->spread >= (residual ? 0.85 : 0.7) && plan->kept >= 0.1;
}

}  // namespace

cudaError_t BatchNormForward(const BatchNormShape& shape, DType dtype, double eps, bool relu,
                             const BatchNormForwardArrays& arrays, cudaStream_t stream) {
  if (IsEmpty(shape)) return cudaSuccess;
  const bool residual = arrays.residual != nullptr;
  ResidentDevice device;
  const cudaError_t error = Prepare(&device);
  if (error != cudaSuccess) return error;
  ResidentPlan plan = {};
  if (AreGroupsAligned(shape, DTypeSize(dtype), arrays.x, arrays.residual, arrays.y) &&
      Pays(shape, dtype, residual, device, arrays.workspace_size, &plan)) {
    SetArrays(arrays, eps, relu, &plan.params);
    const cudaError_t launched = LaunchResident(KernelOf(dtype, residual), plan, stream);
    // Of a device that is shared there may be less than its attributes say.
    if (launched != cudaErrorCooperativeLaunchTooLarge) return launched;
  }
  const cudaError_t launched = BatchNormStatistics(shape, dtype, arrays.statistics(), stream);
  if (launched != cudaSuccess) return launched;
  return BatchNormApply(shape, dtype, eps, relu, arrays.apply(), stream);
}

cudaError_t LoadBatchNormForwardKernels() {
  ResidentDevice device;
  cudaError_t error = Prepare(&device);
  if (error == cudaSuccess) error = LoadBatchNormStatisticsKernels();
  if (error == cudaSuccess) error = LoadBatchNormApplyKernels();
  return error;
}

}  // namespace jax_fastops::cuda

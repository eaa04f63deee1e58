// Selects the batch norm forwards that take the resident kernel, and configures that kernel.

#include <cstdint>

#include "batch_norm/batch_norm.h"
#include "batch_norm/resident.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"

namespace jax_fastops::cuda {

struct BatchNormForwardKernels;  // the list of kernels

namespace {

using namespace batch_norm;  // NOLINT: this file is a part of it

using Config = ResidentConfig<2, 8, 2>;

using Kernel = void (*)(ResidentParams);

// Null for double, which has no cooperative kernel.
Kernel KernelFor(DType dtype, bool residual) {
  return ForDType(dtype, [&](auto tag) -> Kernel {
    using T = typename decltype(tag)::Type;
    using Kernels = BatchNormForwardKernels;
    if constexpr (sizeof(T) == 8) {
      return nullptr;
    } else {
      return residual ? KernelOf<Kernels, ResidentKernel<T, true, Config>>()
                      : KernelOf<Kernels, ResidentKernel<T, false, Config>>();
    }
  });
}

bool MakePlan(const BatchNormShape& shape, DType dtype, const ResidentDevice& device,
              int64_t workspace_size, GridPlan* plan) {
  return ForDType(dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    if constexpr (sizeof(T) == 8) {
      return false;
    } else {
      return MakeResidentPlan<T, Config>(shape, device, workspace_size, plan);
    }
  });
}

// Whether the cooperative kernel supports the shape and was measured to be faster than the three
// separate kernels. If so, sets `plan`.
bool Pays(const BatchNormShape& shape, DType dtype, bool residual, const ResidentDevice& device,
          int64_t workspace_size, GridPlan* plan) {
  // For smaller arrays the barriers dominate the time.
  constexpr int64_t kLeastBytes = 4 << 20;
  const int64_t bytes = shape.groups * shape.group_size() * static_cast<int64_t>(DTypeSize(dtype));
  // With a low `spread` many blocks are idle, as for NCHW with few rows. The busy blocks then have
  // too few loads of the residual in flight, so a residual requires a higher spread.
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
  const cudaError_t error = GetResidentDevice(Config::kBlocks, &device);
  if (error != cudaSuccess) return error;
  GridPlan plan;
  if (AreGroupsAligned(shape, DTypeSize(dtype), arrays.x, arrays.residual, arrays.y) &&
      Pays(shape, dtype, residual, device, arrays.workspace_size, &plan)) {
    const cudaError_t launched =
        LaunchGrid(KernelFor(dtype, residual), MakeResidentParams(shape, plan, arrays, eps, relu),
                   plan, stream);
    // If the device is shared, it may have less room than its attributes say. Use the separate
    // kernels then.
    if (launched != cudaErrorCooperativeLaunchTooLarge) return launched;
  }
  const cudaError_t launched = BatchNormStatistics(shape, dtype, arrays.statistics(), stream);
  if (launched != cudaSuccess) return launched;
  return BatchNormApply(shape, dtype, eps, relu, arrays.apply(), stream);
}

cudaError_t LoadBatchNormForwardKernels() {
  cudaError_t error = LoadKernels<BatchNormForwardKernels>();
  if (error == cudaSuccess) error = LoadBatchNormStatisticsKernels();
  if (error == cudaSuccess) error = LoadBatchNormApplyKernels();
  return error;
}

}  // namespace jax_fastops::cuda

// Selects the batch norm backwards that take the resident kernel, and configures that kernel.

#include <cstdint>

#include "batch_norm/batch_norm.h"
#include "batch_norm/resident_gradient.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"

namespace jax_fastops::cuda {

struct BatchNormGradientKernels;  // the list of kernels

namespace {

using namespace batch_norm;  // NOLINT: this file is a part of it

using Config = ResidentConfig<2, 8, 2>;

using Kernel = void (*)(GradientParams);

// Null for double, which has no cooperative kernel.
Kernel KernelFor(DType dtype, bool mask) {
  return ForDType(dtype, [&](auto tag) -> Kernel {
    using T = typename decltype(tag)::Type;
    using Kernels = BatchNormGradientKernels;
    if constexpr (sizeof(T) == 8) {
      return nullptr;
    } else {
      return mask ? KernelOf<Kernels, GradientKernel<T, true, Config>>()
                  : KernelOf<Kernels, GradientKernel<T, false, Config>>();
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
      return MakeGradientPlan<T, Config>(shape, device, workspace_size, plan);
    }
  });
}

// Whether the cooperative kernel supports the shape and was measured to be faster than the three
// separate kernels on an H100. If so, sets `plan`.
bool Pays(const BatchNormShape& shape, DType dtype, bool mask, const ResidentDevice& device,
          int64_t workspace_size, GridPlan* plan) {
  // For smaller arrays the barriers dominate the time.
  constexpr int64_t kLeastBytes = 4 << 20;
  const int64_t element = static_cast<int64_t>(DTypeSize(dtype));
  const int64_t bytes = 2 * shape.groups * shape.group_size() * element;
  if (bytes < kLeastBytes || device.processors == 0 ||
      !MakePlan(shape, dtype, device, workspace_size, plan)) {
    return false;
  }
  // 16-bit units do the same arithmetic for half the bytes. They lose more time to the loads of
  // mask words and to the block with the most work, so their limits are higher.
  const bool narrow = element < 4;
  return plan->spread >= (narrow ? 0.86 : 0.78) && plan->kept >= (narrow && mask ? 0.13 : 0.05);
}

}  // namespace

cudaError_t BatchNormGradient(const BatchNormShape& shape, DType dtype, double eps,
                              const BatchNormGradientArrays& arrays, cudaStream_t stream) {
  if (IsEmpty(shape)) return cudaSuccess;
  ResidentDevice device;
  const cudaError_t error = GetResidentDevice(Config::kBlocks, &device);
  if (error != cudaSuccess) return error;
  GridPlan plan;
  if (AreGroupsAligned(shape, DTypeSize(dtype), arrays.x, arrays.dy, arrays.dx) &&
      IsAligned(arrays.mask) &&
      Pays(shape, dtype, arrays.mask != nullptr, device, arrays.workspace_size, &plan)) {
    const cudaError_t launched =
        LaunchGrid(KernelFor(dtype, arrays.mask != nullptr),
                   MakeGradientParams(shape, plan, arrays, eps), plan, stream);
    // If the device is shared, it may have less room than its attributes say. Use the separate
    // kernels then.
    if (launched != cudaErrorCooperativeLaunchTooLarge) return launched;
  }
  const cudaError_t launched = BatchNormSums(shape, dtype, eps, arrays.of_sums(), stream);
  if (launched != cudaSuccess) return launched;
  return BatchNormBackward(shape, dtype, eps, arrays.of_dx(), stream);
}

cudaError_t LoadBatchNormGradientKernels() {
  cudaError_t error = LoadKernels<BatchNormGradientKernels>();
  if (error == cudaSuccess) error = LoadBatchNormSumsKernels();
  if (error == cudaSuccess) error = LoadBatchNormBackwardKernels();
  return error;
}

}  // namespace jax_fastops::cuda

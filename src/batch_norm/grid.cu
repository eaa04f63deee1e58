// Selects the batch norm forwards and backwards that take a cooperative kernel, and configures
// these kernels. float64 has no cooperative kernel.
#include <cstdint>

#include "batch_norm/batch_norm.h"
#include "batch_norm/resident.cuh"
#include "batch_norm/resident_gradient.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"

namespace jax_fastops::cuda {

namespace {

using namespace batch_norm;  // NOLINT: this file is a part of it

using Config = ResidentConfig<2, 8, 2>;

int64_t BytesOf(const BatchNormShape& shape, DType dtype) {
  return shape.groups * shape.group_size() * static_cast<int64_t>(DTypeSize(dtype));
}

cudaError_t LaunchResident(const BatchNormShape& shape, DType dtype, double eps, bool relu,
                           const BatchNormArrays& arrays, cudaStream_t stream) {
  const bool residual = arrays.residual != nullptr;
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    if constexpr (sizeof(T) == 8) {
      return cudaErrorCooperativeLaunchTooLarge;
    } else {
      const auto kernel = residual ? KernelOf<BatchNormKernels, ResidentKernel<T, true, Config>>()
                                   : KernelOf<BatchNormKernels, ResidentKernel<T, false, Config>>();
      return LaunchGrid<Config>(
          BytesOf(shape, dtype), stream,
          [&](const ResidentDevice& device, GridPlan* plan) {
            return MakeResidentPlan<T, Config>(shape, device, arrays.workspace_size, plan);
          },
          // With a low `spread` many blocks are idle, as for NCHW with few rows. The busy blocks
          // then have too few loads of the residual in flight, so a residual requires a higher
          // spread.
          [&](const GridPlan& plan) {
            return plan.spread >= (residual ? 0.85 : 0.7) && plan.kept >= 0.1;
          },
          [&](const auto& launch, const GridPlan& plan) {
            return launch(kernel, MakeResidentParams(shape, plan, arrays, eps, relu));
          });
    }
  });
}

cudaError_t LaunchGradient(const BatchNormShape& shape, DType dtype, double eps,
                           const BatchNormArrays& arrays, cudaStream_t stream) {
  const bool mask = arrays.mask != nullptr;
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    if constexpr (sizeof(T) == 8) {
      return cudaErrorCooperativeLaunchTooLarge;
    } else {
      const auto kernel = mask ? KernelOf<BatchNormKernels, GradientKernel<T, true, Config>>()
                               : KernelOf<BatchNormKernels, GradientKernel<T, false, Config>>();
      return LaunchGrid<Config>(
          2 * BytesOf(shape, dtype), stream,
          [&](const ResidentDevice& device, GridPlan* plan) {
            return MakeGradientPlan<T, Config>(shape, device, arrays.workspace_size, plan);
          },
          // 16-bit units do the same arithmetic for half the bytes. They lose more time to the
          // loads of mask words and to the block with the most work, so their limits are higher.
          [&](const GridPlan& plan) {
            constexpr bool kNarrow = sizeof(T) < 4;
            return plan.spread >= (kNarrow ? 0.86 : 0.78) &&
                   plan.kept >= (kNarrow && mask ? 0.13 : 0.05);
          },
          [&](const auto& launch, const GridPlan& plan) {
            return launch(kernel, MakeGradientParams(shape, plan, arrays, eps));
          });
    }
  });
}

}  // namespace

cudaError_t BatchNormForward(const BatchNormShape& shape, DType dtype, double eps, bool relu,
                             const BatchNormArrays& arrays, cudaStream_t stream) {
  if (IsEmpty(shape)) return cudaSuccess;
  if (AreGroupsAligned(shape, DTypeSize(dtype), arrays.x, arrays.residual, arrays.y)) {
    const cudaError_t error = LaunchResident(shape, dtype, eps, relu, arrays, stream);
    if (error != cudaErrorCooperativeLaunchTooLarge) return error;
  }
  const cudaError_t error = BatchNormStatistics(shape, dtype, arrays, stream);
  if (error != cudaSuccess) return error;
  return BatchNormApply(shape, dtype, eps, relu, arrays, stream);
}

cudaError_t BatchNormGradient(const BatchNormShape& shape, DType dtype, double eps,
                              const BatchNormArrays& arrays, cudaStream_t stream) {
  if (IsEmpty(shape)) return cudaSuccess;
  if (AreGroupsAligned(shape, DTypeSize(dtype), arrays.x, arrays.dy, arrays.dx) &&
      IsAligned(arrays.mask)) {
    const cudaError_t error = LaunchGradient(shape, dtype, eps, arrays, stream);
    if (error != cudaErrorCooperativeLaunchTooLarge) return error;
  }
  BatchNormArrays of_sums = arrays;
  of_sums.dx = nullptr;
  const cudaError_t error = BatchNormSums(shape, dtype, eps, of_sums, stream);
  if (error != cudaSuccess) return error;
  return BatchNormBackward(shape, dtype, eps, arrays, stream);
}

cudaError_t LoadBatchNormKernels() { return LoadKernels<BatchNormKernels>(); }

}  // namespace jax_fastops::cuda

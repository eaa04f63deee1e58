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

cudaError_t LaunchResident(const BatchNormCall& call, cudaStream_t stream) {
  const bool residual = call.residual != nullptr;
  return ForDType(call.dtype, [&]<typename T>(TypeTag<T>) {
    if constexpr (sizeof(T) == 8) {
      return cudaErrorCooperativeLaunchTooLarge;
    } else {
      const auto kernel = residual ? KernelOf<BatchNormKernels, ResidentKernel<T, true>>()
                                   : KernelOf<BatchNormKernels, ResidentKernel<T, false>>();
      // With a low `spread` many blocks are idle, as for NCHW with few rows. The busy blocks then
      // have too few loads of the residual in flight, so a residual requires a higher spread.
      const auto pays = [&](const GridPlan& plan) {
        return plan.spread >= (residual ? 0.85 : 0.7) && plan.kept >= 0.1;
      };
      const int64_t pairs = call.workspace_size / (2 * sizeof(double) / sizeof(float));
      return LaunchGrid<RingOf<T, 1>, double>(call, 1, pairs, kernel, MakeResidentParams, pays,
                                              stream);
    }
  });
}

cudaError_t LaunchGradient(const BatchNormCall& call, cudaStream_t stream) {
  const bool mask = call.mask != nullptr;
  return ForDType(call.dtype, [&]<typename T>(TypeTag<T>) {
    if constexpr (sizeof(T) == 8) {
      return cudaErrorCooperativeLaunchTooLarge;
    } else {
      const auto kernel = mask ? KernelOf<BatchNormKernels, GradientKernel<T, true>>()
                               : KernelOf<BatchNormKernels, GradientKernel<T, false>>();
      // 16-bit units do the same arithmetic for half the bytes. They lose more time to the loads of
      // mask words and to the block with the most work, so their limits are higher.
      const auto pays = [&](const GridPlan& plan) {
        constexpr bool kNarrow = sizeof(T) < 4;
        return plan.spread >= (kNarrow ? 0.86 : 0.78) &&
               plan.kept >= (kNarrow && mask ? 0.13 : 0.05);
      };
      return LaunchGrid<GradientRing<T>, float>(call, 2, call.workspace_size / 2, kernel,
                                                MakeGradientParams, pays, stream);
    }
  });
}

}  // namespace

cudaError_t BatchNormForward(const BatchNormCall& call, cudaStream_t stream) {
  if (IsEmpty(call.shape)) return cudaSuccess;
  if (AreGroupsAligned(call, call.x, call.residual, call.y)) {
    const cudaError_t error = LaunchResident(call, stream);
    if (error != cudaErrorCooperativeLaunchTooLarge) return error;
  }
  const cudaError_t error = BatchNormStatistics(call, stream);
  return error == cudaSuccess ? BatchNormApply(call, stream) : error;
}

cudaError_t BatchNormGradient(const BatchNormCall& call, cudaStream_t stream) {
  if (IsEmpty(call.shape)) return cudaSuccess;
  if (AreGroupsAligned(call, call.x, call.dy, call.dx) && IsAligned(call.mask)) {
    const cudaError_t error = LaunchGradient(call, stream);
    if (error != cudaErrorCooperativeLaunchTooLarge) return error;
  }
  BatchNormCall of_sums = call;
  of_sums.dx = nullptr;
  const cudaError_t error = BatchNormSums(of_sums, stream);
  return error == cudaSuccess ? BatchNormBackward(call, stream) : error;
}

cudaError_t LoadBatchNormKernels() { return LoadKernels<BatchNormKernels>(); }

}  // namespace jax_fastops::cuda

// Launches the kernels of a plan. Each element type includes this file once, in a file of its own,
// so that they compile in parallel.
#ifndef JAX_FASTOPS_SOFTMAX_LAUNCH_CUH_
#define JAX_FASTOPS_SOFTMAX_LAUNCH_CUH_

#include <cuda_runtime_api.h>

#include "core/cuda/launch.h"
#include "softmax/block.cuh"
#include "softmax/column_registers.cuh"
#include "softmax/columns.cuh"
#include "softmax/gang.cuh"
#include "softmax/plan.h"
#include "softmax/rows.cuh"
#include "softmax/run.h"
#include "softmax/span.cuh"

namespace jax_fastops::cuda::softmax {

inline LaunchConfig ConfigOf(const Plan& plan) {
  return {.grid = dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.blocks_y)),
          .block = dim3(static_cast<unsigned>(plan.threads)),
          .shared = static_cast<size_t>(plan.shared_bytes),
          .cluster = plan.cluster,
          .cooperative = plan.cooperative};
}

template <typename T, bool kGrad, int kUnits, int kRows, bool kAligned>
cudaError_t LaunchRows(const Plan& plan, const Params& p, cudaStream_t stream) {
  const auto kernel =
      !p.dropout.drops() ? KernelOf<Softmax, RowsKernel<T, kGrad, kUnits, kRows, kAligned>>()
                         : KernelOf<Softmax, RowsKernel<T, kGrad, kUnits, kRows, kAligned, true>>();
  return Launch(kernel, ConfigOf(plan), stream, p, plan.rows);
}

template <typename T, bool kGrad, int kBytes>
cudaError_t LaunchColumns(const Plan& plan, const Params& p, void* workspace, cudaStream_t stream) {
  const auto kernel = KernelOf<Softmax, ColumnsKernel<T, kGrad, kBytes>>();
  ColumnsParams q = plan.columns;
  q.partials = workspace;
  if (q.stage == Stage::kReduce) {
    const cudaError_t error = Launch(kernel, ConfigOf(plan), stream, p, q);
    if (error != cudaSuccess) return error;
    q.stage = Stage::kWrite;
  }
  return Launch(kernel, ConfigOf(plan), stream, p, q);
}

template <typename T, bool kGrad>
cudaError_t LaunchGang(const Plan& plan, const Params& p, void* workspace, cudaStream_t stream) {
  GangParams q = plan.gang;
  q.partials = static_cast<uint32_t*>(workspace);
  if (plan.ones > 0) {
    const cudaError_t error =
        cudaMemsetAsync(workspace, 0xff, plan.ones * sizeof(uint32_t), stream);
    if (error != cudaSuccess) return error;
  }
  const auto kernel = p.log ? KernelOf<Softmax, GangKernel<T, kGrad, true>>()
                            : KernelOf<Softmax, GangKernel<T, kGrad, false>>();
  return Launch(kernel, ConfigOf(plan), stream, p, q);
}

template <typename T, bool kGrad>
cudaError_t Run(const Plan& plan, const Params& p, void* workspace, cudaStream_t stream) {
  if constexpr (sizeof(T) < 8) {
    const auto launch = [&](auto kernel, const auto& q) {
      return Launch(kernel, ConfigOf(plan), stream, p, q);
    };
    switch (plan.kernel) {
      case Kernel::kTinyRows:
        return launch(KernelOf<Softmax, RowsKernel<T, kGrad, 1, 4, true>>(), plan.rows);
      case Kernel::kShortRows:
        return LaunchRows<T, kGrad, 2, 2, true>(plan, p, stream);
      case Kernel::kRows:
        return LaunchRows<T, kGrad, kRowUnits, 1, true>(plan, p, stream);
      case Kernel::kRaggedRows:
        return LaunchRows<T, kGrad, kRowUnits, 1, false>(plan, p, stream);
      case Kernel::kSpan:
        return launch(KernelOf<Softmax, SpanKernel<T, kGrad>>(), plan.span);
      case Kernel::kBlock:
        return launch(KernelOf<Softmax, BlockKernel<T, kGrad>>(), plan.block);
      case Kernel::kGang:
        return LaunchGang<T, kGrad>(plan, p, workspace, stream);
      case Kernel::kColumnRegisters:
        return p.log ? launch(KernelOf<Softmax, ColumnRegistersKernel<T, kGrad, true, 16>>(),
                              plan.registers)
                     : launch(KernelOf<Softmax, ColumnRegistersKernel<T, kGrad, false, 16>>(),
                              plan.registers);
      case Kernel::kElementColumnRegisters:
        return p.log
                   ? launch(KernelOf<Softmax, ColumnRegistersKernel<T, kGrad, true, sizeof(T)>>(),
                            plan.registers)
                   : launch(KernelOf<Softmax, ColumnRegistersKernel<T, kGrad, false, sizeof(T)>>(),
                            plan.registers);
      case Kernel::kColumns:
        return LaunchColumns<T, kGrad, ColumnUnitBytes(sizeof(T))>(plan, p, workspace, stream);
      case Kernel::kElementColumns:
        break;
    }
  }
  return LaunchColumns<T, kGrad, sizeof(T)>(plan, p, workspace, stream);
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_LAUNCH_CUH_

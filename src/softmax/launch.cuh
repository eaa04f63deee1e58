// Launches the kernels of a plan. Each element type includes this file once, in a file of its own,
// so that they compile in parallel.
#ifndef JAX_FASTOPS_SOFTMAX_LAUNCH_CUH_
#define JAX_FASTOPS_SOFTMAX_LAUNCH_CUH_

#include <cuda_runtime_api.h>

#include "core/cuda/launch.h"
#include "softmax/column_registers.cuh"
#include "softmax/columns.cuh"
#include "softmax/plan.h"
#include "softmax/rows.cuh"
#include "softmax/run.h"

namespace jax_fastops::cuda::softmax {

inline LaunchConfig ConfigOf(const Plan& plan) {
  return {.grid = dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.blocks_y)),
          .block = dim3(static_cast<unsigned>(plan.threads)),
          .shared = static_cast<size_t>(plan.shared_bytes),
          .cluster = plan.cluster};
}

template <typename T, bool kGrad, int kBytes>
cudaError_t LaunchColumns(const Plan& plan, const Params& p, void* workspace, cudaStream_t stream) {
  const auto kernel = KernelOf<Softmax, ColumnsKernel<T, kGrad, kBytes>>();
  ColumnsParams q = plan.columns;
  q.partials = workspace;
  if (q.stage == RowStage::kReduce) {
    const cudaError_t error = Launch(kernel, ConfigOf(plan), stream, p, q);
    if (error != cudaSuccess) return error;
    q.stage = RowStage::kWrite;
  }
  return Launch(kernel, ConfigOf(plan), stream, p, q);
}

template <typename T, bool kGrad>
cudaError_t RunColumns(const Plan& plan, const Params& p, void* workspace, cudaStream_t stream) {
  if constexpr (sizeof(T) < 8) {
    const auto launch = [&](auto kernel) {
      return Launch(kernel, ConfigOf(plan), stream, p, plan.registers);
    };
    switch (plan.kernel) {
      case Kernel::kColumnRegisters:
        return p.log ? launch(KernelOf<Softmax, ColumnRegistersKernel<T, kGrad, true, 16>>())
                     : launch(KernelOf<Softmax, ColumnRegistersKernel<T, kGrad, false, 16>>());
      case Kernel::kElementColumnRegisters:
        return p.log
                   ? launch(KernelOf<Softmax, ColumnRegistersKernel<T, kGrad, true, sizeof(T)>>())
                   : launch(KernelOf<Softmax, ColumnRegistersKernel<T, kGrad, false, sizeof(T)>>());
      case Kernel::kColumns:
        return LaunchColumns<T, kGrad, ColumnUnitBytes(sizeof(T))>(plan, p, workspace, stream);
      case Kernel::kElementColumns:
        break;
    }
  }
  return LaunchColumns<T, kGrad, sizeof(T)>(plan, p, workspace, stream);
}

template <typename T, bool kGrad>
cudaError_t Run(const Arguments& arguments, cudaStream_t stream) {
  const auto& [op, rows_plan, rows, plan, columns, workspace] = arguments;
  if constexpr (sizeof(T) < 8) {
    if (rows_plan.holder != RowHolder::kNone) {
      if constexpr (kGrad) {
        return op.dropout.drops()
                   ? LaunchHeldRows<Softmax, DropBackward, T>(rows_plan, rows, op, workspace,
                                                              stream)
                   : LaunchHeldRows<Softmax, Backward, T>(rows_plan, rows, op, workspace, stream);
      } else {
        return op.dropout.drops()
                   ? LaunchHeldRows<Softmax, DropForward, T>(rows_plan, rows, op, workspace, stream)
                   : LaunchHeldRows<Softmax, Forward, T>(rows_plan, rows, op, workspace, stream);
      }
    }
  }
  return RunColumns<T, kGrad>(plan, columns, workspace, stream);
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_LAUNCH_CUH_

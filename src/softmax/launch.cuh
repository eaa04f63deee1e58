// Launches the kernels of a plan. Each element type includes this file once, in a file of its own,
// so that they compile in parallel.
#ifndef JAX_FASTOPS_SOFTMAX_LAUNCH_CUH_
#define JAX_FASTOPS_SOFTMAX_LAUNCH_CUH_

#include <cuda_runtime_api.h>

#include "core/cuda/launch.h"
#include "softmax/functors.cuh"
#include "softmax/run.h"

namespace jax_fastops::cuda::softmax {

template <typename T, bool kGrad>
cudaError_t Run(const Arguments& arguments, cudaStream_t stream) {
  const auto& [op, rows_plan, rows, columns_plan, columns, workspace] = arguments;
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
  return LaunchHeldColumns<Softmax, ColumnFunctors<kGrad>, T>(columns_plan, columns, op, workspace,
                                                              stream);
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_LAUNCH_CUH_

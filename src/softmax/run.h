// The interface between softmax.cu and the files that instantiate the kernels, one for each element
// type.
#ifndef JAX_FASTOPS_SOFTMAX_RUN_H_
#define JAX_FASTOPS_SOFTMAX_RUN_H_

#include <cuda_runtime_api.h>

#include "core/cuda/held_columns.cuh"
#include "core/cuda/held_rows.cuh"
#include "softmax/math.cuh"

namespace jax_fastops::cuda::softmax {

struct Softmax;  // the family, in the list of kernels

// What a call becomes: rows along the minor axis, if `rows_plan` has a kernel for them, or columns
// along any axis.
struct Arguments {
  OpParams op;
  HeldPlan rows_plan;
  HeldRows rows;
  ColumnsPlan columns_plan;
  HeldColumns columns;
  void* workspace;
};

// Enqueues the kernels, of the backward if kGrad.
template <typename T, bool kGrad>
cudaError_t Run(const Arguments& arguments, cudaStream_t stream);

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_RUN_H_

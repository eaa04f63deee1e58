// The launchers of bias_act for one activation. Each activation has its own source file, because
// each has about 60 kernels to compile.
#ifndef JAX_FASTOPS_ELEMENTWISE_BIAS_ACT_OF_H_
#define JAX_FASTOPS_ELEMENTWISE_BIAS_ACT_OF_H_

#include <cuda_runtime_api.h>

#include <utility>

#include "core/dtype.h"
#include "elementwise/broadcast.h"
#include "elementwise/elementwise.h"
#include "elementwise/operands.cuh"

namespace jax_fastops::cuda {

struct BiasActKernels;  // the family of KernelOf
struct Gelu;
struct GeluExact;
struct Silu;

// The kinds of operands in the backward: x is full.
using BiasKinds = std::integer_sequence<int, KindsOf(kPlain, kPlain), KindsOf(kPlain, kColumn),
                                        KindsOf(kPlain, kRow)>;
using BiasRowsKinds = std::integer_sequence<int, KindsOf(kPlain, kColumn), KindsOf(kPlain, kRow)>;

template <typename Act>
cudaError_t BiasActForwardOf(const BroadcastShape& shape, DType dtype, const Operand operands[2],
                             void* out, cudaStream_t stream);

template <typename Act>
cudaError_t BiasActBackwardOf(const BroadcastShape& shape, DType dtype, const void* dy,
                              const Operand operands[2], const Gradient gradients[2],
                              SumWorkspace workspace, cudaStream_t stream);

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_BIAS_ACT_OF_H_

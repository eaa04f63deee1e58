// The backend that a file is compiled for. A launcher has the same name in the namespaces `cpu` and
// `cuda`, and differs only in its result and its last parameter, so one header declares it for
// both:
//
//   namespace jax_fastops::FASTOPS_BACKEND {
//   Status Transpose(const void* x, void* y, ..., Queue queue);
//   }
#pragma once

#if defined(FASTOPS_CUDA) || defined(__CUDACC__)

#include <cuda_runtime_api.h>

#define FASTOPS_BACKEND cuda

namespace jax_fastops::cuda {
// The launcher enqueues kernels, and memsets if there is nothing to compute, and returns the first
// error. It does not allocate, synchronize or load kernels: XLA may record it into a CUDA graph.
// Once its Load...Kernels() has run on the device, its kernels are loaded.
using Queue = cudaStream_t;
using Status = cudaError_t;
}  // namespace jax_fastops::cuda

#else

#include "core/cpu/parallel.h"

#define FASTOPS_BACKEND cpu

namespace jax_fastops::cpu {
// The launcher returns when the work is done.
using Queue = Executor&;
using Status = void;
}  // namespace jax_fastops::cpu

#endif

namespace jax_fastops {
namespace backend = FASTOPS_BACKEND;
}

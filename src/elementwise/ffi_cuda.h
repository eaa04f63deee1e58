// Shared by the CUDA handlers of the element-wise ops.
#ifndef JAX_FASTOPS_ELEMENTWISE_FFI_CUDA_H_
#define JAX_FASTOPS_ELEMENTWISE_FFI_CUDA_H_

#include <cuda_runtime_api.h>

#include "core/ffi/handler_cuda.h"
#include "elementwise/buffers.h"

namespace jax_fastops {

// Reads a call, and launches `kernel(call)` unless the result is empty.
template <typename Read, typename Kernel>
ffi::Error LaunchElementwise(const char* op, cudaStream_t stream, const ffi::RemainingArgs& args,
                             const ffi::RemainingRets& rets, const ffi::Dictionary& attributes,
                             const Read& read, const Kernel& kernel) {
  ElementwiseCall call;
  FASTOPS_RETURN_IF_ERROR(read(args, rets, attributes, &call));
  if (call.IsEmpty()) {
    return call.ClearGradients([&](void* data, size_t bytes) {
      return ToError(op, cudaMemsetAsync(data, 0, bytes, stream));
    });
  }
  return ToError(op, kernel(call));
}

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_ELEMENTWISE_FFI_CUDA_H_

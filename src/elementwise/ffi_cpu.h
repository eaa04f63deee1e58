// Shared by the CPU handlers of the element-wise ops.
#ifndef JAX_FASTOPS_ELEMENTWISE_FFI_CPU_H_
#define JAX_FASTOPS_ELEMENTWISE_FFI_CPU_H_

#include <cstring>

#include "core/ffi/executor.h"
#include "elementwise/buffers.h"

namespace jax_fastops {

// Reads a call, and runs `kernel(call, executor)` unless the result is empty.
template <typename Read, typename Kernel>
ffi::Error RunElementwise(ffi::ThreadPool pool, const ffi::RemainingArgs& args,
                          const ffi::RemainingRets& rets, const ffi::Dictionary& attributes,
                          const Read& read, const Kernel& kernel) {
  ElementwiseCall call;
  FASTOPS_RETURN_IF_ERROR(read(args, rets, attributes, &call));
  if (call.IsEmpty()) {
    return call.ClearGradients([](void* data, size_t bytes) {
      std::memset(data, 0, bytes);
      return ffi::Error::Success();
    });
  }
  XlaExecutor executor(pool);
  kernel(call, executor);
  return ffi::Error::Success();
}

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_ELEMENTWISE_FFI_CPU_H_

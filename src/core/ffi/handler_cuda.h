// Definitions of CUDA handlers of the usual form.
#ifndef JAX_FASTOPS_CORE_FFI_HANDLER_CUDA_H_
#define JAX_FASTOPS_CORE_FFI_HANDLER_CUDA_H_

#include <cuda_runtime_api.h>

#include "core/ffi/cuda_errors.h"
#include "xla/ffi/api/ffi.h"

// A handler for calls with any buffers: it gets the stream, all operands, results and attributes.
#define FASTOPS_CUDA_HANDLER(name, impl)                                      \
  XLA_FFI_DEFINE_HANDLER(name, impl,                                          \
                         ::xla::ffi::Ffi::Bind()                              \
                             .Ctx<::xla::ffi::PlatformStream<cudaStream_t>>() \
                             .RemainingArgs()                                 \
                             .RemainingRets()                                 \
                             .Attrs(),                                        \
                         {::xla::ffi::Traits::kCmdBufferCompatible})

// The initialize stage of a family's targets. `load` takes no arguments, loads the kernels and
// returns a CUDA error. Kernels cannot be loaded later, while a graph is captured.
#define FASTOPS_CUDA_INITIALIZE(name, family, load)                                      \
  XLA_FFI_DEFINE_HANDLER(                                                                \
      name,                                                                              \
      [](::xla::ffi::RemainingArgs, ::xla::ffi::RemainingRets, ::xla::ffi::Dictionary) { \
        return ::jax_fastops::ToError(family " (loading kernels)", load());              \
      },                                                                                 \
      ::xla::ffi::Ffi::Bind<::xla::ffi::ExecutionStage::kInitialize>()                   \
          .RemainingArgs()                                                               \
          .RemainingRets()                                                               \
          .Attrs())

#endif  // JAX_FASTOPS_CORE_FFI_HANDLER_CUDA_H_

// Definitions of CUDA handlers of the usual form.
#ifndef JAX_FASTOPS_FFI_HANDLER_CUDA_H_
#define JAX_FASTOPS_FFI_HANDLER_CUDA_H_

#include <cuda_runtime_api.h>

#include "ffi/cuda_errors.h"
#include "xla/ffi/api/ffi.h"

// A handler of whatever the call has: the stream, all operands, all results, all attributes.
#define FASTOPS_CUDA_HANDLER(name, impl)                                      \
  XLA_FFI_DEFINE_HANDLER(name, impl,                                          \
                         ::xla::ffi::Ffi::Bind()                              \
                             .Ctx<::xla::ffi::PlatformStream<cudaStream_t>>() \
                             .RemainingArgs()                                 \
                             .RemainingRets()                                 \
                             .Attrs(),                                        \
                         {::xla::ffi::Traits::kCmdBufferCompatible})

// The initialize stage of a family's targets: loads its kernels by `load`, a function without
// arguments that returns a CUDA error. Nothing can be loaded later, while a graph is captured.
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

#endif  // JAX_FASTOPS_FFI_HANDLER_CUDA_H_

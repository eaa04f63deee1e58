// Defines and registers the handlers of a family, for the backend that is compiled.
//
//   ffi::Error Forward(Call& call, Queue queue) {
//     const void* const x = call.In("x");
//     ...
//     return call.Run([&] { return backend::Relu(x, ..., queue); });
//   }
//   FASTOPS_HANDLER("dropout", Forward, LoadDropoutKernels);
//
// The last argument is the function that loads the target's CUDA kernels. XLA calls it in the
// initialize stage, because nothing can be loaded while a graph is captured.
//
// Handlers are compiled once for each version of the FFI. What speaks XLA is therefore in the
// inline namespace `xla`: the build renames it for the second version, together with XLA's own.
#pragma once

#include "core/backend.h"
#include "core/ffi/call.h"
#include "core/ffi/registry.h"

#ifndef FASTOPS_CUDA
#include "core/ffi/executor.h"
#include "core/ffi/huge_pages.h"
#endif

namespace jax_fastops::inline xla {

using backend::Queue;

#ifdef FASTOPS_CUDA

// `initialize` is a function of the buffers and attributes that XLA calls before `function`.
#define FASTOPS_CUDA_HANDLER(target, function, initialize)                                         \
  XLA_FFI_DEFINE_HANDLER(kExecute##function,                                                       \
                         +[](cudaStream_t stream, ffi::RemainingArgs args,                         \
                             ffi::RemainingRets rets, ffi::Dictionary attributes) {                \
                           Call call(target, args, rets, attributes);                              \
                           return function(call, stream);                                          \
                         },                                                                        \
                         ffi::Ffi::Bind()                                                          \
                             .Ctx<ffi::PlatformStream<cudaStream_t>>()                             \
                             .RemainingArgs()                                                      \
                             .RemainingRets()                                                      \
                             .Attrs(),                                                             \
                         {ffi::Traits::kCmdBufferCompatible});                                     \
  XLA_FFI_DEFINE_HANDLER(                                                                          \
      kInitialize##function, initialize,                                                           \
      ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().RemainingArgs().RemainingRets().Attrs()); \
  static const Registration kRegistration##function(target, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR,  \
                                                    kExecute##function, kInitialize##function)

#define FASTOPS_HANDLER(target, function, load)                                        \
  FASTOPS_CUDA_HANDLER(                                                                \
      target, function, +[](ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) { \
        return ToError(target " (loading kernels)", cuda::load());                     \
      })

#else

template <XLA_FFI_Handler* kHandler>
XLA_FFI_Error* WithHugePages(XLA_FFI_CallFrame* frame) {
  AdviseHugePages(*frame);
  return kHandler(frame);
}

#define FASTOPS_HANDLER(target, function, load)                                                   \
  XLA_FFI_DEFINE_HANDLER(                                                                         \
      kExecute##function,                                                                         \
      +[](ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,                 \
          ffi::Dictionary attributes) {                                                           \
        Call call(target, args, rets, attributes);                                                \
        XlaExecutor executor(pool);                                                               \
        return function(call, executor);                                                          \
      },                                                                                          \
      ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());           \
  static const Registration kRegistration##function(target, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR, \
                                                    WithHugePages<kExecute##function>)

#endif

}  // namespace jax_fastops::inline xla

// CUDA handlers of the window sum. window_sum/buffers.h lists their buffers.
#include <cuda_runtime_api.h>

#include "core/ffi/handler_cuda.h"
#include "core/ffi/registry.h"
#include "window_sum/buffers.h"
#include "window_sum/window_sum_cuda.h"

namespace jax_fastops {
namespace {

ffi::Error WindowSumImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                         ffi::RemainingRets workspace, ffi::Dictionary attributes) {
  WindowSumCall call;
  FASTOPS_RETURN_IF_ERROR(ReadWindowSum(x, y, workspace, attributes, &call));
  return ToError("window_sum", cuda::WindowSum(call.shape, call.dtype, x.untyped_data(),
                                               y->untyped_data(), call.workspace, stream));
}

FASTOPS_CUDA_INITIALIZE(kInitialize, "window_sum", cuda::LoadWindowSumKernels);
XLA_FFI_DEFINE_HANDLER(kWindowSum, WindowSumImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Ret<ffi::AnyBuffer>()  // y
                           .RemainingRets()        // workspace
                           .Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});

FASTOPS_REGISTER("jax_fastops.window_sum", kWindowSum, kInitialize);

}  // namespace
}  // namespace jax_fastops

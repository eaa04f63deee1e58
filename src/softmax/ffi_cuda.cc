// CUDA handlers of softmax and log-softmax. softmax/buffers.h lists their buffers.
#include <cuda_runtime_api.h>

#include "core/ffi/handler_cuda.h"
#include "core/ffi/registry.h"
#include "softmax/buffers.h"
#include "softmax/softmax_cuda.h"

namespace jax_fastops {
namespace {

ffi::Error SoftmaxImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs mask,
                       ffi::Result<ffi::AnyBuffer> y, ffi::RemainingRets workspace,
                       ffi::Dictionary attributes) {
  SoftmaxCall call;
  FASTOPS_RETURN_IF_ERROR(ReadSoftmaxForward("softmax", x, mask, y, workspace, attributes, &call));
  return ToError("softmax",
                 cuda::SoftmaxForward(call.shape, call.mask, call.dtype, call.log, call.scale,
                                      x.untyped_data(), y->untyped_data(), call.workspace, stream));
}

ffi::Error SoftmaxBwdImpl(cudaStream_t stream, ffi::AnyBuffer y, ffi::AnyBuffer dy,
                          ffi::RemainingArgs mask, ffi::Result<ffi::AnyBuffer> dx,
                          ffi::RemainingRets workspace, ffi::Dictionary attributes) {
  SoftmaxCall call;
  FASTOPS_RETURN_IF_ERROR(
      ReadSoftmaxBackward("softmax_bwd", y, dy, mask, dx, workspace, attributes, &call));
  return ToError("softmax_bwd",
                 cuda::SoftmaxBackward(call.shape, call.masked, call.mask, call.dtype, call.log,
                                       call.scale, y.untyped_data(), dy.untyped_data(),
                                       dx->untyped_data(), call.workspace, stream));
}

FASTOPS_CUDA_INITIALIZE(kInitialize, "softmax", cuda::LoadSoftmaxKernels);
XLA_FFI_DEFINE_HANDLER(kSoftmax, SoftmaxImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .RemainingArgs()        // mask
                           .Ret<ffi::AnyBuffer>()  // y
                           .RemainingRets()        // workspace
                           .Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kSoftmaxBwd, SoftmaxBwdImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // y
                           .Arg<ffi::AnyBuffer>()  // dy
                           .RemainingArgs()        // mask
                           .Ret<ffi::AnyBuffer>()  // dx
                           .RemainingRets()        // workspace
                           .Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});

FASTOPS_REGISTER("jax_fastops.softmax", kSoftmax, kInitialize);
FASTOPS_REGISTER("jax_fastops.softmax_bwd", kSoftmaxBwd, kInitialize);

}  // namespace
}  // namespace jax_fastops

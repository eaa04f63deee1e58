// CPU handlers of softmax and log-softmax. softmax/buffers.h lists their buffers.
#include "softmax/softmax_cpu.h"

#include "core/ffi/executor.h"
#include "core/ffi/handler_cpu.h"
#include "softmax/buffers.h"

namespace jax_fastops {
namespace {

ffi::Error SoftmaxImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs mask,
                       ffi::Result<ffi::AnyBuffer> y, ffi::RemainingRets workspace,
                       ffi::Dictionary attributes) {
  SoftmaxCall call;
  FASTOPS_RETURN_IF_ERROR(ReadSoftmaxForward("softmax", x, mask, y, workspace, attributes, &call));
  XlaExecutor executor(pool);
  cpu::SoftmaxForward(call.shape, call.mask, call.dtype, call.log, call.scale, x.untyped_data(),
                      y->untyped_data(), executor);
  return ffi::Error::Success();
}

ffi::Error SoftmaxBwdImpl(ffi::ThreadPool pool, ffi::AnyBuffer y, ffi::AnyBuffer dy,
                          ffi::RemainingArgs mask, ffi::Result<ffi::AnyBuffer> dx,
                          ffi::RemainingRets workspace, ffi::Dictionary attributes) {
  SoftmaxCall call;
  FASTOPS_RETURN_IF_ERROR(
      ReadSoftmaxBackward("softmax_bwd", y, dy, mask, dx, workspace, attributes, &call));
  XlaExecutor executor(pool);
  cpu::SoftmaxBackward(call.shape, call.masked, call.mask, call.dtype, call.log, call.scale,
                       y.untyped_data(), dy.untyped_data(), dx->untyped_data(), executor);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kSoftmax, SoftmaxImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .RemainingArgs()        // mask
                           .Ret<ffi::AnyBuffer>()  // y
                           .RemainingRets()        // workspace
                           .Attrs());
XLA_FFI_DEFINE_HANDLER(kSoftmaxBwd, SoftmaxBwdImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // y
                           .Arg<ffi::AnyBuffer>()  // dy
                           .RemainingArgs()        // mask
                           .Ret<ffi::AnyBuffer>()  // dx
                           .RemainingRets()        // workspace
                           .Attrs());

FASTOPS_REGISTER_CPU("jax_fastops.softmax", kSoftmax);
FASTOPS_REGISTER_CPU("jax_fastops.softmax_bwd", kSoftmaxBwd);

}  // namespace
}  // namespace jax_fastops

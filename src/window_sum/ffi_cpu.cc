// CPU handlers of the window sum. window_sum/buffers.h lists their buffers.
#include "window_sum/window_sum_cpu.h"

#include "core/ffi/executor.h"
#include "core/ffi/handler_cpu.h"
#include "window_sum/buffers.h"

namespace jax_fastops {
namespace {

ffi::Error WindowSumImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                         ffi::RemainingRets workspace, ffi::Dictionary attributes) {
  WindowSumCall call;
  FASTOPS_RETURN_IF_ERROR(ReadWindowSum(x, y, workspace, attributes, &call));
  XlaExecutor executor(pool);
  cpu::WindowSum(call.shape, call.dtype, x.untyped_data(), y->untyped_data(), executor);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kWindowSum, WindowSumImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Ret<ffi::AnyBuffer>()  // y
                           .RemainingRets()        // workspace
                           .Attrs());

FASTOPS_REGISTER_CPU("jax_fastops.window_sum", kWindowSum);

}  // namespace
}  // namespace jax_fastops

// CPU handlers of layer norm and RMS norm. norm/buffers.h lists their buffers.
#include "norm/norm_cpu.h"

#include "core/ffi/executor.h"
#include "core/ffi/handler_cpu.h"
#include "norm/buffers.h"

namespace jax_fastops {
namespace {

ffi::Error NormImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  NormCall call;
  NormForwardArrays arrays;
  FASTOPS_RETURN_IF_ERROR(ReadNormForward("norm", args, rets, attributes, &call, &arrays));
  XlaExecutor executor(pool);
  cpu::NormForward(call.shape, call.kind, call.dtype, call.eps, arrays, executor);
  return ffi::Error::Success();
}

ffi::Error NormBwdImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  NormCall call;
  NormBackwardArrays arrays;
  FASTOPS_RETURN_IF_ERROR(ReadNormBackward("norm_bwd", args, rets, attributes, &call, &arrays));
  XlaExecutor executor(pool);
  cpu::NormBackward(call.shape, call.kind, call.dtype, arrays, executor);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(
    kNorm, NormImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(
    kNormBwd, NormBwdImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

FASTOPS_REGISTER_CPU("jax_fastops.norm", kNorm);
FASTOPS_REGISTER_CPU("jax_fastops.norm_bwd", kNormBwd);

}  // namespace
}  // namespace jax_fastops

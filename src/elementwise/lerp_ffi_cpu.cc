// CPU handlers of lerp. elementwise/buffers.h lists their buffers.
#include "elementwise/lerp_cpu.h"

#include "core/ffi/handler_cpu.h"
#include "elementwise/ffi_cpu.h"

namespace jax_fastops {
namespace {

ffi::Error LerpImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  return RunElementwise(pool, args, rets, attributes, ReadLerp,
                        [](const ElementwiseCall& call, cpu::Executor& executor) {
                          cpu::LerpForward(call.shape, call.dtype, call.operands, call.out,
                                           executor);
                        });
}

ffi::Error LerpBwdImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  return RunElementwise(pool, args, rets, attributes, ReadLerpBackward,
                        [](const ElementwiseCall& call, cpu::Executor& executor) {
                          cpu::LerpBackward(call.shape, call.dtype, call.dy, call.operands,
                                            call.gradients, call.workspace, executor);
                        });
}

XLA_FFI_DEFINE_HANDLER(
    kLerp, LerpImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(
    kLerpBwd, LerpBwdImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

FASTOPS_REGISTER_CPU("jax_fastops.lerp", kLerp);
FASTOPS_REGISTER_CPU("jax_fastops.lerp_bwd", kLerpBwd);

}  // namespace
}  // namespace jax_fastops

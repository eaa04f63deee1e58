// CPU handlers of bias_act. elementwise/buffers.h lists their buffers.
#include "elementwise/bias_act_cpu.h"

#include "core/ffi/handler_cpu.h"
#include "elementwise/ffi_cpu.h"

namespace jax_fastops {
namespace {

ffi::Error BiasActImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  return RunElementwise(pool, args, rets, attributes, ReadBiasAct,
                        [](const ElementwiseCall& call, cpu::Executor& executor) {
                          cpu::BiasActForward(call.shape, call.dtype, call.activation,
                                              call.operands, call.out, call.mask, executor);
                        });
}

ffi::Error BiasActBwdImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                          ffi::Dictionary attributes) {
  return RunElementwise(pool, args, rets, attributes, ReadBiasActBackward,
                        [](const ElementwiseCall& call, cpu::Executor& executor) {
                          cpu::BiasActBackward(call.shape, call.dtype, call.activation, call.dy,
                                               call.operands, call.gradients, call.workspace,
                                               executor);
                        });
}

ffi::Error BiasReluBwdImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                           ffi::Dictionary attributes) {
  return RunElementwise(pool, args, rets, attributes, ReadBiasReluBackward,
                        [](const ElementwiseCall& call, cpu::Executor& executor) {
                          cpu::BiasReluBackward(call.shape, call.dtype, call.dy, call.saved_mask,
                                                call.gradients, call.workspace, executor);
                        });
}

XLA_FFI_DEFINE_HANDLER(
    kBiasAct, BiasActImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(
    kBiasActBwd, BiasActBwdImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(
    kBiasReluBwd, BiasReluBwdImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

FASTOPS_REGISTER_CPU("jax_fastops.bias_act", kBiasAct);
FASTOPS_REGISTER_CPU("jax_fastops.bias_act_bwd", kBiasActBwd);
FASTOPS_REGISTER_CPU("jax_fastops.bias_relu_bwd", kBiasReluBwd);

}  // namespace
}  // namespace jax_fastops

// CPU handlers of bias_act; ffi/elementwise_buffers.h says what they take.
#include "cpu/bias_act.h"

#include <cstring>

#include "ffi/elementwise_buffers.h"
#include "ffi/executor.h"
#include "ffi/registry.h"

namespace jax_fastops {
namespace {

// Whether there is nothing to do; the sums are then those of nothing.
bool IsEmpty(const ElementwiseCall& call) {
  if (call.shape.elements() != 0) return false;
  for (int i = 0; i < 2; ++i) {
    if (call.gradient_bytes[i] > 0) std::memset(call.gradients[i].data, 0, call.gradient_bytes[i]);
  }
  return true;
}

ffi::Error BiasActImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  ElementwiseCall call;
  FASTOPS_RETURN_IF_ERROR(ReadBiasAct(args, rets, attributes, &call));
  if (IsEmpty(call)) return ffi::Error::Success();
  XlaExecutor executor(pool);
  cpu::BiasActForward(call.shape, call.dtype, call.activation, call.operands, call.out, call.mask,
                      executor);
  return ffi::Error::Success();
}

ffi::Error BiasActBwdImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                          ffi::Dictionary attributes) {
  ElementwiseCall call;
  FASTOPS_RETURN_IF_ERROR(ReadBiasActBackward(args, rets, attributes, &call));
  if (IsEmpty(call)) return ffi::Error::Success();
  XlaExecutor executor(pool);
  cpu::BiasActBackward(call.shape, call.dtype, call.activation, call.dy, call.operands,
                       call.gradients, call.workspace, executor);
  return ffi::Error::Success();
}

ffi::Error BiasReluBwdImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                           ffi::Dictionary attributes) {
  ElementwiseCall call;
  FASTOPS_RETURN_IF_ERROR(ReadBiasReluBackward(args, rets, attributes, &call));
  if (IsEmpty(call)) return ffi::Error::Success();
  XlaExecutor executor(pool);
  cpu::BiasReluBackward(call.shape, call.dtype, call.dy, call.saved_mask, call.gradients,
                        call.workspace, executor);
  return ffi::Error::Success();
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

FASTOPS_REGISTER("jax_fastops.bias_act", kBiasAct);
FASTOPS_REGISTER("jax_fastops.bias_act_bwd", kBiasActBwd);
FASTOPS_REGISTER("jax_fastops.bias_relu_bwd", kBiasReluBwd);

}  // namespace
}  // namespace jax_fastops

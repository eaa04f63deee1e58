// CPU handlers of lerp; ffi/elementwise_buffers.h says what they take.
#include "cpu/lerp.h"

#include <cstring>

#include "ffi/elementwise_buffers.h"
#include "ffi/executor.h"
#include "ffi/registry.h"

namespace jax_fastops {
namespace {

ffi::Error LerpImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  ElementwiseCall call;
  FASTOPS_RETURN_IF_ERROR(ReadLerp(args, rets, attributes, &call));
  if (call.shape.elements() == 0) return ffi::Error::Success();
  XlaExecutor executor(pool);
  cpu::LerpForward(call.shape, call.dtype, call.operands, call.out, executor);
  return ffi::Error::Success();
}

ffi::Error LerpBwdImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  ElementwiseCall call;
  FASTOPS_RETURN_IF_ERROR(ReadLerpBackward(args, rets, attributes, &call));
  if (call.shape.elements() == 0) {  // sums of nothing
    for (int i = 0; i < 3; ++i) {
      if (call.gradient_bytes[i] > 0)
        std::memset(call.gradients[i].data, 0, call.gradient_bytes[i]);
    }
    return ffi::Error::Success();
  }
  XlaExecutor executor(pool);
  cpu::LerpBackward(call.shape, call.dtype, call.dy, call.operands, call.gradients, call.workspace,
                    executor);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(
    kLerp, LerpImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(
    kLerpBwd, LerpBwdImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

FASTOPS_REGISTER("jax_fastops.lerp", kLerp);
FASTOPS_REGISTER("jax_fastops.lerp_bwd", kLerpBwd);

}  // namespace
}  // namespace jax_fastops

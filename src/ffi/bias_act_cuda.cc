// CUDA handlers of bias_act; ffi/elementwise_buffers.h says what they take.
#include <cuda_runtime_api.h>

#include "cuda/bias_act.h"
#include "ffi/cuda_errors.h"
#include "ffi/elementwise_buffers.h"
#include "ffi/registry.h"

namespace jax_fastops {
namespace {

// Sums of nothing.
ffi::Error ZeroGradients(const char* op, const ElementwiseCall& call, cudaStream_t stream) {
  for (int i = 0; i < 2; ++i) {
    if (call.gradient_bytes[i] == 0) continue;
    FASTOPS_RETURN_IF_ERROR(
        ToError(op, cudaMemsetAsync(call.gradients[i].data, 0, call.gradient_bytes[i], stream)));
  }
  return ffi::Error::Success();
}

ffi::Error BiasActImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  ElementwiseCall call;
  FASTOPS_RETURN_IF_ERROR(ReadBiasAct(args, rets, attributes, &call));
  if (call.shape.elements() == 0) return ffi::Error::Success();
  return ToError("bias_act", cuda::BiasActForward(call.shape, call.dtype, call.activation,
                                                  call.operands, call.out, call.mask, stream));
}

ffi::Error BiasActBwdImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                          ffi::Dictionary attributes) {
  ElementwiseCall call;
  FASTOPS_RETURN_IF_ERROR(ReadBiasActBackward(args, rets, attributes, &call));
  if (call.shape.elements() == 0) return ZeroGradients("bias_act_bwd", call, stream);
  return ToError("bias_act_bwd",
                 cuda::BiasActBackward(call.shape, call.dtype, call.activation, call.dy,
                                       call.operands, call.gradients, call.workspace, stream));
}

ffi::Error BiasReluBwdImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                           ffi::Dictionary attributes) {
  ElementwiseCall call;
  FASTOPS_RETURN_IF_ERROR(ReadBiasReluBackward(args, rets, attributes, &call));
  if (call.shape.elements() == 0) return ZeroGradients("bias_relu_bwd", call, stream);
  return ToError("bias_relu_bwd",
                 cuda::BiasReluBackward(call.shape, call.dtype, call.dy, call.saved_mask,
                                        call.gradients, call.workspace, stream));
}

ffi::Error InitializeImpl(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return ToError("bias_act (loading kernels)", cuda::LoadBiasActKernels());
}

XLA_FFI_DEFINE_HANDLER(
    kInitialize, InitializeImpl,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kBiasAct, BiasActImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kBiasActBwd, BiasActBwdImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kBiasReluBwd, BiasReluBwdImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});

FASTOPS_REGISTER("jax_fastops.bias_act", kBiasAct, kInitialize);
FASTOPS_REGISTER("jax_fastops.bias_act_bwd", kBiasActBwd, kInitialize);
FASTOPS_REGISTER("jax_fastops.bias_relu_bwd", kBiasReluBwd, kInitialize);

}  // namespace
}  // namespace jax_fastops

// CUDA handlers of bias_act. elementwise/buffers.h lists their buffers.
#include <cuda_runtime_api.h>

#include "core/ffi/registry.h"
#include "elementwise/bias_act_cuda.h"
#include "elementwise/ffi_cuda.h"

namespace jax_fastops {
namespace {

ffi::Error BiasActImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  return LaunchElementwise("bias_act", stream, args, rets, attributes, ReadBiasAct,
                           [stream](const ElementwiseCall& call) {
                             return cuda::BiasActForward(call.shape, call.dtype, call.activation,
                                                         call.operands, call.out, call.mask,
                                                         stream);
                           });
}

ffi::Error BiasActBwdImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                          ffi::Dictionary attributes) {
  return LaunchElementwise("bias_act_bwd", stream, args, rets, attributes, ReadBiasActBackward,
                           [stream](const ElementwiseCall& call) {
                             return cuda::BiasActBackward(call.shape, call.dtype, call.activation,
                                                          call.dy, call.operands, call.gradients,
                                                          call.workspace, stream);
                           });
}

ffi::Error BiasReluBwdImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                           ffi::Dictionary attributes) {
  return LaunchElementwise("bias_relu_bwd", stream, args, rets, attributes, ReadBiasReluBackward,
                           [stream](const ElementwiseCall& call) {
                             return cuda::BiasReluBackward(call.shape, call.dtype, call.dy,
                                                           call.saved_mask, call.gradients,
                                                           call.workspace, stream);
                           });
}

FASTOPS_CUDA_INITIALIZE(kInitialize, "bias_act", cuda::LoadBiasActKernels);
FASTOPS_CUDA_HANDLER(kBiasAct, BiasActImpl);
FASTOPS_CUDA_HANDLER(kBiasActBwd, BiasActBwdImpl);
FASTOPS_CUDA_HANDLER(kBiasReluBwd, BiasReluBwdImpl);

FASTOPS_REGISTER("jax_fastops.bias_act", kBiasAct, kInitialize);
FASTOPS_REGISTER("jax_fastops.bias_act_bwd", kBiasActBwd, kInitialize);
FASTOPS_REGISTER("jax_fastops.bias_relu_bwd", kBiasReluBwd, kInitialize);

}  // namespace
}  // namespace jax_fastops

// CUDA handlers of lerp. elementwise/buffers.h lists their buffers.
#include <cuda_runtime_api.h>

#include "core/ffi/registry.h"
#include "elementwise/ffi_cuda.h"
#include "elementwise/lerp_cuda.h"

namespace jax_fastops {
namespace {

ffi::Error LerpImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  return LaunchElementwise(
      "lerp", stream, args, rets, attributes, ReadLerp, [stream](const ElementwiseCall& call) {
        return cuda::LerpForward(call.shape, call.dtype, call.operands, call.out, stream);
      });
}

ffi::Error LerpBwdImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  return LaunchElementwise("lerp_bwd", stream, args, rets, attributes, ReadLerpBackward,
                           [stream](const ElementwiseCall& call) {
                             return cuda::LerpBackward(call.shape, call.dtype, call.dy,
                                                       call.operands, call.gradients,
                                                       call.workspace, stream);
                           });
}

FASTOPS_CUDA_INITIALIZE(kInitialize, "lerp", cuda::LoadLerpKernels);
FASTOPS_CUDA_HANDLER(kLerp, LerpImpl);
FASTOPS_CUDA_HANDLER(kLerpBwd, LerpBwdImpl);

FASTOPS_REGISTER("jax_fastops.lerp", kLerp, kInitialize);
FASTOPS_REGISTER("jax_fastops.lerp_bwd", kLerpBwd, kInitialize);

}  // namespace
}  // namespace jax_fastops

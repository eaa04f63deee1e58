// CUDA handlers of layer norm and RMS norm. norm/buffers.h lists their buffers.
#include <cuda_runtime_api.h>

#include "core/ffi/handler_cuda.h"
#include "core/ffi/registry.h"
#include "norm/buffers.h"
#include "norm/norm_cuda.h"

namespace jax_fastops {
namespace {

ffi::Error NormImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  NormCall call;
  NormForwardArrays arrays;
  FASTOPS_RETURN_IF_ERROR(ReadNormForward("norm", args, rets, attributes, &call, &arrays));
  return ToError("norm",
                 cuda::NormForward(call.shape, call.kind, call.dtype, call.eps, arrays, stream));
}

ffi::Error NormBwdImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  NormCall call;
  NormBackwardArrays arrays;
  FASTOPS_RETURN_IF_ERROR(ReadNormBackward("norm_bwd", args, rets, attributes, &call, &arrays));
  return ToError("norm_bwd", cuda::NormBackward(call.shape, call.kind, call.dtype, arrays, stream));
}

FASTOPS_CUDA_INITIALIZE(kInitializeForward, "norm", cuda::LoadNormForwardKernels);
FASTOPS_CUDA_INITIALIZE(kInitializeBackward, "norm_bwd", cuda::LoadNormBackwardKernels);
FASTOPS_CUDA_HANDLER(kNorm, NormImpl);
FASTOPS_CUDA_HANDLER(kNormBwd, NormBwdImpl);

FASTOPS_REGISTER("jax_fastops.norm", kNorm, kInitializeForward);
FASTOPS_REGISTER("jax_fastops.norm_bwd", kNormBwd, kInitializeBackward);

}  // namespace
}  // namespace jax_fastops

// CUDA handlers of layer norm and RMS norm; ffi/norm_buffers.h says what they take.
#include <cuda_runtime_api.h>

#include "cuda/norm.h"
#include "ffi/cuda_errors.h"
#include "ffi/norm_buffers.h"
#include "ffi/registry.h"

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

ffi::Error InitializeForward(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return ToError("norm (loading kernels)", cuda::LoadNormForwardKernels());
}

ffi::Error InitializeBackward(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return ToError("norm_bwd (loading kernels)", cuda::LoadNormBackwardKernels());
}

XLA_FFI_DEFINE_HANDLER(
    kInitializeForward, InitializeForward,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(
    kInitializeBackward, InitializeBackward,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kNorm, NormImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kNormBwd, NormBwdImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs(),
                       {ffi::Traits::kCmdBufferCompatible});

FASTOPS_REGISTER("jax_fastops.norm", kNorm, kInitializeForward);
FASTOPS_REGISTER("jax_fastops.norm_bwd", kNormBwd, kInitializeBackward);

}  // namespace
}  // namespace jax_fastops

// CUDA handlers of batch norm. batch_norm/buffers.h lists their buffers.
#include <cuda_runtime_api.h>

#include "batch_norm/batch_norm_cuda.h"
#include "batch_norm/buffers.h"
#include "batch_norm/forward.h"
#include "batch_norm/gradient.h"
#include "core/ffi/handler_cuda.h"
#include "core/ffi/registry.h"

namespace jax_fastops {
namespace {

ffi::Error ForwardImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  constexpr char kOp[] = "batch_norm_fwd";
  BatchNormCall call;
  BatchNormForwardArrays arrays;
  FASTOPS_RETURN_IF_ERROR(ReadBatchNormForward(kOp, args, rets, attributes, &call, &arrays));
  return ToError(
      kOp, cuda::BatchNormForward(call.shape, call.dtype, call.eps, call.relu, arrays, stream));
}

ffi::Error StatisticsImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                          ffi::Dictionary attributes) {
  constexpr char kOp[] = "batch_norm_statistics";
  BatchNormCall call;
  BatchNormStatisticsArrays arrays;
  FASTOPS_RETURN_IF_ERROR(ReadBatchNormStatistics(kOp, args, rets, attributes, &call, &arrays));
  return ToError(kOp, cuda::BatchNormStatistics(call.shape, call.dtype, arrays, stream));
}

ffi::Error ApplyImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     ffi::Dictionary attributes) {
  constexpr char kOp[] = "batch_norm_apply";
  BatchNormCall call;
  BatchNormApplyArrays arrays;
  FASTOPS_RETURN_IF_ERROR(ReadBatchNormApply(kOp, args, rets, attributes, &call, &arrays));
  return ToError(kOp,
                 cuda::BatchNormApply(call.shape, call.dtype, call.eps, call.relu, arrays, stream));
}

ffi::Error SumsImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  constexpr char kOp[] = "batch_norm_sums";
  BatchNormCall call;
  BatchNormSumsArrays arrays;
  FASTOPS_RETURN_IF_ERROR(ReadBatchNormSums(kOp, args, rets, attributes, &call, &arrays));
  return ToError(kOp, cuda::BatchNormSums(call.shape, call.dtype, call.eps, arrays, stream));
}

ffi::Error BackwardImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Dictionary attributes) {
  constexpr char kOp[] = "batch_norm_bwd";
  BatchNormCall call;
  BatchNormBackwardArrays arrays;
  FASTOPS_RETURN_IF_ERROR(ReadBatchNormBackward(kOp, args, rets, attributes, &call, &arrays));
  return ToError(kOp, cuda::BatchNormBackward(call.shape, call.dtype, call.eps, arrays, stream));
}

ffi::Error GradientImpl(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Dictionary attributes) {
  constexpr char kOp[] = "batch_norm_grad";
  BatchNormCall call;
  BatchNormGradientArrays arrays;
  FASTOPS_RETURN_IF_ERROR(ReadBatchNormGradient(kOp, args, rets, attributes, &call, &arrays));
  return ToError(kOp, cuda::BatchNormGradient(call.shape, call.dtype, call.eps, arrays, stream));
}

FASTOPS_CUDA_INITIALIZE(kInitializeForward, "batch_norm_fwd", cuda::LoadBatchNormForwardKernels);
FASTOPS_CUDA_INITIALIZE(kInitializeStatistics, "batch_norm_statistics",
                        cuda::LoadBatchNormStatisticsKernels);
FASTOPS_CUDA_INITIALIZE(kInitializeApply, "batch_norm_apply", cuda::LoadBatchNormApplyKernels);
FASTOPS_CUDA_INITIALIZE(kInitializeSums, "batch_norm_sums", cuda::LoadBatchNormSumsKernels);
FASTOPS_CUDA_INITIALIZE(kInitializeBackward, "batch_norm_bwd", cuda::LoadBatchNormBackwardKernels);
FASTOPS_CUDA_INITIALIZE(kInitializeGradient, "batch_norm_grad", cuda::LoadBatchNormGradientKernels);
FASTOPS_CUDA_HANDLER(kForward, ForwardImpl);
FASTOPS_CUDA_HANDLER(kStatistics, StatisticsImpl);
FASTOPS_CUDA_HANDLER(kApply, ApplyImpl);
FASTOPS_CUDA_HANDLER(kSums, SumsImpl);
FASTOPS_CUDA_HANDLER(kBackward, BackwardImpl);
FASTOPS_CUDA_HANDLER(kGradient, GradientImpl);

FASTOPS_REGISTER("jax_fastops.batch_norm_fwd", kForward, kInitializeForward);
FASTOPS_REGISTER("jax_fastops.batch_norm_statistics", kStatistics, kInitializeStatistics);
FASTOPS_REGISTER("jax_fastops.batch_norm_apply", kApply, kInitializeApply);
FASTOPS_REGISTER("jax_fastops.batch_norm_sums", kSums, kInitializeSums);
FASTOPS_REGISTER("jax_fastops.batch_norm_bwd", kBackward, kInitializeBackward);
FASTOPS_REGISTER("jax_fastops.batch_norm_grad", kGradient, kInitializeGradient);

}  // namespace
}  // namespace jax_fastops

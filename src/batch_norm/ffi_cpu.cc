// CPU handlers of batch norm. batch_norm/buffers.h lists their buffers.
#include "batch_norm/batch_norm_cpu.h"

#include "batch_norm/buffers.h"
#include "core/ffi/executor.h"
#include "core/ffi/handler_cpu.h"

namespace jax_fastops {
namespace {

ffi::Error ForwardImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  BatchNormCall call;
  BatchNormForwardArrays arrays;
  FASTOPS_RETURN_IF_ERROR(
      ReadBatchNormForward("batch_norm_fwd", args, rets, attributes, &call, &arrays));
  XlaExecutor executor(pool);
  cpu::BatchNormStatistics(call.shape, call.dtype, arrays.statistics(), executor);
  cpu::BatchNormApply(call.shape, call.dtype, call.eps, call.relu, arrays.apply(), executor);
  return ffi::Error::Success();
}

ffi::Error StatisticsImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                          ffi::Dictionary attributes) {
  BatchNormCall call;
  BatchNormStatisticsArrays arrays;
  FASTOPS_RETURN_IF_ERROR(
      ReadBatchNormStatistics("batch_norm_statistics", args, rets, attributes, &call, &arrays));
  XlaExecutor executor(pool);
  cpu::BatchNormStatistics(call.shape, call.dtype, arrays, executor);
  return ffi::Error::Success();
}

ffi::Error ApplyImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     ffi::Dictionary attributes) {
  BatchNormCall call;
  BatchNormApplyArrays arrays;
  FASTOPS_RETURN_IF_ERROR(
      ReadBatchNormApply("batch_norm_apply", args, rets, attributes, &call, &arrays));
  XlaExecutor executor(pool);
  cpu::BatchNormApply(call.shape, call.dtype, call.eps, call.relu, arrays, executor);
  return ffi::Error::Success();
}

ffi::Error SumsImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attributes) {
  BatchNormCall call;
  BatchNormSumsArrays arrays;
  FASTOPS_RETURN_IF_ERROR(
      ReadBatchNormSums("batch_norm_sums", args, rets, attributes, &call, &arrays));
  XlaExecutor executor(pool);
  cpu::BatchNormSums(call.shape, call.dtype, call.eps, arrays, executor);
  return ffi::Error::Success();
}

ffi::Error BackwardImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Dictionary attributes) {
  BatchNormCall call;
  BatchNormBackwardArrays arrays;
  FASTOPS_RETURN_IF_ERROR(
      ReadBatchNormBackward("batch_norm_bwd", args, rets, attributes, &call, &arrays));
  XlaExecutor executor(pool);
  cpu::BatchNormBackward(call.shape, call.dtype, call.eps, arrays, executor);
  return ffi::Error::Success();
}

ffi::Error GradientImpl(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Dictionary attributes) {
  BatchNormCall call;
  BatchNormGradientArrays arrays;
  FASTOPS_RETURN_IF_ERROR(
      ReadBatchNormGradient("batch_norm_grad", args, rets, attributes, &call, &arrays));
  XlaExecutor executor(pool);
  cpu::BatchNormSums(call.shape, call.dtype, call.eps, arrays.of_sums(), executor);
  cpu::BatchNormBackward(call.shape, call.dtype, call.eps, arrays.of_dx(), executor);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(
    kBatchNormForward, ForwardImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(
    kBatchNormStatistics, StatisticsImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(
    kBatchNormApply, ApplyImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(
    kBatchNormSums, SumsImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(
    kBatchNormBackward, BackwardImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(
    kBatchNormGradient, GradientImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

FASTOPS_REGISTER_CPU("jax_fastops.batch_norm_fwd", kBatchNormForward);
FASTOPS_REGISTER_CPU("jax_fastops.batch_norm_statistics", kBatchNormStatistics);
FASTOPS_REGISTER_CPU("jax_fastops.batch_norm_apply", kBatchNormApply);
FASTOPS_REGISTER_CPU("jax_fastops.batch_norm_sums", kBatchNormSums);
FASTOPS_REGISTER_CPU("jax_fastops.batch_norm_bwd", kBatchNormBackward);
FASTOPS_REGISTER_CPU("jax_fastops.batch_norm_grad", kBatchNormGradient);

}  // namespace
}  // namespace jax_fastops

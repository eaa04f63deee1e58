// CUDA handlers of the attention head ops. Names, operands and results (shapes in heads/shape.h):
//   split_heads  x, or x and bias -> one or three arrays of heads
//   merge_heads  one or three arrays of heads -> x, or x and sums
// They have the attribute batch_first (buffers.h).
//
// The execute handlers only launch, so XLA may record them into a CUDA graph. Kernels are loaded in
// the initialize stage, which is never recorded.
#include "heads/heads_cuda.h"

#include <cuda_runtime_api.h>

#include <vector>

#include "core/ffi/handler_cuda.h"
#include "core/ffi/registry.h"
#include "heads/buffers.h"

namespace jax_fastops {
namespace {

ffi::Error SplitHeadsImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::RemainingArgs bias,
                          ffi::RemainingRets y, bool batch_first) {
  const char* op = "split_heads";
  std::vector<NamedBuffer> results;
  void* pointers[kMaxHeadParts] = {};
  FASTOPS_RETURN_IF_ERROR(ReadResults(op, y, &results, pointers));
  HeadsView view;
  FASTOPS_RETURN_IF_ERROR(ReadHeads(op, {"x", x}, results, nullptr, batch_first, &view));
  if (bias.size() == 0) {
    return ToError(op,
                   cuda::SplitHeads(view.shape, view.itemsize, x.untyped_data(), pointers, stream));
  }
  const auto b = bias.get<ffi::AnyBuffer>(0);
  if (bias.size() != 1 || b.has_error()) return InvalidArgument(op, "takes x and a bias");
  DType dtype = DType::kF32;
  bool wide = false;
  FASTOPS_RETURN_IF_ERROR(
      CheckBias(op, {"x", x}, {"bias", *b}, view.shape.features(), &dtype, &wide));
  return ToError(op, cuda::SplitHeadsAddBias(view.shape, dtype, wide, x.untyped_data(),
                                             b->untyped_data(), pointers, stream));
}

ffi::Error MergeHeadsImpl(cudaStream_t stream, ffi::RemainingArgs y, ffi::Result<ffi::AnyBuffer> x,
                          ffi::RemainingRets sums, bool batch_first) {
  const char* op = "merge_heads";
  std::vector<NamedBuffer> operands;
  const void* pointers[kMaxHeadParts] = {};
  FASTOPS_RETURN_IF_ERROR(ReadOperands(op, y, &operands, pointers));
  HeadsView view;
  if (sums.size() == 0) {
    FASTOPS_RETURN_IF_ERROR(ReadHeads(op, {"x", x}, operands, nullptr, batch_first, &view));
    return ToError(
        op, cuda::MergeHeads(view.shape, view.itemsize, pointers, x->untyped_data(), stream));
  }
  auto s = sums.get<ffi::AnyBuffer>(0);
  if (sums.size() != 1 || s.has_error()) return InvalidArgument(op, "gives x and sums");
  const NamedBuffer named("sums", *s);
  FASTOPS_RETURN_IF_ERROR(ReadHeads(op, {"x", x}, operands, &named, batch_first, &view));
  DType dtype = DType::kF32;
  FASTOPS_RETURN_IF_ERROR(CheckSums(op, {"x", x}, named, &dtype));
  return ToError(op, cuda::MergeHeadsWithSums(view.shape, dtype, pointers, x->untyped_data(),
                                              view.sums, (*s)->untyped_data(), stream));
}

FASTOPS_CUDA_INITIALIZE(kInitialize, "heads", cuda::LoadHeadsKernels);
XLA_FFI_DEFINE_HANDLER(kSplitHeads, SplitHeadsImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .RemainingArgs()        // bias
                           .RemainingRets()        // y
                           .Attr<bool>("batch_first"),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kMergeHeads, MergeHeadsImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs()        // y
                           .Ret<ffi::AnyBuffer>()  // x
                           .RemainingRets()        // sums
                           .Attr<bool>("batch_first"),
                       {ffi::Traits::kCmdBufferCompatible});

FASTOPS_REGISTER("jax_fastops.split_heads", kSplitHeads, kInitialize);
FASTOPS_REGISTER("jax_fastops.merge_heads", kMergeHeads, kInitialize);

}  // namespace
}  // namespace jax_fastops

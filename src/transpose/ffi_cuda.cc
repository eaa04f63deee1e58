// CUDA handler of the transposition. Name, operand, result, attributes:
//   transpose  x -> y  axes i64[k]: permutes the last k dimensions; batch_first: see
//                      buffers.h
//
// The execute handler only launches, so XLA may record it into a CUDA graph; kernels are loaded in
// the initialize stage, which is never recorded.
#include "transpose/transpose_cuda.h"

#include <cuda_runtime_api.h>

#include "core/ffi/handler_cuda.h"
#include "core/ffi/registry.h"
#include "transpose/buffers.h"

namespace jax_fastops {
namespace {

ffi::Error TransposeImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                         ffi::Span<const int64_t> axes, bool batch_first) {
  TransposeView view;
  FASTOPS_RETURN_IF_ERROR(ReadTranspose({"x", x}, {"y", y}, axes, batch_first, &view));
  return ToError("transpose", cuda::Transpose(x.untyped_data(), y->untyped_data(), view.dims.data(),
                                              view.axes.data(), static_cast<int>(view.axes.size()),
                                              view.itemsize, stream));
}

FASTOPS_CUDA_INITIALIZE(kInitialize, "transpose", cuda::LoadTransposeKernels);
XLA_FFI_DEFINE_HANDLER(kTranspose, TransposeImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Ret<ffi::AnyBuffer>()  // y
                           .Attr<ffi::Span<const int64_t>>("axes")
                           .Attr<bool>("batch_first"),
                       {ffi::Traits::kCmdBufferCompatible});

FASTOPS_REGISTER("jax_fastops.transpose", kTranspose, kInitialize);

}  // namespace
}  // namespace jax_fastops

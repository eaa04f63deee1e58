// CPU handler of the transposition. Name, operand, result, attributes:
//   transpose  x -> y  axes i64[k]: permutes the last k dimensions; batch_first: see
//                      buffers.h
#include "transpose/transpose_cpu.h"

#include "core/ffi/executor.h"
#include "core/ffi/handler_cpu.h"
#include "transpose/buffers.h"

namespace jax_fastops {
namespace {

ffi::Error TransposeImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                         ffi::Span<const int64_t> axes, bool batch_first) {
  TransposeView view;
  FASTOPS_RETURN_IF_ERROR(ReadTranspose({"x", x}, {"y", y}, axes, batch_first, &view));
  XlaExecutor executor(pool);
  cpu::Transpose(x.untyped_data(), y->untyped_data(), view.dims.data(), view.axes.data(),
                 static_cast<int>(view.axes.size()), view.itemsize, executor);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kTranspose, TransposeImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Ret<ffi::AnyBuffer>()  // y
                           .Attr<ffi::Span<const int64_t>>("axes")
                           .Attr<bool>("batch_first"));

FASTOPS_REGISTER_CPU("jax_fastops.transpose", kTranspose);

}  // namespace
}  // namespace jax_fastops

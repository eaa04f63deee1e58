// CUDA handlers of the relu family. Names, operands and results:
//   relu         x -> y
//   relu_fwd     x[..., n] -> y[..., n], mask u8[..., ceil(n/8)]
//   relu_bwd     mask, dy -> dx
//   add_relu     x, y -> z
//   add_relu_fwd x, y -> z, mask
//
// The execute handlers only launch, so XLA may record them into a CUDA graph. Kernels are loaded in
// the initialize stage, which is never recorded.
#include "relu/relu_cuda.h"

#include <cuda_runtime_api.h>

#include "core/ffi/buffers.h"
#include "core/ffi/handler_cuda.h"
#include "core/ffi/registry.h"

namespace jax_fastops {
namespace {

using Arg = ffi::AnyBuffer;
using Ret = ffi::Result<ffi::AnyBuffer>;
using Stream = ffi::PlatformStream<cudaStream_t>;

uint8_t* Bytes(const ffi::AnyBuffer& buffer) {
  return static_cast<uint8_t*>(buffer.untyped_data());
}

ffi::Error ReluImpl(cudaStream_t stream, Arg x, Ret y) {
  DType dtype;
  FASTOPS_RETURN_IF_ERROR(CheckFloating("relu", {"x", x}, &dtype));
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType("relu", {"x", x}, {"y", y}));
  return ToError("relu", cuda::Relu(dtype, x.untyped_data(), y->untyped_data(),
                                    static_cast<int64_t>(x.element_count()), stream));
}

ffi::Error ReluFwdImpl(cudaStream_t stream, Arg x, Ret y, Ret mask) {
  DType dtype;
  FASTOPS_RETURN_IF_ERROR(CheckFloating("relu_fwd", {"x", x}, &dtype));
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType("relu_fwd", {"x", x}, {"y", y}));
  FASTOPS_RETURN_IF_ERROR(CheckBitmask("relu_fwd", {"mask", mask}, {"x", x}));
  const MatrixView view = AsMatrix(x, 1);
  return ToError("relu_fwd", cuda::ReluForward(dtype, x.untyped_data(), y->untyped_data(),
                                               Bytes(*mask), view.rows, view.columns, stream));
}

ffi::Error ReluBwdImpl(cudaStream_t stream, Arg mask, Arg dy, Ret dx) {
  DType dtype;
  FASTOPS_RETURN_IF_ERROR(CheckFloating("relu_bwd", {"dy", dy}, &dtype));
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType("relu_bwd", {"dy", dy}, {"dx", dx}));
  FASTOPS_RETURN_IF_ERROR(CheckBitmask("relu_bwd", {"mask", mask}, {"dy", dy}));
  const MatrixView view = AsMatrix(dy, 1);
  return ToError("relu_bwd",
                 cuda::ReluBackward(dtype, Bytes(mask), dy.untyped_data(), dx->untyped_data(),
                                    view.rows, view.columns, stream));
}

ffi::Error AddReluImpl(cudaStream_t stream, Arg x, Arg y, Ret z) {
  DType dtype;
  FASTOPS_RETURN_IF_ERROR(CheckFloating("add_relu", {"x", x}, &dtype));
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType("add_relu", {"x", x}, {"y", y}));
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType("add_relu", {"x", x}, {"z", z}));
  return ToError("add_relu",
                 cuda::AddRelu(dtype, x.untyped_data(), y.untyped_data(), z->untyped_data(),
                               static_cast<int64_t>(x.element_count()), stream));
}

ffi::Error AddReluFwdImpl(cudaStream_t stream, Arg x, Arg y, Ret z, Ret mask) {
  DType dtype;
  FASTOPS_RETURN_IF_ERROR(CheckFloating("add_relu_fwd", {"x", x}, &dtype));
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType("add_relu_fwd", {"x", x}, {"y", y}));
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType("add_relu_fwd", {"x", x}, {"z", z}));
  FASTOPS_RETURN_IF_ERROR(CheckBitmask("add_relu_fwd", {"mask", mask}, {"x", x}));
  const MatrixView view = AsMatrix(x, 1);
  return ToError("add_relu_fwd",
                 cuda::AddReluForward(dtype, x.untyped_data(), y.untyped_data(), z->untyped_data(),
                                      Bytes(*mask), view.rows, view.columns, stream));
}

// One handler for all targets, so it reads no operand. XLA calls it before every execution, on the
// device of the execution.
FASTOPS_CUDA_INITIALIZE(kInitialize, "relu", cuda::LoadReluKernels);
XLA_FFI_DEFINE_HANDLER(kRelu, ReluImpl,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()   // x
                           .Ret<ffi::AnyBuffer>(),  // y
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kReluFwd, ReluFwdImpl,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()   // x
                           .Ret<ffi::AnyBuffer>()   // y
                           .Ret<ffi::AnyBuffer>(),  // mask
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kReluBwd, ReluBwdImpl,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()   // mask
                           .Arg<ffi::AnyBuffer>()   // dy
                           .Ret<ffi::AnyBuffer>(),  // dx
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kAddRelu, AddReluImpl,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()   // x
                           .Arg<ffi::AnyBuffer>()   // y
                           .Ret<ffi::AnyBuffer>(),  // z
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kAddReluFwd, AddReluFwdImpl,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Arg<ffi::AnyBuffer>()   // x
                           .Arg<ffi::AnyBuffer>()   // y
                           .Ret<ffi::AnyBuffer>()   // z
                           .Ret<ffi::AnyBuffer>(),  // mask
                       {ffi::Traits::kCmdBufferCompatible});

FASTOPS_REGISTER("jax_fastops.relu", kRelu, kInitialize);
FASTOPS_REGISTER("jax_fastops.relu_fwd", kReluFwd, kInitialize);
FASTOPS_REGISTER("jax_fastops.relu_bwd", kReluBwd, kInitialize);
FASTOPS_REGISTER("jax_fastops.add_relu", kAddRelu, kInitialize);
FASTOPS_REGISTER("jax_fastops.add_relu_fwd", kAddReluFwd, kInitialize);

}  // namespace
}  // namespace jax_fastops

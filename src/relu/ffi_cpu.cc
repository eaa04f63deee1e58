// CPU handlers of the relu family. Names, operands and results:
//   relu         x -> y
//   relu_fwd     x[..., n] -> y[..., n], mask u8[..., ceil(n/8)]
//   relu_bwd     mask, dy -> dx
//   add_relu     x, y -> z
//   add_relu_fwd x, y -> z, mask
#include "relu/relu_cpu.h"

#include "core/ffi/buffers.h"
#include "core/ffi/executor.h"
#include "core/ffi/handler_cpu.h"

namespace jax_fastops {
namespace {

using Arg = ffi::AnyBuffer;
using Ret = ffi::Result<ffi::AnyBuffer>;

uint8_t* Bytes(const ffi::AnyBuffer& buffer) {
  return static_cast<uint8_t*>(buffer.untyped_data());
}

ffi::Error ReluImpl(ffi::ThreadPool pool, Arg x, Ret y) {
  DType dtype;
  FASTOPS_RETURN_IF_ERROR(CheckFloating("relu", {"x", x}, &dtype));
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType("relu", {"x", x}, {"y", y}));
  XlaExecutor executor(pool);
  cpu::Relu(dtype, x.untyped_data(), y->untyped_data(), nullptr, 1,
            static_cast<int64_t>(x.element_count()), executor);
  return ffi::Error::Success();
}

ffi::Error ReluFwdImpl(ffi::ThreadPool pool, Arg x, Ret y, Ret mask) {
  DType dtype;
  FASTOPS_RETURN_IF_ERROR(CheckFloating("relu_fwd", {"x", x}, &dtype));
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType("relu_fwd", {"x", x}, {"y", y}));
  FASTOPS_RETURN_IF_ERROR(CheckBitmask("relu_fwd", {"mask", mask}, {"x", x}));
  const MatrixView view = AsMatrix(x, 1);
  XlaExecutor executor(pool);
  cpu::Relu(dtype, x.untyped_data(), y->untyped_data(), Bytes(*mask), view.rows, view.columns,
            executor);
  return ffi::Error::Success();
}

ffi::Error ReluBwdImpl(ffi::ThreadPool pool, Arg mask, Arg dy, Ret dx) {
  DType dtype;
  FASTOPS_RETURN_IF_ERROR(CheckFloating("relu_bwd", {"dy", dy}, &dtype));
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType("relu_bwd", {"dy", dy}, {"dx", dx}));
  FASTOPS_RETURN_IF_ERROR(CheckBitmask("relu_bwd", {"mask", mask}, {"dy", dy}));
  const MatrixView view = AsMatrix(dy, 1);
  XlaExecutor executor(pool);
  cpu::ReluBackward(dtype, Bytes(mask), dy.untyped_data(), dx->untyped_data(), view.rows,
                    view.columns, executor);
  return ffi::Error::Success();
}

ffi::Error AddReluImpl(ffi::ThreadPool pool, Arg x, Arg y, Ret z) {
  DType dtype;
  FASTOPS_RETURN_IF_ERROR(CheckFloating("add_relu", {"x", x}, &dtype));
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType("add_relu", {"x", x}, {"y", y}));
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType("add_relu", {"x", x}, {"z", z}));
  XlaExecutor executor(pool);
  cpu::AddRelu(dtype, x.untyped_data(), y.untyped_data(), z->untyped_data(), nullptr, 1,
               static_cast<int64_t>(x.element_count()), executor);
  return ffi::Error::Success();
}

ffi::Error AddReluFwdImpl(ffi::ThreadPool pool, Arg x, Arg y, Ret z, Ret mask) {
  DType dtype;
  FASTOPS_RETURN_IF_ERROR(CheckFloating("add_relu_fwd", {"x", x}, &dtype));
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType("add_relu_fwd", {"x", x}, {"y", y}));
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType("add_relu_fwd", {"x", x}, {"z", z}));
  FASTOPS_RETURN_IF_ERROR(CheckBitmask("add_relu_fwd", {"mask", mask}, {"x", x}));
  const MatrixView view = AsMatrix(x, 1);
  XlaExecutor executor(pool);
  cpu::AddRelu(dtype, x.untyped_data(), y.untyped_data(), z->untyped_data(), Bytes(*mask),
               view.rows, view.columns, executor);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(
    kRelu, ReluImpl,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kReluFwd, ReluFwdImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()    // x
                           .Ret<ffi::AnyBuffer>()    // y
                           .Ret<ffi::AnyBuffer>());  // mask
XLA_FFI_DEFINE_HANDLER(kReluBwd, ReluBwdImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()    // mask
                           .Arg<ffi::AnyBuffer>()    // dy
                           .Ret<ffi::AnyBuffer>());  // dx
XLA_FFI_DEFINE_HANDLER(kAddRelu, AddReluImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()    // x
                           .Arg<ffi::AnyBuffer>()    // y
                           .Ret<ffi::AnyBuffer>());  // z
XLA_FFI_DEFINE_HANDLER(kAddReluFwd, AddReluFwdImpl,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()    // x
                           .Arg<ffi::AnyBuffer>()    // y
                           .Ret<ffi::AnyBuffer>()    // z
                           .Ret<ffi::AnyBuffer>());  // mask

FASTOPS_REGISTER_CPU("jax_fastops.relu", kRelu);
FASTOPS_REGISTER_CPU("jax_fastops.relu_fwd", kReluFwd);
FASTOPS_REGISTER_CPU("jax_fastops.relu_bwd", kReluBwd);
FASTOPS_REGISTER_CPU("jax_fastops.add_relu", kAddRelu);
FASTOPS_REGISTER_CPU("jax_fastops.add_relu_fwd", kAddReluFwd);

}  // namespace
}  // namespace jax_fastops

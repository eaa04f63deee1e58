// Handlers of the relu family. jax_fastops/relu.py declares their buffers.
#include "core/ffi/handler.h"
#include "relu/relu.h"

namespace jax_fastops {
namespace {

ffi::Error Forward(Call& call, Queue queue) {
  const void* const x = call.In("x");
  void* const y = call.Out("y");
  auto* const mask = static_cast<uint8_t*>(call.Out("mask?"));
  const DType dtype = call.Type();
  const int64_t rows = call.Batch(), columns = call.Size("n");
  return call.Run([&] { return backend::Relu(dtype, x, y, mask, rows, columns, queue); });
}

ffi::Error AddForward(Call& call, Queue queue) {
  const void *const x = call.In("x"), *const y = call.In("y");
  void* const z = call.Out("z");
  auto* const mask = static_cast<uint8_t*>(call.Out("mask?"));
  const DType dtype = call.Type();
  const int64_t rows = call.Batch(), columns = call.Size("n");
  return call.Run([&] { return backend::AddRelu(dtype, x, y, z, mask, rows, columns, queue); });
}

ffi::Error Backward(Call& call, Queue queue) {
  const void* const dy = call.In("dy");
  const auto* const mask = static_cast<const uint8_t*>(call.In("mask"));
  void* const dx = call.Out("dx");
  const DType dtype = call.Type();
  const int64_t rows = call.Batch(), columns = call.Size("n");
  return call.Run([&] { return backend::ReluBackward(dtype, mask, dy, dx, rows, columns, queue); });
}

FASTOPS_HANDLER("relu", Forward, LoadReluKernels);
FASTOPS_HANDLER("add_relu", AddForward, LoadReluKernels);
FASTOPS_HANDLER("relu_bwd", Backward, LoadReluKernels);

}  // namespace
}  // namespace jax_fastops

// The handler of NAME. jax_fastops/NAME.py declares its buffers.
#include "NAME/NAME.h"
#include "core/ffi/handler.h"

namespace jax_fastops {
namespace {

ffi::Error Forward(Call& call, Queue queue) {
  const DType dtype = call.Type();
  const int64_t n = call.Elements("x");
  const void* const x = call.In("x");
  void* const y = call.Out("y");
  return call.Run([&] { return backend::Name(dtype, x, y, n, queue); });
}

FASTOPS_HANDLER("NAME", Forward, LoadNameKernels);

}  // namespace
}  // namespace jax_fastops

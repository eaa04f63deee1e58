// The handler of dropout. jax_fastops/dropout.py declares its buffers.
#include "core/ffi/handler.h"
#include "dropout/dropout.h"

namespace jax_fastops {
namespace {

ffi::Error Forward(Call& call, Queue queue) {
  DropoutArrays arrays;
  arrays.x = call.In("x");
  arrays.seeds = static_cast<const uint32_t*>(call.In("seeds"));
  arrays.bias = call.In("bias?");
  arrays.wide_bias = call.Wide("bias?");
  arrays.residual = call.In("residual?");
  arrays.y = call.Out("y");
  const DType dtype = call.Type();
  const int64_t rows = call.Batch(), columns = call.Size("n");
  const int64_t threshold = call.Attribute<int64_t>("threshold");
  const double scale = call.Attribute<double>("scale");
  if (threshold < 1 || threshold > 1 << 16) call.Fail("the threshold is not in [1, 65536]");
  return call.Run([&] {
    return backend::Dropout(dtype, arrays, rows, columns, static_cast<uint32_t>(threshold - 1),
                            scale, queue);
  });
}

FASTOPS_HANDLER("dropout", Forward, LoadDropoutKernels);

}  // namespace
}  // namespace jax_fastops

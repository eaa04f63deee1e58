// The handler of dropout. jax_fastops/dropout.py declares its buffers.
#include "core/ffi/dropout.h"
#include "core/ffi/handler.h"
#include "dropout/dropout.h"

namespace jax_fastops {
namespace {

ffi::Error Forward(Call& call, Queue queue) {
  DropoutArrays arrays;
  using A = DropoutArrays;
  call.Fill(&arrays, "x", &A::x, "bias?", &A::bias, "residual?", &A::residual, "y", &A::y);
  arrays.wide_bias = call.Wide("bias?");
  const DType dtype = call.Type();
  const int64_t rows = call.Batch(), columns = call.Size("n");
  const RowDropout dropout = ReadDropout(call, true);
  return call.Run([&] { return backend::Dropout(dtype, arrays, rows, columns, dropout, queue); });
}

FASTOPS_HANDLER("dropout", Forward, LoadDropoutKernels);

}  // namespace
}  // namespace jax_fastops

// The handler of products with a bias and an activation. jax_fastops/dense_act.py declares its
// buffers.
#include "core/alignment.h"
#include "core/ffi/activation.h"
#include "core/ffi/handler.h"
#include "dense_act/dense_act.h"

namespace jax_fastops::inline xla {
namespace {

ffi::Error Forward(Call& call, cudaStream_t stream) {
  const int64_t rows = call.Batch(), columns = call.Size("n"), depth = call.Size("a");
  const DType dtype = call.Type();
  call.Require(dtype == DType::kBF16 || dtype == DType::kF16, "x", "must have 16 bits");
  constexpr int64_t kMax = (int64_t{1} << 31) - 512;  // indices of tiles stay below 2^31
  call.Require(rows <= kMax, "x", "has too many rows");
  for (const int64_t size : {columns, depth}) {
    call.Require(size > 0 && size <= kMax && size % 8 == 0, "kernel",
                 "must have sizes that are multiples of 8 below 2^31");
  }
  const cuda::DenseActCall c = {.dtype = dtype,
                                .activation = ReadActivation(call),
                                .rows = static_cast<int>(rows),
                                .columns = static_cast<int>(columns),
                                .depth = static_cast<int>(depth),
                                .x = call.In("x"),
                                .kernel = call.In("kernel"),
                                .bias = call.In("bias?"),
                                .wide_bias = call.Wide("bias?"),
                                .y = call.Out("y")};
  call.Require(CommonAlignment({c.x, c.kernel, c.bias, c.y}) == 16, "x",
               "and the other arrays must begin at multiples of 16 bytes");
  return call.Run([&] { return cuda::DenseAct(c, stream); });
}

FASTOPS_HANDLER("dense_act", Forward, LoadDenseActKernels);

}  // namespace
}  // namespace jax_fastops::inline xla

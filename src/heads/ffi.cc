// Handlers of the attention head ops. jax_fastops/heads.py declares their buffers.
//
// A call has one array of heads, q, or three of the same shape. With sums, the sequence is two
// dimensions: groups of rows, and the rows of a group.
#include "core/ffi/handler.h"
#include "heads/heads.h"

namespace jax_fastops {
namespace {

HeadsShape ShapeOf(Call& call) {
  HeadsShape shape{};
  shape.batch = call.Batch();
  shape.sequence = call.Size("g", 1) * call.Size("s");
  shape.parts = call.Has("k") ? kMaxHeadParts : 1;
  shape.heads = call.Size("h");
  shape.head_size = call.Size("d");
  call.Require(shape.features() == call.Size("f"), "x", "does not have parts * h * d features");
  return shape;
}

ffi::Error Split(Call& call, Queue queue) {
  const HeadsShape shape = ShapeOf(call);
  const void *const x = call.In("x"), *const bias = call.In("bias?");
  void* const y[kMaxHeadParts] = {call.Out("q"), call.Out("k?"), call.Out("v?")};
  const bool wide = call.Wide("bias");
  if (bias == nullptr) {
    const int64_t itemsize = call.ItemSize();
    return call.Run([&] { return backend::SplitHeads(shape, itemsize, x, y, queue); });
  }
  const DType dtype = call.Type();
  return call.Run(
      [&] { return backend::SplitHeadsAddBias(shape, dtype, wide, x, bias, y, queue); });
}

ffi::Error Merge(Call& call, Queue queue) {
  const HeadsShape shape = ShapeOf(call);
  const void* const y[kMaxHeadParts] = {call.In("q"), call.In("k?"), call.In("v?")};
  void *const x = call.Out("x"), *const sums = call.Out("sums?");
  if (sums == nullptr) {
    const int64_t itemsize = call.ItemSize();
    return call.Run([&] { return backend::MergeHeads(shape, itemsize, y, x, queue); });
  }
  const DType dtype = call.Type();
  const HeadsSums layout{.groups = call.Size("g"), .subgroups = call.Size("p")};
  call.Require(layout.subgroups > 0 || shape.size() == 0, "sums", "has no sums");
  return call.Run(
      [&] { return backend::MergeHeadsWithSums(shape, dtype, y, x, layout, sums, queue); });
}

FASTOPS_HANDLER("split_heads", Split, LoadHeadsKernels);
FASTOPS_HANDLER("merge_heads", Merge, LoadHeadsKernels);

}  // namespace
}  // namespace jax_fastops

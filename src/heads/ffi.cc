// Handlers of the attention head ops. jax_fastops/heads.py declares their buffers.
//
// A call has one array of heads, q, or three of the same shape. With sums, the sequence is two
// dimensions: groups of rows, and the rows of a group.
#include "core/ffi/handler.h"
#include "heads/heads.h"
#include "heads/rotary.h"

namespace jax_fastops {
namespace {

const Limit kHeadSize("rotary_head_size", kRotaryMostHeadSize);
const Limit kRank("rotary_rank", kRotaryRank);
const Limit kHeadsPerSum("rotary_heads_per_sum", RotaryHeadsPerSum(false));

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

// The rows of the angles for the batches of `like`. Where the angles have fewer batches than it,
// index 0 is used for all. (In partitioned programs there may be several equal copies.)
RotaryIndex ReadAngles(Call& call, const char* like) {
  RotaryIndex index;
  const Call::Dims x = call.DimsOf(like), own = call.DimsOf("turns");
  int64_t stride[Call::kMaxRank], step = call.Size("g", 1) * call.Size("s");
  int batches = 0;
  while (batches < own.rank && own.name[batches] < 0) ++batches;
  for (int i = batches; i-- > 0; step *= own.size[i])
    stride[i] = own.size[i] == x.size[i] ? step : 0;
  if (!index.Add(x.size, stride, batches)) call.Fail("the angles are broadcast in too many ways");
  return index;
}

// `like` has the features.
RotaryShape RotaryShapeOf(Call& call, const char* like) {
  RotaryShape shape;
  shape.batch = call.Batch();
  shape.sequence = call.Size("g", 1) * call.Size("s");
  shape.query_heads = call.Size("h");
  shape.key_heads = call.Size("n");
  shape.head_size = call.Size("d");
  shape.interleaved = call.Attribute<bool>("interleaved");
  shape.heads_first = call.Attribute<bool>("heads_first");
  shape.eps = call.Attribute<double>("eps");
  call.Require(shape.features() == call.Size("f"), like, "does not have (h + 2 * n) * d features");
  call.Require(shape.head_size <= kRotaryMostHeadSize, like, "has heads that are too long");
  if (call.Has("turns")) {
    const int64_t turned = call.Size("r");
    shape.pairs = turned / 2;
    const bool fits = turned % 2 == 0 && turned <= shape.head_size;
    call.Require(fits, "turns", "does not have a cosine and a sine for each of some pairs");
    shape.angles = ReadAngles(call, like);
  }
  return shape;
}

RotaryArrays ReadRotary(Call& call, const RotaryShape& shape, bool backward) {
  RotaryArrays arrays;
  const char* const parts[] = {"q", "k", "v"};
  for (int part = 0; part < kMaxHeadParts; ++part)
    arrays.y[part] = backward ? const_cast<void*>(call.In(parts[part])) : call.Out(parts[part]);
  arrays.x = call.In("x?");
  arrays.bias = call.In("bias?");
  arrays.wide_bias = call.Wide("bias");
  const char* const scales[] = {"q_scale?", "k_scale?"};
  for (int part = 0; part < 2; ++part) {
    arrays.scale[part] = call.In(scales[part]);
    arrays.wide_scale[part] = call.Wide(part == 0 ? "q_scale" : "k_scale");
  }
  arrays.turns = shape.pairs == 0 ? nullptr : call.In("turns?");
  return arrays;
}

ffi::Error SplitAndRotate(Call& call, Queue queue) {
  const RotaryShape shape = RotaryShapeOf(call, "x");
  const RotaryArrays arrays = ReadRotary(call, shape, false);
  const DType dtype = call.Type();
  return call.Run([&] { return backend::RotaryHeads(shape, dtype, arrays, queue); });
}

ffi::Error MergeAndRotateBack(Call& call, Queue queue) {
  const RotaryShape shape = RotaryShapeOf(call, "dx");
  RotaryArrays arrays = ReadRotary(call, shape, true);
  using A = RotaryArrays;
  call.Fill(&arrays, "dx", &A::dx, "bias_sums?", &A::bias_sums, "scale_sums?", &A::scale_sums);
  const bool normalized = arrays.scale[0] != nullptr || arrays.scale[1] != nullptr;
  call.Require(normalized == (arrays.x != nullptr), "dx", "needs x exactly if there is a scale");
  if (arrays.scale_sums != nullptr) {
    const int64_t size = shape.scale_sums(arrays.bias_sums != nullptr);
    call.Require(call.Size("m") == size, "scale_sums", "has another number of sums");
  }
  const bool summing = arrays.bias_sums != nullptr || arrays.scale_sums != nullptr;
  const HeadsSums sums{.groups = call.Size("g", 1), .subgroups = summing ? call.Size("p") : 1};
  call.Require(sums.subgroups > 0, "dx", "has no sums");
  const DType dtype = call.Type();
  return call.Run([&] { return backend::RotaryHeadsBackward(shape, dtype, sums, arrays, queue); });
}

FASTOPS_HANDLER("rotary_heads", SplitAndRotate, LoadRotaryKernels);
FASTOPS_HANDLER("rotary_heads_bwd", MergeAndRotateBack, LoadRotaryKernels);
FASTOPS_HANDLER("split_heads", Split, LoadHeadsKernels);
FASTOPS_HANDLER("merge_heads", Merge, LoadHeadsKernels);

}  // namespace
}  // namespace jax_fastops

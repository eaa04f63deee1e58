// The handler of sums by segment. jax_fastops/segment_sum.py declares its buffers.
#include "core/ffi/handler.h"
#include "segment_sum/segment_sum.h"

namespace jax_fastops {
namespace {

ffi::Error Sum(Call& call, Queue queue) {
  using C = SegmentSumCall;
  C c = {};
  c.dtype = call.Type();
  c.wide = call.Wide("y");
  c.batch = call.Batch();
  c.rows = call.Size("r");
  c.columns = call.AxisOf("x", "c").size;
  c.segments = call.Size("s");
  c.tiles = call.Size("tiles", 0);
  c.tile = call.Attribute<int64_t>("tile");
  call.Fill(&c, "x", &C::x, "ids", &C::ids, "order?", &C::order, "y", &C::y, "parts?", &C::parts);
  c.step = call.AxisOf("ids", "c").size;
  const int64_t ids = call.Elements("ids");
  c.id_bytes = ids == 0 ? 4 : static_cast<int>(call.Bytes("ids") / ids);
  const Call::Dims x = call.DimsOf("x"), of_ids = call.DimsOf("ids");
  if (!call.failed()) {
    const size_t batch = static_cast<size_t>(x.rank - 2);
    ArrayStrides strides;
    BroadcastStrides(x.sizes().first(batch), of_ids.sizes().first(batch), &strides);
    call.Require(Collapse(x.sizes().first(batch), &strides, 1, &c.of_batch), "ids",
                 "is broadcast along too many dimensions");
  }
  return call.Run([&] { return backend::SegmentSum(c, queue); });
}

FASTOPS_HANDLER("segment_sum", Sum, LoadSegmentSumKernels);

}  // namespace
}  // namespace jax_fastops

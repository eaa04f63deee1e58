// The handlers of sums by segment, and of the sort of ids for them on CUDA.
// jax_fastops/segment_sum.py declares their buffers.
#include "core/ffi/handler.h"
#include "segment_sum/segment_sum.h"

#ifdef FASTOPS_CUDA
#include "segment_sum/sort.h"
#endif

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

#ifdef FASTOPS_CUDA

ffi::Error Sort(Call& call, Queue queue) {
  using C = cuda::SegmentSortCall;
  C c = {};
  c.lists = call.Batch();
  c.rows = call.Size("r");
  c.segments = call.Attribute<int64_t>("segments");
  c.bits = call.Attribute<int64_t>("bits");
  c.tile = call.Attribute<int64_t>("tile");
  c.work_size = call.Size("w", 0);
  call.Fill(&c, "ids", &C::ids, "keys", &C::keys, "order", &C::order, "work?", &C::work);
  const int64_t keys = call.Elements("keys");
  c.key_bytes = keys == 0 ? 4 : static_cast<int>(call.Bytes("keys") / keys);
  return call.Run([&] { return cuda::SegmentSort(c, queue); });
}

FASTOPS_HANDLER("segment_sum.sort", Sort, LoadSegmentSortKernels);

#endif

}  // namespace
}  // namespace jax_fastops

// Handlers of softmax and log-softmax. jax_fastops/softmax.py declares their buffers.
#include "core/ffi/dropout.h"
#include "core/ffi/handler.h"
#include "softmax/softmax.h"

namespace jax_fastops {
namespace {

const Limit kWorkspace("softmax_workspace", kSoftmaxWorkspace);
const Limit kDropoutRow("softmax_dropout_row", kSoftmaxDropoutRow);
const Limit kMaskRank("softmax_mask_rank", kMaxMaskRank);

// The mask of `like`. Where it is shorter, it is broadcast: its index 0 is used for all. (In
// partitioned programs it may have several equal copies there.)
SoftmaxMask ReadMask(Call& call, const char* like, int axis) {
  SoftmaxMask mask;
  mask.data = static_cast<const uint8_t*>(call.In("mask?"));
  if (mask.data == nullptr) return mask;
  const Call::Dims x = call.DimsOf(like), own = call.DimsOf("mask");
  int64_t stride[Call::kMaxRank], step = 1;
  for (int i = own.rank; i-- > 0; step *= own.size[i])
    stride[i] = own.size[i] == x.size[i] ? step : 0;
  call.Require(own.size[axis] == x.size[axis] || own.size[axis] == 1, "mask", "does not fit rows");
  mask.stride = x.size[axis] == 1 ? 0 : stride[axis];
  call.Require(mask.outer.Add(x.size, stride, axis) &&
                   mask.inner.Add(x.size + axis + 1, stride + axis + 1, x.rank - axis - 1),
               "mask", "is broadcast in too many ways");
  return mask;
}

// `like` is an array with the rows of the call. Its handler reads the arrays.
SoftmaxArguments Read(Call& call, const char* like, bool drops) {
  SoftmaxArguments read;
  const Call::Axis n = call.AxisOf(like, "n");
  read.shape = {.outer = n.outer, .n = n.size, .inner = n.inner};
  read.mask = ReadMask(call, like, n.index);
  read.dtype = call.Type();
  read.scale = call.Attribute<double>("scale");
  if (drops) {
    read.dropout = ReadDropout(call, true);
    read.masked = read.mask.data != nullptr;
    call.Require(n.size <= kSoftmaxDropoutRow, like, "has rows that are too long");
  } else {
    read.log = call.Attribute<bool>("log");
    read.workspace = call.Out("workspace?");
    call.Require(n.size <= kSoftmaxWorkspace || read.workspace != nullptr, like,
                 "needs a workspace");
  }
  return read;
}

using A = SoftmaxArguments;

ffi::Error Forward(Call& call, bool drops, Queue queue) {
  A read = Read(call, "x", drops);
  call.Fill(&read, "x", &A::x, "y", &A::out);
  return call.Run([&] { return backend::SoftmaxForward(read, queue); });
}

ffi::Error Plain(Call& call, Queue queue) { return Forward(call, false, queue); }
ffi::Error Dropping(Call& call, Queue queue) { return Forward(call, true, queue); }

ffi::Error PlainBackward(Call& call, Queue queue) {
  A read = Read(call, "y", false);
  call.Fill(&read, "y", &A::y, "dy", &A::dy, "dx", &A::out);
  read.masked = call.Attribute<bool>("masked");
  call.Require(!read.masked || !read.log || read.mask.data != nullptr, "y", "needs the mask");
  return call.Run([&] { return backend::SoftmaxBackward(read, queue); });
}

ffi::Error DroppingBackward(Call& call, Queue queue) {
  A read = Read(call, "x", true);
  call.Fill(&read, "x", &A::x, "dy", &A::dy, "dx", &A::out);
  return call.Run([&] { return backend::SoftmaxBackward(read, queue); });
}

FASTOPS_HANDLER("softmax", Plain, LoadSoftmaxKernels);
FASTOPS_HANDLER("softmax_bwd", PlainBackward, LoadSoftmaxKernels);
FASTOPS_HANDLER("softmax_dropout", Dropping, LoadSoftmaxKernels);
FASTOPS_HANDLER("softmax_dropout_bwd", DroppingBackward, LoadSoftmaxKernels);

}  // namespace
}  // namespace jax_fastops

// Handlers of batch norm. jax_fastops/batch_norm.py declares their buffers.
//
// `...` are the groups. Each group's n elements are [outer, c, inner] and come flat: XLA may copy
// an array with a dimension of size 1 to give it another layout of the same bytes.
#include "batch_norm/batch_norm.h"
#include "core/ffi/handler.h"

namespace jax_fastops {
namespace {

// The workspace of a group that uses all of a GPU, in accumulators. `outer` is negative if unknown.
const WorkspaceSize kWorkspace("batch_norm", [](int64_t outer, int64_t channels, int64_t inner) {
  constexpr int64_t kLongest = int64_t{1} << 40, kMore = int64_t{1} << 17;
  const int64_t row = channels * inner;
  const BatchNormShape shape{1, outer < 0 ? kLongest / row + 1 : outer, channels, inner};
  const int64_t eighth = shape.group_size() / 8;
  return BatchNormWorkspace(shape) + 4 * (eighth < kMore ? eighth : kMore);
});

using C = BatchNormCall;

// What calls of all functions have.
C Read(Call& call) {
  C c;
  BatchNormShape& shape = c.shape;
  shape.groups = call.Batch();
  shape.channels = call.Size("c");
  shape.inner = call.Attribute<int64_t>("inner");
  const int64_t n = call.Size("n"), row = shape.channels * shape.inner;
  const bool valid = shape.channels > 0 && shape.inner > 0 && n % row == 0;
  call.Require(valid, "x", "must end in outer * channels * inner elements");
  if (valid) shape.outer = n / row;
  c.dtype = call.Type();
  return c;
}

// An operand that is a result of another call.
void* Given(Call& call, const char* name) { return const_cast<void*>(call.In(name)); }

void ReadWorkspace(Call& call, C* c) {
  c->workspace = call.Out("workspace");
  c->workspace_size = call.Size("w");
  call.Require(c->workspace_size >= BatchNormWorkspace(c->shape), "workspace", "is too small");
}

C ReadResult(Call& call) {
  C c = Read(call);
  call.Fill(&c, "x", &C::x, "scale?", &C::scale, "bias?", &C::bias, "residual?", &C::residual, "y",
            &C::y, "mask?", &C::mask);
  c.eps = call.Attribute<double>("eps");
  c.relu = call.Attribute<bool>("relu");
  return c;
}

C ReadGradient(Call& call, const char* var) {
  C c = Read(call);
  call.Fill(&c, "x", &C::x, "dy", &C::dy, "scale?", &C::scale);
  c.mask = Given(call, "mask?");
  c.mean = Given(call, "mean");
  c.var = Given(call, var);
  c.eps = call.Attribute<double>("eps");
  return c;
}

ffi::Error Forward(Call& call, Queue queue) {
  C c = ReadResult(call);
  call.Fill(&c, "mean", &C::mean, "var", &C::var);
  ReadWorkspace(call, &c);
  return call.Run([&] { return backend::BatchNormForward(c, queue); });
}

ffi::Error Statistics(Call& call, Queue queue) {
  C c = Read(call);
  call.Fill(&c, "x", &C::x, "mean", &C::mean, "var", &C::var);
  ReadWorkspace(call, &c);
  return call.Run([&] { return backend::BatchNormStatistics(c, queue); });
}

ffi::Error Apply(Call& call, Queue queue) {
  C c = ReadResult(call);
  c.mean = Given(call, "mean");
  c.var = Given(call, "var");
  return call.Run([&] { return backend::BatchNormApply(c, queue); });
}

ffi::Error Sums(Call& call, Queue queue) {
  C c = ReadGradient(call, "var?");
  call.Fill(&c, "dy2?", &C::dy2, "dx?", &C::dx, "dresidual?", &C::dresidual, "sums", &C::sums);
  ReadWorkspace(call, &c);
  const bool given = c.var != nullptr;
  call.Require(given == (c.dx != nullptr) && (given || c.scale == nullptr), "x",
               "needs dx, var and perhaps a scale, or none of them");
  return call.Run([&] { return backend::BatchNormSums(c, queue); });
}

ffi::Error Backward(Call& call, Queue queue) {
  C c = ReadGradient(call, "var");
  c.sums = Given(call, "sums");
  call.Fill(&c, "dmean", &C::dmean, "dvar", &C::dvar, "dx", &C::dx);
  return call.Run([&] { return backend::BatchNormBackward(c, queue); });
}

ffi::Error Gradient(Call& call, Queue queue) {
  C c = ReadGradient(call, "var");
  call.Fill(&c, "dmean", &C::dmean, "dvar", &C::dvar, "dx", &C::dx, "sums", &C::sums);
  ReadWorkspace(call, &c);
  return call.Run([&] { return backend::BatchNormGradient(c, queue); });
}

FASTOPS_HANDLER("batch_norm_fwd", Forward, LoadBatchNormKernels);
FASTOPS_HANDLER("batch_norm_statistics", Statistics, LoadBatchNormKernels);
FASTOPS_HANDLER("batch_norm_apply", Apply, LoadBatchNormKernels);
FASTOPS_HANDLER("batch_norm_sums", Sums, LoadBatchNormKernels);
FASTOPS_HANDLER("batch_norm_bwd", Backward, LoadBatchNormKernels);
FASTOPS_HANDLER("batch_norm_grad", Gradient, LoadBatchNormKernels);

}  // namespace
}  // namespace jax_fastops

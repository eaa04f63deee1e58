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

BatchNormShape ShapeOf(Call& call) {
  BatchNormShape shape;
  shape.groups = call.Batch();
  shape.channels = call.Size("c");
  shape.inner = call.Attribute<int64_t>("inner");
  const int64_t n = call.Size("n"), row = shape.channels * shape.inner;
  const bool valid = shape.channels > 0 && shape.inner > 0 && n % row == 0;
  call.Require(valid, "x", "must end in outer * channels * inner elements");
  if (valid) shape.outer = n / row;
  return shape;
}

using A = BatchNormArrays;

// An operand that is a result of another call.
void* Given(Call& call, const char* name) { return const_cast<void*>(call.In(name)); }

void ReadWorkspace(Call& call, const BatchNormShape& shape, BatchNormArrays* arrays) {
  arrays->workspace = call.Out("workspace");
  arrays->workspace_size = call.Size("w");
  call.Require(arrays->workspace_size >= BatchNormWorkspace(shape), "workspace", "is too small");
}

void ReadResult(Call& call, BatchNormArrays* arrays) {
  call.Fill(arrays, "x", &A::x, "scale?", &A::scale, "bias?", &A::bias, "residual?", &A::residual,
            "y", &A::y, "mask?", &A::mask);
}

void ReadGradient(Call& call, BatchNormArrays* arrays) {
  call.Fill(arrays, "x", &A::x, "dy", &A::dy, "scale?", &A::scale);
  arrays->mask = Given(call, "mask?");
  arrays->mean = Given(call, "mean");
}

ffi::Error Forward(Call& call, Queue queue) {
  const BatchNormShape shape = ShapeOf(call);
  BatchNormArrays arrays;
  ReadResult(call, &arrays);
  call.Fill(&arrays, "mean", &A::mean, "var", &A::var);
  ReadWorkspace(call, shape, &arrays);
  const DType dtype = call.Type();
  const double eps = call.Attribute<double>("eps");
  const bool relu = call.Attribute<bool>("relu");
  return call.Run(
      [&] { return backend::BatchNormForward(shape, dtype, eps, relu, arrays, queue); });
}

ffi::Error Statistics(Call& call, Queue queue) {
  const BatchNormShape shape = ShapeOf(call);
  BatchNormArrays arrays;
  call.Fill(&arrays, "x", &A::x, "mean", &A::mean, "var", &A::var);
  ReadWorkspace(call, shape, &arrays);
  const DType dtype = call.Type();
  return call.Run([&] { return backend::BatchNormStatistics(shape, dtype, arrays, queue); });
}

ffi::Error Apply(Call& call, Queue queue) {
  const BatchNormShape shape = ShapeOf(call);
  BatchNormArrays arrays;
  ReadResult(call, &arrays);
  arrays.mean = Given(call, "mean");
  arrays.var = Given(call, "var");
  const DType dtype = call.Type();
  const double eps = call.Attribute<double>("eps");
  const bool relu = call.Attribute<bool>("relu");
  return call.Run([&] { return backend::BatchNormApply(shape, dtype, eps, relu, arrays, queue); });
}

ffi::Error Sums(Call& call, Queue queue) {
  const BatchNormShape shape = ShapeOf(call);
  BatchNormArrays arrays;
  ReadGradient(call, &arrays);
  arrays.var = Given(call, "var?");
  call.Fill(&arrays, "dy2?", &A::dy2, "dx?", &A::dx, "dresidual?", &A::dresidual, "sums", &A::sums);
  ReadWorkspace(call, shape, &arrays);
  const DType dtype = call.Type();
  const double eps = call.Attribute<double>("eps");
  const bool given = arrays.var != nullptr;
  call.Require(given == (arrays.dx != nullptr) && (given || arrays.scale == nullptr), "x",
               "needs dx, var and perhaps a scale, or none of them");
  return call.Run([&] { return backend::BatchNormSums(shape, dtype, eps, arrays, queue); });
}

ffi::Error Backward(Call& call, Queue queue) {
  const BatchNormShape shape = ShapeOf(call);
  BatchNormArrays arrays;
  ReadGradient(call, &arrays);
  arrays.var = Given(call, "var");
  arrays.sums = Given(call, "sums");
  call.Fill(&arrays, "dmean", &A::dmean, "dvar", &A::dvar, "dx", &A::dx);
  const DType dtype = call.Type();
  const double eps = call.Attribute<double>("eps");
  return call.Run([&] { return backend::BatchNormBackward(shape, dtype, eps, arrays, queue); });
}

ffi::Error Gradient(Call& call, Queue queue) {
  const BatchNormShape shape = ShapeOf(call);
  BatchNormArrays arrays;
  ReadGradient(call, &arrays);
  arrays.var = Given(call, "var");
  call.Fill(&arrays, "dmean", &A::dmean, "dvar", &A::dvar, "dx", &A::dx, "sums", &A::sums);
  ReadWorkspace(call, shape, &arrays);
  const DType dtype = call.Type();
  const double eps = call.Attribute<double>("eps");
  return call.Run([&] { return backend::BatchNormGradient(shape, dtype, eps, arrays, queue); });
}

FASTOPS_HANDLER("batch_norm_fwd", Forward, LoadBatchNormKernels);
FASTOPS_HANDLER("batch_norm_statistics", Statistics, LoadBatchNormKernels);
FASTOPS_HANDLER("batch_norm_apply", Apply, LoadBatchNormKernels);
FASTOPS_HANDLER("batch_norm_sums", Sums, LoadBatchNormKernels);
FASTOPS_HANDLER("batch_norm_bwd", Backward, LoadBatchNormKernels);
FASTOPS_HANDLER("batch_norm_grad", Gradient, LoadBatchNormKernels);

}  // namespace
}  // namespace jax_fastops

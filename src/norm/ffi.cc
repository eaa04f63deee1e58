// Handlers of layer norm and RMS norm. jax_fastops/norm.py declares their buffers.
#include "core/ffi/dropout.h"
#include "core/ffi/handler.h"
#include "norm/norm.h"

namespace jax_fastops {
namespace {

const Limit kWorkspace("norm_workspace", kNormWorkspace);
const Limit kDropoutLeast("norm_dropout_least", kNormDropoutLeast);
const Limit kDropoutMost("norm_dropout_most", kNormDropoutMost);

NormParameter Parameter(Call& call, const char* name) { return {call.In(name), call.Wide(name)}; }

NormKind Kind(Call& call) {
  return call.Attribute<bool>("rms") ? NormKind::kRms : NormKind::kLayer;
}

ffi::Error Forward(Call& call, Queue queue) {
  NormShape shape;
  shape.rows = call.Batch();
  shape.n = call.Size("n");
  NormForwardArrays arrays;
  arrays.x = call.In("x");
  arrays.residual = call.In("residual?");
  arrays.input_bias = Parameter(call, "input_bias?");
  arrays.scale = Parameter(call, "scale?");
  arrays.bias = Parameter(call, "bias?");
  arrays.y = call.Out("y");
  arrays.sum = call.Out("sum?");
  arrays.mean = call.Out("mean?");
  arrays.rstd = call.Out("rstd?");
  arrays.workspace = call.Out("workspace?");
  arrays.dropout = ReadDropout(call);
  const NormKind kind = Kind(call);
  const DType dtype = call.Type();
  const double eps = call.Attribute<double>("eps");
  call.Require(shape.n <= kNormWorkspace || arrays.workspace != nullptr, "x", "needs a workspace");
  return call.Run([&] { return backend::NormForward(shape, kind, dtype, eps, arrays, queue); });
}

ffi::Error Backward(Call& call, Queue queue) {
  NormShape shape;
  NormBackwardArrays arrays;
  arrays.dy = call.In("dy");
  arrays.s = call.In("s");
  arrays.mean = call.In("mean?");
  arrays.rstd = call.In("rstd");
  arrays.scale = Parameter(call, "scale?");
  arrays.dsum = call.In("dsum?");
  arrays.dy2 = call.In("dy2?");
  arrays.dx = call.Out("dx");
  arrays.dresidual = call.Out("dresidual?");
  arrays.dscale = call.Out("dscale?");
  arrays.dbias = call.Out("dbias?");
  arrays.dinput_bias = call.Out("dinput_bias?");
  arrays.dropout = ReadDropout(call);
  shape.n = call.Size("n");
  shape.rows = call.Batch();
  if (call.Size("sums", 0) > 0) {
    shape.batch = call.Batch();
    shape.rows = call.Size("r");
    shape.sums = call.Size("sums");
  }
  const NormKind kind = Kind(call);
  const DType dtype = call.Type();
  call.Require((arrays.mean != nullptr) == (kind == NormKind::kLayer), "dy",
               "needs a mean or none");
  return call.Run([&] { return backend::NormBackward(shape, kind, dtype, arrays, queue); });
}

FASTOPS_HANDLER("norm", Forward, LoadNormForwardKernels);
FASTOPS_HANDLER("norm_bwd", Backward, LoadNormBackwardKernels);

}  // namespace
}  // namespace jax_fastops

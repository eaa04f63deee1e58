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
  using A = NormForwardArrays;
  call.Fill(&arrays, "x", &A::x, "residual?", &A::residual, "y", &A::y, "sum?", &A::sum, "mean?",
            &A::mean, "rstd?", &A::rstd, "workspace?", &A::workspace);
  arrays.input_bias = Parameter(call, "input_bias?");
  arrays.scale = Parameter(call, "scale?");
  arrays.bias = Parameter(call, "bias?");
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
  using A = NormBackwardArrays;
  call.Fill(&arrays, "dy", &A::dy, "s", &A::s, "mean?", &A::mean, "rstd", &A::rstd, "dsum?",
            &A::dsum, "dy2?", &A::dy2, "dx", &A::dx, "dresidual?", &A::dresidual);
  call.Fill(&arrays, "dscale?", &A::dscale, "dbias?", &A::dbias, "dinput_bias?", &A::dinput_bias);
  arrays.scale = Parameter(call, "scale?");
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

// Handlers of cross_entropy. jax_fastops/cross_entropy.py declares their buffers.
#include "core/ffi/handler.h"
#include "cross_entropy/cross_entropy.h"

namespace jax_fastops {
namespace {

void FillCommon(Call& call, CrossEntropyCall* c) {
  using C = CrossEntropyCall;
  call.Fill(c, "logits", &C::logits, "labels", &C::labels);
  c->rows = call.Batch();
  c->n = call.Size("v");
  c->dtype = call.Type();
  const double smoothing = call.Attribute<double>("label_smoothing");
  c->smoothing = c->n > 0 ? smoothing : 0;  // without classes there is no logit to read
  c->z_loss = call.Attribute<double>("z_loss");
}

ffi::Error Forward(Call& call, Queue queue) {
  using C = CrossEntropyForwardCall;
  C c;
  FillCommon(call, &c);
  call.Fill(&c, "loss", &C::loss, "top?", &C::top, "log_sum?", &C::log_sum);
  call.Require((c.top == nullptr) == (c.log_sum == nullptr), "loss",
               "needs top and log_sum, or none");
  return call.Run([&] { return backend::CrossEntropyForward(c, queue); });
}

ffi::Error Backward(Call& call, Queue queue) {
  using C = CrossEntropyBackwardCall;
  C c;
  FillCommon(call, &c);
  call.Fill(&c, "dloss", &C::cotangent, "top", &C::top, "log_sum", &C::log_sum, "dlogits", &C::dx);
  return call.Run([&] { return backend::CrossEntropyBackward(c, queue); });
}

FASTOPS_HANDLER("cross_entropy", Forward, LoadCrossEntropyKernels);
FASTOPS_HANDLER("cross_entropy_bwd", Backward, LoadCrossEntropyKernels);

}  // namespace
}  // namespace jax_fastops

// Handlers of cross_entropy. jax_fastops/cross_entropy.py declares their buffers.
#include "core/ffi/handler.h"
#include "cross_entropy/cross_entropy.h"

namespace jax_fastops {
namespace {

CrossEntropyCall Common(Call& call) {
  CrossEntropyCall found;
  found.logits = call.In("logits");
  found.labels = static_cast<const int32_t*>(call.In("labels"));
  found.rows = call.Batch();
  found.n = call.Size("v");
  found.dtype = call.Type();
  // Without classes there is no logit to read.
  found.smoothing = found.n > 0 ? call.Attribute<double>("label_smoothing") : 0;
  found.z_loss = call.Attribute<double>("z_loss");
  return found;
}

ffi::Error Forward(Call& call, Queue queue) {
  const CrossEntropyCall c = Common(call);
  void *const loss = call.Out("loss"), *const top = call.Out("top?");
  void* const log_sum = call.Out("log_sum?");
  call.Require((top == nullptr) == (log_sum == nullptr), "loss", "needs top and log_sum, or none");
  return call.Run([&] { return backend::CrossEntropyForward(c, loss, top, log_sum, queue); });
}

ffi::Error Backward(Call& call, Queue queue) {
  const CrossEntropyCall c = Common(call);
  const void *const cotangent = call.In("dloss"), *const top = call.In("top");
  const void* const log_sum = call.In("log_sum");
  void* const dx = call.Out("dlogits");
  return call.Run(
      [&] { return backend::CrossEntropyBackward(c, cotangent, top, log_sum, dx, queue); });
}

FASTOPS_HANDLER("cross_entropy", Forward, LoadCrossEntropyKernels);
FASTOPS_HANDLER("cross_entropy_bwd", Backward, LoadCrossEntropyKernels);

}  // namespace
}  // namespace jax_fastops

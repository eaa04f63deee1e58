// Handlers of group_norm. jax_fastops/group_norm.py declares their buffers.
#include <string_view>

#include "core/ffi/activation.h"
#include "core/ffi/handler.h"
#include "group_norm/group_norm.h"

namespace jax_fastops {
namespace {

void FillCommon(Call& call, const char* x, GroupNormCall* c) {
  const Call::Dims dims = call.DimsOf(x);
  const int64_t* const own = dims.size + (dims.rank < 4 ? 0 : dims.rank - 4);
  call.Require(dims.rank >= 4, x, "needs four dimensions");
  if (call.failed()) return;
  c->samples = call.Batch();
  c->outer = own[0], c->groups = own[1], c->channels = own[2], c->inner = own[3];
  call.Require(c->outer == 1 || c->inner == 1, x, "must have its channels first or last");
  call.Require(c->samples == 0 || c->sample_size() > 0, x, "must have elements");
  c->dtype = call.Type();
  const int64_t most = kMaxGroupChannels / (c->dtype == DType::kF64 ? 2 : 1);
  call.Require(c->channels <= most, x, "has groups of too many channels");
  c->active = call.Attribute<std::string_view>("activation") != "none";
  if (c->active) c->activation = ReadActivation(call);
  c->scale = {call.In("scale?"), call.Wide("scale?")};
  c->bias = {call.In("bias?"), call.Wide("bias?")};
  c->workspace = call.Out("workspace");
  c->workspace_size = call.Size("w");
}

ffi::Error Forward(Call& call, Queue queue) {
  using C = GroupNormForwardCall;
  C c = {};
  FillCommon(call, "x", &c);
  c.eps = call.Attribute<double>("eps");
  call.Fill(&c, "x", &C::x, "residual?", &C::residual, "y", &C::y, "sum?", &C::sum, "mean?",
            &C::mean, "rstd?", &C::rstd);
  return call.Run([&] { return backend::GroupNormForward(c, queue); });
}

ffi::Error Backward(Call& call, Queue queue) {
  using C = GroupNormBackwardCall;
  C c = {};
  FillCommon(call, "dy", &c);
  call.Fill(&c, "dy", &C::dy, "s", &C::s, "mean", &C::mean, "rstd", &C::rstd, "dx", &C::dx,
            "dscale?", &C::dscale, "dbias?", &C::dbias);
  return call.Run([&] { return backend::GroupNormBackward(c, queue); });
}

FASTOPS_HANDLER("group_norm", Forward, LoadGroupNormKernels);
FASTOPS_HANDLER("group_norm_bwd", Backward, LoadGroupNormKernels);
const Limit kGroupNormChannels("group_norm_channels", kMaxGroupChannels);

}  // namespace
}  // namespace jax_fastops

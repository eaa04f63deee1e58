// The attribute `activation` of a call.
#pragma once

#include <string>
#include <string_view>

#include "core/activation.h"
#include "core/ffi/call.h"

namespace jax_fastops {

inline Activation ReadActivation(Call& call) {
  const auto name = call.Attribute<std::string_view>("activation");
  for (int i = 0; i < kNumActivations; ++i) {
    if (name == kActivationNames[i]) return static_cast<Activation>(i);
  }
  call.Fail("does not know the activation '" + std::string(name) + "'");
  return Activation::kGelu;
}

}  // namespace jax_fastops

#include "core/ffi/registry.h"

namespace jax_fastops {
namespace {

// Constant-initialized, so it is ready before the first static Registration is constructed.
const Registration* first_registration = nullptr;

}  // namespace

Registration::Registration(const char* target, XLA_FFI_Handler* execute,
                           XLA_FFI_Handler* initialize)
    : target_(target), execute_(execute), initialize_(initialize), next_(first_registration) {
  first_registration = this;
}

const Registration* Registration::First() { return first_registration; }

}  // namespace jax_fastops

// Registers CPU handlers, which ask for huge pages before they write.
#ifndef JAX_FASTOPS_CORE_FFI_HANDLER_CPU_H_
#define JAX_FASTOPS_CORE_FFI_HANDLER_CPU_H_

#include "core/ffi/huge_pages.h"
#include "core/ffi/registry.h"

namespace jax_fastops {

template <XLA_FFI_Handler* kHandler>
XLA_FFI_Error* WithHugePages(XLA_FFI_CallFrame* frame) {
  AdviseHugePages(*frame);
  return kHandler(frame);
}

}  // namespace jax_fastops

// FASTOPS_REGISTER_CPU(target, execute)
#define FASTOPS_REGISTER_CPU(target, execute) \
  FASTOPS_REGISTER(target, ::jax_fastops::WithHugePages<execute>)

#endif  // JAX_FASTOPS_CORE_FFI_HANDLER_CPU_H_

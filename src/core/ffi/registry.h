// The handler table of one native module (`_cpu` or `_cuda`).
//
// A handler file ends with one line per FFI target:
//
//   FASTOPS_REGISTER("jax_fastops.relu_fwd", ReluFwd);            // execute stage only
//   FASTOPS_REGISTER("jax_fastops.relu_fwd", ReluFwd, ReluInit);  // and an initialize stage
//
// where `ReluFwd` is a handler defined by XLA_FFI_DEFINE_HANDLER_SYMBOL (or
// XLA_FFI_DEFINE_HANDLER). The line registers the target when the module is loaded, so there is no
// list to maintain: the module's `handlers()` returns all registered targets. Target names carry no
// ABI suffix; Python adds it. core/ffi/handler_cpu.h registers CPU handlers.
#ifndef JAX_FASTOPS_CORE_FFI_REGISTRY_H_
#define JAX_FASTOPS_CORE_FFI_REGISTRY_H_

#include "xla/ffi/api/c_api.h"

namespace jax_fastops {

// The version of the contract between Python and the kernels: operands, results, attributes, and
// the layout of residuals (the bitmask). Increase it when any of them changes: it is part of every
// target's name, so that compiled programs that were stored under an older version do not run
// against newer kernels.
inline constexpr int kKernelAbi = 2;

class Registration {
 public:
  Registration(const char* target, XLA_FFI_Handler* execute, XLA_FFI_Handler* initialize = nullptr);
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  // The registrations of this module, newest first.
  static const Registration* First();
  const Registration* Next() const { return next_; }

  const char* target() const { return target_; }
  XLA_FFI_Handler* execute() const { return execute_; }
  XLA_FFI_Handler* initialize() const { return initialize_; }

 private:
  const char* const target_;
  XLA_FFI_Handler* const execute_;
  XLA_FFI_Handler* const initialize_;
  const Registration* const next_;
};

}  // namespace jax_fastops

#define FASTOPS_CONCAT_INNER(a, b) a##b
#define FASTOPS_CONCAT(a, b) FASTOPS_CONCAT_INNER(a, b)

// FASTOPS_REGISTER(target, execute[, initialize])
#define FASTOPS_REGISTER(...)                                                                \
  static const ::jax_fastops::Registration FASTOPS_CONCAT(fastops_registration_, __LINE__) { \
    __VA_ARGS__                                                                              \
  }

#endif  // JAX_FASTOPS_CORE_FFI_REGISTRY_H_

// What a native module (`_cpu` or `_cuda`) tells Python: its handlers, the limits of its kernels,
// the sizes of workspaces, and functions of a family. Families register all of these with a line
// each in their ffi.cc, once for each version of the FFI that their handlers are compiled for.
#pragma once

#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace jax_fastops {

// The version of what a description of buffers does not say: the meaning of buffers (the order of a
// mask's bits) and attributes. Increase it when such a thing changes: it is part of every target's
// name, so that compiled programs that were stored under an older version do not run against newer
// kernels. A call whose buffers or attributes the kernel does not know is refused by its handler.
inline constexpr int kKernelAbi = 4;

// A list that consists of its static elements.
template <typename T>
class Listed {
 public:
  Listed(const Listed&) = delete;
  Listed& operator=(const Listed&) = delete;

  // The elements of this module, newest first.
  static const T* First() { return first_; }
  const T* Next() const { return next_; }

 protected:
  Listed() : next_(first_) { first_ = static_cast<const T*>(this); }

 private:
  // Constant-initialized, so it is ready before the first static element is constructed.
  inline static const T* first_ = nullptr;
  const T* const next_;
};

// The handlers of one target for one version of the FFI. Its name carries no ABI suffix; Python
// adds it.
struct Registration : Listed<Registration> {
  Registration(const char* target, int ffi_major, int ffi_minor, XLA_FFI_Handler* execute,
               XLA_FFI_Handler* initialize = nullptr)
      : target(target),
        ffi_major(ffi_major),
        ffi_minor(ffi_minor),
        execute(execute),
        initialize(initialize) {}

  const char* const target;
  const int ffi_major, ffi_minor;
  XLA_FFI_Handler* const execute;
  XLA_FFI_Handler* const initialize;
};

// A number that Python must know, such as the longest row without a workspace:
//   static const Limit kLimit("softmax_workspace", kSoftmaxWorkspace);
struct Limit : Listed<Limit> {
  Limit(const char* name, int64_t value) : name(name), value(value) {}

  const char* const name;
  const int64_t value;
};

// The size of a workspace that depends on more than one dimension. Python asks for it by name.
struct WorkspaceSize : Listed<WorkspaceSize> {
  using Function = int64_t (*)(int64_t, int64_t, int64_t);
  WorkspaceSize(const char* name, Function function) : name(name), function(function) {}

  const char* const name;
  const Function function;
};

// Functions that a family adds to the Python module, a nanobind::module_:
//   static const ModulePart kPart(&Define);
struct ModulePart : Listed<ModulePart> {
  using Define = void (*)(void* module);
  explicit ModulePart(Define define) : define(define) {}

  const Define define;
};

}  // namespace jax_fastops

// Shared by both Python modules: the handler table as Python objects, and the build information.
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "core/activation.h"
#include "core/ffi/registry.h"

#ifndef FASTOPS_JAXLIB_VERSION
#error "the build passes the version of the jaxlib whose headers it compiles against"
#endif

namespace jax_fastops {

inline nanobind::object HandlerCapsule(XLA_FFI_Handler* handler) {
  PyObject* capsule = PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr);
  if (capsule == nullptr) throw nanobind::python_error();
  return nanobind::steal(capsule);
}

// {FFI version: {target: {stage: capsule}}}, as jax.ffi.register_ffi_target takes the stages.
inline nanobind::dict Handlers() {
  nanobind::dict versions;
  for (const Registration* r = Registration::First(); r != nullptr; r = r->Next()) {
    const nanobind::tuple version = nanobind::make_tuple(r->ffi_major, r->ffi_minor);
    if (!versions.contains(version)) versions[version] = nanobind::dict();
    auto table = nanobind::cast<nanobind::dict>(versions[version]);
    const std::string target = std::string("jax_fastops.") + r->target;
    if (table.contains(target.c_str())) {
      throw std::logic_error("FFI target registered twice: " + target);
    }
    nanobind::dict stages;
    stages["execute"] = HandlerCapsule(r->execute);
    if (r->initialize != nullptr) stages["initialize"] = HandlerCapsule(r->initialize);
    table[target.c_str()] = stages;
  }
  return versions;
}

// The entries of build_info() that do not depend on the backend.
inline nanobind::dict CommonBuildInfo() {
  nanobind::dict info;
  info["abi"] = kKernelAbi;
  info["jaxlib_version"] = FASTOPS_JAXLIB_VERSION;
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#elif defined(__GNUC__)
  info["compiler"] = "gcc " __VERSION__;
#else
  info["compiler"] = "unknown";
#endif
  nanobind::dict limits;
  for (const Limit* limit = Limit::First(); limit != nullptr; limit = limit->Next()) {
    limits[limit->name] = limit->value;
  }
  info["limits"] = limits;
  nanobind::list activations;
  for (const char* name : kActivationNames) activations.append(name);
  info["activations"] = activations;
  return info;
}

inline int64_t WorkspaceOf(const char* name, int64_t a, int64_t b, int64_t c) {
  for (const WorkspaceSize* w = WorkspaceSize::First(); w != nullptr; w = w->Next()) {
    if (std::string(w->name) == name) return w->function(a, b, c);
  }
  throw std::invalid_argument(std::string("no workspace of ") + name);
}

// The functions of both modules.
inline void Define(nanobind::module_& m, nanobind::dict (*build_info)()) {
  m.def("handlers", &Handlers, "FFI version -> target -> stage -> capsule.");
  m.def("build_info", build_info, "How this module was built, and its kernels' limits.");
  m.def("workspace", &WorkspaceOf, "The size of a workspace, from three sizes.");
}

}  // namespace jax_fastops

// The Python module `_cpu`.
#include <nanobind/nanobind.h>

#include "core/cpu/isa.h"
#include "core/ffi/module.h"

namespace {

namespace cpu = jax_fastops::cpu;

nanobind::dict BuildInfo() {
  nanobind::dict info = jax_fastops::CommonBuildInfo();
  nanobind::list built;
  for (int i = 0; i < cpu::kNumIsas; ++i) {
    const cpu::Isa isa = static_cast<cpu::Isa>(i);
    if (cpu::IsaIsBuilt(isa)) built.append(cpu::IsaName(isa));
  }
  info["isa_built"] = built;
  info["isa"] = cpu::IsaName(cpu::ActiveIsa());
  return info;
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of jax_fastops as XLA FFI handlers.";
  jax_fastops::Define(m, &BuildInfo);
}

#include "core/cpu/isa.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace jax_fastops::cpu {
namespace {

// Checks everything that the flags in CMakeLists.txt allow the compiler to use. The builtin also
// checks, with XGETBV, that the operating system saves the wide registers.
bool MachineSupports(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // F16C is read from CPUID, because not every compiler's builtin knows the name.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> 29 & 1) != 0;
  const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (isa == Isa::kAvx2) return avx2;
  if (isa == Isa::kAvx512) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return isa == Isa::kBaseline;
}

Isa ChooseIsa() {
  int limit = kNumIsas - 1;
  if (const char* wanted = std::getenv("JAX_FASTOPS_CPU_ISA")) {
    for (int i = 0; i < kNumIsas; ++i) {
      if (std::strcmp(wanted, IsaName(static_cast<Isa>(i))) == 0) limit = i;
    }
  }
  for (int i = limit; i >= 0; --i) {
    const Isa isa = static_cast<Isa>(i);
    if (IsaIsBuilt(isa) && MachineSupports(isa)) return isa;
  }
  std::fprintf(stderr, "jax_fastops: the CPU kernels were built for other machines\n");
  std::abort();
}

}  // namespace

Isa ActiveIsa() {
  static const Isa isa = ChooseIsa();
  return isa;
}

bool IsaIsBuilt(Isa isa) {
  constexpr bool kBuilt[] = {FASTOPS_BUILT_baseline, FASTOPS_BUILT_avx2, FASTOPS_BUILT_avx512};
  return kBuilt[static_cast<int>(isa)];
}

const char* IsaName(Isa isa) {
  constexpr const char* kNames[] = {"baseline", "avx2", "avx512"};
  return kNames[static_cast<int>(isa)];
}

}  // namespace jax_fastops::cpu

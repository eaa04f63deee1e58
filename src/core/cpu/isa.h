// Instruction sets: one binary runs on every machine of its architecture, and uses the widest
// vectors that the machine has.
//
// A file named *_simd.cc is compiled once per instruction set, each time with other compiler flags.
// FASTOPS_ISA is then the name of a namespace (baseline, avx2, avx512), and FASTOPS_ISA_LEVEL is 0,
// 1, 2. The file defines tables of function pointers in that namespace:
//
//   namespace jax_fastops::cpu::FASTOPS_ISA {
//   namespace { ... the kernels ... }
//   const NormKernels norm_kernels[] = FASTOPS_EACH_DTYPE(Norm, kKernels);
//   }
//
// The family's header declares the tables with FASTOPS_DECLARE_KERNELS(NormKernels,
// norm_kernels[kNumDTypes]), and FASTOPS_DEFINE_KERNELS(Kernels, norm_kernels) in the launcher's
// file defines Kernels(dtype), which returns that of the dtype. A family whose kernels do not
// depend on the dtype has a single table, and FASTOPS_DEFINE_TABLE.
//
// Only the tables may have external linkage in such files and in the headers that they include. An
// inline function or template outside of an anonymous namespace would be emitted once per
// instruction set, and the linker would keep an arbitrary copy, so a baseline machine could execute
// AVX-512 code. So these files include no C++ standard header that contains functions. For the same
// reason, tables are constants that are initialized without code.
#pragma once

#include "core/dtype.h"

namespace jax_fastops::cpu {

enum class Isa { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };
inline constexpr int kNumIsas = 3;

// The instruction set in use: the widest that was built and that the machine and its operating
// system support. JAX_FASTOPS_CPU_ISA=baseline|avx2|avx512 limits it. Decided once per process.
Isa ActiveIsa();
bool IsaIsBuilt(Isa isa);
const char* IsaName(Isa isa);

}  // namespace jax_fastops::cpu

#define FASTOPS_DECLARE_KERNELS(Table, name) \
  namespace baseline {                       \
  extern const Table name;                   \
  }                                          \
  namespace avx2 {                           \
  extern const Table name;                   \
  }                                          \
  namespace avx512 {                         \
  extern const Table name;                   \
  }

// A reference to the table of the active instruction set. For files that are compiled once. The
// build defines FASTOPS_BUILT_baseline and so on as 1 or 0.
#define FASTOPS_TABLE(isa, name) (FASTOPS_BUILT_##isa ? &::jax_fastops::cpu::isa::name : nullptr)
#define FASTOPS_KERNELS(name)                                                                   \
  ([]() -> decltype(::jax_fastops::cpu::baseline::name)& {                                      \
    decltype(&::jax_fastops::cpu::baseline::name) tables[::jax_fastops::cpu::kNumIsas] = {      \
        FASTOPS_TABLE(baseline, name), FASTOPS_TABLE(avx2, name), FASTOPS_TABLE(avx512, name)}; \
    return *tables[static_cast<int>(::jax_fastops::cpu::ActiveIsa())];                          \
  }())
// Defines a function that returns it.
#define FASTOPS_DEFINE_TABLE(function, name)          \
  const auto& function() {                            \
    static const auto& table = FASTOPS_KERNELS(name); \
    return table;                                     \
  }
// Defines a function that returns that of a dtype.
#define FASTOPS_DEFINE_KERNELS(function, name)         \
  const auto& function(DType dtype) {                  \
    static const auto& tables = FASTOPS_KERNELS(name); \
    return tables[static_cast<int>(dtype)];            \
  }

// Instruction sets: one binary runs on every machine of its architecture and uses the widest
// vectors there.
//
// A file named *_simd.cc is compiled once per instruction set, each time with other compiler flags
// and with FASTOPS_ISA set to the name of a namespace (baseline, avx2, avx512) and
// FASTOPS_ISA_LEVEL to 0, 1, 2. It defines tables of function pointers in that namespace:
//
//   namespace jax_fastops::cpu::FASTOPS_ISA {
//   namespace { ... the kernels ... }
//   extern const ReluKernels relu_kernels = {...};
//   }
//
// The family's header declares the table with FASTOPS_DECLARE_KERNELS(ReluKernels, relu_kernels),
// and the launcher takes it from FASTOPS_KERNELS(relu_kernels).
//
// Such files, and the headers they include, define nothing but tables with external linkage: an
// inline function or template that is not in an anonymous namespace would be emitted once per
// instruction set, the linker would keep an arbitrary copy, and a plain machine would run into
// AVX-512 code. So they include no C++ standard header that has functions in it. For the same
// reason tables are constants, initialised without code.
#ifndef JAX_FASTOPS_CPU_ISA_H_
#define JAX_FASTOPS_CPU_ISA_H_

namespace jax_fastops::cpu {

enum class Isa { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };
inline constexpr int kNumIsas = 3;

// The instruction set in use: the widest that was built and that this machine and its operating
// system support. JAX_FASTOPS_CPU_ISA=baseline|avx2|avx512 lowers it. Decided once per process.
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

#ifdef FASTOPS_BUILT_avx2
#define FASTOPS_AVX2_TABLE(name) &::jax_fastops::cpu::avx2::name
#else
#define FASTOPS_AVX2_TABLE(name) nullptr
#endif
#ifdef FASTOPS_BUILT_avx512
#define FASTOPS_AVX512_TABLE(name) &::jax_fastops::cpu::avx512::name
#else
#define FASTOPS_AVX512_TABLE(name) nullptr
#endif

// A reference to the active instruction set's table, for use in files that are compiled once.
#define FASTOPS_KERNELS(name)                                                              \
  ([]() -> decltype(::jax_fastops::cpu::baseline::name)& {                                 \
    decltype(&::jax_fastops::cpu::baseline::name) tables[::jax_fastops::cpu::kNumIsas] = { \
        &::jax_fastops::cpu::baseline::name, FASTOPS_AVX2_TABLE(name),                     \
        FASTOPS_AVX512_TABLE(name)};                                                       \
    return *tables[static_cast<int>(::jax_fastops::cpu::ActiveIsa())];                     \
  }())

#endif  // JAX_FASTOPS_CPU_ISA_H_

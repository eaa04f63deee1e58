// The inner loops of NAME.h.
#include "NAME/NAME_simd.h"

#include "core/cpu/block_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

template <typename E>
struct Name {
  using A = typename E::A;

  static void Run(const char* x, char* y, int64_t n) {
    OverBlocks<E::kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> v = Loaded<A>(LoadElements<E>(extent, x + i * E::kBytes, count));
      StoreElements<E, false>(extent, y + i * E::kBytes, E::Narrow(Add(v, v)), count);
    });
  }
};

}  // namespace

const NameKernel NAME_kernels[] = FASTOPS_EACH_DTYPE(Name, Run);

}  // namespace jax_fastops::cpu::FASTOPS_ISA

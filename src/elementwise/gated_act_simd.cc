// The inner loops of gated_act: y = act(gate) * up, and the gradients of both operands.
#include "core/cpu/activation_math.h"
#include "core/cpu/block_math.h"
#include "elementwise/elementwise_simd.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

template <typename E, Activation kActivation>
struct GatedAct {
  using A = typename E::A;
  using M = ActivationMath<A>;
  using Vec = typename A::Vec;
  using F = FormulaOf<kActivation, M>;

  static void Forward(int64_t n, const BlockArray* in, const BlockArray* out) {
    const BlockArray gate = in[0], up = in[1], y = out[0];
    OverBlocks<E::kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> s = LoadBlock<E>(extent, gate, i, count);
      const Pair<A> value = Each<A>([](Vec v) FASTOPS_LAMBDA { return F::Value(v); }, s);
      StoreBlock<E>(extent, y, i, count, Mul(value, LoadBlock<E>(extent, up, i, count)));
    });
  }

  static void Backward(int64_t n, const BlockArray* in, const BlockArray* out) {
    const BlockArray dy = in[0], gate = in[1], up = in[2], dgate = out[0], dup = out[1];
    OverBlocks<E::kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> s = LoadBlockAhead<E>(extent, gate, i, count);
      const Pair<A> g = LoadBlockAhead<E>(extent, dy, i, count);
      const Pair<A> product = Mul(g, LoadBlockAhead<E>(extent, up, i, count));
      StoreBlock<E>(
          extent, dgate, i, count,
          Each<A>([](Vec s, Vec g) FASTOPS_LAMBDA { return Pull<M, F>(s, g); }, s, product));
      const Pair<A> value = Each<A>([](Vec v) FASTOPS_LAMBDA { return F::Value(v); }, s);
      StoreBlock<E>(extent, dup, i, count, Mul(g, value));
    });
  }

  static constexpr ElementwiseKernels kKernels = {Forward, Backward};
};

}  // namespace

#define FASTOPS_GATED_ACT(name, Formula) FASTOPS_EACH_DTYPE_OF(GatedAct, Formula)
const ElementwiseKernels gated_act_kernels[][kNumDTypes] = {FASTOPS_ACTIVATIONS(FASTOPS_GATED_ACT)};

}  // namespace jax_fastops::cpu::FASTOPS_ISA

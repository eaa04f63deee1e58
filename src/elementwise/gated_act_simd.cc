// The inner loops of gated_act_cpu.cc: y = act(gate) * up, and the gradients of both operands.
#include "elementwise/activation_math.h"
#include "elementwise/bias_act_simd.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

template <typename A>
struct Relu {
  using Vec = typename A::Vec;
  // NaN is not equal to itself, so it is kept.
  static FASTOPS_INLINE Vec Value(Vec x) {
    const Vec zero = A::Set(0);
    return A::Select(More<A>::Less(zero, x), x, A::Select(A::Equal(x, x), zero, x));
  }
};

// The gradient of the activation's argument `s`, from the gradient `g` of its value. With relu, it
// is selected, never multiplied.
template <typename A, template <typename> class Activation>
FASTOPS_INLINE typename A::Vec Pull(typename A::Vec s, typename A::Vec g) {
  if constexpr (__is_same(Activation<A>, Relu<A>)) {
    return A::Select(More<A>::Less(A::Set(0), s), g, A::Set(0));
  } else {
    return A::Mul(g, Activation<A>::Derivative(s));
  }
}

template <typename E, template <typename> class Activation>
struct GatedAct {
  using A = typename E::A;
  using Vec = typename A::Vec;

  static void Forward(int64_t n, const BlockArray* in, const BlockArray* out) {
    const BlockArray gate = in[0], up = in[1], y = out[0];
    OverBlocks<E::kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> s = LoadBlock<E>(extent, gate, i, count);
      const Pair<A> value =
          Each<A>([](Vec v) FASTOPS_LAMBDA { return Activation<A>::Value(v); }, s);
      StoreBlock<E>(extent, y, i, count, Mul(value, LoadBlock<E>(extent, up, i, count)));
    });
  }

  static void Backward(int64_t n, const BlockArray* in, const BlockArray* out) {
    const BlockArray dy = in[0], gate = in[1], up = in[2], dgate = out[0], dup = out[1];
    OverBlocks<E::kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> s = LoadBlockAhead<E>(extent, gate, i, count);
      const Pair<A> g = LoadBlockAhead<E>(extent, dy, i, count);
      const Pair<A> product = Mul(g, LoadBlockAhead<E>(extent, up, i, count));
      StoreBlock<E>(extent, dgate, i, count,
                    Each<A>([](Vec s, Vec g) FASTOPS_LAMBDA { return Pull<A, Activation>(s, g); },
                            s, product));
      const Pair<A> value =
          Each<A>([](Vec v) FASTOPS_LAMBDA { return Activation<A>::Value(v); }, s);
      StoreBlock<E>(extent, dup, i, count, Mul(g, value));
    });
  }
};

}  // namespace

#define FASTOPS_BY_DTYPE(Activation, name)                             \
  {GatedAct<E32, Activation>::name, GatedAct<EBF16, Activation>::name, \
   GatedAct<EF16, Activation>::name, GatedAct<E64, Activation>::name}

extern const BiasActKernels gated_act_kernels;
const BiasActKernels gated_act_kernels = {
    {FASTOPS_BY_DTYPE(Gelu, Forward), FASTOPS_BY_DTYPE(GeluExact, Forward),
     FASTOPS_BY_DTYPE(Silu, Forward), FASTOPS_BY_DTYPE(Relu, Forward)},
    {FASTOPS_BY_DTYPE(Gelu, Backward), FASTOPS_BY_DTYPE(GeluExact, Backward),
     FASTOPS_BY_DTYPE(Silu, Backward), FASTOPS_BY_DTYPE(Relu, Backward)}};

}  // namespace jax_fastops::cpu::FASTOPS_ISA

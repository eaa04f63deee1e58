// The inner loops of bias_act. The backward computes x + bias again, without rounding it to the
// element type. The addition is cheap next to the exponential, and no array has to be stored.
#include "elementwise/elementwise_simd.h"

#include "core/cpu/activation_math.h"
#include "core/cpu/block_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

template <typename E, Activation kActivation>
struct BiasAct {
  using A = typename E::A;
  using M = ActivationMath<A>;
  using Vec = typename A::Vec;
  using F = FormulaOf<kActivation, M>;

  static void Forward(int64_t n, const BlockArray* in, const BlockArray* out) {
    const BlockArray x = in[0], bias = in[1], y = out[0];
    OverBlocks<E::kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> s =
          Add(LoadBlock<E>(extent, x, i, count), LoadBlock<E>(extent, bias, i, count));
      StoreBlock<E>(extent, y, i, count,
                    Each<A>([](Vec v) FASTOPS_LAMBDA { return F::Value(v); }, s));
    });
  }

  static void Backward(int64_t n, const BlockArray* in, const BlockArray* out) {
    const BlockArray dy = in[0], x = in[1], bias = in[2], dx = out[0], dbias = out[1];
    OverBlocks<E::kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> s =
          Add(LoadBlockAhead<E>(extent, x, i, count), LoadBlockAhead<E>(extent, bias, i, count));
      const Pair<A> g = Each<A>([](Vec s, Vec dy) FASTOPS_LAMBDA { return Pull<M, F>(s, dy); }, s,
                                LoadBlockAhead<E>(extent, dy, i, count));
      StoreBlock<E>(extent, dx, i, count, g);
      StoreBlock<E>(extent, dbias, i, count, g);
    });
  }

  static constexpr ElementwiseKernels kKernels = {Forward, Backward};
};

// Keeps one bit per element.
template <typename E>
struct BiasAct<E, Activation::kRelu> {
  using A = typename E::A;
  using Vec = typename A::Vec;

  static void Forward(int64_t n, const BlockArray* in, const BlockArray* out) {
    const BlockArray x = in[0], bias = in[1], y = out[0], mask = out[1];
    OverBlocks<E::kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      Pair<A> s = LoadBlock<E>(extent, x, i, count);
      if (bias.data != nullptr) s = Add(s, LoadBlock<E>(extent, bias, i, count));
      const Pair<A> zero = SetPair<A>(0);
      const PairMask<A> positive = Less(zero, s);
      // NaN is not equal to itself, so it is kept.
      StoreBlock<E>(extent, y, i, count, Select(positive, s, Select(Equal(s, s), zero, s)));
      StoreBits<E>(extent, mask, i, count, positive);
    });
  }

  static void Backward(int64_t n, const BlockArray* in, const BlockArray* out) {
    const BlockArray dy = in[0], mask = in[1], dx = out[0], dbias = out[1];
    OverBlocks<E::kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> g = Select(LoadBits<E>(extent, mask, i, count),
                               Loaded(LoadBlockAhead<E>(extent, dy, i, count)), SetPair<A>(0));
      StoreBlock<E>(extent, dx, i, count, g);
      StoreBlock<E>(extent, dbias, i, count, g);
    });
  }

  static constexpr ElementwiseKernels kKernels = {Forward, Backward};
};

}  // namespace

#define FASTOPS_BIAS_ACT(name, Formula) FASTOPS_EACH_DTYPE_OF(BiasAct, Formula)
const ElementwiseKernels bias_act_kernels[][kNumDTypes] = {FASTOPS_ACTIVATIONS(FASTOPS_BIAS_ACT)};

}  // namespace jax_fastops::cpu::FASTOPS_ISA

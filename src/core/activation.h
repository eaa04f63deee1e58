// The activations: their names, and their formulas for both backends.
//
// To add one, name it in FASTOPS_ACTIVATIONS, write its formula here, and its name and meaning in
// jax_fastops/_activations.py. Everything else follows from these lists.
//
// A formula is a template of M, the operations of a backend (core/cpu/activation_math.h,
// core/cuda/activation.cuh):
//
//   Vec                    a number, or a vector of numbers
//   Set, Add, Sub, Mul, MulAdd, Less, Select
//   Reciprocal(x)          1 / x, if x is neither subnormal nor huge
//   Magnitude<F>(s)        min(|s|, limit), or NaN; at the limit Tail<F> is 0
//   Tail<F>(a)             scaled exp(-a (F::kLinear + F::kCubic a^2)), for a >= 0
//   Scaled, Unscaled       x times the factor of Tail, and x divided by it
//   PositivePart(s)        relu
//   Sigmoid<F>(s)          of F's argument, if M has a faster form of it
//   GeluExact              the formula, which needs an approximation of erf
//
// Only the tail gets small, nothing overflows, and almost equal numbers are subtracted only where a
// derivative has its zero. So the error is a few ulp of the result, also far down the negative
// tails. As in jax.nn, NaN gives NaN, and the value at -inf and the derivatives at infinities are
// NaN: s, which has no limit, is multiplied by a number that is 0 there.
#pragma once

#include <stdint.h>

// The name in Python, and the formula.
#define FASTOPS_ACTIVATIONS(X) \
  X(gelu, Gelu)                \
  X(gelu_exact, GeluExact)     \
  X(silu, Silu)                \
  X(relu, Relu)                \
  X(quick_gelu, QuickGelu)     \
  X(mish, Mish)

#ifdef __CUDACC__
#define FASTOPS_FORMULA __device__ __forceinline__
#else
#define FASTOPS_FORMULA inline __attribute__((always_inline))
#endif

namespace jax_fastops {

enum class Activation : uint8_t {
#define FASTOPS_ENUMERATOR(name, Formula) k##Formula,
  FASTOPS_ACTIVATIONS(FASTOPS_ENUMERATOR)
#undef FASTOPS_ENUMERATOR
};

inline constexpr const char* kActivationNames[] = {
#define FASTOPS_NAME(name, Formula) #name,
    FASTOPS_ACTIVATIONS(FASTOPS_NAME)
#undef FASTOPS_NAME
};
inline constexpr int kNumActivations = sizeof(kActivationNames) / sizeof(*kActivationNames);

// s sigmoid(v) with v = s (kLinear + kCubic s^2). With r = 1 / (1 + exp(-|v|)), sigmoid(v) is r for
// s >= 0 and 1 - r = exp(-|v|) r for s < 0. The derivative is sigmoid(v) + exp(-|v|) r^2 s v'.
template <typename M, typename F>
struct Logistic {
  using Vec = typename M::Vec;

  static FASTOPS_FORMULA Vec Value(Vec s) {
    if constexpr (requires { M::template Sigmoid<F>(s); }) {
      return M::Mul(s, M::template Sigmoid<F>(s));
    } else {
      const Vec e = M::template Tail<F>(M::template Magnitude<F>(s));
      const Vec y = M::Mul(s, M::Reciprocal(M::Add(M::Set(1), M::Unscaled(e))));
      return M::Select(M::Less(s, M::Set(0)), M::Unscaled(M::Mul(y, e)), y);
    }
  }

  static FASTOPS_FORMULA Vec Derivative(Vec s) {
    const Vec a = M::template Magnitude<F>(s);
    const Vec e = M::template Tail<F>(a);
    const Vec r = M::Reciprocal(M::Add(M::Set(1), M::Unscaled(e)));
    const Vec below = M::Mul(e, r);
    Vec slope = M::Mul(below, r);
    if constexpr (F::kCubic != 0) {
      const Vec square = M::Mul(a, a);
      slope = M::Mul(slope, M::MulAdd(square, M::Set(3 * F::kCubic), M::Set(F::kLinear)));
    } else if constexpr (F::kLinear != 1) {
      slope = M::Mul(slope, M::Set(F::kLinear));
    }
    const Vec sigmoid = M::Select(M::Less(s, M::Set(0)), below, M::Scaled(r));
    return M::Unscaled(M::MulAdd(slope, s, sigmoid));
  }
};

// (1 + tanh(u)) / 2 = sigmoid(2 u) with u = sqrt(2 / pi) (s + 0.044715 s^3).
template <typename M>
struct Gelu : Logistic<M, Gelu<M>> {
  static constexpr double kLinear = 1.5957691216057308;
  static constexpr double kCubic = kLinear * 0.044715;
};

template <typename M>
struct Silu : Logistic<M, Silu<M>> {
  static constexpr double kLinear = 1, kCubic = 0;
};

template <typename M>
struct QuickGelu : Logistic<M, QuickGelu<M>> {
  static constexpr double kLinear = 1.702, kCubic = 0;
};

template <typename M>
using GeluExact = typename M::GeluExact;

template <typename M>
struct Relu {
  using Vec = typename M::Vec;

  static FASTOPS_FORMULA Vec Value(Vec s) { return M::PositivePart(s); }
  static FASTOPS_FORMULA Vec Pull(Vec s, Vec g) {
    return M::Select(M::Less(M::Set(0), s), g, M::Set(0));
  }
};

// s t with t = tanh(softplus(s)) = (w - 1) / (w + 1), w = (1 + exp(s))^2. With e = exp(-|s|), t is
// n / d for s >= 0 and e n / d for s < 0, and t' = 4 exp(s) (1 + exp(s)) / (w + 1)^2 is
// 4 (1 + e) / d^2 times e^2 or e.
template <typename M>
struct Mish {
  using Vec = typename M::Vec;
  static constexpr double kLinear = 1, kCubic = 0;

  static FASTOPS_FORMULA Vec Value(Vec s) {
    const Terms x(s);
    const Vec y = M::Mul(s, x.t);
    return M::Select(M::Less(s, M::Set(0)), M::Unscaled(M::Mul(y, x.tail)), y);
  }

  static FASTOPS_FORMULA Vec Derivative(Vec s) {
    const Terms x(s);
    const auto below = M::Less(s, M::Set(0));
    Vec slope = M::Mul(M::MulAdd(M::Set(4), x.e, M::Set(4)), M::Mul(x.r, x.r));
    slope = M::Mul(slope, M::Select(below, M::Set(1), M::Mul(x.e, x.e)));
    const Vec d = M::MulAdd(slope, s, x.t);
    return M::Select(below, M::Unscaled(M::Mul(x.tail, d)), d);
  }

 private:
  struct Terms {
    Vec tail, e;
    Vec r;  // 1 / d
    Vec t;  // n / d

    explicit FASTOPS_FORMULA Terms(Vec s) {
      tail = M::template Tail<Mish>(M::template Magnitude<Mish>(s));
      e = M::Unscaled(tail);
      const auto below = M::Less(s, M::Set(0));
      const Vec twice = M::Add(e, e);
      const Vec n = M::Select(below, M::Add(M::Set(2), e), M::Add(M::Set(1), twice));
      r = M::Reciprocal(M::MulAdd(e, M::Select(below, n, twice), M::Select(below, M::Set(2), n)));
      t = M::Mul(n, r);
    }
  };
};

template <Activation kActivation, typename M>
struct FormulaOf;
#define FASTOPS_FORMULA_OF(name, Formula) \
  template <typename M>                   \
  struct FormulaOf<Activation::k##Formula, M> : Formula<M> {};
FASTOPS_ACTIVATIONS(FASTOPS_FORMULA_OF)
#undef FASTOPS_FORMULA_OF

// The gradient of the activation's argument `s`, from the gradient `g` of its value. For
// relu, it is selected, never multiplied.
template <typename M, typename F>
FASTOPS_FORMULA typename M::Vec Pull(typename M::Vec s, typename M::Vec g) {
  if constexpr (requires { F::Pull(s, g); }) {
    return F::Pull(s, g);
  } else {
    return M::Mul(g, F::Derivative(s));
  }
}

}  // namespace jax_fastops

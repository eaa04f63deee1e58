// The activations of bias_act and their derivatives, as vectors of an accumulator's type, for the
// instruction set that a *_simd.cc file is being compiled for. As in simd_math.h, everything is in
// the anonymous namespace.
//
// Each is written so that no step is a difference of two nearly equal numbers, or Inf * 0 for a
// finite x: so the error is a few units in the last place of the result itself, far down the
// negative tails too. At the infinities the results are those of jax.nn, NaN where that multiplies
// one by 0.
#ifndef JAX_FASTOPS_CPU_ACTIVATION_MATH_H_
#define JAX_FASTOPS_CPU_ACTIVATION_MATH_H_

#include "cpu/block_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

template <typename A>
FASTOPS_INLINE typename A::Vec Absolute(typename A::Vec x) {
  return A::Max(A::Sub(A::Set(0), x), x);  // NaN stays
}

// 1 / (1 + exp(-x)), and 1 minus that.
template <typename A>
struct Sigmoid {
  typename A::Vec value, rest;

  explicit FASTOPS_INLINE Sigmoid(typename A::Vec x) {
    using Vec = typename A::Vec;
    const Vec zero = A::Set(0), one = A::Set(1);
    const Vec e = A::Exp(A::Sub(zero, Absolute<A>(x)));
    const Vec large = More<A>::Div(one, A::Add(one, e));
    const Vec small = A::Mul(e, large);
    const auto negative = More<A>::Less(x, zero);
    value = A::Select(negative, small, large);
    rest = A::Select(negative, large, small);
  }
};

// x * sigmoid(x)
template <typename A>
struct Silu {
  using Vec = typename A::Vec;
  static FASTOPS_INLINE Vec Value(Vec x) { return A::Mul(x, Sigmoid<A>(x).value); }
  static FASTOPS_INLINE Vec Derivative(Vec x) {
    const Sigmoid<A> s(x);
    return A::MulAdd(A::Mul(x, s.value), s.rest, s.value);
  }
};

// x * (1 + tanh(u)) / 2 = x * sigmoid(2u) with 2u = x * (kLinear + kCubic * x^2)
template <typename A>
struct Gelu {
  using Vec = typename A::Vec;
  using Scalar = typename A::Scalar;
  static constexpr Scalar kLinear = static_cast<Scalar>(1.5957691216057307117597842397375L);
  static constexpr Scalar kCubic = static_cast<Scalar>(0.07135481627260024877633875227986L);
  static FASTOPS_INLINE Vec Value(Vec x) {
    const Vec u = A::Mul(x, A::MulAdd(A::Mul(x, x), A::Set(kCubic), A::Set(kLinear)));
    return A::Mul(x, Sigmoid<A>(u).value);
  }
  // Beyond +-30 it is 0 or 1 in float and double, and x^2 is not needed.
  static FASTOPS_INLINE Vec Derivative(Vec x) {
    const Vec v = A::Max(A::Set(-30), A::Min(A::Set(30), x));
    const Vec square = A::Mul(v, v);
    const Sigmoid<A> s(A::Mul(v, A::MulAdd(square, A::Set(kCubic), A::Set(kLinear))));
    const Vec slope = A::MulAdd(square, A::Set(3 * kCubic), A::Set(kLinear));
    const Vec d = A::MulAdd(A::Mul(A::Mul(v, slope), s.value), s.rest, s.value);
    return A::Add(d, A::Sub(x, x));  // NaN at the infinities
  }
};

// The normal distribution: its upper tail behind t >= 0 is exp(-t^2 / 2) * ratio(t), where the
// ratio falls from 1/2 as slowly as 1/t. (1 + 2t) * ratio(t) is a polynomial of v = (t - k) / (t +
// k), interpolated at Chebyshev's points of all t for which the tail is not 0: relative
// errors 5.9e-9 and 4e-18.
template <typename Scalar>
struct TailOf;

template <>
struct TailOf<float> {
  static constexpr float kCentre = 4, kEnd = 14.5f;
  static constexpr float kSplit = 4097;
  static constexpr int kTerms = 11;
  static constexpr float kP[kTerms] = {0x1.b30b52p-1f,   -0x1.78fb9ap-6f,  -0x1.8ac5bep-4f,
                                       0x1.08007cp-3f,   -0x1.862fd6p-4f,  0x1.6b8318p-5f,
                                       -0x1.586312p-7f,  -0x1.47a90ap-10f, 0x1.980202p-10f,
                                       -0x1.3b2a38p-14f, -0x1.44f9cep-13f};
  static constexpr int kNearTerms = 6;
  static constexpr float kNear[kNearTerms] = {0x1.988454p-2f,   -0x1.105832p-4f, 0x1.46ce58p-7f,
                                              -0x1.36fe32p-10f, 0x1.dc102ap-14f, -0x1.010b86p-17f};
  static constexpr float kNearSlope[kNearTerms] = {0x1.988454p-1f,  -0x1.105826p-2f,
                                                   0x1.ea31dap-5f,  -0x1.36cf6ap-7f,
                                                   0x1.27a9f0p-10f, -0x1.74409cp-14f};
};

template <>
struct TailOf<double> {
  static constexpr double kCentre = 5, kEnd = 39;
  static constexpr double kSplit = 134217729;
  static constexpr int kTerms = 24;
  static constexpr double kP[kTerms] = {
      0x1.b135a378924a6p-1,   -0x1.44c9cd8f57979p-5,  -0x1.ba6f247fb882bp-5,
      0x1.9d3d58860d5aep-4,   -0x1.9c4af953d7993p-4,  0x1.28e8fee3812c6p-4,
      -0x1.42359ad015dc4p-5,  0x1.f96034e86d973p-7,   -0x1.d426361eafd0dp-9,
      -0x1.f1d640095d306p-14, 0x1.bdbeca01850eap-12,  -0x1.c5b9fd998379fp-14,
      -0x1.bb899b364d95bp-16, 0x1.4552bf71b6b62p-16,  0x1.1f71fa7ebeae4p-21,
      -0x1.7fe039bef7846p-19, 0x1.7ad46e3ac8520p-23,  0x1.d18c2206dcd99p-22,
      -0x1.4bdf8fa65452cp-25, -0x1.257cd77b106a5p-24, 0x1.c4dc50463d021p-29,
      0x1.39cfd4d42b1cep-27,  0x1.6769efe136c3ap-32,  -0x1.2234572934b43p-31};
  static constexpr int kNearTerms = 11;
  static constexpr double kNear[kNearTerms] = {
      0x1.9884533d43651p-2,  -0x1.1058377e2cedfp-4,  0x1.46d0429769010p-7,  -0x1.37403f6b93143p-10,
      0x1.e42b0d4b14d39p-14, -0x1.3ce8f9bacee1ep-17, 0x1.6589f17ce2693p-21, -0x1.621cc567a99f7p-25,
      0x1.380b151d37375p-29, -0x1.e69d43072e1f8p-34, 0x1.1eb48cc19cdecp-38};
  static constexpr double kNearSlope[kNearTerms] = {
      0x1.9884533d43651p-1,  -0x1.1058377e2ced8p-2,  0x1.ea3863e31d039p-5,  -0x1.37403f6b77d4cp-7,
      0x1.2e9ae848f8c01p-10, -0x1.db5d751b7e728p-14, 0x1.38d8967b8c434p-17, -0x1.621a14c327d19p-21,
      0x1.5ee5c1821b47cp-25, -0x1.2eeeca3686954p-29, 0x1.8221ba9a127b8p-34};
};

// x * Phi(x)
template <typename A>
struct GeluExact {
  using Vec = typename A::Vec;
  using Scalar = typename A::Scalar;
  using C = TailOf<Scalar>;
  // 1 / sqrt(2 pi)
  static constexpr Scalar kDensity = static_cast<Scalar>(0.39894228040143267793994605993438L);

  template <int kTerms>
  static FASTOPS_INLINE Vec Polynomial(const Scalar (&c)[kTerms], Vec x) {
    Vec p = A::Set(c[kTerms - 1]);
#pragma GCC unroll 32
    for (int i = kTerms - 2; i >= 0; --i) p = A::MulAdd(p, x, A::Set(c[i]));
    return p;
  }
  template <int kTerms>
  static FASTOPS_INLINE Vec Near(const Scalar (&c)[kTerms], Vec x) {
    return A::MulAdd(x, Polynomial<kTerms>(c, A::Mul(x, x)), A::Set(0.5f));
  }

  // exp(-t^2 / 2) and the ratio, t being |x|, or kEnd if that is less: both factors stay finite.
  struct Tail {
    Vec t, exp, ratio;

    explicit FASTOPS_INLINE Tail(Vec x) {
      t = A::Min(A::Set(C::kEnd), Absolute<A>(x));
      // t^2 = square + rest exactly, or nearly so: far out, the rounding of t^2 alone would change
      // its exponential by many units in the last place.
      const Vec square = A::Mul(t, t);
      const Vec split = A::Mul(t, A::Set(C::kSplit));
      const Vec high = A::Sub(split, A::Sub(split, t)), low = A::Sub(t, high);
      Vec rest = A::Sub(A::Mul(high, high), square);
      rest = A::Add(rest, A::Mul(A::Add(high, high), low));
      rest = A::Add(rest, A::Mul(low, low));
      const Vec half = A::Set(-0.5f);
      exp = A::Exp(A::Mul(square, half));
      exp = A::MulAdd(exp, A::Mul(rest, half), exp);

      const Vec centre = A::Set(C::kCentre);
      // One division for both quotients.
      const Vec sum = A::Add(t, centre), scale = A::MulAdd(t, A::Set(2), A::Set(1));
      const Vec inverse = More<A>::Div(A::Set(1), A::Mul(sum, scale));
      const Vec v = A::Mul(A::Sub(t, centre), A::Mul(inverse, scale));
      ratio = A::Mul(Polynomial<C::kTerms>(C::kP, v), A::Mul(inverse, sum));
    }
  };

  static FASTOPS_INLINE Vec Value(Vec x) {
    const Tail tail(x);
    const Vec rest = A::Mul(tail.exp, tail.ratio);
    const Vec far =
        A::Select(More<A>::Less(A::Set(0), x), A::Sub(x, A::Mul(tail.t, rest)), A::Mul(x, rest));
    return A::Select(More<A>::Less(tail.t, A::Set(1)), A::Mul(x, Near(C::kNear, x)), far);
  }
  static FASTOPS_INLINE Vec Derivative(Vec x) {
    const Tail tail(x);
    const Vec d = A::Mul(tail.exp, A::NegMulAdd(tail.t, A::Set(kDensity), tail.ratio));
    const Vec far = A::Select(More<A>::Less(A::Set(0), x), A::Sub(A::Set(1), d), d);
    const Vec all = A::Select(More<A>::Less(tail.t, A::Set(1)), Near(C::kNearSlope, x), far);
    return A::Add(all, A::Sub(x, x));  // NaN at the infinities
  }
};

}  // namespace
}  // namespace jax_fastops::cpu::FASTOPS_ISA

#endif  // JAX_FASTOPS_CPU_ACTIVATION_MATH_H_

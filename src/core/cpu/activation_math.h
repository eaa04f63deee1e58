// The operations of core/activation.h on vectors of the accumulator type, and the kernels of all
// activations, for the instruction set for which a *_simd.cc file is compiled. As in simd_math.h,
// everything is in the anonymous namespace.
#pragma once

#include "core/activation.h"
#include "core/cpu/simd_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

template <typename A>
FASTOPS_INLINE typename A::Vec Absolute(typename A::Vec x) {
  return A::Max(A::Sub(A::Set(0), x), x);  // NaN stays NaN
}

// The normal distribution. Its upper tail, above t >= 0, is exp(-t^2 / 2) * ratio(t). The ratio is
// 1/2 at 0 and falls only as 1/t. (t + k) * ratio(t) is a polynomial of v = (t - k) / (t + k) = 1 -
// 2k / (t + k), interpolated at Chebyshev points over all t for which the tail is not 0. The
// relative errors are 1.9e-8 and 5e-19. A smaller k amplifies the rounding of the quotient less; a
// larger k needs fewer terms.
template <typename Scalar>
struct TailOf;

template <>
struct TailOf<float> {
  static constexpr float kCentre = 2.5f, kEnd = 14.5f;
  static constexpr float kSplit = 4097;
  static constexpr int kTerms = 10;
  static constexpr float kP[kTerms] = {
      0x1.69cee6p-1f,   -0x1.bc19c0p-2f, 0x1.0e4f36p-3f,  0x1.2ea14ep-7f,   -0x1.0c7aaap-6f,
      -0x1.a35942p-10f, 0x1.4b0698p-9f,  0x1.665b68p-11f, -0x1.487e1ap-12f, -0x1.4b9966p-13f};
  // The fewest terms for which the error for small x is at most twice that of jax.nn.
  static constexpr float kNearEnd = 0.5f;
  static constexpr int kNearTerms = 4;
  static constexpr float kNear[kNearTerms] = {0x1.988454p-2f, -0x1.1057c4p-4f, 0x1.468754p-7f,
                                              -0x1.28899cp-10f};
  static constexpr float kNearSlope[kNearTerms] = {0x1.988452p-1f, -0x1.105718p-2f, 0x1.e98366p-5f,
                                                   -0x1.24f614p-7f};
};

template <>
struct TailOf<double> {
  static constexpr double kCentre = 5, kEnd = 39;
  static constexpr double kSplit = 134217729;
  static constexpr int kTerms = 24;
  static constexpr double kP[kTerms] = {
      0x1.89d3abe1f95aep-1,   -0x1.54ad03f27ca18p-1,  0x1.fb31653876f89p-2,
      -0x1.410ed5f875946p-2,  0x1.51f6329f01ba3p-3,   -0x1.1b1c254ca42c5p-4,
      0x1.54b4d4f48a95dp-6,   -0x1.88590e97fa725p-9,  -0x1.a2503777d193ep-11,
      0x1.1daf1ad402a68p-11,  -0x1.f214934cc2997p-15, -0x1.a1700f97933d8p-15,
      0x1.17df18b48c12bp-16,  0x1.0b14870d680c8p-18,  -0x1.73e13a7eebb7bp-19,
      -0x1.673ef5ca91651p-22, 0x1.d4772f5151200p-22,  0x1.592046569c07ep-25,
      -0x1.2d422be3e72a3p-24, -0x1.25f8b412cdb42p-27, 0x1.72fe74371fc82p-27,
      0x1.313b2a0d09987p-29,  -0x1.3f1a1f1afa304p-30, -0x1.a397ed7719499p-32};
  static constexpr double kNearEnd = 1;
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
struct GeluByErf {
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

  // exp(-t^2 / 2) and the ratio, where t = min(|x|, kEnd), so that both factors stay finite.
  struct Tail {
    Vec t, exp, ratio;

    explicit FASTOPS_INLINE Tail(Vec x) {
      t = A::Min(A::Set(C::kEnd), Absolute<A>(x));
      // t^2 = square + rest, exactly or nearly so. For large t, the rounding error of t^2 would
      // change its exponential by many ulp.
      const Vec square = A::Mul(t, t), half = A::Set(-0.5f);
#if FASTOPS_ISA_LEVEL > 0
      const Vec rest = A::MulAdd(A::Mul(t, half), t, A::Mul(square, A::Set(0.5f)));
#else
      const Vec split = A::Mul(t, A::Set(C::kSplit));
      const Vec high = A::Sub(split, A::Sub(split, t)), low = A::Sub(t, high);
      Vec rest = A::Sub(A::Mul(high, high), square);
      rest = A::Add(rest, A::Mul(A::Add(high, high), low));
      rest = A::Mul(A::Add(rest, A::Mul(low, low)), half);
#endif
      exp = ExpInRange<A>(A::Mul(square, half), &rest);

      const Vec inverse = A::Div(A::Set(1), A::Add(t, A::Set(C::kCentre)));
      const Vec v = A::NegMulAdd(inverse, A::Set(2 * C::kCentre), A::Set(1));
      ratio = A::Mul(Polynomial<C::kTerms>(C::kP, v), inverse);
    }
  };

  static FASTOPS_INLINE Vec Value(Vec x) {
    const Tail tail(x);
    const Vec rest = A::Mul(tail.exp, tail.ratio);
    // The order matters far below 0: the product of the two small factors may be subnormal although
    // the result is not.
    const Vec below = A::Mul(A::Mul(x, tail.ratio), tail.exp);
    const Vec far = A::Select(A::Less(A::Set(0), x), A::Sub(x, A::Mul(tail.t, rest)), below);
    return A::Select(A::Less(tail.t, A::Set(C::kNearEnd)), A::Mul(x, Near(C::kNear, x)), far);
  }
  static FASTOPS_INLINE Vec Derivative(Vec x) {
    const Tail tail(x);
    const Vec d = A::Mul(tail.exp, A::NegMulAdd(tail.t, A::Set(kDensity), tail.ratio));
    const Vec far = A::Select(A::Less(A::Set(0), x), A::Sub(A::Set(1), d), d);
    const Vec all = A::Select(A::Less(tail.t, A::Set(C::kNearEnd)), Near(C::kNearSlope, x), far);
    return A::Add(all, A::Sub(x, x));  // NaN at the infinities
  }
};

template <typename A>
struct ActivationMath : A {
  using Vec = typename A::Vec;
  using Scalar = typename A::Scalar;
  using GeluExact = GeluByErf<A>;

  static FASTOPS_INLINE Vec Reciprocal(Vec x) { return A::Div(A::Set(1), x); }
  static FASTOPS_INLINE Vec Scaled(Vec x) { return x; }
  static FASTOPS_INLINE Vec Unscaled(Vec x) { return x; }

  // The a with a (kLinear + kCubic a^2) = v, by Newton's method. Tail is 0 there if exp(-v) is.
  template <typename F>
  static constexpr double Solve(double v) {
    double a = v / F::kLinear;
    for (int i = 0; i < 32; ++i) {
      const double cubic = F::kCubic * a * a;
      a -= (a * (F::kLinear + cubic) - v) / (F::kLinear + 3 * cubic);
    }
    return a;
  }

  template <typename F>
  static FASTOPS_INLINE Vec Magnitude(Vec s) {
    constexpr auto limit = static_cast<Scalar>(Solve<F>(-ExpOf<Scalar>::kLow));
    return A::Min(A::Set(limit), Absolute<A>(s));
  }

  template <typename F>
  static FASTOPS_INLINE Vec Tail(Vec a) {
    Vec factor = A::Set(static_cast<Scalar>(-F::kLinear));
    if constexpr (F::kCubic != 0) {
      factor = A::MulAdd(A::Mul(a, a), A::Set(static_cast<Scalar>(-F::kCubic)), factor);
    }
    return ExpInRange<A>(A::Mul(a, factor), nullptr);
  }

  static FASTOPS_INLINE Vec PositivePart(Vec s) {
    const Vec zero = A::Set(0);
    // NaN is not equal to itself, so it is kept.
    return A::Select(A::Less(zero, s), s, A::Select(A::Equal(s, s), zero, s));
  }
};

// A row of a table for FASTOPS_ACTIVATIONS: Template<E, activation>::kKernels for every dtype.
#define FASTOPS_EACH_DTYPE_OF(Template, Formula)      \
  {Template<E32, Activation::k##Formula>::kKernels,   \
   Template<EBF16, Activation::k##Formula>::kKernels, \
   Template<EF16, Activation::k##Formula>::kKernels,  \
   Template<E64, Activation::k##Formula>::kKernels},

}  // namespace
}  // namespace jax_fastops::cpu::FASTOPS_ISA

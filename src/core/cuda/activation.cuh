// The operations of core/activation.h on one element on a GPU.
//
// A kernel that calls the formulas is bound by memory only if an element costs few instructions: an
// H100 has about 40 issue slots in the time in which it reads and writes an element of 16 bits, and
// twice as many for a float32. The functions of CUDA's math library are too slow. tanh.approx is
// fast, but loses the negative tail, where the result is small but its relative error still counts.
// So:
//
// - One ex2.approx and at most one rcp.approx per element, no branch. Where a polynomial in the
//   exponent is accurate enough, it takes the place of the rcp.approx.
// - An error dt of t is a relative error dt ln 2 of 2^t. For float, the rounding error of t is
//   computed and corrected in the power, and the reciprocal is refined. Types of 16 bits do not
//   need this; their code is exact only to 2^-16.
// - A tail e is held as 2^kShift e: a subnormal e would lose bits that the result, which is larger,
//   needs.
//
// gelu_exact, with a = |s|: y = s Phi(s), Phi(-a) = exp(-a^2 / 2) g(a), Phi(a) = 1 - Phi(-a), y' =
// Phi + s exp(-s^2 / 2) / sqrt(2 pi). g(a) = erfcx(a / sqrt 2) / 2 falls like 1 / a. It is q times
// a polynomial of q = 1 / (1 + c a), fitted for the smallest relative error over the a that matter.
//
// In types of 16 bits, y = relu(s) - a Phi(-a), and log2 Phi(-a) is a polynomial of a. In bfloat16,
// where a may be 13, log2(Phi(-a) / K(a)) is one of a lower degree. K is quadratic, and has its
// roots near the two zeros of Phi(-a) that are closest to the positive numbers. The derivative at
// -a, Phi(-a) - a exp(-a^2 / 2) / sqrt(2 pi), is computed in the same way, times a0 - a for its
// zero a0. Formulas with sigmoid(v) compute it as one quotient, 1 / (1 + exp(-v)).
//
// For float64 there is time for the math library.
#pragma once

#include <type_traits>

#include "core/activation.h"
#include "core/cuda/math.cuh"
#include "core/cuda/relu_of.cuh"
#include "core/cuda/vec.cuh"

namespace jax_fastops::cuda {
namespace activation {

inline constexpr double kLog2E = 1.4426950408889634;  // cuda::kLog2E is a float

// float16 underflows long before float does.
template <typename T>
inline constexpr int kShift = std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, float> ? 40 : 0;
template <typename T>
inline constexpr ComputeType<T> kUnshift = kShift<T> == 0 ? 1.0 : 9.094947017729282e-13;

// A constant in two parts: its rounding to float, and the rounding error.
struct Constant {
  float high, low;
  constexpr explicit Constant(double value)
      : high(static_cast<float>(value)),
        low(static_cast<float>(value - static_cast<double>(static_cast<float>(value)))) {}
};

// 2^(kShift + a b + low). `low` is used only for float. A subnormal result is 0.
template <typename T>
__device__ __forceinline__ float PowerOfTwo(float a, float b, float low) {
  constexpr float shift = kShift<T>;
  // For float, both rounding errors of t are known. t - shift is exact: either the sum is the
  // smaller of the two numbers, or t is between shift / 2 and shift.
  const float t = sizeof(T) == 2 ? fmaf(a, b, shift) : __fadd_rn(__fmul_rn(a, b), shift);
  const float power = Exp2(t);
  if constexpr (sizeof(T) == 2) return power;
  const float lost = fmaf(a, b, shift - t) + low;
  return fmaf(power, lost * 0.69314718f, power);
}

// 1 / x, if x is neither subnormal nor huge.
template <typename T>
__device__ __forceinline__ ComputeType<T> Reciprocal(ComputeType<T> x) {
  if constexpr (sizeof(T) == 8) {
    return 1.0 / x;
  } else {
    const float y = cuda::Reciprocal(x);
    return sizeof(T) == 2 ? y : fmaf(y, fmaf(-x, y, 1.0f), y);
  }
}

// min(|s|, limit), or NaN if s is NaN.
__device__ __forceinline__ float Magnitude(float s, float limit) {
  float a;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(fabsf(s)), "f"(limit));
  return a;
}
__device__ __forceinline__ double Magnitude(double s, double limit) {
  const double a = fabs(s);
  return a > limit ? limit : a;
}

// A polynomial of x, from its highest coefficient on.
template <typename... Coefficients>
__device__ __forceinline__ float Polynomial(float x, float highest, Coefficients... others) {
  ((highest = fmaf(highest, x, others)), ...);
  return highest;
}

}  // namespace activation

// s * Phi(s), which is jax.nn.gelu's form with erf.
template <typename T>
struct GeluByErf {
  static __device__ __forceinline__ ComputeType<T> Value(ComputeType<T> s) {
    if constexpr (sizeof(T) == 8) {
      return 0.5 * s * erfc(-s * kSqrtHalf);
    } else if constexpr (sizeof(T) == 2) {
      return ValueOfTwice(0.5f * s);
    } else {
      const Normal n = NormalOf(s);
      const float below = s * n.below * activation::kUnshift<T>;
      const float above = s * (1.0f - n.below * activation::kUnshift<T>);
      return s < 0.0f ? below : above;
    }
  }

  // The value for s = 2 h, in types of 16 bits: a sum of two numbers can be halved for nothing.
  // Phi(-a) is accurate to 2^-12 in bfloat16, to 2^-17 in float16.
  static __device__ __forceinline__ float ValueOfTwice(float h)
    requires(sizeof(T) == 2)
  {
    // h + |h|, rounded down: -0 for negative numbers, and NaN for -inf, as the product s * 0.
    const float positive = __fadd_rd(h, fabsf(h));
    const float a = activation::Magnitude(h, std::is_same_v<T, __half> ? 4.0f : 8.0f);  // |s| / 2
    if constexpr (std::is_same_v<T, __half>) {
      const float twice =
          Exp2(activation::Polynomial(a, 0.00207658787f, -0.0239502564f, 0.12707819f, -0.424416572f,
                                      -1.83668077f, -2.30207348f, -7.57e-06f));
      return fmaf(-a, twice, positive);
    } else {
      constexpr float shift = activation::kShift<T>, unit = activation::kUnshift<T>;
      const float power =
          Exp2(activation::Polynomial(a, -0.000230960126f, 0.00637943251f, -0.0766102448f,
                                      -2.33815622f, -2.9647665f, shift - 1.00027227f));
      const float twice =
          activation::Polynomial(a, 0.842026651f * unit, 0.931091845f * unit, 2 * unit);
      return fmaf(-(a * power), twice, positive);
    }
  }

  static __device__ __forceinline__ ComputeType<T> Derivative(ComputeType<T> s) {
    if constexpr (sizeof(T) == 8) {
      const double t = s < -40.0 ? -40.0 : s > 40.0 ? 40.0 : s;
      return 0.5 * erfc(-t * kSqrtHalf) + t * (kDensity * exp(-0.5 * (t * t))) + (s - s);
    } else if constexpr (sizeof(T) == 2) {
      // Phi(-a) - a phi(a), by its zero: to 2^-12 in bfloat16, to 2^-16 in float16. NaN at
      // infinity.
      constexpr bool kHalf = std::is_same_v<T, __half>;
      constexpr float shift = activation::kShift<T>, unit = activation::kUnshift<T>;
      const float a = activation::Magnitude(s, 16.0f);  // the power is 0 there
      const float power =
          Exp2(kHalf ? activation::Polynomial(a, 0.000361578518f, -0.00891288387f, -0.612962403f,
                                              -1.01411092f, shift - 0.588418632f)
                     : activation::Polynomial(a, -4.08772535e-06f, 0.000227195105f, -0.00550237035f,
                                              -0.641471947f, -0.898041926f, shift - 0.588590919f));
      const float below = (0.75179154f - fabsf(s)) * power *
                          activation::Polynomial(a, (kHalf ? 0.1306374f : 0.1133172f) * unit,
                                                 (kHalf ? 0.43760168f : 0.35922646f) * unit, unit);
      return s < 0.0f ? below : 1.0f - below;
    } else {
      const Normal n = NormalOf(s);
      const float below = fmaf(n.a * n.e, -static_cast<float>(kDensity), n.below);
      const float far = below * activation::kUnshift<T>;
      return (s < 0.0f ? far : 1.0f - far) + (s - s);
    }
  }

 private:
  static constexpr double kSqrtHalf = 0.7071067811865476;
  static constexpr double kDensity = 0.3989422804014327;  // 1 / sqrt(2 pi)

  struct Normal {
    float a;
    float e;      // 2^kShift exp(-a^2 / 2)
    float below;  // 2^kShift Phi(-a)
  };

  static __device__ __forceinline__ Normal NormalOf(float s) {
    constexpr activation::Constant c(-0.5 * activation::kLog2E);
    Normal n;
    n.a = activation::Magnitude(s, 16.0f);
    const float a2 = n.a * n.a;
    const float lost = fmaf(n.a, n.a, -a2);
    n.e = activation::PowerOfTwo<T>(a2, c.high, fmaf(a2, c.low, lost * c.high));
    n.below = n.e * Scaled(n.a);
    return n;
  }

  // g(a): 2^-28 for a <= 14.5.
  static __device__ __forceinline__ float Scaled(float a) {
    const float q = activation::Reciprocal<T>(fmaf(a, 0.3f, 1.0f));
    return q * activation::Polynomial(q, -0.020623479f, 0.112435676f, -0.22821376f, 0.19178475f,
                                      -0.07942368f, 0.09615694f, 0.07838961f, 0.11023543f,
                                      0.11957181f, 0.11968669f);
  }
};

template <typename T>
struct ActivationMath {
  using Vec = ComputeType<T>;
  using GeluExact = GeluByErf<T>;

  static __device__ __forceinline__ Vec Set(double x) { return static_cast<Vec>(x); }
  static __device__ __forceinline__ Vec Add(Vec a, Vec b) { return a + b; }
  static __device__ __forceinline__ Vec Sub(Vec a, Vec b) { return a - b; }
  static __device__ __forceinline__ Vec Mul(Vec a, Vec b) { return a * b; }
  static __device__ __forceinline__ Vec MulAdd(Vec a, Vec b, Vec c) { return a * b + c; }
  static __device__ __forceinline__ bool Less(Vec a, Vec b) { return a < b; }
  static __device__ __forceinline__ Vec Select(bool m, Vec a, Vec b) { return m ? a : b; }

  static __device__ __forceinline__ Vec Reciprocal(Vec x) { return activation::Reciprocal<T>(x); }
  static __device__ __forceinline__ Vec Scaled(Vec x) {
    return x * (Vec(1) / activation::kUnshift<T>);
  }
  static __device__ __forceinline__ Vec Unscaled(Vec x) { return x * activation::kUnshift<T>; }
  static __device__ __forceinline__ Vec PositivePart(Vec s) { return ReluOf(s); }

  // 1 / (1 + exp(-s (F::kLinear + F::kCubic s^2))), in types of 16 bits.
  template <typename F>
  static __device__ __forceinline__ float Sigmoid(float s)
    requires(sizeof(T) == 2)
  {
    constexpr float c0 = -F::kLinear * activation::kLog2E, c1 = -F::kCubic * activation::kLog2E;
    constexpr float unit = activation::kUnshift<T>;
    const float factor = F::kCubic == 0 ? c0 : fmaf(s * s, c1, c0);
    const float power = Exp2(fmaf(s, factor, -activation::kShift<T>));
    return cuda::Reciprocal(unit + power) * unit;
  }

  template <typename F>
  static __device__ __forceinline__ Vec Magnitude(Vec s) {
    return activation::Magnitude(s, sizeof(T) == 8 ? 760 : 120);
  }

  template <typename F>
  static __device__ __forceinline__ Vec Tail(Vec a) {
    if constexpr (sizeof(T) == 8) {
      return exp(-a * (F::kCubic * (a * a) + F::kLinear));
    } else {
      constexpr activation::Constant c0(-F::kLinear * activation::kLog2E);
      constexpr activation::Constant c1(-F::kCubic * activation::kLog2E);
      const float factor = F::kCubic == 0 ? c0.high : fmaf(a * a, c1.high, c0.high);
      return activation::PowerOfTwo<T>(a, factor, a * c0.low);
    }
  }
};

// act(x + bias).
template <Activation kActivation, typename T>
__device__ __forceinline__ ComputeType<T> ActivatedSum(ComputeType<T> x, ComputeType<T> bias) {
  using Formula = FormulaOf<kActivation, ActivationMath<T>>;
  if constexpr (requires { Formula::ValueOfTwice(x); }) {
    return Formula::ValueOfTwice(fmaf(x, 0.5f, 0.5f * bias));
  } else {
    return Formula::Value(x + bias);
  }
}

// Calls visit with an activation as a std::integral_constant. With a default, what visit sets need
// not be kept through the switch: else bias_act's backward spills 32 bytes in place of 16.
template <typename Visit>
__device__ __forceinline__ void ForActivation(Activation activation, const Visit& visit) {
  switch (activation) {
#define FASTOPS_CASE(name, Formula) \
  case Activation::k##Formula:      \
    return visit(std::integral_constant<Activation, Activation::k##Formula>());
    FASTOPS_ACTIVATIONS(FASTOPS_CASE)
#undef FASTOPS_CASE
    default:
      return visit(std::integral_constant<Activation, Activation::kRelu>());
  }
}

}  // namespace jax_fastops::cuda

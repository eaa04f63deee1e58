// Functions of the special function unit, and those that exist for float and double.
#pragma once

#include <cmath>

namespace jax_fastops::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;

// 2^x. Subnormal results become 0.
__device__ __forceinline__ float Exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// 1 / x, accurate to about one unit in the last place, with a tenth of the instructions of a
// division. Subnormal results become 0.
__device__ __forceinline__ float Reciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

// 1 / sqrt(x). The error for float is at most two units in the last place.
__device__ __forceinline__ float FastReciprocalRoot(float x) { return rsqrtf(x); }
__device__ __forceinline__ double FastReciprocalRoot(double x) { return rsqrt(x); }

// As FastReciprocalRoot, with one Newton step. The step is skipped where its terms would not be
// normal numbers.
__device__ __forceinline__ float ReciprocalRoot(float x) {
  const float root = rsqrtf(x);
  const float step = 0.5f * root * fmaf(-(x * root), root, 1.0f);
  return x > 1e-30f && x < 1e30f ? root + step : root;
}
__device__ __forceinline__ double ReciprocalRoot(double x) { return 1.0 / sqrt(x); }

__device__ __forceinline__ float Exp(float x) { return expf(x); }
__device__ __forceinline__ double Exp(double x) { return exp(x); }
__device__ __forceinline__ float Log(float x) { return logf(x); }
__device__ __forceinline__ double Log(double x) { return log(x); }

}  // namespace jax_fastops::cuda

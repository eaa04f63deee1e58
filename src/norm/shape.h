// The shape of a layer norm or RMS norm and its arrays, shared by the backends.
#pragma once

#include <cstdint>

#include "core/philox.h"

namespace jax_fastops {

// Row-major arrays [batch, rows, n]. Each row of n elements is normalized independently. Parameter
// gradients are summed separately for each of the `batch` groups, into `sums` partial sums:
// [batch, sums, n]. Partial sum p of a group covers the rows from p * rows / sums to
// (p + 1) * rows / sums, or another fixed set, as long as each row is in exactly one set.
struct NormShape {
  int64_t batch = 1;
  int64_t rows = 1;
  int64_t n = 1;
  int64_t sums = 1;

  int64_t all_rows() const { return batch * rows; }
};

enum class NormKind : uint8_t {
  kLayer,  // (s - mean(s)) * rsqrt(var(s) + eps), var biased
  kRms,    // s * rsqrt(mean(s^2) + eps)
};

// A parameter [n] in the element type of x, or, if `wide`, in its accumulator type.
struct NormParameter {
  const void* data = nullptr;  // null: absent
  bool wide = false;
};

// y = norm(s) * scale + bias. s is x, or, with a residual, an input bias or dropout,
// dropout(x + input_bias) + residual, computed in the accumulator type and rounded once to the
// element type. The statistics are those of the rounded s.
struct NormForwardArrays {
  const void* x = nullptr;
  const void* residual = nullptr;  // null: absent
  NormParameter input_bias;
  NormParameter scale;
  NormParameter bias;  // layer norm only
  void* y = nullptr;
  void* sum = nullptr;   // s; null: not stored
  void* mean = nullptr;  // [batch, rows], accumulator type; null: not stored (RMS norm: never)
  void* rstd = nullptr;  // rsqrt(var + eps), or rsqrt(mean(s^2) + eps); null: not stored
  // ceil(n / 1024) elements of the accumulator type per row, if n > kNormWorkspace.
  void* workspace = nullptr;
  RowDropout dropout;  // of x + input_bias
};

// With xhat = (s - mean) * rstd (RMS norm: s * rstd) and g = dy * scale, where dy is the sum of dy
// and dy2, if there is one, rounded to the element type:
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsum   (RMS norm: without mean(g))
//   dscale = sum over rows of dy * xhat,  dbias = sum of dy,  dinput_bias = sum of unrounded dx
// With dropout, that dx is dresidual, and dx is dropout(dresidual before it is rounded).
struct NormBackwardArrays {
  const void* dy = nullptr;
  const void* s = nullptr;
  const void* mean = nullptr;  // null for RMS norm
  const void* rstd = nullptr;
  NormParameter scale;
  const void* dsum = nullptr;  // the cotangent of the sum, of the element type; null: absent
  const void* dy2 = nullptr;   // the cotangent of y's second user; null: absent
  void* dx = nullptr;
  void* dresidual = nullptr;  // only with dropout; null: not stored
  // Partial sums [batch, sums, n] in the accumulator type. Null if not requested.
  void* dscale = nullptr;
  void* dbias = nullptr;
  void* dinput_bias = nullptr;
  RowDropout dropout;
};

// The forward of a longer row has a workspace.
inline constexpr int64_t kNormWorkspace = 16384;

// The rows whose norm has CUDA kernels with dropout, if they are whole multiples of 16 bytes. Other
// rows are right with dropout, but not fast.
inline constexpr int64_t kNormDropoutLeast = 256, kNormDropoutMost = 1024;

}  // namespace jax_fastops

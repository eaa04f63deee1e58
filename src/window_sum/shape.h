// The shape of a window sum, shared by the backends.
#pragma once

#include <cstdint>

namespace jax_fastops {

// A row-major array x[outer, n, inner] and its sums y[outer, m, inner]:
//
//   y[o, i, c] = sum of x[o, j, c] for j from i - pad to i - pad + 2 * radius, where 0 <= j < n
//
// `pad` is 0 for the windows that lie within x, `radius` for a window around each element, and
// 2 * radius for all windows that touch x, which is the transpose of the first case.
struct WindowSumShape {
  int64_t outer = 1;
  int64_t n = 1;
  int64_t inner = 1;
  int64_t radius = 0;
  int64_t pad = 0;

  int64_t window() const { return 2 * radius + 1; }
  int64_t m() const { return n + 2 * pad - 2 * radius; }
};

// A longer window over an axis longer than kWindowSumShortAxis has a workspace: ceil(n / 8)
// accumulators for each of the outer * inner lines.
inline constexpr int64_t kWindowSumLongWindow = 2049;
inline constexpr int64_t kWindowSumShortAxis = 256;

}  // namespace jax_fastops

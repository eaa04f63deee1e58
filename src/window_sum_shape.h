// What a windowed sum runs over, shared by the backends.
#ifndef JAX_FASTOPS_WINDOW_SUM_SHAPE_H_
#define JAX_FASTOPS_WINDOW_SUM_SHAPE_H_

#include <cstdint>

namespace jax_fastops {

// A row-major array x[outer, n, inner] and its sums y[outer, m, inner]:
//
//   y[o, i, c] = sum of x[o, j, c] for j from i - pad to i - pad + 2 * radius, where 0 <= j < n
//
// `pad` is 0 for the windows that lie in x as a whole, `radius` for one around each element, and
// 2 * radius for all that touch x: the transpose of the first.
struct WindowSumShape {
  int64_t outer = 1;
  int64_t n = 1;
  int64_t inner = 1;
  int64_t radius = 0;
  int64_t pad = 0;

  int64_t window() const { return 2 * radius + 1; }
  int64_t m() const { return n + 2 * pad - 2 * radius; }
};

// Windows longer than this come with a workspace, where the axis is longer than
// kWindowSumShortAxis: ceil(n / 8) accumulators for each of the outer * inner lines.
inline constexpr int64_t kWindowSumLongWindow = 2049;
inline constexpr int64_t kWindowSumShortAxis = 256;

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_WINDOW_SUM_SHAPE_H_

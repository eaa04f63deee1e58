// The shape of a batch norm and its arrays, shared by the backends.
#ifndef JAX_FASTOPS_BATCH_NORM_SHAPE_H_
#define JAX_FASTOPS_BATCH_NORM_SHAPE_H_

#include <cstdint>

namespace jax_fastops {

// Row-major arrays [groups, outer, channels, inner]: NHWC has inner = 1, NCHW has outer = N. Every
// group has separate statistics, over its `outer` and `inner`. Statistics, parameters and sums are
// [groups, channels] in the accumulator type (double for double, otherwise float).
//
// A mask has one bit for each element, in ceil(outer * channels * inner / 8) bytes for each group:
// bit j of byte k belongs to element 8 * k + j of the group. Bits after its last element are 0.
struct BatchNormShape {
  int64_t groups = 1;
  int64_t outer = 1;
  int64_t channels = 1;
  int64_t inner = 1;

  int64_t group_size() const { return outer * channels * inner; }  // elements
  int64_t mask_bytes() const { return (group_size() + 7) / 8; }    // of a group
};

// mean = sum(x) / n and var = sum((x - mean)^2) / n with n = outer * inner.
struct BatchNormStatisticsArrays {
  const void* x = nullptr;
  void* mean = nullptr;
  void* var = nullptr;
  // `workspace_size` accumulators for each group, at least BatchNormWorkspace of them.
  void* workspace = nullptr;
  int64_t workspace_size = 0;
};

// z = (x - mean) * (rsqrt(var + eps) * scale) + bias + residual, y = relu(z) or z. Computed in the
// accumulator type and rounded once. relu keeps NaN.
struct BatchNormApplyArrays {
  const void* x = nullptr;
  const void* mean = nullptr;
  const void* var = nullptr;
  const void* scale = nullptr;     // null: 1
  const void* bias = nullptr;      // null: 0
  const void* residual = nullptr;  // null: 0
  void* y = nullptr;
  void* mask = nullptr;  // z > 0; null: not stored
};

// Statistics and result together: mean and var are results. `workspace` is aligned for double.
struct BatchNormForwardArrays {
  const void* x = nullptr;
  const void* scale = nullptr;     // null: 1
  const void* bias = nullptr;      // null: 0
  const void* residual = nullptr;  // null: 0
  void* y = nullptr;
  void* mean = nullptr;
  void* var = nullptr;
  void* mask = nullptr;  // z > 0; null: not stored
  void* workspace = nullptr;
  int64_t workspace_size = 0;

  BatchNormStatisticsArrays statistics() const {
    BatchNormStatisticsArrays arrays;
    arrays.x = x;
    arrays.mean = mean;
    arrays.var = var;
    arrays.workspace = workspace;
    arrays.workspace_size = workspace_size;
    return arrays;
  }
  BatchNormApplyArrays apply() const {
    BatchNormApplyArrays arrays;
    arrays.x = x;
    arrays.mean = mean;
    arrays.var = var;
    arrays.scale = scale;
    arrays.bias = bias;
    arrays.residual = residual;
    arrays.y = y;
    arrays.mask = mask;
    return arrays;
  }
};

// With g = dy + dy2 where the mask is set, otherwise 0 (selected, not multiplied), and
// n = outer * inner, the averages
//   sums[0] = sum(g) / n,  sums[1] = sum(g * (x - mean)) / n
// of each channel. g is rounded to the type of x: if y has two users, dy and dy2 are their
// cotangents, which JAX would add in that type. The same pass writes dresidual = g, and with `dx`
// the gradient for given statistics, dx = g * rsqrt(var + eps) * scale.
struct BatchNormSumsArrays {
  const void* x = nullptr;
  const void* dy = nullptr;
  const void* dy2 = nullptr;   // null: 0
  const void* mask = nullptr;  // null: all set
  const void* mean = nullptr;
  const void* var = nullptr;    // null unless dx is given
  const void* scale = nullptr;  // null: 1
  void* dx = nullptr;           // null: not requested
  void* dresidual = nullptr;    // null: not requested
  void* sums = nullptr;         // [groups, 2, channels]
  void* workspace = nullptr;
  int64_t workspace_size = 0;
};

// With g = dy where the mask is set, otherwise 0 (selected), and a = rsqrt(var + eps) * scale:
//   dx = a * (g - sums[0] - (x - mean) * sums[1] / (var + eps)) + dmean + 2 * dvar * (x - mean)
// dmean and dvar are the cotangents of the statistics divided by the number of elements. If the
// kernel of the sums has written g, then g is passed as dy, without a mask.
struct BatchNormBackwardArrays {
  const void* x = nullptr;
  const void* dy = nullptr;
  const void* mask = nullptr;  // null: all set
  const void* mean = nullptr;
  const void* var = nullptr;
  const void* scale = nullptr;  // null: 1
  const void* sums = nullptr;   // [groups, 2, channels]
  const void* dmean = nullptr;
  const void* dvar = nullptr;
  void* dx = nullptr;
};

// Sums and dx together, without dy2 and dresidual. The sums are a result.
struct BatchNormGradientArrays {
  const void* x = nullptr;
  const void* dy = nullptr;
  const void* mask = nullptr;  // null: all set
  const void* mean = nullptr;
  const void* var = nullptr;
  const void* scale = nullptr;  // null: 1
  const void* dmean = nullptr;
  const void* dvar = nullptr;
  void* dx = nullptr;
  void* sums = nullptr;  // [groups, 2, channels]
  void* workspace = nullptr;
  int64_t workspace_size = 0;

  BatchNormSumsArrays of_sums() const {
    BatchNormSumsArrays arrays;
    arrays.x = x;
    arrays.dy = dy;
    arrays.mask = mask;
    arrays.mean = mean;
    arrays.sums = sums;
    arrays.workspace = workspace;
    arrays.workspace_size = workspace_size;
    return arrays;
  }
  BatchNormBackwardArrays of_dx() const {
    BatchNormBackwardArrays arrays;
    arrays.x = x;
    arrays.dy = dy;
    arrays.mask = mask;
    arrays.mean = mean;
    arrays.var = var;
    arrays.scale = scale;
    arrays.sums = sums;
    arrays.dmean = dmean;
    arrays.dvar = dvar;
    arrays.dx = dx;
    return arrays;
  }
};

// The minimum workspace of a group, in accumulators: two doubles per channel for each block, with
// one block for each piece of a row. A larger workspace allows more blocks.
inline int64_t BatchNormWorkspace(const BatchNormShape& shape) {
  const int64_t row = shape.channels * shape.inner;
  const int64_t of_rows = 8 * shape.channels + row / (shape.inner < 1024 ? 16 : 64) + 2050;
  const int64_t of_group = shape.channels * (shape.group_size() / 256 + 1);
  return 4 * (of_rows < of_group ? of_rows : of_group);
}

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_BATCH_NORM_SHAPE_H_

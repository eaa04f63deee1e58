// The shape of a batch norm and its arrays, shared by the backends.
#pragma once

#include <cstdint>

#include "core/dtype.h"

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

// The operands and results of all functions of batch_norm.h, which says what each of them reads and
// writes. `mask` has the bits z > 0; without it all are set.
struct BatchNormArrays {
  const void* x = nullptr;
  void* mean = nullptr;
  void* var = nullptr;
  const void* scale = nullptr;     // null: 1
  const void* bias = nullptr;      // null: 0
  const void* residual = nullptr;  // null: 0
  void* y = nullptr;
  void* mask = nullptr;
  const void* dy = nullptr;
  const void* dy2 = nullptr;  // null: 0
  const void* dmean = nullptr;
  const void* dvar = nullptr;
  void* sums = nullptr;  // [groups, 2, channels]
  void* dx = nullptr;
  void* dresidual = nullptr;  // null: not requested
  // `workspace_size` accumulators for each group, at least BatchNormWorkspace of them, aligned for
  // double.
  void* workspace = nullptr;
  int64_t workspace_size = 0;
};

struct BatchNormCall : BatchNormArrays {
  BatchNormShape shape;
  DType dtype;
  double eps = 0;
  bool relu = false;
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

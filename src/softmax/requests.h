// What a call of softmax asks of the core's planners of rows and of columns: plain C++, with a
// property test (tests/native/softmax_plan_test.cc).
#pragma once

#include <cstdint>

#include "core/integer.h"
#include "core/plan_columns.h"
#include "core/plan_rows.h"
#include "softmax/shape.h"

namespace jax_fastops::cuda::softmax {

// Of the arrays; `second` is `first` if there is one input.
struct Addresses {
  uint64_t first, second, out;
};

// Along the minor axis, `size` elements have a word of the mask if this is a multiple of `size`:
// its bytes are contiguous, and aligned to their number. Along another axis likewise for `size`
// inner elements.
inline uint64_t MaskBits(const SoftmaxShape& shape, const SoftmaxMask& mask) {
  const bool minor = shape.inner == 1;
  const bool contiguous =
      minor ? mask.stride == 1 : mask.inner.rank == 1 && mask.inner.stride[0] == 1;
  if (!contiguous) return 1;
  const uint64_t step = static_cast<uint64_t>(minor ? shape.n : mask.stride);
  uint64_t bits = reinterpret_cast<uintptr_t>(mask.data) | step;
  for (int i = 0; i < mask.outer.rank; ++i) bits |= static_cast<uint64_t>(mask.outer.stride[i]);
  return bits;
}

// The plan along the minor axis. Without one (RowHolder::kNone), rows are columns: float64, arrays
// of other misalignments, rows of 2^31 elements. softmax.py asks for dropout only in rows that have
// a kernel.
inline HeldPlan PlanRowsOf(const SoftmaxShape& shape, const Addresses& at, int itemsize, int inputs,
                           bool dropout, const HeldLimits& limits) {
  const int64_t n = shape.n;
  if (shape.inner > 1 || itemsize == 8 || (dropout && n > kSoftmaxDropoutRow)) return {};
  const bool alike = (at.first ^ at.out) % 16 == 0 && (at.first ^ at.second) % 16 == 0;
  return PlanHeldRows({.rows = shape.outer,
                       .n = n,
                       .itemsize = itemsize,
                       .inputs = inputs,
                       .alike = alike,
                       .aligned = alike && at.first % 16 == 0 && n * itemsize % 16 == 0,
                       .registers_only = dropout,
                       // The forward has two sums of a block, a maximum among them.
                       .room = n > kSoftmaxWorkspace ? CeilDiv(n, 1024) / (3 - inputs) : 0},
                      limits);
}

// The columns along any axis.
inline ColumnsShape ColumnsOf(const SoftmaxShape& shape, const SoftmaxMask& mask,
                              const Addresses& at, int itemsize, int inputs) {
  const bool inner_mask = mask.data != nullptr && mask.inner.rank > 0;
  return {.outer = shape.outer,
          .n = shape.n,
          .inner = shape.inner,
          .itemsize = itemsize,
          .inputs = inputs,
          .addresses = at.first | at.second | at.out,
          .mask_bits = inner_mask ? MaskBits(shape, mask) : 0,
          .long_workspace = shape.n > kSoftmaxWorkspace};
}

}  // namespace jax_fastops::cuda::softmax

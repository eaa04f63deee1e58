// Cross entropy with integer labels on raw pointers: `rows` contiguous rows of n logits, and one
// label for each row. A row whose label is negative is left out: its loss and its gradient are 0,
// and do not depend on its logits. For a label of n or more, x[y] is NaN, and does not depend on
// the logits.
//
// With m = max(x), s = log(sum(exp(x - m))), lse = m + s, and the label y, the loss of a row is
//   (1 - e) * (lse - x[y]) + e * (lse - mean(x)) + z * lse^2
//
// Losses, m, s and the cotangents have the accumulator's type (double for double, otherwise float).
// m and s are kept apart because their sum would lose the low bits of s if the logits are far from
// 0. Empty arrays succeed. Pointers need only the alignment of an element; outputs must not overlap
// inputs.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"

namespace jax_fastops {

struct CrossEntropyCall {
  int64_t rows, n;
  DType dtype;
  double smoothing;  // e
  double z_loss;     // z
  const void* logits;
  const int32_t* labels;
};

struct CrossEntropyForwardCall : CrossEntropyCall {
  void* loss;
  // These get m and s, or are both null. A row that is left out has zeros there.
  void *top, *log_sum;
};

struct CrossEntropyBackwardCall : CrossEntropyCall {
  const void *cotangent, *top, *log_sum;
  void* dx;
};

}  // namespace jax_fastops

namespace jax_fastops::FASTOPS_BACKEND {

Status CrossEntropyForward(const CrossEntropyForwardCall& call, Queue queue);

// dx = g * ((1 + 2 * z * lse) * exp(x - m - s) - e / n), less g * (1 - e) at the label, where g is
// the row's cotangent. No logit is at a label of n or more.
Status CrossEntropyBackward(const CrossEntropyBackwardCall& call, Queue queue);

// CUDA only: loads the kernels on the current device.
Status LoadCrossEntropyKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND

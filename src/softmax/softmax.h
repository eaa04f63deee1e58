// Softmax and log-softmax on raw pointers. softmax/shape.h has the shapes.
//
// Empty arrays succeed. Pointers need only the alignment of an element; outputs must not overlap
// inputs. If rows are longer than kSoftmaxWorkspace, the caller passes an uninitialized workspace
// of ceil(n / 1024) elements per row, of the accumulator's type (double for double, otherwise
// float). The CPU does not use it.
#pragma once

#include "core/backend.h"
#include "softmax/shape.h"

namespace jax_fastops::FASTOPS_BACKEND {

// y = softmax(scale * x) along n, or its logarithm if `log`. Elements that the mask excludes do not
// count, whatever their value. Their y is 0, or -inf if `log`. The special cases are those of
// jax.nn. A row that the mask excludes as a whole is 0 (-inf). A row whose maximum is +inf or -inf,
// or that contains a NaN, is NaN wherever the mask is true.
// Then dropout, for rows of contiguous elements (inner is 1) of up to kSoftmaxDropoutRow; on CUDA,
// not in float64.
Status SoftmaxForward(const SoftmaxArguments& call, Queue queue);

// dx from y and dy. Without a mask:
//   softmax      dx = scale * y * (dy - sum(dy * y))
//   log_softmax  dx = scale * (dy - exp(y) * sum(dy))
// With a mask the excluded elements take no part in the sums, and their dx is 0 whatever dy is
// there, including Inf and NaN. For softmax the excluded elements are those with y = 0 if `masked`
// (the mask is not read); for log_softmax the mask itself is read. With dropout, dx is computed
// from x and the mask.
Status SoftmaxBackward(const SoftmaxArguments& call, Queue queue);

// CUDA only: loads the kernels on the current device.
Status LoadSoftmaxKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND

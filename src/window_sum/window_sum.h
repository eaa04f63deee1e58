// Window sums on raw pointers. window_sum/shape.h defines them.
//
// Sums are computed in float (double for double) and rounded once. Nothing is subtracted, so a NaN
// or an infinity reaches only the windows that contain it, and the error of a sum does not depend
// on its position. Sizes of zero succeed. Pointers need only the alignment of an element; x, y and
// the workspace must not overlap.
#pragma once

#include "core/backend.h"
#include "core/dtype.h"
#include "window_sum/shape.h"

namespace jax_fastops::FASTOPS_BACKEND {

// `workspace`: outer * ceil(n / 8) * inner accumulators, uninitialized. Null is always valid, but
// makes long windows over long axes slow on a GPU. The CPU does not use it.
Status WindowSum(const WindowSumShape& shape, DType dtype, const void* x, void* y, void* workspace,
                 Queue queue);

// CUDA only: loads the kernels on the current device.
Status LoadWindowSumKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND

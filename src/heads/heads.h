// Splitting features into attention heads and merging heads into features, on raw pointers, with
// the bias or its gradient in the same pass. heads/shape.h has the shapes. Empty arrays succeed,
// and sums are then set to 0. Pointers need only the alignment of an element; outputs must not
// overlap inputs.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"
#include "heads/shape.h"

namespace jax_fastops::FASTOPS_BACKEND {

// y[p][b, h, s, d] = x[b, s, p, h, d], for elements of `itemsize` bytes (1, 2, 4, 8 or 16).
Status SplitHeads(const HeadsShape& shape, int64_t itemsize, const void* x, void* const* y,
                  Queue queue);

// y[p][b, h, s, d] = x[b, s, p, h, d] + bias[p, h, d]. The bias has the type of x, or is float32
// while x has 16 bits (`wide_bias`). The sum is rounded once.
Status SplitHeadsAddBias(const HeadsShape& shape, DType dtype, bool wide_bias, const void* x,
                         const void* bias, void* const* y, Queue queue);

// x[b, s, p, h, d] = y[p][b, h, s, d].
Status MergeHeads(const HeadsShape& shape, int64_t itemsize, const void* const* y, void* x,
                  Queue queue);

// The same, with the sums of y over runs of the sequence, in float32 (float64 for float64).
Status MergeHeadsWithSums(const HeadsShape& shape, DType dtype, const void* const* y, void* x,
                          const HeadsSums& layout, void* sums, Queue queue);

// CUDA only: loads the kernels on the current device.
Status LoadHeadsKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND

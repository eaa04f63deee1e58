// Splitting features into attention heads and merging heads into features, on raw device pointers,
// with the bias or its gradient in the same pass. heads/shape.h has the shapes.
//
// Every function enqueues at most one kernel on `stream` and returns the result of the launch. The
// functions do not allocate or synchronize. Once LoadHeadsKernels has run on the device, they may
// be captured into a CUDA graph. Empty arrays succeed, and sums are then set to 0. Pointers need
// only the alignment of an element; outputs must not overlap inputs.
#ifndef JAX_FASTOPS_HEADS_HEADS_CUDA_H_
#define JAX_FASTOPS_HEADS_HEADS_CUDA_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"
#include "heads/shape.h"

namespace jax_fastops::cuda {

// y[p][b, h, s, d] = x[b, s, p, h, d], for elements of `itemsize` bytes (1, 2, 4, 8 or 16).
cudaError_t SplitHeads(const HeadsShape& shape, int64_t itemsize, const void* x, void* const* y,
                       cudaStream_t stream);

// y[p][b, h, s, d] = x[b, s, p, h, d] + bias[p, h, d]. The bias has the type of x, or is float32
// while x has 16 bits (`wide_bias`). The sum is rounded once.
cudaError_t SplitHeadsAddBias(const HeadsShape& shape, DType dtype, bool wide_bias, const void* x,
                              const void* bias, void* const* y, cudaStream_t stream);

// x[b, s, p, h, d] = y[p][b, h, s, d].
cudaError_t MergeHeads(const HeadsShape& shape, int64_t itemsize, const void* const* y, void* x,
                       cudaStream_t stream);

// The same, with the sums of y over runs of the sequence, in float32 (float64 for float64).
cudaError_t MergeHeadsWithSums(const HeadsShape& shape, DType dtype, const void* const* y, void* x,
                               const HeadsSums& layout, void* sums, cudaStream_t stream);

// Loads every kernel of the above into the current device; see LoadTransposeKernels.
cudaError_t LoadHeadsKernels();

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_HEADS_HEADS_CUDA_H_

// Splitting features into attention heads and merging heads into features, on the CPU, with the
// bias or its gradient in the same pass. heads/shape.h has the shapes. Pointers need no alignment.
// Outputs must not overlap inputs. For empty arrays, sums are set to 0.
#ifndef JAX_FASTOPS_HEADS_HEADS_CPU_H_
#define JAX_FASTOPS_HEADS_HEADS_CPU_H_

#include <cstdint>

#include "core/cpu/parallel.h"
#include "core/dtype.h"
#include "heads/shape.h"

namespace jax_fastops::cpu {

// y[p][b, h, s, d] = x[b, s, p, h, d], for elements of `itemsize` bytes (1, 2, 4, 8 or 16).
void SplitHeads(const HeadsShape& shape, int64_t itemsize, const void* x, void* const* y,
                Executor& executor);

// y[p][b, h, s, d] = x[b, s, p, h, d] + bias[p, h, d]. The bias has the type of x, or is float32
// while x has 16 bits (`wide_bias`). The sum is rounded once.
void SplitHeadsAddBias(const HeadsShape& shape, DType dtype, bool wide_bias, const void* x,
                       const void* bias, void* const* y, Executor& executor);

// x[b, s, p, h, d] = y[p][b, h, s, d].
void MergeHeads(const HeadsShape& shape, int64_t itemsize, const void* const* y, void* x,
                Executor& executor);

// The same, with the sums of y over runs of the sequence, in float32 (float64 for float64).
void MergeHeadsWithSums(const HeadsShape& shape, DType dtype, const void* const* y, void* x,
                        const HeadsSums& layout, void* sums, Executor& executor);

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_HEADS_HEADS_CPU_H_

// Splitting features into attention heads and merging them again, on the CPU, with the bias and its
// gradient in the same pass. Shapes are in heads_shape.h. Pointers need no alignment; outputs must
// not overlap inputs. Where there are no elements, sums are set to 0.
#ifndef JAX_FASTOPS_CPU_HEADS_H_
#define JAX_FASTOPS_CPU_HEADS_H_

#include <cstdint>

#include "cpu/parallel.h"
#include "dtype.h"
#include "heads_shape.h"

namespace jax_fastops::cpu {

// y[p][b, h, s, d] = x[b, s, p, h, d], elements of `itemsize` bytes (1, 2, 4, 8 or 16).
void SplitHeads(const HeadsShape& shape, int64_t itemsize, const void* x, void* const* y,
                Executor& executor);

// y[p][b, h, s, d] = x[b, s, p, h, d] + bias[p, h, d]. The bias has the type of x, or is float32
// beside a 16-bit x (`wide_bias`); the sum is rounded once.
void SplitHeadsAddBias(const HeadsShape& shape, DType dtype, bool wide_bias, const void* x,
                       const void* bias, void* const* y, Executor& executor);

// x[b, s, p, h, d] = y[p][b, h, s, d].
void MergeHeads(const HeadsShape& shape, int64_t itemsize, const void* const* y, void* x,
                Executor& executor);

// The same, and the sums of y over runs of the sequence, in float32 (float64 for float64).
void MergeHeadsWithSums(const HeadsShape& shape, DType dtype, const void* const* y, void* x,
                        const HeadsSums& layout, void* sums, Executor& executor);

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_CPU_HEADS_H_

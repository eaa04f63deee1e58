// The interface between the element-wise engine and its kernels, and the helpers of blocks.cc for
// one instruction set. This header is included by the files that are compiled several times; isa.h
// says what such a header may contain.
#ifndef JAX_FASTOPS_CPU_BLOCKS_SIMD_H_
#define JAX_FASTOPS_CPU_BLOCKS_SIMD_H_

#include <stdint.h>

#include "cpu/isa.h"
#include "dtype.h"

namespace jax_fastops::cpu {

// An array as a kernel sees it: a contiguous run of elements, one for each element of the block.
struct BlockArray {
  char* data = nullptr;  // null for an output that is not requested
  // A bit mask for offsets. All ones: every element has its own value. A power of two minus 1: that
  // many values are repeated, a multiple of the widest block of registers. 0: one value is
  // repeated, and fills kSplatBytes.
  int64_t mask = -1;
  bool wide = false;    // has the accumulator type, not the element type
  bool stream = false;  // outputs: use streaming stores; aligned to a cache line
  bool add = false;     // wide outputs: add to the existing values
};

// The largest kBlock of all element types (simd_math.h). Shorter periods do not use the mask.
inline constexpr int64_t kLeastPeriod = 32;
// The size of a repeated single value, in bytes.
inline constexpr int kSplatBytes = 128;

// n > 0. Arrays of bits begin at a whole byte. Unused bits of the last byte are written as 0.
using BlockKernel = void(int64_t n, const BlockArray* in, const BlockArray* out);

// The elements of a block, as rows of an array. Row r begins `offsets[r]` elements after the
// block's first element. Its `inner` elements are `step` apart, which is 0 or 1 if the rows are
// summed.
struct BlockRows {
  const int64_t* offsets;
  int64_t rows, inner;
  int64_t step;
};

// The same for short rows. A vector of `lanes` elements of the block is a permutation of
// `counts[v]` elements of the operand, beginning with element `bases[v]`: element i of the vector
// is number `indices[i]` of these.
struct BlockPermutation {
  const uint16_t* bases;
  const uint8_t* counts;
  const uint8_t* indices;
};

struct BlockHelpers {
  // By element size (2, 4, 8): the number of elements per permutation, or 0 if there is no such
  // instruction, and a function that permutes ceil(n / lanes) vectors. Nothing at or after source +
  // length is read.
  int lanes[3];
  using Permute = void(const void* source, int64_t length, const BlockPermutation& permutation,
                       int64_t n, void* dense);
  Permute* permute[3];
  // By element size: makes a dense copy of a block.
  void (*expand[3])(const void* source, const BlockRows& rows, void* dense);
  // By element size: repeats one value to fill kSplatBytes.
  void (*splat[3])(const void* source, void* values);

  // By the type of the terms, float or double: sums in double. Long chains of additions in double
  // are as accurate as pairwise sums in float.
  void (*add[2])(const void* values, int64_t n, double* sums);
  double (*sum[2])(const void* values, int64_t n);
  void (*add_rows[2])(const void* values, const BlockRows& rows, double* sums);

  // By the DType of the result.
  void (*write[kNumDTypes])(const double* sums, int64_t n, void* result);

  // Must follow streaming stores.
  void (*fence)();
};
FASTOPS_DECLARE_KERNELS(BlockHelpers, block_helpers)

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_CPU_BLOCKS_SIMD_H_

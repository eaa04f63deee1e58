// The interface between the element-wise engine and its kernels, and the helpers of blocks_cpu.cc
// for one instruction set. isa.h says what this header may contain.
#pragma once

#include <stdint.h>

#include "core/cpu/block.h"
#include "core/cpu/isa.h"
#include "core/dtype.h"

namespace jax_fastops::cpu {

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

// What an element-wise kernel over broadcast operands is handed, and the helpers of blocks.cc
// for one instruction set. Included by the files that are compiled several times: see isa.h for
// what such a header may hold.
#ifndef JAX_FASTOPS_CPU_BLOCKS_SIMD_H_
#define JAX_FASTOPS_CPU_BLOCKS_SIMD_H_

#include <stdint.h>

#include "cpu/isa.h"
#include "dtype.h"

namespace jax_fastops::cpu {

// An array as a kernel sees it: a dense run of as many elements as the block has.
struct BlockArray {
  char* data = nullptr;  // an output that is not wanted is null
  // An offset is masked with it: all ones; one less than a power of 2 if so many values, a multiple
  // of the widest block of registers, are repeated; 0 if one value is, which then fills
  // kSplatBytes.
  int64_t mask = -1;
  bool wide = false;    // of the accumulator's type, not the element type
  bool stream = false;  // of an output: past the caches; aligned to a cache line
  bool add = false;     // of a wide output: added to what is there
};

// The greatest kBlock of all element types (simd_math.h): what has a shorter period is not masked.
inline constexpr int64_t kLeastPeriod = 32;
// The longest repeated value, in bytes.
inline constexpr int kSplatBytes = 128;

// n > 0 elements. Arrays of bits begin at a whole byte; unused bits of the last are written as 0.
using BlockKernel = void(int64_t n, const BlockArray* in, const BlockArray* out);

// The elements of a block by rows: row r begins `offsets[r]` elements behind the block's first, and
// its `inner` elements are `step` apart: 0 or 1, of what is summed.
struct BlockRows {
  const int64_t* offsets;
  int64_t rows, inner;
  int64_t step;
};

// The same for short rows: a vector of `lanes` elements of the block is `counts[v]` elements of the
// operand from `bases[v]` on, permuted: element i is the one with the number `indices[i]` of those.
struct BlockPermutation {
  const uint16_t* bases;
  const uint8_t* counts;
  const uint8_t* indices;
};

struct BlockHelpers {
  // By the size of an element, 2, 4, 8: how many a permutation takes at once, 0 if there is none;
  // and one of ceil(n / lanes) vectors. Nothing from source + length on is read.
  int lanes[3];
  using Permute = void(const void* source, int64_t length, const BlockPermutation& permutation,
                       int64_t n, void* dense);
  Permute* permute[3];
  // Likewise: a dense copy of a block.
  void (*expand[3])(const void* source, const BlockRows& rows, void* dense);
  // The value, as often as fits into kSplatBytes.
  void (*splat[3])(const void* source, void* values);

  // By the type that is added up, float or double, in double: chains of any length are as good as
  // pairwise sums.
  void (*add[2])(const void* values, int64_t n, double* sums);
  double (*sum[2])(const void* values, int64_t n);
  void (*add_rows[2])(const void* values, const BlockRows& rows, double* sums);

  // By the DType of what is written.
  void (*write[kNumDTypes])(const double* sums, int64_t n, void* result);

  // After streaming stores.
  void (*fence)();
};
FASTOPS_DECLARE_KERNELS(BlockHelpers, block_helpers)

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_CPU_BLOCKS_SIMD_H_

// A block of elements, as the kernels of element-wise passes see it. isa.h says what this header
// may contain.
#pragma once

#include <stdint.h>

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

}  // namespace jax_fastops::cpu

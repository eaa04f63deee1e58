// The plan of a call of the element-wise engine: its blocks, and the order of the loops over them.
//
// A block is a run of indices of one dimension (the cut dimension), with all dimensions inside of
// it. So a block is contiguous in the result, and lies in a short range of each operand.
//
// A stride of an input other than 0 may be larger than in a dense array, for example if the array
// has several copies along a dimension and only one is read. The elements between neighbors are
// skipped. Outputs have no such gaps.
#pragma once

#include <algorithm>

#include "elementwise/blocks_cpu.h"

namespace jax_fastops::cpu::blocks {

// The maximum number of elements in a block of which parts are on the stack.
inline constexpr int64_t kTile = 1024;
inline constexpr int kMaxLoops = kMaxBroadcastRank + 1, kMaxSlots = kMaxInputs + kMaxOutputs;
// Up to this many values are added in their own type, before they are added to sums in double. This
// replaces four conversions and two additions by one vector addition, and its error is no larger
// than that of the values themselves. If a block is summed to one value, kPartialSums partial sums
// are kept.
inline constexpr int64_t kMostDepth = 8, kPartialSums = 128;

// The layout of an array within a block: contiguous; one value; a repeated run of values; any rows.
enum class Pattern : uint8_t { kDense, kSplat, kPeriod, kRows };

// An array, input or output.
struct Slot {
  char* data;
  Storage storage;
  int bytes;  // per element; 0 for bits
  Pattern pattern;
  int64_t period;  // kPeriod: the number of elements that are repeated
  int64_t stride[kMaxBroadcastRank];
  int64_t step[kMaxLoops];
  const int64_t* offsets;
  bool byte_rows;                // bits: rows of one byte each, contiguous
  BlockPermutation permutation;  // if bases is not null

  int SizeIndex() const { return bytes / 4; }  // of 2, 4, 8
  char* At(int64_t offset) const {
    return data + (storage == Storage::kBits ? offset / 8 : offset * bytes);
  }
};

// Memory for the tables of an operand.
struct Tables {
  int64_t offsets[kTile];
  uint16_t bases[kTile];
  uint8_t counts[kTile], indices[kTile];
};

// An output that is summed.
struct Sum {
  int slot;
  int first;             // outermost loop that is summed over; number of loops if none
  int64_t slice_blocks;  // number of blocks that are summed into a slice
  int64_t size;          // number of sums in a slice
  int64_t step[kMaxLoops];
  int64_t length, last_length;  // of the gradient in a block, and in a block of the last chunk
};

struct Plan {
  int64_t size[kMaxBroadcastRank];
  int rank;

  int cut;                    // the cut dimension: a block has a run of its indices
  int64_t chunk, last_chunk;  // lengths of these runs
  int64_t chunks;
  int64_t inside;  // elements per index of the cut dimension
  int loops;
  int64_t extent[kMaxLoops];
  int chunk_loop;  // the loop over the chunks; -1 if there is only one chunk
  int64_t blocks;

  int inputs, slots;
  Slot slot[kMaxSlots];
  Tables tables[kMaxSlots];
  int sums;
  Sum sum[kMaxOutputs];
  int sum_of[kMaxOutputs];   // -1 if the output is not summed
  bool stream[kMaxOutputs];  // use streaming stores

  DType dtype;
  int accumulator;  // 0 float, 1 double
  BlockKernel* kernel;

  int64_t piece_blocks;
  int64_t sums_per_piece;  // for all slices, twice each
  double* workspace;

  BlockRows Rows(const Slot& s, int64_t n) const {
    const int64_t inner = cut == rank - 1 ? n : size[rank - 1];
    return {s.offsets, n / inner, inner, s.stride[rank - 1]};
  }
};

// The range of an operand in `count` indices of the cut dimension, in elements. It may be larger
// than the number of elements, because strides may have gaps.
inline int64_t ReachOf(const Plan& plan, const Slot& s, int64_t count) {
  int64_t last = (count - 1) * s.stride[plan.cut];
  for (int d = plan.cut + 1; d < plan.rank; ++d) last += (plan.size[d] - 1) * s.stride[d];
  return last + 1;
}

// The number of values that are kept of a block of n, for a gradient that is summed.
inline int64_t WidthOf(const Slot& s, int64_t n) {
  const int64_t width = s.pattern == Pattern::kSplat    ? kPartialSums
                        : s.pattern == Pattern::kPeriod ? s.period
                                                        : n;
  return std::min(n, width);
}

// Plans a call of `kernel` on a shape with elements. All but the workspace is set.
void SetPlan(const BroadcastShape& shape, DType dtype, std::span<const BlockOperand> in,
             std::span<const BlockOperand> out, BlockKernel* kernel, int threads, Plan* plan);

}  // namespace jax_fastops::cpu::blocks

// Launch plans of kernels over columns (core/cuda/held_columns.cuh).
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/fast_divide.h"
#include "core/plan_rows.h"

namespace jax_fastops {

// Words of columns that registers do not hold have at most four elements, because each of them
// needs a maximum and a sum in registers.
constexpr int ColumnBytes(int itemsize) { return itemsize == 4 ? 16 : 8; }

// Threads of a block: the most for columns in registers. 1024 threads per SM with 64 registers each
// have 128 KB of elements in flight. With four blocks per SM, some load while others compute. Words
// of one element need the larger blocks, so that tiles are wide enough.
constexpr int ColumnThreads(bool registers, int bytes, int inputs) {
  if (registers) return bytes == 16 ? 256 : 512;
  return inputs == 2 ? 512 : 256;
}
constexpr int MinColumnBlocks(bool registers, int bytes, int inputs) {
  if (registers) return 1024 / ColumnThreads(registers, bytes, inputs);
  return inputs == 2 ? 2 : 3;
}
// Words that a thread holds in registers, and those that it loads at once of a longer column.
constexpr int HeldColumnWords(int bytes) { return bytes == 16 ? 8 : 16; }
constexpr int LoadedColumnWords(int bytes, int inputs) { return (bytes >= 8 ? 4 : 8) / inputs; }
// Whether the second array of columns in registers is in shared memory.
constexpr bool SecondInShared(int words, int bytes, int inputs) {
  return inputs == 2 && words * bytes > 64;
}
// Whether a cluster may hold a tile in registers. The forward of softmax runs out of them.
constexpr bool ColumnsInClusters(int bytes, int inputs) { return inputs == 2 && bytes == 16; }

struct ColumnsShape {
  int64_t outer, n, inner;
  int itemsize;
  int inputs;          // arrays that are read, 1 or 2
  uint64_t addresses;  // the bitwise or of the addresses of all arrays
  // Words of k elements are words of a mask along inner if this is a multiple of k.
  uint64_t mask_bits;
  bool long_workspace;  // sums of blocks have a workspace: ceil(n / 1024) values of each column
};

// How the threads of a launch share the columns.
struct ColumnsLaunch {
  FastDivisor64 row_words;  // words of inner elements
  int64_t columns;          // words of all of outer and inner
  int log_width;            // a tile is 1 << log_width words wide
  int log_threads;          // of a tile in a block: 5 (a tile per warp), or the whole block
  int log_blocks = 0;       // blocks that hold a tile together, as a cluster
  bool adjacent = false;    // the lanes of a column are adjacent threads of a warp
  bool held = true;         // in registers or shared memory, or else read twice
  DType dtype;              // of the elements
  int words;                // most words of a thread, if they are held
  int64_t chunk;            // the part of n that a block takes
  int64_t chunks = 1;
  RowStage stage = RowStage::kAll;
  void* partials = nullptr;  // of each chunk, sums of each column
  int scratch;               // for reductions: places in shared memory, in 16 bytes
  int exchange = 0;
};

struct ColumnsPlan {
  bool registers = false;  // in registers
  int bytes;               // of a word
  int64_t blocks;
  int threads;
  int cluster = 1;
  int64_t shared_bytes;
  ColumnsLaunch launch;
};

// The array is not empty. A plan with more blocks than a grid may have cannot be launched.
ColumnsPlan PlanColumns(const ColumnsShape& shape, const HeldLimits& limits);

}  // namespace jax_fastops

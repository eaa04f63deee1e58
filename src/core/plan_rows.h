// Launch plans of kernels over rows (core/cuda/rows.cuh): which kernel, and the threads of a row.
#pragma once

#include <cstdint>

namespace jax_fastops {

inline constexpr int kRowWords = 4;           // 16-byte words that a lane loads at once
inline constexpr int kMaxRowThreads = 1024;   // of a block
inline constexpr int kShortRowThreads = 256;  // of a block of short rows
inline constexpr int kMaxRowCluster = 8;      // blocks of a cluster

// Whether such rows have a ShortRowsKernel. Reductions of wider elements are faster in registers.
constexpr bool MayBeShort(bool reduces, int itemsize) { return !reduces || itemsize == 2; }

struct RowsShape {
  int64_t rows, n;
  int itemsize;
  bool reduces;  // otherwise blocks may share a row without a cluster
};

struct RowsPlan {
  bool is_short = false;  // ShortRowsKernel
  int log_lanes = 0;      // lanes of a row in a block: part of a warp, a warp, or the block
  int threads = 128;      // of a block
  int blocks_of_row = 1;  // a cluster, if the op reduces
  int rows_of_block = 1;
  int64_t blocks = 0;
};

// `processors` is the number of SMs, `max_cluster` the blocks of the largest cluster that the
// device runs: 1 without clusters.
RowsPlan PlanRows(const RowsShape& shape, int processors, int max_cluster);

// -------------------------------------------------------------------------------------------------
// Rows that are reduced and then written (core/cuda/held_rows.cuh)

inline constexpr int kMaxHeldThreads = 256;    // of a block that holds rows in registers
inline constexpr int kMaxSharedThreads = 512;  // in shared memory
inline constexpr int kStreamedThreads = 256;   // nowhere
inline constexpr int kShortHeldThreads = 128;  // of a block of short rows
inline constexpr int kShortHeldElements = 16;  // of a short row, in a lane
inline constexpr int kMaxHeldCluster = 16;
// Elements of a row. The index of an element that a lane has no edge for is below 2^31, too.
inline constexpr int64_t kMaxHeldRow = 0x7fffffff - (1 << 14);
// Shared memory of a block that leaves room for two, one more, or none on an SM of an H100.
inline constexpr int kMaxSharedBytes = 132 << 10;

// Where a row is between its reductions and its results.
enum class RowHolder { kShort, kRegisters, kShared, kStreamed, kNone };

// What a launch does with rows that are streamed.
enum class RowStage { kAll, kReduce, kWrite };

struct HeldShape {
  int64_t rows, n;
  int itemsize;
  int inputs;           // arrays that are read, 1 or 2
  bool alike;           // all arrays have the same misalignment within 16 bytes
  bool aligned;         // and every row begins and ends with a word
  bool registers_only;  // the functor has no other kernels
  int64_t room;         // for sums of blocks of each row, if it is streamed
};

struct HeldLimits {
  int processors = 0;
  int shared_bytes = 0;  // of dynamic shared memory, of a block
  int max_cluster = 1;
};

struct HeldPlan {
  RowHolder holder = RowHolder::kNone;  // kNone: no kernel takes the rows
  bool edges = false;                   // rows may have edges
  int words = kRowWords;                // of a lane, in registers
  int log_lanes = 0;                    // lanes of a row in a block
  int threads = 128;                    // of a block
  int blocks_of_row = 1;                // a cluster, except for streamed rows in two launches
  bool one_launch = true;
  int rows_of_block = 1;
  int words_of_block = 0;  // room for the words of an array in shared memory
  int64_t blocks = 0;
  int64_t shared_bytes = 0;
};

HeldPlan PlanHeldRows(const HeldShape& shape, const HeldLimits& limits);

}  // namespace jax_fastops

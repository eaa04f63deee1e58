// Launch plans of kernels over rows (core/cuda/rows.cuh): which kernel, and the threads of a row.
#ifndef JAX_FASTOPS_CORE_PLAN_ROWS_H_
#define JAX_FASTOPS_CORE_PLAN_ROWS_H_

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

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_CORE_PLAN_ROWS_H_

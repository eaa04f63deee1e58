// Launch plans of the CUDA kernel that splits and merges heads: its unit, its tiles and its grid.
// heads.cu explains why they are chosen so.
#pragma once

#include <cstdint>

#include "core/fast_divide.h"
#include "heads/shape.h"

namespace jax_fastops {

inline constexpr int kHeadsThreads = 256;  // per block

// What the kernel does with the elements that it moves. A bias is added by splits only, and only
// merges have sums.
enum class HeadsWork { kMove, kAddBias, kSum };

// The number of rows that a thread has in flight. With sums it is eight, so that 16 row lanes
// process 128 rows in one pass. For narrow units, more rows share the instructions that compute the
// column.
constexpr int HeadsInFlight(int unit, HeadsWork work) {
  if (unit <= 2) return 16;
  return unit < 16 || work == HeadsWork::kSum ? 8 : 4;
}

struct HeadsCall {
  HeadsShape shape;  // not empty
  HeadsWork work = HeadsWork::kMove;
  bool split = true;
  int64_t itemsize = 4;
  int64_t alignment = 16;  // of x and every y, at most 16
  int64_t bias_itemsize = 0;
  int64_t bias_alignment = 16;
  HeadsSums sums{1, 1};
};

// How the rows of x are cut into tiles. Sizes of rows and heads are in units.
struct HeadsTiles {
  FastDivisor row;
  FastDivisor head;
  FastDivisor heads;
  int64_t batch = 0;
  int64_t sequence = 0;

  // A sequence has groups of `group_rows` rows. A group has `subgroups` runs of `run_rows` rows.
  FastDivisor subgroups;
  int64_t group_rows = 0;
  int64_t run_rows = 0;
  int64_t runs = 0;  // per sequence

  // The tile is 1 << log_columns units wide, with 1 << log_row_lanes threads per column. 1 <<
  // log_warp_rows of these threads are in one warp.
  int log_columns = 0;
  int log_row_lanes = 0;
  int log_warp_rows = 0;
  int passes = 1;      // with sums: the number of batches of in-flight rows per thread
  int64_t x_step = 0;  // bytes between a thread's consecutive rows
  int64_t y_step = 0;

  // Columns are counted in 32 bits. So the grid has one plane for each slab, which has a number of
  // batches and of runs of each. There is more than one slab if all runs together have more than
  // 2^31 columns.
  int64_t slab_batches = 0;
  FastDivisor slab_runs;
};

struct HeadsPlan {
  bool valid = false;  // false: a row or a run of rows is too long
  int unit = 1;        // bytes
  HeadsTiles tiles;
  // The grid.
  int64_t blocks = 0;
  int64_t batch_slabs = 0;
  int64_t run_slabs = 0;
};

HeadsPlan PlanHeads(const HeadsCall& call);

}  // namespace jax_fastops

// The plan of an element-wise backward with sums (core/cuda/elements_sums.cuh): which gradients a
// pass sums, and what its blocks take. The host computes it for each call.
//
// The dimensions but the innermost one are sorted into two sets: planes, and the rows of a plane.
// Every gradient that a pass sums keeps all dimensions of a set or none. So it is one of three:
//
//   a row       keeps the innermost dimension and no rows: a lane adds up its columns;
//   a column    keeps the rows: a value per row;
//   a number    keeps neither: a value per plane, or one for all planes.
//
// Gradients that do not fit the sets of the first one (operands that are broadcast crosswise) take
// a pass of their own.
#pragma once

#include <cstdint>

#include "core/broadcast.h"

namespace jax_fastops::cuda {

inline constexpr int kSumsThreads = 256;  // of a block, at most

// Some of the dimensions of a shape, major to minor.
struct DimSet {
  int rank = 0;
  int64_t length = 1;
  int64_t size[kMaxBroadcastRank];
  // Of the result, and of array a of the shape at 1 + a.
  int64_t stride[1 + kMaxBroadcastArrays][kMaxBroadcastRank];

  void Add(int64_t its_size, const int64_t* strides, int arrays);
  // Whether array a has the stride 0 along all dimensions.
  bool IsFixed(int a) const;
};

// The class of an array relative to planes and rows.
enum class RowClass : uint8_t {
  kFull,     // as the result
  kRow,      // the same row for all rows of a plane
  kColumn,   // a value per row, or for several
  kStrided,  // rows at other distances than those of the result
};

struct RowsSplit {
  DimSet planes, rows;
  int64_t n = 1, last_n = 1;  // elements of a row, and of the last row, which may be shorter
  int arrays = 0;
  bool full[kMaxBroadcastArrays];
  int64_t inner_stride[kMaxBroadcastArrays];

  RowClass ClassOf(int array) const;
};

// Bit d of `planes` is set if dimension d is one of the planes. A result of one dimension is cut
// into rows of `flat_row` elements.
RowsSplit SplitRows(const BroadcastShape& shape, uint32_t planes, int64_t flat_row);

// The dimensions, but the innermost one, that an array keeps.
uint32_t KeptDims(const BroadcastShape& shape, int array);

// Chooses the planes with which one pass takes the most of the `count` arrays to sum. Sets bit i of
// `*chosen` if the pass takes arrays[i].
uint32_t ChoosePlanes(const BroadcastShape& shape, const int* arrays, int count, uint32_t* chosen);

// A gradient that a pass sums.
struct SumLayout {
  int array = 0;
  // Set by PlanPass:
  RowClass its_class = RowClass::kRow;
  bool per_row = false;  // a column
  bool keeps_planes = false;
  // As many sums as the blocks make: written to the gradient. Otherwise they are partial sums: of
  // a row [plane][part][n], of a column [part][plane][row], of a number [plane][part].
  bool direct = false;
  int64_t parts = 1;  // of a plane

  // The partial sums.
  int64_t Partial(const RowsSplit& split) const;
};

// How the second kernel adds up the partial sums of a gradient.
struct FinishSum {
  const void* parts;
  void* out;
  bool wide;
  // The numbers of planes, rows and columns that the gradient keeps, or 1, and the strides of the
  // partial sums along them.
  int64_t kept[3], step[3];
  int64_t terms, term_step;
  // The dimensions of planes and rows in the gradient.
  int rank[2];
  int64_t size[2][kMaxBroadcastRank], stride[2][kMaxBroadcastRank];
};

// Without the addresses, and `wide`.
FinishSum FinishOf(const RowsSplit& split, const SumLayout& layout);

struct PassLimits {
  int unit = 1;            // elements that a lane accesses at once
  int rows_in_flight = 1;  // of a lane
  int blocks_of_processor = 1;
  int processors = 1;
  int64_t workspace = 0;  // elements for partial sums
};

// Rows whose first elements have the same position in a 16-byte word form a class: every period-th
// row of a plane. A block takes rows of one class, and a strip of their columns.
struct PassPlan {
  bool valid = false;
  int lanes = 32;    // of a row: a power of two, or whole warps
  int threads = 32;  // of a block
  int64_t period = 1, classes = 1, strips = 1, boxes = 1, planes = 1;

  int64_t blocks_of_plane() const { return classes * strips * boxes; }
  int64_t blocks() const { return blocks_of_plane() * planes; }
};

// Also completes `sums`. The plan is not valid if rows cannot be accessed by such units, or if the
// partial sums do not fit into the workspace.
PassPlan PlanPass(const RowsSplit& split, SumLayout* sums, int count, const PassLimits& limits);

}  // namespace jax_fastops::cuda

// Launch plans of the CUDA kernels that transpose: one of four kernels, its index arithmetic, and
// its grid. transpose.cu explains the kernels.
//
// Offsets into the arrays are in bytes, and 64-bit. Divisors and the numbers that they divide are
// below 2^31, except in RowsPlan<uint64_t>.
#pragma once

#include <cstdint>
#include <type_traits>
#include <variant>

#include "core/fast_divide.h"
#include "transpose/permutation.h"

namespace jax_fastops {

// -------------------------------------------------------------------------------------------------
// Rows: the minor dimension stays

inline constexpr int kRowsThreads = 256;  // per block
inline constexpr int kUnitsPerThread = 4;
inline constexpr int kChunksPerThread = 2;

template <typename Index>
struct RowDim {
  std::conditional_t<sizeof(Index) == 4, FastDivisor, FastDivisor64> size;
  int64_t in_stride = 0;
};

// Units of 16 bytes, or bytes if rows are not aligned to 16 bytes.
template <typename Index>
struct RowsPlan {
  bool by_bytes = false;
  Index count = 0;  // units or bytes
  int rank = 0;
  RowDim<Index> dims[kMaxPermutationRank];  // minor to major; the first one is a row
  int64_t blocks = 0;
};

// -------------------------------------------------------------------------------------------------
// Tiles: the minor dimension moves

inline constexpr int kTileThreads = 256;  // per block
inline constexpr int kSector = 32;        // bytes: what DRAM and L2 move

// A tile has kTileRows rows, which are contiguous in the input, of kTileColumns elements; its
// columns are contiguous in the output.
constexpr int TileColumns(int element) { return element == 1 ? 128 : element <= 4 ? 64 : 32; }
constexpr int TileRows(int element) { return element <= 2 ? 128 : element <= 8 ? 64 : 32; }

// A dimension by which an index is split.
struct MovedDim {
  FastDivisor size;
  int64_t in_stride = 0, out_stride = 0;
};

struct TilePlan {
  // Every row, or column, of every tile is aligned to 16 bytes and a multiple of them.
  bool aligned_in = false, aligned_out = false;
  int64_t columns = 0, rows = 0;  // of the matrix of tiles: the lengths of the runs
  // Tiles are numbered down a band of columns, `band` tiles high, then along it, so that blocks
  // that run together read and write adjacent memory.
  FastDivisor tiles;       // per matrix
  FastDivisor band_tiles;  // per band
  FastDivisor band, last_band;
  uint32_t last_band_index = 0;
  int column_dims = 0, row_dims = 0, rank = 0;
  // The dimensions of a row, of a column, then the others; each minor to major.
  MovedDim dims[kMaxPermutationRank];
  int64_t blocks = 0;
};

// -------------------------------------------------------------------------------------------------
// Boxes: the runs share a dimension

inline constexpr int kBoxThreads = 128;  // per block
inline constexpr int kBoxBlocks = 8;     // per SM, shared memory permitting

// The maximum number of dimensions in a box: 16 KB cannot hold more dimensions of two elements.
inline constexpr int kMaxBoxRank = 16;

struct BoxDim {
  FastDivisor size;            // of the box
  FastDivisor before;          // entries of the table that come from the dimensions before
  uint32_t shared_stride = 0;  // in elements
  int64_t stride = 0;          // in the input or the output
};

// One side of the boxes: segments that are contiguous in the array. Lengths are in elements.
struct BoxSide {
  FastDivisor length;       // of a segment
  FastDivisor chunks;       // of 16 bytes per segment, rounded up
  uint32_t pitch = 0;       // `length` rounded up to 16 bytes
  uint32_t count = 0;       // of segments
  int64_t last_offset = 0;  // of the last segment
  bool aligned = false;     // all segments of an aligned box are aligned to 16 bytes
  int run_dims = 0, segment_dims = 0;
  BoxDim dims[kMaxBoxRank];  // of a segment, then those that number segments; each minor to major
};

// A dimension that a box contains only in part.
struct BoxPart {
  int dim = -1;  // in BoxPlan::dims; -1: there is none
  uint32_t size = 1;
  int64_t total = 1;  // of the array
};

struct BoxPlan {
  int64_t bytes = 0;  // of the array
  BoxSide in, out;
  // The major dimension of the input's and of the output's segments, if it is in part. If both
  // are, each one is the most major dimension that numbers the other side's segments.
  BoxPart in_part, out_part;
  // 16 bytes of padding follow every 2^pad_shift bytes of a box in shared memory.
  uint32_t pad_shift = 31;
  bool turned = false;  // lanes gather the words of their chunks in different orders
  uint32_t table_bytes = 0, data_bytes = 0, staged_bytes = 0;
  uint32_t shared_bytes = 0;  // of the block
  int64_t boxes = 0;
  int rank = 0;
  MovedDim dims[kMaxPermutationRank];  // of the grid of boxes, minor to major

  // The place of a byte of the box in shared memory.
  constexpr uint32_t Place(uint32_t byte) const { return byte + (byte >> pad_shift) * 16; }
};

// -------------------------------------------------------------------------------------------------

struct CopyPlan {};

struct TransposePlan {
  int unit = 1;  // bytes that move together
  std::variant<CopyPlan, RowsPlan<uint32_t>, RowsPlan<uint64_t>, TilePlan, BoxPlan> kernel;
};

// A plan is valid on every device. The sizes of boxes suit one with so many processors (SMs). No
// dimension may have size 0.
TransposePlan PlanTranspose(const TransposeShape& shape, int processors);

}  // namespace jax_fastops

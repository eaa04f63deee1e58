// Launch plans of the CUDA kernels that transpose: one of three kernels, its index arithmetic, and
// its grid. transpose.cu explains the kernels. A plan depends on the shape only, and is cached.
//
// Offsets into the arrays are in bytes, and 64-bit, except in UnitsPlan. Divisors and the numbers
// that they divide are below 2^31, except in UnitsPlan<uint64_t>.
#ifndef JAX_FASTOPS_TRANSPOSE_PLAN_H_
#define JAX_FASTOPS_TRANSPOSE_PLAN_H_

#include <cstdint>
#include <type_traits>
#include <variant>

#include "core/fast_divide.h"
#include "transpose/permutation.h"

namespace jax_fastops {

// -------------------------------------------------------------------------------------------------
// Units and rows, each from its own place

inline constexpr int kUnitsThreads = 256;   // per block
inline constexpr int kChunksPerThread = 2;  // of rows

// A thread that moves units writes words of at least 4 bytes.
constexpr int UnitsPerWord(int unit) { return unit < 4 ? 4 / unit : 1; }
constexpr int WordsPerThread(int unit) { return unit == 1 ? 2 : 4; }

template <typename Index>
struct UnitsDim {
  std::conditional_t<sizeof(Index) == 4, FastDivisor, FastDivisor64> size;
  Index in_stride = 0;
};

// Counts bytes, if rows of any number of bytes move, otherwise units.
template <typename Index>
struct UnitsPlan {
  bool rows = false;
  bool together = false;  // the units of a word are of one row of the output
  Index count = 0;
  int rank = 0;
  UnitsDim<Index> dims[kMaxPermutationRank];  // minor to major
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

struct CopyPlan {};

struct TransposePlan {
  int unit = 1;  // bytes that move together
  std::variant<CopyPlan, UnitsPlan<uint32_t>, UnitsPlan<uint64_t>, TilePlan> kernel;
};

// A plan is valid on every device. No dimension may have size 0.
TransposePlan PlanTranspose(const TransposeShape& shape);

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_TRANSPOSE_PLAN_H_

// Which kernel computes a softmax, and with which launch. Plain C++, so that it is tested without a
// GPU.
#ifndef JAX_FASTOPS_SOFTMAX_PLAN_H_
#define JAX_FASTOPS_SOFTMAX_PLAN_H_

#include <cstdint>

#include "core/fast_divide.h"
#include "softmax/shape.h"

namespace jax_fastops::cuda::softmax {

// -------------------------------------------------------------------------------------------------
// Numbers that plans and kernels share

inline constexpr int kRowThreads = 256;        // most threads per block of RowsKernel
inline constexpr int kRowUnits = 4;            // units of a row per thread, except for short rows
inline constexpr int kSpanThreads = 128;       // of SpanKernel
inline constexpr int kSpanUnits = 16;          // units of 4 bytes per thread
inline constexpr int kMostBlockThreads = 512;  // of BlockKernel
inline constexpr int kMostCluster = 16;

inline constexpr int kGangThreads = 512;
inline constexpr int kGangUnits = 16;  // units of a row in a thread's registers
inline constexpr int64_t kGangBlockUnits = int64_t{kGangThreads} * kGangUnits;
inline constexpr int kGangSlots = 28;  // ring slots per thread
inline constexpr int kGangShared = kGangSlots * kGangThreads * 16;
inline constexpr int kMostGangBlocks = 192;

constexpr int ColumnThreads(bool grad) { return grad ? 512 : 256; }

// Bytes of a unit of ColumnsKernel: at most four elements, because each of them needs a maximum and
// a sum in registers.
constexpr int ColumnUnitBytes(int itemsize) { return itemsize == 2 ? 8 : itemsize == 4 ? 16 : 8; }

// Most threads per block of ColumnRegistersKernel. 1024 threads per SM with 64 registers each have
// 128 KB of elements in flight. With four blocks per SM, some load while others compute: with
// blocks of twice the size, the forward for n = 500 measured 1.39 times the copy floor. Units of
// one element need the larger blocks, so that tiles are wide enough.
constexpr int ColumnRegisterThreads(int bytes) { return bytes == 16 ? 256 : 512; }
// The most units that a thread holds.
constexpr int ColumnPlaces([[maybe_unused]] int itemsize, int bytes) {
  return bytes == 16 ? 8 : 16;
}
// Whether the second array of a backward is in shared memory.
constexpr bool SharesSecond(int itemsize, int bytes, bool grad) {
  return grad && ColumnPlaces(itemsize, bytes) * bytes > 64;
}
// Whether a cluster may hold a tile.
constexpr bool ColumnsInClusters(int bytes, bool grad) { return grad && bytes == 16; }

// -------------------------------------------------------------------------------------------------
// Parameters of the kernels, besides those of the op

struct RowsParams {
  int lanes;      // threads of a row: 1 to 32 (a power of two), or the block
  int log_lanes;  // up to 32 lanes
  int groups;     // rows that a block holds at once
  int units;      // of a row per thread
};

struct SpanParams {
  int log_lanes;  // of a row
  int units;      // of a row per thread
  int rows;       // per block
  int words;      // room for the span of one array in shared memory
};

struct BlockParams {
  int block_units;  // units of a row per block of the cluster
  int cluster;
  int log_cluster;
};

struct GangParams {
  int blocks;          // per gang
  int gangs;           // of the launch; a gang takes every gangs-th row
  int block_units;     // units of a row per block
  uint32_t* partials;  // sum and, in the forward, maximum of each block of each row; see GangSum
};

enum class Stage { kAll, kReduce, kWrite };

struct ColumnsParams {
  FastDivisor64 row_units;  // units of inner elements
  int64_t columns;          // units of all of outer and inner
  int log_width;            // a tile is 1 << log_width units wide
  bool adjacent;            // the lanes of a column are adjacent threads of a warp
  bool held;                // in shared memory
  bool fold;                // the elements of a unit belong to the same row
  Stage stage;
  int64_t chunk;  // the part of n that a block takes
  int64_t chunks;
  void* partials;  // of each chunk: the maxima of all rows, then their sums
  int scratch;     // shared memory for the reduction over lanes: offset in 16 bytes
};

struct ColumnRegistersParams {
  FastDivisor64 row_units;  // units of inner elements
  int64_t columns;          // units of all of outer and inner
  int log_width;            // a tile is 1 << log_width units wide
  int log_threads;          // of a tile: 5 (a tile per warp), or the whole block
  int log_blocks;           // blocks that hold a tile together, as a cluster
  int places;               // most units per thread
  int scratch;              // shared memory for the reduction over lanes: offset in 16 bytes
  int exchange;             // and for the one over the blocks of a cluster
};

// -------------------------------------------------------------------------------------------------
// Plans

// The limits of a device that matter here.
struct Limits {
  int processors = 0;
  int shared_bytes = 0;  // of dynamic shared memory, most per block
  int cluster = 1;       // most blocks per cluster
};

// Shared memory per block with which three blocks, two blocks, or one block fit on an SM of an
// H100.
inline constexpr int kThirdOfShared = 72 << 10;
inline constexpr int kHalfOfShared = 108 << 10;
inline constexpr int kMostOfShared = 132 << 10;

// A longer row has a workspace of ceil(n / 1024) elements of the accumulator's type.
inline constexpr int64_t kWorkspaceRow = 16384;

struct Call {
  SoftmaxShape shape;
  SoftmaxMask mask;  // no data: none
  int itemsize;
  bool grad;
  bool log;
  bool dropout = false;
  // The addresses of the arrays. `b` is that of `a` in a forward.
  uint64_t a;
  uint64_t b;
  uint64_t out;
};

enum class Kernel {
  kTinyRows,    // RowsKernel with one unit of four rows per thread
  kShortRows,   // RowsKernel with two units of two rows per thread
  kRows,        // RowsKernel with kRowUnits units of a row per thread
  kRaggedRows,  // the same for rows that begin or end inside a unit
  kSpan,
  kBlock,
  kGang,
  kColumnRegisters,         // with units of 16 bytes
  kElementColumnRegisters,  // with units of one element
  kColumns,                 // with units of ColumnUnitBytes
  kElementColumns,
};

struct Plan {
  Kernel kernel;
  // Of the call, or a view of it: rows as columns of units.
  SoftmaxShape shape;
  SoftmaxMask mask;
  bool mask_units = false;  // the mask of a unit may be read in one load
  int64_t blocks = 0;
  int64_t blocks_y = 1;
  int threads = 0;
  int64_t shared_bytes = 0;
  int cluster = 1;
  bool cooperative = false;
  int64_t ones = 0;  // 32-bit words of the workspace whose bits are set before the launch
  union {
    RowsParams rows;
    SpanParams span;
    BlockParams block;
    GangParams gang;
  };
  ColumnsParams columns = {};
  ColumnRegistersParams registers = {};

  Plan() : rows{} {}
};

// The plan of a call whose array is not empty. A plan with more blocks than a grid may have cannot
// be launched. With dropout, the kernel is one of RowsKernel if the array can have such a kernel:
// see TakesDropout.
Plan MakePlan(const Call& call, const Limits& limits);

// Whether the kernel of a plan has a variant with dropout. It has for rows of up to
// kSoftmaxDropoutRow elements of up to 4 bytes, if all arrays begin alike within 16 bytes.
constexpr bool TakesDropout(const Plan& plan) {
  return plan.kernel == Kernel::kShortRows || plan.kernel == Kernel::kRows ||
         plan.kernel == Kernel::kRaggedRows;
}

inline constexpr int64_t kMostBlocks = 0x7fffffff;

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_PLAN_H_

// Which kernel computes a softmax, and with which launch. Plain C++, so that it is tested without a
// GPU.
#ifndef JAX_FASTOPS_SOFTMAX_PLAN_H_
#define JAX_FASTOPS_SOFTMAX_PLAN_H_

#include <cstdint>

#include "core/fast_divide.h"
#include "core/plan_rows.h"
#include "softmax/shape.h"

namespace jax_fastops::cuda::softmax {

// -------------------------------------------------------------------------------------------------
// Numbers that plans and kernels share

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

struct ColumnsParams {
  FastDivisor64 row_units;  // units of inner elements
  int64_t columns;          // units of all of outer and inner
  int log_width;            // a tile is 1 << log_width units wide
  bool adjacent;            // the lanes of a column are adjacent threads of a warp
  bool held;                // in shared memory
  RowStage stage;
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

// Shared memory per block with which three blocks fit on an SM of an H100.
inline constexpr int kThirdOfShared = 72 << 10;

// A longer row has a workspace of ceil(n / 1024) elements of the accumulator's type.
inline constexpr int64_t kWorkspaceRow = 16384;

struct Call {
  SoftmaxShape shape;
  SoftmaxMask mask;  // no data: none
  int itemsize;
  bool grad;
  bool dropout = false;
  // The addresses of the arrays. `b` is that of `a` in a forward.
  uint64_t a;
  uint64_t b;
  uint64_t out;
};

enum class Kernel {
  kColumnRegisters,         // with units of 16 bytes
  kElementColumnRegisters,  // with units of one element
  kColumns,                 // with units of ColumnUnitBytes
  kElementColumns,
};

struct Plan {
  Kernel kernel;
  bool mask_units = false;  // the mask of a unit may be read in one load
  int64_t blocks = 0;
  int64_t blocks_y = 1;
  int threads = 0;
  int64_t shared_bytes = 0;
  int cluster = 1;
  ColumnsParams columns = {};
  ColumnRegistersParams registers = {};
};

// The plan of a call along the minor axis for the core's kernels over rows. Without a kernel there
// (RowHolder::kNone), rows are columns: float64, arrays of other misalignments, rows of 2^31
// elements. softmax.py asks for dropout only in rows that have a kernel.
HeldPlan PlanRowsOf(const Call& call, const HeldLimits& limits);

// Whether the mask of aligned rows can be loaded for 16 bytes of elements at a time.
bool MaskHasWords(const Call& call);

// The plan of a call along any axis, whose array is not empty. A plan with more blocks than a grid
// may have cannot be launched.
Plan MakePlan(const Call& call, const HeldLimits& limits);

inline constexpr int64_t kMostBlocks = 0x7fffffff;

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_PLAN_H_

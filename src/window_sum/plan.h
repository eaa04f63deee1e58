// Launch plans of the CUDA kernels of window sums: which kernel, on how many blocks, and how the
// array is cut. The files of the kernels explain the terms.
#pragma once

#include <cstdint>

#include "core/fast_divide.h"
#include "window_sum/shape.h"

namespace jax_fastops {

// x[outer, n, inner] and y[outer, m, inner], as in window_sum/shape.h. The number of sums is given,
// because a piece of a row has fewer than a row.
struct WindowSumSizes {
  int64_t outer, n, inner, m, pad, window;
};

enum class WindowSumKernel {
  kCopy,  // the windows are single elements: no kernel
  kDirect,
  kWarpsNear,     // windows of up to a unit and one element
  kWarpsAligned,  // x is aligned as y is, at both ends of windows
  kWarpsShifted,
  kColumns,
  kTree,
};

inline constexpr int kWindowSumThreads = 256;  // per block

// WarpsKernel: units of a thread. It counts the elements of a row in 32 bits.
inline constexpr int kWarpsUnits = 2;
inline constexpr int kWarpsLongest = 1 << 29;

// ColumnsKernel: the rows that a thread processes in one step, for units of `bytes`.
constexpr int ColumnsRows(int bytes) { return bytes == 16 ? 4 : 8; }
// Blocks for which an SM has registers: a unit of 8 elements takes 8 accumulators.
constexpr int ColumnsBlocks(int bytes, int itemsize) { return bytes / itemsize > 4 ? 2 : 3; }

// Tree: the nodes below a node, which is also the number of sums of a thread.
inline constexpr int kTreeFan = 16, kTreeLevels = 16;

struct WindowSumWarps {
  int log_lanes = 0;   // of a group
  FastDivisor chunks;  // of a row: the units of a warp
  uint32_t total = 0;  // chunks of y
};

struct WindowSumColumns {
  int64_t segment = 0;     // sums per block along the axis
  FastDivisor64 strips;    // of inner
  FastDivisor64 segments;  // of the axis
  int64_t blocks = 0;
  int log_width = 0;  // of a strip, in units
  int log_group = 0;  // threads per group of rows
  int ring = 0;       // rows
};

struct WindowSumTree {
  int levels = 0;                   // above the elements
  int64_t count[kTreeLevels] = {};  // nodes of a line; count[0] is n
};

struct WindowSumPlan {
  WindowSumKernel kernel = WindowSumKernel::kCopy;
  int unit = 16;  // kDirect and kColumns: bytes
  int64_t blocks = 0;
  int64_t shared = 0;  // bytes of dynamic shared memory
  WindowSumWarps warps;
  WindowSumColumns columns;
  WindowSumTree tree;
};

struct WindowSumCall {
  WindowSumSizes sizes;  // not empty
  int itemsize = 4;
  int x_shift = 0, y_shift = 0;  // distance from an address that is aligned to 16 bytes, in bytes
  bool workspace = false;
  int processors = 1;        // SMs
  int shared_per_block = 0;  // bytes
};

// Blocks of kernels that process one item per thread, and loop if there are more.
int64_t WindowSumBlocks(int64_t items);

WindowSumPlan PlanWindowSum(const WindowSumCall& call);

}  // namespace jax_fastops

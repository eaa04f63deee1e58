// Window sums along an axis that is not the last: adjacent elements belong to different lines.
//
// A block takes a strip, a few adjacent units of inner elements wide, and moves along the axis. So
// each element is read once, except at the beginning of the strip. The axis is cut into groups of
// rows shorter than the window. A window then begins in one group and ends in a later one:
//
//   sum = (end of its first group) + (whole groups between) + (beginning of its last group)
//
// In each step a thread takes a few rows of one unit. The sums from the beginning of a group up to
// these rows belong to the windows that end there, and stay in registers. The sums from the rows to
// the end of the group wait in a ring in shared memory, as long as a window, until the block gets
// to the ends of the windows that begin there. The sum of a whole group is that from its first row.
#pragma once

#include <cstdint>

#include "core/cuda/divide.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/vec.cuh"
#include "window_sum/arrays.cuh"
#include "window_sum/plan.h"

namespace jax_fastops::cuda::window_sum {

// The thread's part in a step, which is the same in all steps.
struct ColumnsThread {
  int width, log_width;  // of the strip
  int column;
  int slot, slots;            // of rows: the thread's, and their number in a step
  int in_group, group_slots;  // the slot's index in its group, and the slots of a group

  __device__ __forceinline__ explicit ColumnsThread(const WindowSumColumns& tiles)
      : width(1 << tiles.log_width),
        log_width(tiles.log_width),
        column(threadIdx.x & (width - 1)),
        slot(threadIdx.x >> tiles.log_width),
        slots(kWindowSumThreads >> tiles.log_width),
        in_group(slot & ((1 << tiles.log_group) - 1)),
        group_slots(1 << tiles.log_group) {}
};

// The sums that wait in shared memory, [rows][planes][width][kPiece]: a unit's accumulators in
// pieces of up to 16 bytes, each in its own plane.
template <typename A, int kSize>
struct ColumnsRing {
  static constexpr int kPiece = kSize * sizeof(A) > 16 ? 16 / sizeof(A) : kSize;
  static constexpr int kPlanes = kSize / kPiece;
  using Piece = Unit<A, kPiece * sizeof(A)>;

  A* sums;
  int rows;
  int width, column;

  __device__ __forceinline__ A* Place(int row, int plane) const {
    return sums + ((row * kPlanes + plane) * width + column) * kPiece;
  }
  // The row's place, for a row after the last and for one before the first.
  __device__ __forceinline__ int Down(int row) const { return row - (row >= rows ? rows : 0); }
  __device__ __forceinline__ int Up(int row) const { return row + (row < 0 ? rows : 0); }
  __device__ __forceinline__ void Load(int row, A (&out)[kSize]) const {
#pragma unroll
    for (int h = 0; h < kPlanes; ++h) {
      const Piece piece = Piece::Load(Place(row, h));
#pragma unroll
      for (int i = 0; i < kPiece; ++i) out[h * kPiece + i] = piece.elements[i];
    }
  }
  __device__ __forceinline__ void Store(int row, const A (&in)[kSize]) const {
#pragma unroll
    for (int h = 0; h < kPlanes; ++h) {
      Piece piece;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) piece.elements[i] = in[h * kPiece + i];
      piece.Store(Place(row, h));
    }
  }
};

// The rows of x and y that a block passes, and the thread's columns of them.
template <typename T, int kBytes>
struct ColumnsStrip {
  static constexpr int kSize = kBytes / sizeof(T), kRows = ColumnsRows(kBytes);
  using V = Vec<T, kBytes>;

  const Arrays& arrays;
  int64_t begin, sums;  // the first of the strip's sums along the axis, and their number
  bool active;
  const T* x;
  T* y;

  __device__ __forceinline__ ColumnsStrip(const Arrays& a, const WindowSumColumns& tiles,
                                          int64_t block, int column)
      : arrays(a) {
    const int64_t above = Divide(static_cast<uint64_t>(block), tiles.strips);
    const int64_t strip = block - above * static_cast<int64_t>(tiles.strips.divisor);
    const int64_t outer = Divide(static_cast<uint64_t>(above), tiles.segments);
    begin = (above - outer * static_cast<int64_t>(tiles.segments.divisor)) * tiles.segment;
    sums = a.m - begin < tiles.segment ? a.m - begin : tiles.segment;
    const int width = 1 << tiles.log_width;
    const int64_t at = (strip * width + column) * kSize;  // of inner
    active = at < a.inner;
    x = reinterpret_cast<const T*>(a.x) + outer * a.n * a.inner + at;
    y = reinterpret_cast<T*>(a.y) + (outer * a.m + begin) * a.inner + at;
  }

  __device__ __forceinline__ int64_t Rows() const { return sums + arrays.window - 1; }
  __device__ __forceinline__ const T* Row(int64_t row) const {
    return x + (begin + row - arrays.pad) * arrays.inner;
  }
  __device__ __forceinline__ bool Wanted(int64_t row) const {
    const int64_t j = begin + row - arrays.pad;
    return active && row < Rows() && j >= 0 && j < arrays.n;
  }

  // Loads rows, the padding as zeros.
  __device__ __forceinline__ void Load(int64_t first, V (&units)[kRows]) const {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      units[k] = V{};
      if (Wanted(first + k)) units[k] = V::Load(Row(first + k));
    }
  }

  // Stores sum `i` along the axis.
  __device__ __forceinline__ void Store(int64_t i, const ComputeType<T> (&values)[kSize]) const {
    Unit<T, kBytes> unit;
#pragma unroll
    for (int e = 0; e < kSize; ++e) unit.elements[e] = FromCompute<T>(values[e]);
    unit.template Store<CacheHint::kStreaming>(y + i * arrays.inner);
  }
};

// Sets `before` and `after` to the sums of the group's rows before and after the thread's.
template <typename V, int kRows, typename A, int kSize>
__device__ __forceinline__ void SumGroup(const ColumnsThread& t, const V (&units)[kRows],
                                         A (&before)[kSize], A (&after)[kSize]) {
  if (t.group_slots == 1) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) before[i] = after[i] = 0;
    return;
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    before[i] = ToCompute(units[0][i]);
#pragma unroll
    for (int k = 1; k < kRows; ++k) before[i] += ToCompute(units[k][i]);
    after[i] = before[i];
  }
  SumOthers(before, after, t.in_group, t.group_slots, t.width);
}

// Adds the `whole - 1` groups before a group, whose first row in the ring is `group_at`, to
// `middle`. Groups before the strip, which has `group` of them, belong to no window.
template <typename A, int kSize>
__device__ __forceinline__ void SumMiddle(const ColumnsThread& t, const ColumnsRing<A, kSize>& ring,
                                          int whole, int64_t group, int group_at, int group_rows,
                                          A (&middle)[kSize]) {
  for (int back = 1 + t.in_group; back < whole; back += t.group_slots) {
    if (back > group) break;
    A sum[kSize];
    ring.Load(ring.Up(group_at - back * group_rows), sum);
#pragma unroll
    for (int i = 0; i < kSize; ++i) middle[i] += sum[i];
  }
  RowGroup<kWarpSize>::Sync();
  Butterfly(Sum(), middle, t.group_slots << t.log_width, t.width);
}

template <typename T, int kBytes>
__global__ void __launch_bounds__(kWindowSumThreads, ColumnsBlocks(kBytes, sizeof(T)))
    ColumnsKernel(const Arrays a, const WindowSumColumns tiles) {
  using A = ComputeType<T>;
  using Strip = ColumnsStrip<T, kBytes>;
  using V = typename Strip::V;
  constexpr int kSize = Strip::kSize, kRows = Strip::kRows;
  extern __shared__ __align__(16) unsigned char shared[];

  const ColumnsThread t(tiles);
  const ColumnsRing<A, kSize> ring = {reinterpret_cast<A*>(shared), tiles.ring, t.width, t.column};
  const int window = static_cast<int>(a.window);
  const int rows = t.slots * kRows, group_rows = kRows << tiles.log_group;
  const int whole = (window - 1) / group_rows;  // groups between, or one less

  for (int64_t block = blockIdx.x; block < tiles.blocks; block += gridDim.x) {
    const Strip strip(a, tiles, block, t.column);
    V next[kRows];
    strip.Load(t.slot * kRows, next);
    int base = 0;  // the ring's row of the step's first row
    for (int64_t first = 0; first < strip.Rows(); first += rows) {
      const int64_t my_first = first + t.slot * kRows;
      V units[kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k) units[k] = next[k];
      if (first + rows < strip.Rows()) strip.Load(my_first + rows, next);

      A before[kSize], after[kSize];
      SumGroup(t, units, before, after);
      const int own = ring.Down(base + t.slot * kRows);  // the first of the thread's rows
#pragma unroll
      for (int k = kRows - 1; k >= 0; --k) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) after[i] += ToCompute(units[k][i]);
        ring.Store(ring.Down(own + k), after);
      }
      __syncthreads();

      const int64_t group = my_first / group_rows;
      const int group_at = own - static_cast<int>(my_first - group * group_rows);
      A middle[kSize] = {}, furthest[kSize] = {};
      if (whole > 1) SumMiddle(t, ring, whole, group, group_at, group_rows, middle);
      if (whole > 0 && whole <= group) {
        ring.Load(ring.Up(group_at - whole * group_rows), furthest);
      }

#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const int64_t i_sum = my_first + k - (window - 1);
#pragma unroll
        for (int i = 0; i < kSize; ++i) before[i] += ToCompute(units[k][i]);
        if (!strip.active || i_sum < 0 || i_sum >= strip.sums) continue;
        A out[kSize];
        if (whole == 0 && k >= window - 1) {  // within the thread's own rows
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            out[i] = ToCompute(units[k][i]);
#pragma unroll
            for (int j = 1; j <= k; ++j) {
              if (j < window) out[i] += ToCompute(units[k - j][i]);
            }
          }
        } else {
          ring.Load(ring.Down(ring.Up(own + k - (window - 1))), out);
          const bool far = whole > 0 && i_sum < (group - whole) * group_rows;
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            out[i] = out[i] + before[i] + middle[i];
            if (far) out[i] += furthest[i];
          }
        }
        strip.Store(i_sum, out);
      }
      __syncthreads();  // the ring is written again
      base = ring.Down(base + rows);
    }
  }
}

}  // namespace jax_fastops::cuda::window_sum

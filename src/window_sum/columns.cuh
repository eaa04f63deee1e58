// Window sums along an axis that is not the last: adjacent elements belong to different lines.
//
// A block takes a strip, a few adjacent units of inner elements wide, and moves along the axis. So
// each element is read once, except at the beginning of the strip. As in window_sum_rows.cuh, the
// axis is cut into groups shorter than the window, and
//
//   sum = (end of its first group) + (whole groups between) + (beginning of its last group)
//
// In each step a thread takes a few rows of one unit. The sums from the beginning of a group up to
// these rows belong to the windows that end there, and stay in registers. The sums from the rows to
// the end of the group wait in a ring in shared memory, as long as a window, until the block gets
// to the ends of the windows that begin there. The sum of a whole group is that from its first row.
#ifndef JAX_FASTOPS_WINDOW_SUM_COLUMNS_CUH_
#define JAX_FASTOPS_WINDOW_SUM_COLUMNS_CUH_

#include <cstdint>
#include <cstring>

#include "core/cuda/divide.cuh"
#include "core/cuda/packed.cuh"
#include "core/cuda/unit.cuh"
#include "core/fast_divide.h"
#include "window_sum/words.cuh"

namespace jax_fastops::cuda::window_sum {

inline constexpr int kColumnThreads = 256;

// Rows of a thread in one step.
template <int kBytes>
inline constexpr int kColumnRows = kBytes == 16 ? 4 : 8;

// Blocks for which an SM has registers: a unit of 8 elements takes 8 accumulators.
template <typename T, int kBytes, bool kShifted = false>
inline constexpr int kColumnBlocks = kBytes / sizeof(T) > 4 || kShifted ? 2 : 3;

struct ColumnsParams {
  const char* x;
  char* y;
  int64_t n;
  int64_t inner;
  int64_t m;
  int64_t pad;
  int64_t segment;         // sums per block along the axis
  FastDivisor64 strips;    // of inner
  FastDivisor64 segments;  // of the axis
  int64_t blocks;
  int window;
  int log_width;  // of a strip, in units
  int log_group;  // threads per group of rows
  int ring;       // rows
  Array array;    // x
};

// kShifted: rows have different alignments. A thread always has the same columns, at any address,
// so it loads the two aligned words that contain them. It stores the aligned word that ends within
// its columns; the thread to its left computes the beginning of that word. The first thread of a
// strip's row computes only such a beginning, so strips overlap by a unit.

// Stores the word at `to`, for the columns that begin at `at`, as far as they lie within the row.
template <typename T>
__device__ __forceinline__ void StoreShifted(const uint4& left, const uint4& own, T* to, int64_t at,
                                             int64_t inner) {
  constexpr int kSize = 16 / sizeof(T);
  const int shift = WordShift(to), before = shift / static_cast<int>(sizeof(T));
  const uint4 word = ShiftUnit<sizeof(T)>(shift > 0 ? left : own, own, -shift & 15);
  to -= before;
  at -= before;
  if (at >= 0 && at + kSize <= inner) {
    __stcs(reinterpret_cast<uint4*>(to), word);
    return;
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (at + i >= 0 && at + i < inner) to[i] = ElementOf<T>(word, i);
  }
}

template <typename T, int kBytes, bool kShifted = false>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks<T, kBytes, kShifted>)
    ColumnsKernel(const ColumnsParams p) {
  using A = ComputeType<T>;
  using U = Unit<T, kBytes>;
  using Bits = Word<kBytes>;
  static_assert(!kShifted || kBytes == 16);
  constexpr int kSize = U::kSize, kRows = kColumnRows<kBytes>, kWords = kShifted ? 2 : 1;
  // A unit's accumulators in pieces of up to 16 bytes, each in its own plane of the ring.
  constexpr int kPiece = kSize * sizeof(A) > 16 ? 16 / sizeof(A) : kSize;
  constexpr int kPlanes = kSize / kPiece;
  using Piece = Unit<A, kPiece * sizeof(A)>;
  constexpr unsigned kAll = 0xffffffffu;
  extern __shared__ __align__(16) unsigned char shared[];
  A* const ring = reinterpret_cast<A*>(shared);

  const int width = 1 << p.log_width;
  const int column = threadIdx.x & (width - 1), slot = threadIdx.x >> p.log_width;
  const int slots = kColumnThreads >> p.log_width, rows = slots * kRows;  // of a step
  const int group_slots = 1 << p.log_group, in_group = slot & (group_slots - 1);
  const int group_rows = kRows << p.log_group;
  const int whole = (p.window - 1) / group_rows;  // groups between, or one less

  const auto place = [&](int row, int plane) {  // in the ring
    return ring + ((row * kPlanes + plane) * width + column) * kPiece;
  };
  const auto load_sums = [&](int row, A(&sums)[kSize]) {
#pragma unroll
    for (int h = 0; h < kPlanes; ++h) {
      const Piece piece = Piece::Load(place(row, h));
#pragma unroll
      for (int i = 0; i < kPiece; ++i) sums[h * kPiece + i] = piece.elements[i];
    }
  };

  for (int64_t block = blockIdx.x; block < p.blocks; block += gridDim.x) {
    const int64_t above = Divide(static_cast<uint64_t>(block), p.strips);
    const int64_t strip = block - above * static_cast<int64_t>(p.strips.divisor);
    const int64_t outer = Divide(static_cast<uint64_t>(above), p.segments);
    const int64_t begin =
        (above - outer * static_cast<int64_t>(p.segments.divisor)) * p.segment;  // of its sums
    const int64_t sums = p.m - begin < p.segment ? p.m - begin : p.segment;
    const int64_t at = kShifted ? (strip * (width - 1) + column - 1) * kSize  // of inner
                                : ((strip << p.log_width) + column) * kSize;
    const bool active = at >= 0 && at < p.inner;
    const T* const x = reinterpret_cast<const T*>(p.x) + outer * p.n * p.inner + at;
    T* const y = reinterpret_cast<T*>(p.y) + (outer * p.m + begin) * p.inner + at;

    const int64_t total = sums + p.window - 1;  // rows of x, padding included
    const auto wanted = [&](int64_t row) {
      const int64_t j = begin + row - p.pad;
      return active && row < total && j >= 0 && j < p.n;
    };
    const auto load = [&](int64_t first, Bits(&words)[kRows][kWords]) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const int64_t row = first + slot * kRows + k;
        const T* const from = x + (begin + row - p.pad) * p.inner;
        if constexpr (kShifted) {
          LoadWords(p.array, from, wanted(row), words[k]);
        } else {
          words[k][0] = Bits{};
          if (wanted(row)) words[k][0] = *reinterpret_cast<const Bits*>(from);
        }
      }
    };

    Bits next[kRows][kWords];
    load(0, next);
    int base = 0;  // the ring's row of the step's first row
    for (int64_t first = 0; first < total; first += rows) {
      Bits units[kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        if constexpr (kShifted) {
          const int64_t row = first + slot * kRows + k;
          const T* const from = x + (begin + row - p.pad) * p.inner;
          PatchWords<T>(p.array, from, wanted(row), next[k]);
          units[k] = ShiftUnit<sizeof(T)>(next[k][0], next[k][1], WordShift(from));
        } else {
          units[k] = next[k][0];
        }
      }
      if (first + rows < total) load(first + rows, next);

      A before[kSize], after[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) before[i] = after[i] = 0;
      if (group_slots > 1) {
        A up[kSize], down[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          up[i] = ToCompute(ElementOf<T>(units[0], i));
#pragma unroll
          for (int k = 1; k < kRows; ++k) up[i] += ToCompute(ElementOf<T>(units[k], i));
          down[i] = up[i];
        }
        const int lane = threadIdx.x & 31;
        for (int d = 1; d < group_slots; d <<= 1) {
          const bool has_left = in_group >= d, has_right = in_group + d < group_slots;
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            const A left = __shfl_sync(kAll, up[i], lane - (d << p.log_width));
            const A right = __shfl_sync(kAll, down[i], lane + (d << p.log_width));
            if (has_left) up[i] = left + up[i];
            if (has_right) down[i] += right;
          }
        }
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const A left = __shfl_sync(kAll, up[i], lane - width);
          const A right = __shfl_sync(kAll, down[i], lane + width);
          before[i] = in_group > 0 ? left : A(0);
          after[i] = in_group + 1 < group_slots ? right : A(0);
        }
      }

      int own = base + slot * kRows;  // the first of the thread's rows in the ring
      own -= own >= p.ring ? p.ring : 0;
#pragma unroll
      for (int k = kRows - 1; k >= 0; --k) {
        int row = own + k;
        row -= row >= p.ring ? p.ring : 0;
#pragma unroll
        for (int h = 0; h < kPlanes; ++h) {
          Piece piece;
#pragma unroll
          for (int i = 0; i < kPiece; ++i) {
            after[h * kPiece + i] += ToCompute(ElementOf<T>(units[k], h * kPiece + i));
            piece.elements[i] = after[h * kPiece + i];
          }
          piece.Store(place(row, h));
        }
      }
      __syncthreads();

      // Whole groups before the thread's group, the nearest first. Groups before the strip belong
      // to no window.
      const int64_t my_first = first + slot * kRows;
      const int64_t group = my_first / group_rows;
      const int group_at = own - static_cast<int>(my_first - group * group_rows);
      const auto group_row = [&](int back) {
        int row = group_at - back * group_rows;
        row += row < 0 ? p.ring : 0;
        return row;
      };
      A middle[kSize], furthest[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) middle[i] = furthest[i] = 0;
      if (whole > 1) {
        for (int back = 1 + in_group; back < whole; back += group_slots) {
          if (back > group) break;
          A sum[kSize];
          load_sums(group_row(back), sum);
#pragma unroll
          for (int i = 0; i < kSize; ++i) middle[i] += sum[i];
        }
        __syncwarp();
        for (int d = 1; d < group_slots; d <<= 1) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            middle[i] += __shfl_xor_sync(kAll, middle[i], d << p.log_width);
          }
        }
      }
      if (whole > 0 && whole <= group) load_sums(group_row(whole), furthest);

#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const int64_t row = my_first + k, i_sum = row - (p.window - 1);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          before[i] += ToCompute(ElementOf<T>(units[k], i));
        }
        const bool summed = i_sum >= 0 && i_sum < sums;
        if (!kShifted && (!active || !summed)) continue;
        A out[kSize];
        if (whole == 0 && k >= p.window - 1) {  // within the thread's own rows
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            out[i] = ToCompute(ElementOf<T>(units[k], i));
#pragma unroll
            for (int j = 1; j <= k; ++j) {
              if (j < p.window) out[i] += ToCompute(ElementOf<T>(units[k - j], i));
            }
          }
        } else {
          int at_ring = own + k - (p.window - 1);
          at_ring += at_ring < 0 ? p.ring : 0;
          at_ring -= at_ring >= p.ring ? p.ring : 0;
          load_sums(at_ring, out);
          const bool far = whole > 0 && i_sum < (group - whole) * group_rows;
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            out[i] = out[i] + before[i] + middle[i];
            if (far) out[i] += furthest[i];
          }
        }
        U unit;
#pragma unroll
        for (int i = 0; i < kSize; ++i) unit.elements[i] = FromCompute<T>(out[i]);
        if constexpr (kShifted) {
          uint4 own, left;
          memcpy(&own, unit.elements, 16);
          const int from = (threadIdx.x & 31) - 1;
          left.x = __shfl_sync(kAll, own.x, from);
          left.y = __shfl_sync(kAll, own.y, from);
          left.z = __shfl_sync(kAll, own.z, from);
          left.w = __shfl_sync(kAll, own.w, from);
          if (column == 0 || !summed) continue;
          StoreShifted(left, own, y + i_sum * p.inner, at, p.inner);
        } else {
          unit.template Store<CacheHint::kStreaming>(y + i_sum * p.inner);
        }
      }
      __syncthreads();  // the ring is written again
      base += rows;
      base -= base >= p.ring ? p.ring : 0;
    }
  }
}

}  // namespace jax_fastops::cuda::window_sum

#endif  // JAX_FASTOPS_WINDOW_SUM_COLUMNS_CUH_

// Window sums along the last axis, for long windows.
//
// A block, or a few of its warps, computes a tile of one row's sums. The tile's elements and the
// next 2 * radius elements are cut into groups shorter than the window: a unit of 16 bytes, or the
// units of 2 to 32 adjacent lanes. A window then begins in one group and ends in a later one:
//
//   sum = (end of its first group) + (whole groups between) + (beginning of its last group)
//
// Each thread computes the sums from both ends of a group to each of its elements: serially within
// a unit, by shuffles across lanes. The sums from the end of the group belong to the windows that
// begin at the thread's elements, and stay in registers. The sums from the group's beginning are
// needed one window to the left, and go through shared memory. The cost does not depend on the
// window, except for the elements after the tile, which the next tile reads again from L2.
//
// Units begin where y is aligned, so that stores are whole. If x is aligned differently, two
// aligned loads are shifted into one unit; the second load hits L1.
#ifndef JAX_FASTOPS_WINDOW_SUM_ROWS_CUH_
#define JAX_FASTOPS_WINDOW_SUM_ROWS_CUH_

#include <cstdint>
#include <cstring>

#include "core/cuda/divide.cuh"
#include "core/cuda/packed.cuh"
#include "core/fast_divide.h"
#include "window_sum/words.cuh"

namespace jax_fastops::cuda::window_sum {

inline constexpr int kRowThreads = 512;    // maximum per block
inline constexpr int kRowResident = 1024;  // threads per SM, limited by their registers
inline constexpr int kRowMiddles = 64;     // groups of a tile with several whole groups after them

struct RowsParams {
  const char* x;
  char* y;
  int64_t rows;
  int64_t n;
  int64_t m;
  int64_t pad;
  int window;
  int log_lanes;        // of a group
  FastDivisor64 tiles;  // of a row
  int tile_units;       // of y
  int halo_units;       // more of x
};

// The number of units of a thread.
template <typename T>
inline constexpr int kRowUnits = sizeof(T) == 2 ? 2 : 4;

// Shared memory for the tile of `threads` threads, in bytes. Lanes are a unit apart; the padding
// avoids bank conflicts.
template <typename T>
constexpr int RowShared(int threads) {
  constexpr int kSize = 16 / sizeof(T);
  return (threads * kRowUnits<T> * (kSize + 1) + kRowMiddles) *
         static_cast<int>(sizeof(ComputeType<T>));
}

template <typename T>
struct RowUnit {
  using A = ComputeType<T>;
  static constexpr int kSize = 16 / sizeof(T);

  A values[kSize];

  explicit __device__ __forceinline__ RowUnit(const uint4& bits) {
    T elements[kSize];
    memcpy(elements, &bits, 16);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = ToCompute(elements[i]);
  }

  __device__ __forceinline__ A Sum() const {
    A sum = values[0];
#pragma unroll
    for (int i = 1; i < kSize; ++i) sum += values[i];
    return sum;
  }
};

// The elements beginning at index `first` of a row, 0 outside of it. For the ends of rows and
// arrays.
template <typename T>
__device__ __forceinline__ uint4 LoadRagged(const T* row, int64_t first, int64_t n) {
  constexpr int kSize = 16 / sizeof(T);
  T elements[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const int64_t at = first + i;
    elements[i] = at >= 0 && at < n ? row[at] : FromCompute<T>(0);
  }
  uint4 bits;
  memcpy(&bits, elements, 16);
  return bits;
}

template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowResident / kRowThreads)
    RowsKernel(const RowsParams p) {
  using A = ComputeType<T>;
  constexpr int kSize = 16 / sizeof(T), kUnits = kRowUnits<T>, kPitch = kSize + 1;
  constexpr unsigned kAll = 0xffffffffu;
  extern __shared__ __align__(16) unsigned char shared[];
  const int threads = blockDim.x;
  A* begins =
      reinterpret_cast<A*>(shared) + threadIdx.y * (threads * kUnits * kPitch + kRowMiddles);
  A* middles = begins + threads * kUnits * kPitch;

  const int lanes = 1 << p.log_lanes;
  const int in_group = threadIdx.x & (lanes - 1);
  const int whole = (p.window - 1) / (kSize << p.log_lanes);  // groups between, or one less
  // The distance from a window's first element to its last, in units and remaining elements.
  const int ahead = (p.window - 1) / kSize, offset = (p.window - 1) % kSize;

  const int64_t tiles = p.rows * static_cast<int64_t>(p.tiles.divisor);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < tiles;
       first += step) {
    const int64_t tile = first + threadIdx.y;
    const bool active = tile < tiles;
    const int64_t row = active ? Divide(static_cast<uint64_t>(tile), p.tiles) : 0;
    const int64_t in_row = tile - row * static_cast<int64_t>(p.tiles.divisor);
    const T* x = reinterpret_cast<const T*>(p.x) + row * p.n;
    T* y = reinterpret_cast<T*>(p.y) + row * p.m;
    // Index in y of the tile's first element; negative if y's row begins within a unit.
    const int64_t begin = in_row * p.tile_units * kSize -
                          static_cast<int64_t>((reinterpret_cast<uintptr_t>(y) & 15) / sizeof(T));
    const int units = active ? p.tile_units + p.halo_units : 0;
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(x + (begin - p.pad)) &
                                       15);  // the same all along the row

    uint4 raw[kUnits];
    const char* const array_end = p.x + p.rows * p.n * static_cast<int64_t>(sizeof(T));
    if (shift == 0) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        const int unit = k * threads + threadIdx.x;
        const int64_t at = begin - p.pad + unit * kSize;
        raw[k] = make_uint4(0, 0, 0, 0);
        if (unit < units && at >= 0 && at + kSize <= p.n) {
          raw[k] = __ldg(reinterpret_cast<const uint4*>(x + at));
        }
      }
    } else {
      uint4 next[kUnits];
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        const int unit = k * threads + threadIdx.x;
        const int64_t at = begin - p.pad + unit * kSize;
        const char* low = reinterpret_cast<const char*>(x + at) - shift;
        raw[k] = next[k] = make_uint4(0, 0, 0, 0);
        if (unit < units && at >= 0 && at + kSize <= p.n && low >= p.x && low + 32 <= array_end) {
          raw[k] = __ldg(reinterpret_cast<const uint4*>(low));
          next[k] = __ldg(reinterpret_cast<const uint4*>(low + 16));
        }
      }
#pragma unroll
      for (int k = 0; k < kUnits; ++k) raw[k] = ShiftUnit<sizeof(T)>(raw[k], next[k], shift);
    }

    A ends[kUnits];  // sums of the group's elements after the thread's unit
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int unit = k * threads + threadIdx.x;
      ends[k] = 0;
      if (k * threads + static_cast<int>(threadIdx.x & ~31u) >= units) continue;  // the whole warp
      const int64_t at = begin - p.pad + unit * kSize;
      const char* low = reinterpret_cast<const char*>(x + at) - shift;
      const bool loaded =
          at >= 0 && at + kSize <= p.n && (shift == 0 || (low >= p.x && low + 32 <= array_end));
      if (unit < units && !loaded && at < p.n && at + kSize > 0) {
        raw[k] = LoadRagged<T>(x, at, p.n);
      }
      const RowUnit<T> v(raw[k]);
      A before = 0;
      if (lanes > 1) {
        A up = v.Sum(), down = up;
        for (int d = 1; d < lanes; d <<= 1) {
          const A left = __shfl_up_sync(kAll, up, d, lanes);
          const A right = __shfl_down_sync(kAll, down, d, lanes);
          if (in_group >= d) up = left + up;
          if (in_group + d < lanes) down += right;
        }
        const A left = __shfl_up_sync(kAll, up, 1, lanes);
        const A right = __shfl_down_sync(kAll, down, 1, lanes);
        before = in_group > 0 ? left : A(0);
        ends[k] = in_group + 1 < lanes ? right : A(0);
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        before += v.values[i];
        begins[unit * kPitch + i] = before;
      }
    }
    __syncthreads();

    // The sum up to a group's last element is the group's sum.
    const auto group_sum = [&](int group) {
      return begins[((group + 1) << p.log_lanes) * kPitch - 2];
    };
    if (whole > 1) {  // the same for all
      const int groups = active ? ((p.tile_units - 1) >> p.log_lanes) + 1 : 0;
      for (int g = threadIdx.x; g < groups; g += threads) {
        A sum = 0;
        for (int i = 1; i < whole; ++i) sum += group_sum(g + i);
        middles[g] = sum;
      }
      __syncthreads();
    }

#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int unit = k * threads + threadIdx.x;
      const int64_t at = begin + unit * kSize;
      if (!active || unit >= p.tile_units || at >= p.m) continue;
      const RowUnit<T> v(raw[k]);
      const int group = unit >> p.log_lanes;
      // The sums for the windows that end in the unit `ahead`, and in the one after it.
      const int last = (unit + ahead) >> p.log_lanes;
      const int next = (unit + ahead + 1) >> p.log_lanes;
      A middle = whole > 1 ? middles[group] : A(0), next_middle = middle;
      if (whole > 0) {
        if (last - group > whole) middle += group_sum(group + whole);
        if (offset > 0 && next - group > whole) next_middle += group_sum(group + whole);
      }
      A end = ends[k];
      A sums[kSize];
#pragma unroll
      for (int i = kSize - 1; i >= 0; --i) {
        end += v.values[i];
        const bool over = i + offset >= kSize;  // the same for all lanes
        const A begin_sum = begins[(unit + ahead) * kPitch + i + offset + (over ? 1 : 0)];
        sums[i] = end + begin_sum + (over ? next_middle : middle);
      }
      if (ahead == 0) {  // windows within one unit
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if (i + offset >= kSize) continue;
          A sum = v.values[i];
#pragma unroll
          for (int j = 1; j < kSize; ++j) {
            if (i + j < kSize && j < p.window) sum += v.values[i + j];
          }
          sums[i] = sum;
        }
      }
      Packed128<T> out;
#pragma unroll
      for (int i = 0; i < kSize; ++i) out[i] = FromCompute<T>(sums[i]);
      if (at >= 0 && at + kSize <= p.m) {
        StorePacked<CacheHint::kStreaming>(y + at, out);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if (at + i >= 0 && at + i < p.m) y[at + i] = out[i];
        }
      }
    }
    __syncthreads();  // `begins` is written again
  }
}

}  // namespace jax_fastops::cuda::window_sum

#endif  // JAX_FASTOPS_WINDOW_SUM_ROWS_CUH_

// The backward of layer norm and RMS norm for rows that no block or cluster can hold.
//
// Each row is divided into tiles. A first kernel reduces each tile of a row. A second one
// (core/cuda/partial_sums.cuh) adds up the sums of the tiles for each row. In the third, a block
// processes the rows of one tile and one partial sum. The tile's sums, and later the row's totals,
// are two values of the accumulator's type. They are stored in the place of the tile's dx until
// that is written.
#pragma once

#include <cstdint>
#include <cstring>
#include <iterator>

#include "core/cuda/group.cuh"
#include "core/cuda/partial_sums.cuh"
#include "core/cuda/vec.cuh"
#include "norm/backward_ring.cuh"
#include "norm/plan.h"

namespace jax_fastops::cuda {
namespace {

constexpr int kLongColumns = kNormLongTile / kBlock;  // per thread

__device__ __forceinline__ Range TileOf(int64_t tile, int64_t tiles, int64_t n) {
  // Every tile has at least half the maximum length.
  return {tile * n / tiles, (tile + 1) * n / tiles};
}

// Stores or loads two values at an address that is only aligned to an element of dx.
template <typename T, typename A>
__device__ __forceinline__ void StoreSums(T* at, const A (&values)[2]) {
  T pieces[2 * sizeof(A) / sizeof(T)];
  memcpy(pieces, values, 2 * sizeof(A));
#pragma unroll
  for (int i = 0; i < static_cast<int>(std::size(pieces)); ++i) at[i] = pieces[i];
}
template <typename T, typename A>
__device__ __forceinline__ void LoadSums(const T* at, A (&values)[2]) {
  T pieces[2 * sizeof(A) / sizeof(T)];
#pragma unroll
  for (int i = 0; i < static_cast<int>(std::size(pieces)); ++i) pieces[i] = at[i];
  memcpy(values, pieces, 2 * sizeof(A));
}

template <typename T>
struct LongTile {
  using A = ComputeType<T>;
  int64_t first;  // first column of this thread; its columns are kBlock apart
  int columns;    // the number of its columns
  A scale[kLongColumns];

  __device__ __forceinline__ LongTile(const Params& p, const Range& tile) {
    first = tile.begin + threadIdx.x;
    columns = static_cast<int>((tile.end - first + kBlock - 1) / kBlock);
#pragma unroll
    for (int j = 0; j < kLongColumns; ++j) {
      scale[j] = 1;
      if (j < columns && p.scale.data != nullptr) {
        const int64_t column = first + j * kBlock;
        scale[j] = p.scale.wide ? static_cast<const A*>(p.scale.data)[column]
                                : ToCompute(static_cast<const T*>(p.scale.data)[column]);
      }
    }
  }

  // Loads this thread's xhat and dy of a row.
  __device__ __forceinline__ void Load(const Params& p, int64_t row, A rstd,
                                       A (&xhat)[kLongColumns], A (&dy)[kLongColumns]) const {
    const T* dys = static_cast<const T*>(p.arrays[kDy]) + row * p.n + first;
    const T* s = static_cast<const T*>(p.arrays[kS]) + row * p.n + first;
    const A mean = p.arrays[kMean] != nullptr ? static_cast<const A*>(p.arrays[kMean])[row] : A(0);
#pragma unroll
    for (int j = 0; j < kLongColumns; ++j) {
      xhat[j] = dy[j] = 0;
      if (j < columns) {
        xhat[j] = ToCompute(s[j * kBlock]);
        dy[j] = ToCompute(dys[j * kBlock]);
      }
    }
    if (p.arrays[kDy2] != nullptr) {
      const T* more = static_cast<const T*>(p.arrays[kDy2]) + row * p.n + first;
#pragma unroll
      for (int j = 0; j < kLongColumns; ++j) {
        if (j < columns) {
          dy[j] = ToCompute(FromCompute<T>(dy[j] + ToCompute(more[j * kBlock])));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kLongColumns; ++j) {
      if (j < columns) xhat[j] = (xhat[j] - mean) * rstd;
    }
  }
};

struct LongSums {
  static constexpr int kBlocks = 4;
  Params p;
  int64_t tiles;

  template <typename T>
  __device__ __forceinline__ void Run() const {
    using A = ComputeType<T>;
    using Group = RowGroup<kBlock>;
    __shared__ typename Group::template Scratch<A, 2> scratch;
    int phase = 0;
    for (int64_t block = blockIdx.x; block < p.all_rows * tiles; block += gridDim.x) {
      const int64_t row = block / tiles;
      const Range range = TileOf(block - row * tiles, tiles, p.n);
      const LongTile<T> tile(p, range);
      A xhat[kLongColumns], dy[kLongColumns], totals[2] = {};
      tile.Load(p, row, static_cast<const A*>(p.arrays[kRstd])[row], xhat, dy);
#pragma unroll
      for (int j = 0; j < kLongColumns; ++j) {
        totals[0] += dy[j] * tile.scale[j];
        totals[1] += dy[j] * tile.scale[j] * xhat[j];
      }
      Group::AllReduce(Sum(), totals, scratch, phase);
      if (threadIdx.x == 0) StoreSums(static_cast<T*>(p.dx) + row * p.n + range.begin, totals);
    }
  }
};

// Adds up the sums of the tiles of a row, and stores the row's means in the place of each of them.
// They are read and written as pieces of 2 bytes, whatever the type of dx.
template <typename A>
struct LongTotals {
  using Value = A;
  static constexpr int kValues = 2;
  static constexpr int kPlans = 1;

  char* dx;
  int itemsize;
  int64_t n, tiles;
  bool centered;

  struct Terms {
    const char* row;
    int itemsize;
    int64_t n, tiles;

    __device__ __forceinline__ int64_t At(uint32_t tile) const {
      return TileOf(tile, tiles, n).begin * itemsize;
    }
    __device__ __forceinline__ void Load(int64_t place, A (&values)[2]) const {
      LoadSums(reinterpret_cast<const uint16_t*>(row + place), values);
    }
  };

  __device__ __forceinline__ Terms TermsOf(int64_t, int64_t row) const {
    return {dx + row * n * itemsize, itemsize, n, tiles};
  }

  __device__ __forceinline__ void Write(int64_t, int64_t row, const A (&sums)[2], int writer,
                                        int writers) const {
    const A means[2] = {centered ? sums[0] / A(n) : A(0), sums[1] / A(n)};
    for (int64_t tile = writer; tile < tiles; tile += writers) {
      const int64_t place = row * n + TileOf(tile, tiles, n).begin;
      StoreSums(reinterpret_cast<uint16_t*>(dx + place * itemsize), means);
    }
  }
};

struct LongRows {
  static constexpr int kBlocks = 2;
  Params p;
  int64_t tiles;

  template <typename T>
  __device__ __forceinline__ void Run() const {
    using A = ComputeType<T>;
    for (int64_t block = blockIdx.x; block < p.partials * tiles; block += gridDim.x) {
      const int64_t partial = block / tiles;
      const Range range = TileOf(block - partial * tiles, tiles, p.n);
      const LongTile<T> tile(p, range);
      const Range rows = RowsOf(partial, p.rows, p.sums);
      A dscale[kLongColumns] = {}, dbias[kLongColumns] = {}, dinput_bias[kLongColumns] = {};
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        A means[2];
        LoadSums(static_cast<const T*>(p.dx) + row * p.n + range.begin, means);
        A xhat[kLongColumns], dy[kLongColumns];
        const A rstd = static_cast<const A*>(p.arrays[kRstd])[row];
        tile.Load(p, row, rstd, xhat, dy);
        RowGroup<kBlock>::Sync();  // all threads have read the means, which dx overwrites now
        T* dx = static_cast<T*>(p.dx) + row * p.n + tile.first;
#pragma unroll
        for (int j = 0; j < kLongColumns; ++j) {
          if (j < tile.columns) {
            A gradient = rstd * (dy[j] * tile.scale[j] - means[0] - xhat[j] * means[1]);
            if (p.arrays[kDsum] != nullptr) {
              gradient += ToCompute(
                  static_cast<const T*>(p.arrays[kDsum])[row * p.n + tile.first + j * kBlock]);
            }
            dscale[j] += dy[j] * xhat[j];
            dbias[j] += dy[j];
            dinput_bias[j] += gradient;
            dx[j * kBlock] = FromCompute<T>(gradient);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kLongColumns; ++j) {
        if (j < tile.columns) {
          const int64_t at = partial * p.n + tile.first + j * kBlock;
          if (p.dscale != nullptr) static_cast<A*>(p.dscale)[at] = dscale[j];
          if (p.dbias != nullptr) static_cast<A*>(p.dbias)[at] = dbias[j];
          if (p.dinput_bias != nullptr) static_cast<A*>(p.dinput_bias)[at] = dinput_bias[j];
        }
      }
    }
  }
};

}  // namespace
}  // namespace jax_fastops::cuda

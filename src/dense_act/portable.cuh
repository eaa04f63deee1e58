// The tiles of dense_act for devices and code without products of warpgroups: products of single
// warps, whose operands all threads copy. Each group has 64 rows of every tile.
#pragma once

#include "core/cuda/dependent.cuh"
#include "dense_act/tile.cuh"

namespace jax_fastops::cuda {

inline constexpr int kPortableSlots = 2;

// Starts to copy a step of both operands into a slot. What is outside of them is zeros.
template <typename T, typename Tile>
__device__ __forceinline__ void CopyStep(const DenseActCall& call, int row, int column, int depth,
                                         T* slot) {
  constexpr int kThreads = Tile::kGroups * Tile::kGroup;
  const int word = threadIdx.x % 8;
  const T* const x = static_cast<const T*>(call.x);
  const T* const kernel = static_cast<const T*>(call.kernel);
  for (int i = threadIdx.x / 8; i < kRows; i += kThreads / 8) {
    const bool inside = row + i < call.rows && depth + word * 8 < call.depth;
    const int64_t at = inside ? int64_t{row + i} * call.depth + depth + word * 8 : 0;
    CopyAsyncOrZero(inside, slot + Swizzled(i, word), x + at);
  }
  for (int i = threadIdx.x / 8; i < kDepth * Tile::kColumns / 64; i += kThreads / 8) {
    const int d = depth + i % kDepth, c = column + i / kDepth * 64 + word * 8;
    const bool inside = d < call.depth && c < call.columns;
    const int64_t at = inside ? int64_t{d} * call.columns + c : 0;
    CopyAsyncOrZero(inside, slot + (kRows + i / kDepth * 64) * kDepth + Swizzled(i % kDepth, word),
                    kernel + at);
  }
}

template <typename T, typename Tile>
__device__ __forceinline__ void ComputeTilesPortably(const DenseParams& p,
                                                     const DenseShared<T, Tile>& shared, int group,
                                                     int tiles, int across, int steps) {
  const int lane = threadIdx.x % kWarpSize, own = WarpIndex() * 16;
  LetDependentsStart();
  AwaitPredecessors();
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int row = tile / across * kRows, column = tile % across * Tile::kColumns;
    MatrixC c[1][Tile::kColumns / 8] = {};
    LoadTileBias<T, Tile>(p.call, column, shared.bias);
    CopyStep<T, Tile>(p.call, row, column, 0, shared.slots);
    for (int step = 0; step < steps; ++step) {
      const T* const slot = shared.slots + step % 2 * Tile::kSlot;
      AwaitAllCopies();
      AwaitThreads<256>(kBothGroups);
      if (step + 1 < steps) {
        CopyStep<T, Tile>(p.call, row, column, (step + 1) * kDepth,
                          shared.slots + (step + 1) % 2 * Tile::kSlot);
      }
#pragma unroll
      for (int i = 0; i < kDepth / 16; ++i) {
        MatrixA x;
        LoadMatrices<false>(x, slot + Swizzled(own + lane % 16, i * 2 + lane / 16));
#pragma unroll
        for (int t = 0; t < Tile::kColumns / 8; t += 2) {
          uint32_t kernel[4];
          const int word = t % 8 + lane / 16;
          LoadMatrices<true>(
              kernel, slot + (kRows + t / 8 * 64) * kDepth + Swizzled(i * 16 + lane % 16, word));
          Multiply<T>(c[0][t], x, kernel);
          Multiply<T>(c[0][t + 1], x, kernel + 2);
        }
      }
      AwaitThreads<256>(kBothGroups);
    }
    FinishTile<T, Tile>(p, c, shared, group, row + group * 64, column);
  }
}

}  // namespace jax_fastops::cuda

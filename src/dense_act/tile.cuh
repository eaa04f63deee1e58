// Tiles of the result of dense_act: where they are, and what follows the product.
#pragma once

#include "core/cuda/activation.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/matrix.cuh"
#include "core/cuda/ring.cuh"
#include "core/cuda/tile_copy.cuh"
#include "core/cuda/vec.cuh"
#include "core/cuda/warpgroup.cuh"
#include "dense_act/dense_act.h"

namespace jax_fastops::cuda {

// Elements of x and of the kernel come in steps of 64 along the depth. A step of both is a slot of
// shared memory: 128 rows of x, and arrays of 64 columns of the kernel.
inline constexpr int kDepth = 64, kRows = 128, kPart = 64 * 64;  // kPart: 64 rows and columns

// A tile has 128 rows. Two groups of four warps compute it: each one 64 rows of every tile or, with
// kTurns, all rows of every second tile, while the other group finishes the tile before.
template <int kColumns_, int kSlots_, bool kTurns_>
struct DenseTile {
  static constexpr int kColumns = kColumns_, kSlots = kSlots_;
  static constexpr bool kTurns = kTurns_;
  static constexpr int kOwn = kTurns ? 2 : 1;                // times 64 rows, of a group
  static constexpr int kGroups = 2, kGroup = 128;            // threads of a group
  static constexpr int kThreads = (kGroups + 1) * kGroup;    // one more group copies
  static constexpr int kSlot = (kRows + kColumns) * kDepth;  // elements
  static constexpr int kFinished = kGroups * 2 * kPart;      // elements that wait to be stored
  static constexpr int kOther = kGroups * kColumns * 4 + Ring<kSlots>::kBytes;  // bytes: bias, ring

  static constexpr int64_t SharedBytes(int slots) {
    return int64_t{2} * (slots * kSlot + kFinished) + kOther;
  }
};

struct DenseParams {
  CUtensorMap x, kernel, y;  // not set where tiles cannot be copied
  DenseActCall call;
};

// What a block has in shared memory.
template <typename T, typename Tile>
struct DenseShared {
  T *slots, *finished;  // `finished`: two parts of this group
  float* bias;          // of this group
  Ring<Tile::kSlots> ring;

  __device__ __forceinline__ DenseShared(unsigned char* shared, int slot_count, int group)
      : slots(reinterpret_cast<T*>(shared)),
        finished(slots + slot_count * Tile::kSlot + group * 2 * kPart),
        bias(reinterpret_cast<float*>(slots + slot_count * Tile::kSlot + Tile::kFinished) +
             group * Tile::kColumns),
        ring(bias + (Tile::kGroups - group) * Tile::kColumns) {}
};

// Barriers of the block. The first two are also those of the second group, plus 1.
inline constexpr int kGroupOnly = 1, kTurn = 3, kBothGroups = 5;

// The bias of a tile's columns in float32.
template <typename T, typename Tile>
__device__ __forceinline__ void LoadTileBias(const DenseActCall& call, int column, float* bias) {
#pragma unroll
  for (int i = threadIdx.x % Tile::kGroup; i < Tile::kColumns; i += Tile::kGroup) {
    const int at = column + i;
    float b = 0;
    if (call.bias != nullptr && at < call.columns) {
      b = call.wide_bias ? static_cast<const float*>(call.bias)[at]
                         : ToCompute(static_cast<const T*>(call.bias)[at]);
    }
    bias[i] = b;
  }
}

// Puts act(c + bias) of 64 columns of a group's 64 rows into shared memory. A lane has two rows.
template <typename T, Activation kActivation>
__device__ __forceinline__ void Activate(const MatrixC* c, const float* bias, T* rows, int lane) {
  const int row = WarpIndex() % 4 * 16 + lane / 4, pair = lane % 4 * 2;
  // A load between the stores would wait for them: 1024 x 768 -> 3072 in 12.1 in place of 11.1 us
  // on an H200.
  Unit<float, 8> b[8];
#pragma unroll
  for (int t = 0; t < 8; ++t) b[t] = Unit<float, 8>::Load(bias + t * 8 + pair);
#pragma unroll
  for (int t = 0; t < 8; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float y[2] = {ActivatedSum<kActivation, T>(c[t][i * 2], b[t][0]),
                          ActivatedSum<kActivation, T>(c[t][i * 2 + 1], b[t][1])};
      Vec<T, 4>::Packed(y).Store(rows + Swizzled(row + i * 8, t) + pair);
    }
  }
}

// Stores 64 columns of a group's rows, without a description of the matrix.
template <typename T>
__device__ __forceinline__ void StoreRows(const DenseActCall& call, int row, int column,
                                          const T* rows) {
  const int word = threadIdx.x % 8, at = column + word * 8;
  for (int i = threadIdx.x % 128 / 8; i < 64 && row + i < call.rows; i += 16) {
    if (at >= call.columns) break;
    Unit<T>::Load(rows + Swizzled(i, word))
        .Store(static_cast<T*>(call.y) + int64_t{row + i} * call.columns + at);
  }
}

// Writes a group's part of a tile: act(c + bias), 64 columns at once. While one part is being
// stored, the next one is computed.
template <typename T, typename Tile, int kOwn>
__device__ __forceinline__ void FinishTile(const DenseParams& p,
                                           MatrixC (&c)[kOwn][Tile::kColumns / 8],
                                           const DenseShared<T, Tile>& shared, int group, int row,
                                           int column) {
  constexpr int kAcross = Tile::kColumns / 64;
  const int lane = threadIdx.x % kWarpSize;
  const bool stores = threadIdx.x % Tile::kGroup == 0;
  ForActivation(p.call.activation, [&](auto known) {
#pragma unroll
    for (int i = 0; i < kOwn * kAcross; ++i) {
      const int first = row + i / kAcross * 64, part = i % kAcross;
      T* const rows = shared.finished + i % 2 * kPart;
      if (kWarpgroups && stores) {
        // With an odd number of parts, the last store of the tile before has the first one's place.
        if (i == 0 && kOwn * kAcross % 2 != 0) {
          AwaitReadsOfStores<0>();
        } else {
          AwaitReadsOfStores<1>();
        }
      }
      AwaitThreads<Tile::kGroup>(kGroupOnly + group);
      Activate<T, known.value>(c[i / kAcross] + part * 8, shared.bias + part * 64, rows, lane);
      ShowToProducts();
      AwaitThreads<Tile::kGroup>(kGroupOnly + group);
      if constexpr (!kWarpgroups) {
        StoreRows(p.call, first, column + part * 64, rows);
      } else if (stores && first < p.call.rows) {
        StoreTile(p.y, first, column + part * 64, rows);
      }
    }
  });
}

}  // namespace jax_fastops::cuda

// The forward of layer norm and RMS norm for long rows, which a cluster of blocks holds.
//
// Reading the parameters from L2 for every row would move as many bytes as the row itself, or more,
// and every row would wait for them. So blocks are persistent and process many rows. Each thread
// keeps the parameters of its columns in shared memory, where no other thread reads them. The next
// row is loaded while the current one is reduced.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/cuda/group.cuh"
#include "core/cuda/math.cuh"
#include "core/cuda/vec.cuh"
#include "norm/forward_row.cuh"
#include "norm/plan.h"

namespace jax_fastops::cuda {
namespace {

// The threads of a block, which hold the block's part of a row. Sums are those of the cluster.
struct LongGroup {
  static constexpr int kSize = kNormLongThreads;
  template <typename A, int kMost>
  using Scratch = ClusterSum<A, kMost, kNormLongThreads / 32, kNormLongCluster, false>;

  static __device__ __forceinline__ int Rank() { return threadIdx.x; }

  template <typename A, int kCount, typename S>
  static __device__ __forceinline__ void AllReduce(Sum, A (&values)[kCount], S& scratch,
                                                   int& phase) {
    scratch.AllReduce(values, phase);
  }
};

// The columns of a parameter that a thread needs, in shared memory.
template <typename Row>
struct KeptParameter {
  using A = typename Row::A;
  static constexpr int kUnits = Row::kUnits;
  static constexpr int kPieces = Row::kSize * int{sizeof(A)} / 16;  // words of a wide unit
  static constexpr int kBytes = kUnits * kPieces * 16 * kNormLongThreads;

  char* place = nullptr;  // null: absent
  bool wide = false;

  // Copies the parameter to shared memory at `next`, and advances `next`.
  __device__ __forceinline__ void Keep(const NormParameter& parameter, const Row& row,
                                       char*& next) {
    if (parameter.data == nullptr) return;
    place = next + threadIdx.x * 16;
    next += kBytes;
    wide = parameter.wide;
    const int size = wide ? sizeof(A) : sizeof(typename Row::T);
    const char* from = static_cast<const char*>(parameter.data) + row.piece.column * size;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (!row.Has(k)) continue;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (i * 16 >= Row::kSize * size) continue;
        Unit<uint32_t, 16>::Load(from + Row::First(k) * size + i * 16).Store(At(k, i));
      }
    }
  }

  __device__ __forceinline__ void Load(int k, A (&values)[Row::kSize]) const {
    if constexpr (!std::is_same_v<A, typename Row::T>) {
      if (!wide) {
        Row::U::Load(At(k, 0)).Unpack(values);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const auto piece = Unit<A, 16>::Load(At(k, i));
#pragma unroll
      for (int j = 0; j < piece.kSize; ++j) values[i * piece.kSize + j] = piece.elements[j];
    }
  }

 private:
  __device__ __forceinline__ char* At(int k, int i) const {
    return place + (k * kPieces + i) * kNormLongThreads * 16;
  }
};

template <typename T>
__global__ void __launch_bounds__(kNormLongThreads, 1024 / kNormLongThreads)
    NormLongKernel(const NormForwardParams p) {
  if constexpr (kHopper) {
    using Row = Held<T, NormAccess::kUnits, LongGroup, kNormLongHeld>;
    using U = typename Row::U;
    using A = typename Row::A;
    constexpr int kSize = Row::kSize, kUnits = Row::kUnits;
    __shared__ typename Row::Scratch scratch;
    extern __shared__ __align__(16) char kept[];
    int phase = 0;
    scratch.Begin();

    const int blocks = BlocksOfCluster(), block = BlockOfCluster();
    const int block_units = static_cast<int>(p.block_columns / kSize);
    const int64_t stride = gridDim.x / blocks;
    int64_t index = blockIdx.x / blocks;
    Row row(p, index, int64_t{block} * block_units, block_units);
    U units[kUnits], residual[kUnits];
    const auto fetch = [&] {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        units[k] = row.Has(k) ? row.piece.Load(p.x, Row::First(k)) : U{};
      }
      if (p.residual == nullptr) return;
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        if (row.Has(k)) residual[k] = row.piece.Load(p.residual, Row::First(k));
      }
    };
    fetch();
    KeptParameter<Row> input_bias, scale, bias;
    char* next = kept;
    input_bias.Keep(p.input_bias, row, next);
    scale.Keep(p.scale, row, next);
    bias.Keep(p.bias, row, next);
    for (; index < p.rows; index += stride) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        A(&values)[kSize] = row.s[k];
        units[k].Unpack(values);
        if (!p.adds || !row.Has(k)) continue;
        if (p.input_bias.data != nullptr) {
          A added[kSize];
          input_bias.Load(k, added);
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] += added[i];
        }
        if (p.residual != nullptr) {
          A added[kSize];
          residual[k].Unpack(added);
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] += added[i];
        }
        const U rounded = U::Packed(values);
        if (p.sum != nullptr) row.piece.Store(p.sum, Row::First(k), rounded);
        rounded.Unpack(values);
      }
      const int64_t start = row.piece.start;
      row.piece.start += stride * p.n;
      if (index + stride < p.rows) fetch();
      row.piece.start = start;

      const auto moments = row.Reduce(p.layer, Inverse<A>(p), scratch, phase);
      const A rstd = ReciprocalRoot(moments.squares * Inverse<A>(p) + Eps<A>(p));
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        if (!row.Has(k)) continue;
        A values[kSize], columns[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) values[i] = (row.s[k][i] - moments.correction) * rstd;
        if (p.scale.data != nullptr) {
          scale.Load(k, columns);
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] *= columns[i];
        }
        if (p.bias.data != nullptr) {
          bias.Load(k, columns);
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] += columns[i];
        }
        row.piece.Store(p.y, Row::First(k), U::Packed(values));
      }
      if (block == 0 && threadIdx.x == 0) {
        StoreMoments(p, index, moments.mean + moments.correction, rstd);
      }
      row.piece.start += stride * p.n;
    }
  }
}

}  // namespace
}  // namespace jax_fastops::cuda

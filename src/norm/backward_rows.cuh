// The backward of layer norm and RMS norm for rows that a worker holds in registers: the kernel
// that backward.cu describes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/cuda/dispatch.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/kept.cuh"
#include "core/cuda/partial_sums.cuh"
#include "core/cuda/vec.cuh"
#include "norm/backward_ring.cuh"
#include "norm/plan.h"

namespace jax_fastops::cuda {
namespace {

// How a kernel distributes the work. See NormBackwardForm.
template <typename Element, bool kAligned, int kIndex>
struct Layout {
  using T = Element;
  static constexpr NormBackwardForm kForm = NormBackwardFormOf(sizeof(T), kAligned, kIndex);
  using A = ComputeType<T>;
  static constexpr bool kInUnits = kAligned;
  using U = Unit<T, kAligned ? 16 : sizeof(T)>;
  static constexpr int kThreads = kForm.threads;  // of a row, in each block
  static constexpr int kSize = U::kSize;
  static constexpr int kUnits = kForm.columns / kSize;  // per thread
  static constexpr int kLeastUnits = kForm.least / kSize;
  static constexpr int kWorkers = NormWorkers(kThreads);
  static constexpr int kWorkerThreads = kBlock / kWorkers;
  static constexpr int kRowLanes = kThreads < kWarpSize ? kWarpSize / kThreads : 1;
  static constexpr int kRepeat = NormRepeat(kForm, sizeof(T));  // rows that a thread holds at once
  static constexpr int kTile = NormTile(kForm, sizeof(T));
  static constexpr bool kClusters = kForm.clusters && kHopper;
  // A worker of several warps that is not a block.
  static constexpr bool kWarps = kWorkers > 1 && kThreads > kWarpSize;
  // Such a worker has rows that fill only half of its columns. Its threads skip 8 columns at a time
  // if they have none of them.
  static constexpr int kGroup = kWarps && kSize < 8 ? 8 / kSize : kWarps ? 1 : kUnits;
  // Columns per thread that workers exchange through shared memory at once when they add up a
  // partial sum.
  static constexpr int kExchange = 8 * sizeof(float) / sizeof(A);
  static constexpr int kSums = 2 * kRepeat;  // per row of a tile: of g, and of g * xhat
  using Group = RowGroup<kThreads, kWorkers>;
  using Scratch =
      std::conditional_t<kClusters, ClusterSum<A, kSums, kBlock / kWarpSize, kNormBackwardCluster>,
                         typename Group::template Scratch<A, kSums>>;
  static_assert(kForm.columns % kSize == 0 && (kWorkers == 1 || kForm.columns % kExchange == 0));
  static_assert(kUnits % kGroup == 0 && kLeastUnits <= kUnits && kWorkerThreads % kWarpSize == 0);
};

// The shared memory of a block, next to its rings.
template <typename L>
struct Shared {
  Barrier full[L::kWorkers][kNormMaxStages];
  Source sources[kArrays];  // in shared memory to save registers
  typename L::Scratch scratch;
  typename L::A exchange[L::kWorkers > 1 ? 2 * L::kWorkers * L::kExchange * L::kThreads : 1];
};

// Adds up the contributions of a block's workers to a partial sum and writes it. All threads must
// call it.
template <typename L>
__device__ __forceinline__ void AddUpAndWriteSums(typename L::A (&totals)[L::kUnits][L::kSize],
                                                  typename L::A* buffers, int& phase, int columns,
                                                  typename L::A* sums) {
  using A = typename L::A;
  constexpr int kThreads = L::kThreads, kSize = L::kSize;
  constexpr int kExchangeUnits = L::kExchange / kSize;
  constexpr int kWidth = L::kExchange * kThreads;  // columns
  const int worker = threadIdx.x / L::kWorkerThreads, in_worker = threadIdx.x % L::kWorkerThreads;
#pragma unroll
  for (int first = 0; first < L::kUnits; first += kExchangeUnits) {
    A* buffer = buffers + phase * L::kWorkers * kWidth;
#pragma unroll
    for (int j = 0; j < kExchangeUnits; ++j) {
      if constexpr (kThreads < kWarpSize) {
        Butterfly(Sum(), totals[first + j], kWarpSize, kThreads);
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (in_worker < kThreads) {
          buffer[worker * kWidth + (j * kThreads + in_worker) * kSize + i] = totals[first + j][i];
        }
      }
    }
    // After its barrier, the other buffer is free too.
    AddParts<kBlock>(buffer, L::kWorkers, kWidth, kWidth, [&](int at, A sum) {
      const int column = first * kSize * kThreads + at;
      if (column < columns) sums[column] = sum;
    });
    phase ^= 1;
  }
}

// Writes a partial sum of which each thread has its own columns, `units` units of them.
template <typename L>
__device__ __forceinline__ void WriteSums(const typename L::A (&totals)[L::kUnits][L::U::kSize],
                                          int units, bool aligned, typename L::A* sums) {
  using A = typename L::A;
  constexpr int kSize = L::U::kSize;
#pragma unroll
  for (int j = 0; j < L::kUnits; ++j) {
    if (j < units) {
      A* to = sums + int64_t{j * L::kThreads + static_cast<int>(threadIdx.x)} * kSize;
      if constexpr (kSize * sizeof(A) % 16 == 0) {
        if (aligned) {
          using Piece = Unit<A, 16>;
#pragma unroll
          for (int i = 0; i < kSize; i += Piece::kSize) {
            Piece piece;
#pragma unroll
            for (int k = 0; k < Piece::kSize; ++k) piece.elements[k] = totals[j][i + k];
            piece.Store(to + i);
          }
          continue;
        }
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) to[i] = totals[j][i];
    }
  }
}

// A tile in its stage.
struct Tile {
  char* stage;
  int64_t row;
  int rows;
};

// One thread of a block.
template <typename L, bool kDrops>
struct Rows {
  using T = typename L::T;
  using A = typename L::A;
  using U = typename L::U;
  static constexpr int kUnits = L::kUnits, kSize = L::kSize, kRepeat = L::kRepeat;

  const Params& p;
  Shared<L>& shared;
  const int worker = threadIdx.x / L::kWorkerThreads;
  const int in_worker = threadIdx.x % L::kWorkerThreads;
  const int in_row = threadIdx.x % L::kThreads;
  const int row_lane = in_worker / L::kThreads;
  const int blocks = L::kClusters ? BlocksOfCluster() : 1;  // that share a row
  const int first_partial = blockIdx.x / blocks, stride = gridDim.x / blocks;
  // The columns of this block, and the number of units of them in this thread.
  const int first_column = L::kClusters ? BlockOfCluster() * p.ring.block_columns : 0;
  const int columns = max(0, min(p.ring.block_columns, static_cast<int>(p.n) - first_column));
  const int units = (columns / kSize - in_row + L::kThreads - 1) / L::kThreads;
  const bool has_mean = p.arrays[kMean] != nullptr, has_dsum = p.arrays[kDsum] != nullptr;
  const A inverse_n = A(1) / A(p.n);
  char* const stages;  // of this worker
  Cursor<L::kTile, L::kWorkers> ahead;
  int phase = 0;  // of sums along rows

  A scale[kUnits][kSize];
  // The sums over the rows of a partial sum.
  A dscale[kUnits][kSize], dbias[kUnits][kSize], dinput_bias[kUnits][kSize];
  // Values of a tile that stay in registers between Reduce and WriteDx.
  A xhat[kRepeat][kUnits][kSize], g[kRepeat][kUnits][kSize], rstd[kRepeat];
  // With dropout, the elements of a tile that are kept.
  KeptUnits<kSize, kUnits> kept[kDrops ? kRepeat : 1];

  __device__ __forceinline__ Rows(const Params& params, Shared<L>& block, char* ring)
      : p(params),
        shared(block),
        stages(ring +
               threadIdx.x / L::kWorkerThreads * params.ring.stages * params.ring.stage_bytes) {}

  __device__ __forceinline__ bool InColumns(int unit) const {
    return unit < L::kLeastUnits || unit < units;
  }
  // Whether this thread has no column of the group of units that begins with `unit`.
  __device__ __forceinline__ bool Skips(int unit) const {
    return L::kWarps && unit >= L::kLeastUnits && unit >= units;
  }
  static __device__ __forceinline__ bool InTile(const Tile& tile, int r) {
    return L::kTile == 1 || r < tile.rows;
  }
  // The offset of unit j of row r from the first element of a tile, in bytes.
  __device__ __forceinline__ int Place(int r, int j) const {
    return (r * columns + (j * L::kThreads + in_row) * kSize) * int{sizeof(T)};
  }
  __device__ __forceinline__ char* StageAt(int stage) const {
    return stages + stage * p.ring.stage_bytes;
  }

  // The offset of an element from a 16-byte boundary in global memory, which is also its offset in
  // the stage.
  static __device__ __forceinline__ int Offset(const void* array, int64_t index, int size) {
    return static_cast<int>((reinterpret_cast<uintptr_t>(array) + index * size) & 15);
  }
  // The address of the tile's elements of one array.
  __device__ __forceinline__ char* Elements(const Tile& tile, int slot, const void* array) const {
    const int64_t first = tile.row * p.n + first_column;
    return tile.stage + slot + (L::kInUnits ? 0 : Offset(array, first, sizeof(T)));
  }

  // Mean and rstd of row r. Both are 0 if there is no such row, so that it contributes nothing.
  struct Stats {
    A mean;
    A rstd;
  };
  __device__ __forceinline__ Stats StatsOf(const Tile& tile, int r) const {
    const char* at = tile.stage + 2 * p.ring.slot_bytes;
    const auto value = [&](const void* array) {
      return reinterpret_cast<const A*>(at + Offset(array, tile.row, sizeof(A)))[r];
    };
    Stats stats = {};
    if (InTile(tile, r)) {
      stats.rstd = value(p.arrays[kRstd]);
      at += p.ring.stat_bytes;
      if (has_mean) stats.mean = value(p.arrays[kMean]);
    }
    return stats;
  }

  // Initializes the barriers and the block's list of sources. All threads call it.
  __device__ __forceinline__ void Begin() {
    const int arrivals =
        (kHopper ? 0 : L::kWorkerThreads) + 3 + has_mean + has_dsum + (p.arrays[kDy2] != nullptr);
    if (in_worker < p.ring.stages) shared.full[worker][in_worker].Init(arrivals);
    if (threadIdx.x < kArrays) {
      shared.sources[threadIdx.x] = SourceOf<T>(p, threadIdx.x, first_column, columns);
    }
    if constexpr (L::kClusters) {
      shared.scratch.Begin();
    } else {
      Barrier::PublishInit();
      RowGroup<kBlock>::Sync();
    }
  }

  // Starts to copy the next tile of this worker, if there is one.
  __device__ __forceinline__ void Fill(int stage) {
    if (!ahead.Valid(p)) return;
    char* to = StageAt(stage);
    Barrier* barrier = &shared.full[worker][stage];
    if constexpr (kHopper) {
      // One thread per array, from the first ones of the worker, issues its copy.
      if (in_worker < kArrays) {
        const Source source = shared.sources[in_worker];
        if (source.data != nullptr) source.Copy(to, barrier, ahead.row, ahead.Rows(), 0, 1);
      }
    } else {
      for (int array = 0; array < kArrays; ++array) {
        const Source source = shared.sources[array];
        if (source.data == nullptr) continue;
        source.Copy(to, barrier, ahead.row, ahead.Rows(), in_worker, L::kWorkerThreads);
        if (in_worker == 0) barrier->Arrive();  // for its own stores; copies arrive below
      }
      barrier->ArriveAfterCopies();
    }
    ahead.Next(p, stride, worker);
  }

  __device__ __forceinline__ void LoadScale() {
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int column = first_column + (j * L::kThreads + in_row) * kSize + i;
        scale[j][i] = 1;
        if (InColumns(j) && p.scale.data != nullptr) {
          scale[j][i] = p.scale.wide ? static_cast<const A*>(p.scale.data)[column]
                                     : ToCompute(static_cast<const T*>(p.scale.data)[column]);
        }
      }
    }
  }

  // Replaces dy by dy + dy2, rounded, in the stage. Each thread does this for its own units, which
  // no other thread reads. It processes a batch at a time and loads all of it before the first
  // store.
  __device__ __forceinline__ void AddDy2(const Tile& tile) const {
    constexpr int kAll = kRepeat * kUnits, kBatch = kAll < 4 ? kAll : 4;
    char* const dys = Elements(tile, 0, p.arrays[kDy]);
    const char* const others =
        Elements(tile, p.ring.stage_bytes - p.ring.slot_bytes, p.arrays[kDy2]);
#pragma unroll 1
    for (int first = 0; first < kAll; first += kBatch) {
      bool in[kBatch];
      int at[kBatch];
      U sum[kBatch], other[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int k = kRepeat == 1 ? 0 : (first + b) / kUnits, j = first + b - k * kUnits;
        const int r = k * L::kRowLanes + row_lane;
        in[b] = j < units && InTile(tile, r);
        at[b] = in[b] ? Place(r, j) : 0;
        // Without a unit, load from a place that no thread writes.
        sum[b] = U::Load(in[b] ? dys + at[b] : others);
        other[b] = U::Load(others + at[b]);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          sum[b].elements[i] =
              FromCompute<T>(ToCompute(sum[b].elements[i]) + ToCompute(other[b].elements[i]));
        }
        if (in[b]) sum[b].Store(dys + at[b]);
      }
    }
    // Orders these stores before the bulk copy that will fill the stage again.
    if constexpr (kHopper) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  // Computes xhat, dy and dy * scale of a unit; 0 if there is no such unit.
  __device__ __forceinline__ void Load(const Tile& tile, const char* dys, const char* s,
                                       const Stats& stats, int r, int j, A (&x)[kSize],
                                       A (&dy)[kSize], A (&gs)[kSize]) const {
    const bool in = InColumns(j);
    U dy_unit, s_unit;
    if (in && InTile(tile, r)) {
      dy_unit = U::Load(dys + Place(r, j));
      s_unit = U::Load(s + Place(r, j));
    } else {
      memset(&dy_unit, 0, sizeof(U));
      memset(&s_unit, 0, sizeof(U));
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      dy[i] = ToCompute(dy_unit.elements[i]);
      // Outside the row a mean that is NaN must not propagate.
      x[i] = in ? (ToCompute(s_unit.elements[i]) - stats.mean) * stats.rstd : A(0);
      gs[i] = dy[i] * scale[j][i];
    }
  }

  // First step: adds the tile to the sums over rows, and computes its sums along rows.
  __device__ __forceinline__ void Reduce(const Tile& tile, A (&totals)[L::kSums]) {
    const char* const dys = Elements(tile, 0, p.arrays[kDy]);
    const char* const s = Elements(tile, p.ring.slot_bytes, p.arrays[kS]);
#pragma unroll
    for (int k = 0; k < kRepeat; ++k) {
      const int r = k * L::kRowLanes + row_lane;
      const Stats row = StatsOf(tile, r);
      rstd[k] = row.rstd;
      totals[2 * k] = totals[2 * k + 1] = 0;
#pragma unroll
      for (int group = 0; group < kUnits; group += L::kGroup) {
        if (Skips(group)) continue;
#pragma unroll
        for (int j = group; j < group + L::kGroup; ++j) {
          A(&x)[kSize] = xhat[k][j];
          A(&gs)[kSize] = g[k][j];
          A dy[kSize];
          Load(tile, dys, s, row, r, j, x, dy, gs);
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            dscale[j][i] += dy[i] * x[i];
            dbias[j][i] += dy[i];
            totals[2 * k] += gs[i];
            totals[2 * k + 1] += gs[i] * x[i];
          }
        }
      }
    }
  }

  // Sums over the threads of a row. All threads of the worker have read their part of the stage
  // after it.
  __device__ __forceinline__ void AllReduce(A (&totals)[L::kSums]) {
    if constexpr (L::kClusters) {
      shared.scratch.AllReduce(totals, phase);
    } else {
      L::Group::AllReduce(Sum(), totals, shared.scratch, phase);
      if constexpr (L::kWorkers > 1 && !L::kWarps) L::Group::Sync();
    }
  }

  // Draws the random bits of a tile.
  __device__ __forceinline__ void Draw(const Tile& tile) {
    const KeptLimit limit(p.dropout.largest);
#pragma unroll
    for (int k = 0; k < kRepeat; ++k) {
      const int64_t row = min(tile.row + k * L::kRowLanes + row_lane, p.all_rows - 1);
      kept[k].Draw(p.dropout.seeds.At(row), first_column + in_row * kSize, L::kThreads * kSize,
                   limit);
    }
  }

  // Second step: dx of the tile.
  __device__ __forceinline__ void WriteDx(const Tile& tile, const A (&totals)[L::kSums]) {
    const char* const dsum =
        Elements(tile, 2 * p.ring.slot_bytes + 2 * p.ring.stat_bytes, p.arrays[kDsum]);
    const int64_t place = (tile.row * p.n + first_column) * int64_t{sizeof(T)};
    char* const dx = static_cast<char*>(p.dx) + place;
#pragma unroll
    for (int k = 0; k < kRepeat; ++k) {
      const int r = k * L::kRowLanes + row_lane;
      const A mean_g = has_mean ? totals[2 * k] * inverse_n : A(0);
      const A mean_gx = totals[2 * k + 1] * inverse_n;
#pragma unroll
      for (int group = 0; group < kUnits; group += L::kGroup) {
        if (Skips(group)) continue;
#pragma unroll
        for (int j = group; j < group + L::kGroup; ++j) {
          const bool in = InColumns(j) && InTile(tile, r);
          A gradient[kSize];
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            gradient[i] = rstd[k] * (g[k][j][i] - mean_g - xhat[k][j][i] * mean_gx);
          }
          if (has_dsum && in) {
            const U dsum_unit = U::Load(dsum + Place(r, j));
#pragma unroll
            for (int i = 0; i < kSize; ++i) gradient[i] += ToCompute(dsum_unit.elements[i]);
          }
          U dx_unit;
          if constexpr (kDrops) {
            // No second pointer: no register is left for it.
            char* const dresidual = static_cast<char*>(p.dresidual) + (place + Place(r, j));
#pragma unroll
            for (int i = 0; i < kSize; ++i) {
              dx_unit.elements[i] = FromCompute<T>(gradient[i]);
              gradient[i] = kept[k].Has(j, i) ? gradient[i] * p.gain : A(0);
            }
            if (in && p.dresidual != nullptr) dx_unit.Store(dresidual);
          }
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            dinput_bias[j][i] += gradient[i];
            dx_unit.elements[i] = FromCompute<T>(gradient[i]);
          }
          if (in) dx_unit.Store(dx + Place(r, j));
        }
      }
    }
  }

  __device__ __forceinline__ void WritePartial(int64_t partial, int& exchange_phase) {
    const auto write = [&](A(&totals)[kUnits][kSize], void* sums) {
      if (sums == nullptr) return;
      A* to = static_cast<A*>(sums) + partial * p.n + first_column;
      if constexpr (L::kWorkers > 1) {
        AddUpAndWriteSums<L>(totals, shared.exchange, exchange_phase, columns, to);
      } else {
        WriteSums<L>(totals, units, p.aligned_sums, to);
      }
    };
    write(dscale, p.dscale);
    write(dbias, p.dbias);
    write(dinput_bias, p.dinput_bias);
  }

  __device__ __forceinline__ void Run() {
    Begin();
    ahead.Seek(p, first_partial, stride, worker);
    for (int i = 0; i < p.ring.stages; ++i) Fill(i);
    LoadScale();
    int stage = 0, parity = 0, exchange_phase = 0;
    for (int64_t partial = first_partial; partial < p.partials; partial += stride) {
      const Range range = RowsOf(partial, p.rows, p.sums);
      memset(dscale, 0, sizeof(dscale));
      memset(dbias, 0, sizeof(dbias));
      memset(dinput_bias, 0, sizeof(dinput_bias));
      for (int64_t row = range.begin + worker * L::kTile; row < range.end;
           row += L::kTile * L::kWorkers) {
        const Tile tile = {StageAt(stage), row,
                           static_cast<int>(min(int64_t{L::kTile}, range.end - row))};
        A totals[L::kSums];
        if constexpr (kDrops) Draw(tile);  // while the tile arrives
        shared.full[worker][stage].Wait(parity);
        if (p.arrays[kDy2] != nullptr) AddDy2(tile);
        Reduce(tile, totals);
        AllReduce(totals);
        if (!has_dsum) Fill(stage);
        WriteDx(tile, totals);
        if (has_dsum) {  // only this is still needed after the reduction
          L::Group::Sync();
          Fill(stage);
        }
        if (++stage == p.ring.stages) {
          stage = 0;
          parity ^= 1;
        }
      }
      WritePartial(partial, exchange_phase);
    }
  }
};

template <typename L, int kBytes, bool kDrops>
__device__ __forceinline__ void NormRows(const Params& p) {
  static_assert(sizeof(Shared<L>) <= kBytes);
  static_assert(kBytes <= (L::kWorkers > 1 ? kNormWorkersStatic : kNormBlockStatic));
  extern __shared__ __align__(128) char ring[];
  Rows<L, kDrops>(p, *reinterpret_cast<Shared<L>*>(SharedBytes<kBytes>()), ring).Run();
}

template <typename T, bool kAligned, int kForm, bool kDrops>
__global__ void __launch_bounds__(kBlock, 1) NormRowsKernel(const __grid_constant__ Params p) {
  using L = Layout<T, kAligned, kForm>;
  NormRows<L, sizeof(Shared<L>), kDrops>(p);
}

// One kernel for all types but float64, which has a form of its own.
template <bool kAligned, int kForm, bool kDrops>
__global__ void __launch_bounds__(kBlock, 1) NormAnyRowsKernel(const __grid_constant__ Params p) {
  constexpr int kBytes = std::max(sizeof(Shared<Layout<float, kAligned, kForm>>),
                                  sizeof(Shared<Layout<__half, kAligned, kForm>>));
  ForTypesOf<float>(p.dtype, [&]<typename T>(TypeTag<T>) {
    NormRows<Layout<T, kAligned, kForm>, kBytes, kDrops>(p);
  });
}

}  // namespace
}  // namespace jax_fastops::cuda

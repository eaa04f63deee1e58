// The backward pass of layer norm and RMS norm: dx, and the parameters' gradients as partial sums,
// in one pass that reads dy and s once.
//
// It moves 3 arrays (one more with dsum, and with dy2) and is bound by memory. What makes it hard
// is that a row is needed whole before any of its dx is known, and that the sums over rows want
// threads that keep their columns.
//
// - A worker holds one row at a time, or a few, in registers: a warp up to 1024 columns, a block of
//   256 threads up to 8192, a cluster of such blocks beyond (RowGroup). A thread has the same
//   columns of every row, up to 32; scale and the sums of its columns stay in its registers. The
//   sums are computed wanted or not: there is arithmetic to spare.
// - A block is persistent, one per SM, and gets its rows through a ring of stages in shared memory.
//   A stage is a tile of neighbouring rows, brought in by bulk copies that complete on a barrier,
//   so that 50 KB or more are in flight whatever the threads are doing, and no registers are held
//   for it. Warps that work alone have a ring each, and never wait for each other. Before sm_90 the
//   same ring is filled by cp.async.
// - Bulk copies move multiples of 16 bytes. Where rows are not that, the copies are of the aligned
//   pieces that cover them, and so read a few bytes more, of the same array; the rows lie in shared
//   memory as much off as they do in global memory. Threads then take single elements, neighbours
//   next to each other, instead of units of 16 bytes. Mean and rstd come the same way.
// - Where y had two users, their cotangents are added up in the stage, by the threads that read the
//   sum there then: nothing else has to know of the second one, and it costs no registers.
// - A partial sum belongs to one block, or to one cluster, and its rows are contiguous. Warps share
//   a block's sum and add theirs up at its end, while the next rows are already on their way.
// - Rows too long for a cluster are read twice: chunks are reduced on their own, then columns are
//   done by blocks that have the totals.
#include "cuda/norm.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "cuda/load_kernels.h"
#include "cuda/norm_backward_ring.cuh"
#include "cuda/packed.cuh"
#include "cuda/row_group.cuh"
#include "cuda/unit.cuh"
#include "permutation.h"

namespace jax_fastops::cuda {
namespace {

// -------------------------------------------------------------------------------------------------
// Rows that a worker can hold

// How a kernel shares the work out. kThreads of a block have a row, with up to kColumns columns in
// each, of which kLeast are in every row; in a cluster those of all its blocks.
template <typename T, int kUnit, int kThreads, int kColumns, int kLeast, int kCluster>
struct Layout {
  using A = ComputeType<T>;
  using U = Unit<T, kUnit>;
  using Group = RowGroup<kThreads, kCluster>;
  static constexpr int kUnits = kColumns / U::kSize;  // of a thread
  static constexpr int kLeastUnits = kLeast / U::kSize;
  static constexpr int kWorkers = kThreads <= kWarpSize ? kBlock / kWarpSize : 1;
  static constexpr int kWorkerThreads = kBlock / kWorkers;
  static constexpr int kRowLanes = kThreads < kWarpSize ? kWarpSize / kThreads : 1;
  // So many rows at once that a thread has 64 bytes of an array, or one.
  static constexpr int kRepeat =
      kCluster == 1 && kColumns * sizeof(T) < 64 ? 64 / (kColumns * sizeof(T)) : 1;
  static constexpr int kTile = kRepeat * kRowLanes;
  // Of the sums of warps that share one, so many columns of a thread meet in shared memory at once.
  static constexpr int kMeet = 8 * sizeof(float) / sizeof(A);
  static_assert(kColumns % U::kSize == 0 && (kWorkers == 1 || kColumns % kMeet == 0));
  static_assert(kLeastUnits <= kUnits && kWorkerThreads % kWarpSize == 0);
};

// RowGroup's reduction in a cluster, other than by a barrier of the cluster: values are sent so
// that they complete on a barrier of the block that they are for. What is before a barrier of the
// cluster has to be seen by all behind it, so that every row would wait until the last one's dx is
// written.
template <typename L>
struct ClusterReduction {
  using A = typename L::A;
  static constexpr int kCount = 2 * L::kRepeat;
  static constexpr int kWarps = kBlock / kWarpSize;
  static constexpr int kBlocks = L::Group::kSize / kBlock;
  static constexpr int kSlots = kWarps * kBlocks;

  // Two of everything: a block that is ahead sends for the next row, but not for the one after it
  // before every warp has sent for the next, which each does when it has read this row's.
  Barrier complete[2];
  A values[2][kCount][kSlots];

  __device__ __forceinline__ void Init() {
    if (threadIdx.x < 2) complete[threadIdx.x].Init(1);
  }

  // `phase` counts the rows.
  __device__ __forceinline__ void AllReduce(A (&sums)[kCount], int& phase) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, half = phase & 1;
    if (threadIdx.x == 0) complete[half].ArriveAndExpect(sizeof(values[0]));
#pragma unroll
    for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], lanes);
    }
    if (lane < kBlocks) {
      const uint32_t barrier = In(&complete[half], lane);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const uint32_t to = In(&values[half][i][L::Group::BlockRank() * kWarps + warp], lane);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        if constexpr (sizeof(A) == 4) {
          asm volatile(
              "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
              "r"(__float_as_uint(static_cast<float>(sums[i]))), "r"(barrier)
              : "memory");
        } else {
          asm volatile(
              "st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(to),
              "l"(__double_as_longlong(sums[i])), "r"(barrier)
              : "memory");
        }
#endif
      }
    }
    complete[half].Wait(phase >> 1 & 1);
    ++phase;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      A sum = lane < kSlots ? values[half][i][lane] : A(0);
#pragma unroll
      for (int slot = kWarpSize; slot < kSlots; slot += kWarpSize) {
        sum += values[half][i][slot + lane];
      }
#pragma unroll
      for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
      }
      sums[i] = sum;
    }
  }

 private:
  static __device__ __forceinline__ uint32_t In(const void* p, [[maybe_unused]] int block) {
    uint32_t address = SharedAddress(p);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(block));
#endif
    return address;
  }
};

// Adds up what the workers of a block have of one sum, and writes it. All threads call it.
template <typename L>
__device__ __forceinline__ void MeetAndWrite(typename L::A (&totals)[L::kUnits][L::U::kSize],
                                             typename L::A* buffers, int& phase, int n,
                                             typename L::A* sums) {
  using A = typename L::A;
  constexpr int kThreads = kWarpSize / L::kRowLanes;
  constexpr int kMeetUnits = L::kMeet / L::U::kSize;
  constexpr int kWidth = L::kMeet * kThreads;  // columns
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int first = 0; first < L::kUnits; first += kMeetUnits) {
    A* buffer = buffers + phase * L::kWorkers * kWidth;
#pragma unroll
    for (int j = 0; j < kMeetUnits; ++j) {
#pragma unroll
      for (int i = 0; i < L::U::kSize; ++i) {
        A total = totals[first + j][i];
#pragma unroll
        for (int lanes = kThreads; lanes < kWarpSize; lanes *= 2) {
          total += __shfl_xor_sync(0xffffffffu, total, lanes);
        }
        if (lane < kThreads) {
          buffer[warp * kWidth + (j * kThreads + lane) * L::U::kSize + i] = total;
        }
      }
    }
    __syncthreads();  // the other buffer is free then, too
    const int column = first * L::U::kSize * kThreads + threadIdx.x;
    if (threadIdx.x < kWidth && column < n) {
      A sum = buffer[threadIdx.x];
#pragma unroll
      for (int w = 1; w < L::kWorkers; ++w) sum += buffer[w * kWidth + threadIdx.x];
      sums[column] = sum;
    }
    phase ^= 1;
  }
}

// Writes a sum that each thread has its columns of, `units` units.
template <typename L, int kThreads>
__device__ __forceinline__ void Write(const typename L::A (&totals)[L::kUnits][L::U::kSize],
                                      int units, bool aligned, typename L::A* sums) {
  using A = typename L::A;
  constexpr int kSize = L::U::kSize;
#pragma unroll
  for (int j = 0; j < L::kUnits; ++j) {
    if (j < units) {
      A* to = sums + int64_t{j * kThreads + static_cast<int>(threadIdx.x)} * kSize;
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

template <typename T, int kUnit, int kThreads, int kColumns, int kLeast, int kCluster>
__device__ __forceinline__ void RowsKernelBody(const Params& p) {
  using L = Layout<T, kUnit, kThreads, kColumns, kLeast, kCluster>;
  using A = typename L::A;
  using U = typename L::U;
  using Group = typename L::Group;
  constexpr int kUnits = L::kUnits, kSize = U::kSize, kRepeat = L::kRepeat;
  constexpr bool kWarps = L::kWorkers > 1;

  extern __shared__ __align__(128) char ring[];
  __shared__ Barrier full[L::kWorkers][kMaxStages];
  __shared__ Source sources[kArrays];  // there, so that they take no registers
  using Scratch = typename Group::template Scratch<A, 2 * kRepeat>;
  __shared__ std::conditional_t<kCluster == 1, Scratch, ClusterReduction<L>> scratch;
  __shared__ A meeting[kWarps ? 2 * L::kWorkers * L::kMeet * kWarpSize / L::kRowLanes : 1];

  const int worker = threadIdx.x / L::kWorkerThreads;
  const int in_worker = threadIdx.x % L::kWorkerThreads;
  const int in_row = threadIdx.x % kThreads;
  const int row_lane = in_worker / kThreads;
  const int first_partial = blockIdx.x / kCluster, stride = gridDim.x / kCluster;

  // The columns of this block, and how many units of them this thread has.
  const int first_column = Group::BlockRank() * p.block_columns;
  const int columns = max(0, min(p.block_columns, static_cast<int>(p.n) - first_column));
  const int units = (columns / kSize - in_row + kThreads - 1) / kThreads;
  const bool has_mean = p.arrays[kMean] != nullptr, has_dsum = p.arrays[kDsum] != nullptr;
  const auto in_columns = [&](int unit) { return unit < L::kLeastUnits || unit < units; };

  char* const stages = ring + worker * p.stages * p.stage_bytes;
  const int arrivals =
      (kBulkCopies ? 0 : L::kWorkerThreads) + 3 + has_mean + has_dsum + (p.arrays[kDy2] != nullptr);
  if (in_worker < p.stages) full[worker][in_worker].Init(arrivals);
  if (threadIdx.x < kArrays) {
    sources[threadIdx.x] = SourceOf<T>(p, threadIdx.x, first_column, columns);
  }
  if constexpr (kCluster > 1) scratch.Init();
  Barrier::PublishInit();
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
    Group::Begin();  // other blocks send to these barriers
  }

  const auto fill = [&](int stage, int64_t row, int rows) {
    char* to = stages + stage * p.stage_bytes;
    Barrier* barrier = &full[worker][stage];
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    // Every array has a thread, one of the first of the worker.
    if (in_worker < kArrays) {
      const Source source = sources[in_worker];
      if (source.data != nullptr) source.Copy(to, barrier, row, rows, 0, 1);
    }
#else
    for (int array = 0; array < kArrays; ++array) {
      const Source source = sources[array];
      if (source.data == nullptr) continue;
      source.Copy(to, barrier, row, rows, in_worker, L::kWorkerThreads);
      if (in_worker == 0)
        barrier->Arrive();  // for what it stored itself; below, for what it copies
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(SharedAddress(barrier))
                 : "memory");
#endif
  };

  Cursor<L::kTile, L::kWorkers> ahead;
  ahead.Seek(p, first_partial, stride, worker);
  for (int i = 0; i < p.stages && ahead.Valid(p); ++i) {
    fill(i, ahead.row, ahead.Rows());
    ahead.Next(p, stride, worker);
  }

  A scale[kUnits][kSize];
#pragma unroll
  for (int j = 0; j < kUnits; ++j) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int column = first_column + (j * kThreads + in_row) * kSize + i;
      scale[j][i] = 1;
      if (in_columns(j) && p.scale.data != nullptr) {
        scale[j][i] = p.scale.wide ? static_cast<const A*>(p.scale.data)[column]
                                   : ToCompute(static_cast<const T*>(p.scale.data)[column]);
      }
    }
  }
  const A inverse_n = A(1) / A(p.n);

  // How far from a boundary of 16 bytes an element is in global memory, and so in its stage.
  const auto offset = [](const void* array, int64_t index, int size) {
    return static_cast<int>((reinterpret_cast<uintptr_t>(array) + index * size) & 15);
  };

  // A tile, in its stage.
  struct Tile {
    char* stage;
    int64_t row;
    int rows;
  };
  const auto stage_at = [&](int stage) { return stages + stage * p.stage_bytes; };
  const auto in_tile = [&](const Tile& tile, int r) { return L::kTile == 1 || r < tile.rows; };
  // Where one of the elements' arrays is in it.
  const auto elements = [&](const Tile& tile, int slot, const void* array) {
    const int64_t first = tile.row * p.n + first_column;
    return tile.stage + slot + (kUnit == 16 ? 0 : offset(array, first, sizeof(T)));
  };
  // Row r's mean and rstd; where there is no such row, 0: then nothing comes of it.
  struct Stats {
    A mean;
    A rstd;
  };
  const auto stats = [&](const Tile& tile, int r) {
    const char* at = tile.stage + 2 * p.slot_bytes;
    Stats stats = {};
    if (in_tile(tile, r)) {
      stats.rstd = reinterpret_cast<const A*>(at + offset(p.arrays[kRstd], tile.row, sizeof(A)))[r];
      at += p.stat_bytes;
      if (has_mean) {
        stats.mean =
            reinterpret_cast<const A*>(at + offset(p.arrays[kMean], tile.row, sizeof(A)))[r];
      }
    }
    return stats;
  };
  const auto place = [&](int r, int j) {
    return (r * columns + (j * kThreads + in_row) * kSize) * int{sizeof(T)};
  };
  // Puts dy + dy2, rounded, in the place of dy: this thread's units, which no other one reads. Some
  // at a time, all loaded before the first is stored.
  const auto add_dy2 = [&](const Tile& tile) {
    constexpr int kAll = kRepeat * kUnits, kBatch = kAll < 4 ? kAll : 4;
    char* const dys = elements(tile, 0, p.arrays[kDy]);
    const char* const others = elements(tile, p.stage_bytes - p.slot_bytes, p.arrays[kDy2]);
#pragma unroll 1
    for (int first = 0; first < kAll; first += kBatch) {
      bool in[kBatch];
      int at[kBatch];
      U sum[kBatch], other[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int k = kRepeat == 1 ? 0 : (first + b) / kUnits, j = first + b - k * kUnits;
        const int r = k * L::kRowLanes + row_lane;
        in[b] = j < units && in_tile(tile, r);
        at[b] = in[b] ? place(r, j) : 0;
        // Without a unit, something that no thread stores to.
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
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    // The bulk copy that will fill the stage again must come behind these stores.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  };
  // xhat, dy and dy * scale of a unit, 0 where there is none.
  const auto load = [&](const Tile& tile, const char* dys, const char* s, const Stats& stats, int r,
                        int j, A(&xhat)[kSize], A(&dy)[kSize], A(&g)[kSize]) {
    const bool in = in_columns(j);
    U dy_unit, s_unit;
    if (in && in_tile(tile, r)) {
      dy_unit = U::Load(dys + place(r, j));
      s_unit = U::Load(s + place(r, j));
    } else {
      memset(&dy_unit, 0, sizeof(U));
      memset(&s_unit, 0, sizeof(U));
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      dy[i] = ToCompute(dy_unit.elements[i]);
      // Outside the row nothing may come of a mean that is NaN.
      xhat[i] = in ? (ToCompute(s_unit.elements[i]) - stats.mean) * stats.rstd : A(0);
      g[i] = dy[i] * scale[j][i];
    }
  };

  int stage = 0, parity = 0, phase = 0, meeting_phase = 0;
  for (int64_t partial = first_partial; partial < p.partials; partial += stride) {
    const Range range = RowsOf(partial, p.rows, p.sums);
    A dscale[kUnits][kSize] = {}, dbias[kUnits][kSize] = {}, dinput_bias[kUnits][kSize] = {};
    // What is kept of a tile from one step to the other.
    A xhat[kRepeat][kUnits][kSize], g[kRepeat][kUnits][kSize], rstd[kRepeat];

    // The first step: the tile's part in the sums over rows, and in those along them.
    const auto reduce = [&](const Tile& tile, A(&totals)[2 * kRepeat]) {
      const char* const dys = elements(tile, 0, p.arrays[kDy]);
      const char* const s = elements(tile, p.slot_bytes, p.arrays[kS]);
#pragma unroll
      for (int k = 0; k < kRepeat; ++k) {
        const int r = k * L::kRowLanes + row_lane;
        const Stats row = stats(tile, r);
        rstd[k] = row.rstd;
        totals[2 * k] = totals[2 * k + 1] = 0;
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
          A(&x)[kSize] = xhat[k][j];
          A(&gs)[kSize] = g[k][j];
          A dy[kSize];
          load(tile, dys, s, row, r, j, x, dy, gs);
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            dscale[j][i] += dy[i] * x[i];
            dbias[j][i] += dy[i];
            totals[2 * k] += gs[i];
            totals[2 * k + 1] += gs[i] * x[i];
          }
        }
      }
    };
    // The second: its dx.
    const auto write = [&](const Tile& tile, const A(&totals)[2 * kRepeat]) {
      const char* const dsum = elements(tile, 2 * p.slot_bytes + 2 * p.stat_bytes, p.arrays[kDsum]);
      char* const dx =
          static_cast<char*>(p.dx) + (tile.row * p.n + first_column) * int64_t{sizeof(T)};
#pragma unroll
      for (int k = 0; k < kRepeat; ++k) {
        const int r = k * L::kRowLanes + row_lane;
        const A mean_g = has_mean ? totals[2 * k] * inverse_n : A(0);
        const A mean_gx = totals[2 * k + 1] * inverse_n;
#pragma unroll
        for (int j = 0; j < kUnits; ++j) {
          A(&x)[kSize] = xhat[k][j];
          A(&gs)[kSize] = g[k][j];
          const bool in = in_columns(j) && in_tile(tile, r);
          A gradient[kSize];
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            gradient[i] = rstd[k] * (gs[i] - mean_g - x[i] * mean_gx);
          }
          if (has_dsum && in) {
            const U dsum_unit = U::Load(dsum + place(r, j));
#pragma unroll
            for (int i = 0; i < kSize; ++i) gradient[i] += ToCompute(dsum_unit.elements[i]);
          }
          U dx_unit;
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            dinput_bias[j][i] += gradient[i];
            dx_unit.elements[i] = FromCompute<T>(gradient[i]);
          }
          if (in) dx_unit.Store(dx + place(r, j));
        }
      }
    };
    const auto refill = [&](int free) {
      if (ahead.Valid(p)) {
        fill(free, ahead.row, ahead.Rows());
        ahead.Next(p, stride, worker);
      }
    };

    for (int64_t row = range.begin + worker * L::kTile; row < range.end;
         row += L::kTile * L::kWorkers) {
      const Tile tile = {stage_at(stage), row,
                         static_cast<int>(min(int64_t{L::kTile}, range.end - row))};
      A totals[2 * kRepeat];
      full[worker][stage].Wait(parity);
      if (p.arrays[kDy2] != nullptr) add_dy2(tile);
      reduce(tile, totals);
      if constexpr (kCluster == 1) {
        Group::AllReduce(Sum(), totals, scratch, phase);
      } else {
        scratch.AllReduce(totals, phase);
      }
      // Now every thread has read the stage; only dsum may still have to be read.
      if constexpr (kWarps) __syncwarp();
      if (!has_dsum) refill(stage);
      write(tile, totals);
      if (has_dsum) {
        if constexpr (kWarps) {
          __syncwarp();
        } else {
          __syncthreads();
        }
        refill(stage);
      }
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }

    const int64_t at = partial * p.n + first_column;
    const auto finish = [&](A(&totals)[kUnits][kSize], void* sums) {
      if (sums == nullptr) return;
      A* to = static_cast<A*>(sums) + at;
      if constexpr (kWarps) {
        MeetAndWrite<L>(totals, meeting, meeting_phase, columns, to);
      } else {
        Write<L, kThreads>(totals, units, p.aligned_sums, to);
      }
    };
    finish(dscale, p.dscale);
    finish(dbias, p.dbias);
    finish(dinput_bias, p.dinput_bias);
  }
}

template <typename T, int kUnit, int kThreads, int kColumns, int kLeast, int kCluster>
__global__ void __launch_bounds__(kBlock, 1) RowsKernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  // Never launched with clusters.
  if constexpr (kCluster == 1)
#endif
    RowsKernelBody<T, kUnit, kThreads, kColumns, kLeast, kCluster>(p);
}

// -------------------------------------------------------------------------------------------------
// Longer rows
//
// Each row is cut into tiles. First every tile of a row is reduced on its own. Then, for every row,
// the tiles' sums are. Then a block goes over the rows of one tile and of one partial sum. What a
// tile has to say, and to hear, is kept where its dx will be: two values of the accumulator's type.

constexpr int kLongColumns = 16;  // of a thread

__device__ __forceinline__ Range TileOf(int64_t tile, int64_t tiles, int64_t n) {
  // Of at least half the length that a tile may have.
  return {tile * n / tiles, (tile + 1) * n / tiles};
}

// Two values, at an address that is aligned to an element of dx alone.
template <typename T, typename A>
__device__ __forceinline__ void Leave(T* at, const A (&values)[2]) {
  T pieces[2 * sizeof(A) / sizeof(T)];
  memcpy(pieces, values, 2 * sizeof(A));
#pragma unroll
  for (int i = 0; i < static_cast<int>(std::size(pieces)); ++i) at[i] = pieces[i];
}
template <typename T, typename A>
__device__ __forceinline__ void Find(const T* at, A (&values)[2]) {
  T pieces[2 * sizeof(A) / sizeof(T)];
#pragma unroll
  for (int i = 0; i < static_cast<int>(std::size(pieces)); ++i) pieces[i] = at[i];
  memcpy(values, pieces, 2 * sizeof(A));
}

template <typename T>
struct LongTile {
  using A = ComputeType<T>;
  int64_t first;  // of this thread's columns, which are kBlock apart
  int columns;    // how many it has
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

  // This thread's xhat and dy of a row. kTwo: whether there is a dy2. A test of that would take
  // registers, and so leave room for fewer blocks.
  template <bool kTwo>
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
    if constexpr (kTwo) {
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

template <typename T, bool kTwo>
__global__ void __launch_bounds__(kBlock)
    LongSumsKernel(const __grid_constant__ Params p, int64_t tiles) {
  using A = ComputeType<T>;
  using Group = RowGroup<kBlock>;
  __shared__ typename Group::template Scratch<A, 2> scratch;
  int phase = 0;
  const int64_t row = blockIdx.x / tiles;
  const Range range = TileOf(blockIdx.x - row * tiles, tiles, p.n);
  const LongTile<T> tile(p, range);
  A xhat[kLongColumns], dy[kLongColumns], totals[2] = {};
  tile.template Load<kTwo>(p, row, static_cast<const A*>(p.arrays[kRstd])[row], xhat, dy);
#pragma unroll
  for (int j = 0; j < kLongColumns; ++j) {
    totals[0] += dy[j] * tile.scale[j];
    totals[1] += dy[j] * tile.scale[j] * xhat[j];
  }
  Group::AllReduce(Sum(), totals, scratch, phase);
  if (threadIdx.x == 0) Leave(static_cast<T*>(p.dx) + row * p.n + range.begin, totals);
}

template <typename T>
__global__ void __launch_bounds__(kBlock)
    LongTotalsKernel(const __grid_constant__ Params p, int64_t tiles) {
  using A = ComputeType<T>;
  using Group = RowGroup<kBlock>;
  __shared__ typename Group::template Scratch<A, 2> scratch;
  int phase = 0;
  T* dx = static_cast<T*>(p.dx) + blockIdx.x * p.n;
  A totals[2] = {}, values[2];
  for (int64_t tile = threadIdx.x; tile < tiles; tile += kBlock) {
    Find(dx + TileOf(tile, tiles, p.n).begin, values);
    totals[0] += values[0];
    totals[1] += values[1];
  }
  Group::AllReduce(Sum(), totals, scratch, phase);
  totals[0] = p.arrays[kMean] != nullptr ? totals[0] / A(p.n) : A(0);
  totals[1] /= A(p.n);
  for (int64_t tile = threadIdx.x; tile < tiles; tile += kBlock) {
    Leave(dx + TileOf(tile, tiles, p.n).begin, totals);
  }
}

template <typename T, bool kTwo>
__global__ void __launch_bounds__(kBlock)
    LongRowsKernel(const __grid_constant__ Params p, int64_t tiles) {
  using A = ComputeType<T>;
  const int64_t partial = blockIdx.x / tiles;
  const Range range = TileOf(blockIdx.x - partial * tiles, tiles, p.n);
  const LongTile<T> tile(p, range);
  const Range rows = RowsOf(partial, p.rows, p.sums);
  A dscale[kLongColumns] = {}, dbias[kLongColumns] = {}, dinput_bias[kLongColumns] = {};
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    A means[2];
    Find(static_cast<const T*>(p.dx) + row * p.n + range.begin, means);
    A xhat[kLongColumns], dy[kLongColumns];
    const A rstd = static_cast<const A*>(p.arrays[kRstd])[row];
    tile.template Load<kTwo>(p, row, rstd, xhat, dy);
    __syncthreads();  // all have read the means, where dx is written now
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

// -------------------------------------------------------------------------------------------------
// Launches

struct Form {
  void (*kernel)(Params);
  int unit;
  int columns;  // that a block can have of a row
  int least;    // that it must have
  int cluster;
  int workers;
  int tile;
};

template <typename T, int kUnit, int kThreads, int kColumns, int kLeast, int kCluster = 1>
Form MakeForm() {
  // double takes twice the registers.
  constexpr int kWords = sizeof(ComputeType<T>) / sizeof(float);
  constexpr int kMost = kColumns / kWords, kFew = kLeast / kWords;
  using L = Layout<T, kUnit, kThreads, kMost, kFew, kCluster>;
  return {RowsKernel<T, kUnit, kThreads, kMost, kFew, kCluster>,
          kUnit,
          kThreads * kMost,
          kThreads * kFew,
          kCluster,
          L::kWorkers,
          L::kTile};
}

// From the shortest rows to the longest. Where a device has too little shared memory for what a
// warp would need, a block may do.
template <typename T, int kUnit>
inline const Form kForms[] = {
    MakeForm<T, kUnit, 8, 8, 0>(),       MakeForm<T, kUnit, 32, 8, 0>(),
    MakeForm<T, kUnit, 32, 16, 8>(),     MakeForm<T, kUnit, 32, 24, 16>(),
    MakeForm<T, kUnit, 32, 32, 24>(),    MakeForm<T, kUnit, 256, 8, 0>(),
    MakeForm<T, kUnit, 256, 16, 8>(),    MakeForm<T, kUnit, 256, 32, 16>(),
    MakeForm<T, kUnit, 256, 32, 8, 2>(), MakeForm<T, kUnit, 256, 32, 8, 4>(),
    MakeForm<T, kUnit, 256, 32, 8, 8>(),
};

// The widest unit. Elements of 8 bytes are as good as units.
template <typename T>
constexpr int kWideUnit = sizeof(T) == 8 ? 8 : 16;

// What a block's rings take of shared memory, if two stages do not need more. In more, tiles only
// wait longer for their turn, and more of them are left when all is read: 2 to 6% slower.
constexpr int64_t kRing = 64 << 10;
constexpr int64_t kMinStages = 2;

struct Device {
  int processors;
  int shared_memory;  // that a block can have
  bool clusters;
};

cudaError_t GetDevice(const void* kernel, Device& device) {
  int id;
  cudaError_t error = cudaGetDevice(&id);
  const auto get = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, id);
  };
  int clusters = 0;
  get(device.processors, cudaDevAttrMultiProcessorCount);
  get(device.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(clusters, cudaDevAttrClusterLaunch);
  if (error != cudaSuccess) return error;
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, kernel);
  // What was compiled for older devices, and runs on a newer one, has no clusters either.
  device.clusters = clusters != 0 && attributes.ptxVersion >= 90;
  device.shared_memory -= static_cast<int>(attributes.sharedSizeBytes);
  return error;
}

// The stages that there is room for; 0 where the form does not do.
int PlanStages(const Form& form, int64_t itemsize, int shared_memory, Params& p) {
  const int64_t unit_columns = std::max<int64_t>(1, form.unit / itemsize);
  const int64_t columns = RoundUp(CeilDiv(p.n, form.cluster), unit_columns);
  if (columns > form.columns || p.n - (form.cluster - 1) * columns < form.least) return 0;
  const int64_t accumulator = std::max<int64_t>(itemsize, sizeof(float));
  // Whatever the alignment is, it fits.
  p.block_columns = static_cast<int>(columns);
  p.slot_bytes = static_cast<int>(RoundUp(form.tile * columns * itemsize, 16) + 16);
  p.stat_bytes = static_cast<int>(RoundUp(form.tile * accumulator, 16) + 16);
  const int slots = 2 + (p.arrays[kDsum] != nullptr) + (p.arrays[kDy2] != nullptr);
  p.stage_bytes = slots * p.slot_bytes + 2 * p.stat_bytes;
  const int64_t round = int64_t{form.workers} * p.stage_bytes;
  const int64_t enough = kRing / round;
  p.stages = static_cast<int>(std::min<int64_t>(
      {kMaxStages, shared_memory / round, std::max<int64_t>(kMinStages, enough)}));
  if (p.stages < kMinStages) return 0;
  return p.stages;
}

cudaError_t LaunchRows(const Form& form, const Device& device, Params p, cudaStream_t stream) {
  // Blocks stay where they are put: as many as there are SMs. Clusters, of which not every SM can
  // be in one, come and go.
  const int64_t blocks = form.cluster == 1 ? std::min<int64_t>(p.partials, device.processors)
                                           : std::min<int64_t>(p.partials, 1 << 20) * form.cluster;
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute cluster;
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kBlock);
  config.dynamicSmemBytes = static_cast<size_t>(form.workers) * p.stages * p.stage_bytes;
  config.stream = stream;
  if (form.cluster > 1) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = form.cluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  void* arguments[] = {&p};
  static_cast<void>(
      cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(form.kernel), arguments));
  return cudaGetLastError();  // which the next launch would else return again
}

template <typename T>
cudaError_t LaunchLong(const Params& p, cudaStream_t stream) {
  const int64_t tiles = CeilDiv(p.n, kLongColumns * kBlock);
  const bool two = p.arrays[kDy2] != nullptr;
  auto* sums = two ? LongSumsKernel<T, true> : LongSumsKernel<T, false>;
  auto* rows = two ? LongRowsKernel<T, true> : LongRowsKernel<T, false>;
  sums<<<static_cast<unsigned>(p.all_rows * tiles), kBlock, 0, stream>>>(p, tiles);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  LongTotalsKernel<T><<<static_cast<unsigned>(p.all_rows), kBlock, 0, stream>>>(p, tiles);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  rows<<<static_cast<unsigned>(p.partials * tiles), kBlock, 0, stream>>>(p, tiles);
  return cudaGetLastError();
}

// Sums that nobody wants do not bound how many may work: so many rows to each.
void FreeSums(Params& p, int64_t rows) {
  p.rows = p.all_rows;
  p.partials = p.sums = CeilDiv(p.all_rows, rows);
}

template <typename T>
cudaError_t Launch(Params p, cudaStream_t stream) {
  constexpr int kWide = kWideUnit<T>;
  const bool sums = p.dscale != nullptr || p.dbias != nullptr || p.dinput_bias != nullptr;
  const int64_t alignment =
      CommonAlignment({p.arrays[kDy], p.arrays[kS], p.arrays[kDsum], p.arrays[kDy2], p.dx});
  const bool aligned = alignment % kWide == 0 && p.n * int64_t{sizeof(T)} % kWide == 0;
  const Form* forms = aligned ? std::begin(kForms<T, kWide>) : std::begin(kForms<T, sizeof(T)>);
  const Form* end = aligned ? std::end(kForms<T, kWide>) : std::end(kForms<T, sizeof(T)>);
  Device device;
  const cudaError_t error = GetDevice(reinterpret_cast<const void*>(end[-1].kernel), device);
  if (error != cudaSuccess) return error;
  for (const Form* form = forms; form != end; ++form) {
    if (form->cluster > 1 && !device.clusters) break;
    constexpr int kStatic = 20 << 10;  // at most
    if (PlanStages(*form, sizeof(T), device.shared_memory - kStatic, p) == 0) continue;
    if (!sums) {
      const int64_t groups = 4 * device.processors / form->cluster;
      FreeSums(p, std::max<int64_t>(CeilDiv(p.all_rows, groups), form->workers * form->tile));
    }
    return LaunchRows(*form, device, p, stream);
  }
  if (!sums) FreeSums(p, 8);
  return LaunchLong<T>(p, stream);
}

// Calls `visit` with the type's forms and its kernels for longer rows.
template <typename T, typename Visit>
void VisitKernels(const Visit& visit) {
  for (const Form& form : kForms<T, kWideUnit<T>>) {
    visit(reinterpret_cast<const void*>(form.kernel), true);
  }
  if constexpr (sizeof(T) < 8) {
    for (const Form& form : kForms<T, sizeof(T)>) {
      visit(reinterpret_cast<const void*>(form.kernel), true);
    }
  }
  visit(reinterpret_cast<const void*>(LongSumsKernel<T, false>), false);
  visit(reinterpret_cast<const void*>(LongSumsKernel<T, true>), false);
  visit(reinterpret_cast<const void*>(LongTotalsKernel<T>), false);
  visit(reinterpret_cast<const void*>(LongRowsKernel<T, false>), false);
  visit(reinterpret_cast<const void*>(LongRowsKernel<T, true>), false);
}

}  // namespace

cudaError_t NormBackward(const NormShape& shape, NormKind kind, DType dtype,
                         const NormBackwardArrays& arrays, cudaStream_t stream) {
  const int64_t accumulator = std::max<int64_t>(DTypeSize(dtype), sizeof(float));
  const int64_t partials = shape.batch * shape.sums;
  void* const sums[] = {arrays.dscale, arrays.dbias, arrays.dinput_bias};
  if (shape.n == 0 || shape.all_rows() == 0) {
    cudaError_t error = cudaSuccess;
    for (void* sum : sums) {
      if (sum != nullptr && partials * shape.n > 0 && error == cudaSuccess) {
        error = cudaMemsetAsync(sum, 0, partials * shape.n * accumulator, stream);
      }
    }
    return error;
  }

  Params p = {};
  p.arrays[kDy] = arrays.dy;
  p.arrays[kS] = arrays.s;
  p.arrays[kRstd] = arrays.rstd;
  p.arrays[kMean] = kind == NormKind::kLayer ? arrays.mean : nullptr;
  p.arrays[kDsum] = arrays.dsum;
  p.arrays[kDy2] = arrays.dy2;
  p.scale = arrays.scale;
  p.dx = arrays.dx;
  p.dscale = arrays.dscale;
  p.dbias = arrays.dbias;
  p.dinput_bias = arrays.dinput_bias;
  p.rows = shape.rows;
  p.all_rows = shape.all_rows();
  p.n = shape.n;
  p.sums = shape.sums;
  p.partials = partials;
  p.aligned_sums =
      shape.n * accumulator % 16 == 0 && CommonAlignment({sums[0], sums[1], sums[2]}) == 16;
  switch (dtype) {
    case DType::kF32:
      return Launch<float>(p, stream);
    case DType::kBF16:
      return Launch<__nv_bfloat16>(p, stream);
    case DType::kF16:
      return Launch<__half>(p, stream);
    case DType::kF64:
      return Launch<double>(p, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LoadNormBackwardKernels() {
  static KernelLoader loader;
  return loader.Load([](const auto& load) {
    const auto visit = [&load](const void* kernel, bool ring) {
      load(kernel);
      if (!ring || load.failed()) return;
      Device device;
      load.Check(GetDevice(kernel, device));
      if (load.failed()) return;
      load.Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      device.shared_memory));
    };
    VisitKernels<float>(visit);
    VisitKernels<__nv_bfloat16>(visit);
    VisitKernels<__half>(visit);
    VisitKernels<double>(visit);
  });
}

}  // namespace jax_fastops::cuda

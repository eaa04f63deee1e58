// The backward of layer norm and RMS norm: dx, and the gradients of the parameters as partial sums,
// in one pass that reads dy and s once.
//
// The pass moves 3 arrays (one more with dsum, and one more with dy2) and is memory-bound. Two
// requirements conflict: no dx of a row is known before the whole row has been read, and the sums
// over rows need threads that keep their columns.
//
// - A worker holds one row, or a few, in registers. The worker is a warp for up to 1024 columns, a
//   block of 256 threads for up to 8192, and a cluster of such blocks for longer rows (RowGroup);
//   in double for half as many. A thread has the same columns of every row, at most 32. The scale
//   and the sums of its columns stay in its registers. The sums are always computed, even if they
//   are not requested, because arithmetic is not the bottleneck.
// - Blocks are persistent, one per SM, except in clusters. A block reads its rows through a ring of
//   stages in shared memory. A stage is a tile of contiguous rows. Bulk copies that complete on an
//   mbarrier fill it. This keeps 50 KB or more in flight whatever the threads do, and takes no
//   registers. Workers that are warps have a ring each and never wait for each other. Before sm_90,
//   cp.async fills the same ring.
// - Bulk copies move multiples of 16 bytes. If rows are not aligned to 16 bytes, the copies move
//   the aligned blocks that cover them, and so read a few more bytes of the same array. In shared
//   memory the rows keep their offset from a 16-byte boundary. Threads then access single elements,
//   adjacent lanes adjacent elements, instead of 16-byte units. Mean and rstd are copied in the
//   same way.
// - If y has two users, the threads that read dy from a stage first add the second cotangent (dy2)
//   to it there. The rest of the code needs no change, and no registers are needed for it.
// - A partial sum belongs to one block or cluster, and its rows are contiguous. If the workers are
//   warps, they share the partial sum of their block. They add up their contributions at its end,
//   while the next rows are already being copied.
// - Rows that are too long for a cluster are read twice: tiles of a row are reduced separately,
//   then blocks process columns with the totals.
#include "norm/norm_cuda.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "core/alignment.h"
#include "core/cuda/load_kernels.h"
#include "core/cuda/packed.cuh"
#include "core/cuda/row_group.cuh"
#include "core/cuda/unit.cuh"
#include "norm/backward_ring.cuh"

namespace jax_fastops::cuda {
namespace {

// -------------------------------------------------------------------------------------------------
// Rows that a worker can hold

// How a kernel distributes the work. kThreads threads of a block hold a row, or in a cluster
// kThreads threads of each block. A thread has up to kColumns columns. The first kLeast of them
// exist in every row that the kernel is launched for, so they need no bounds checks.
template <typename T, int kUnit, int kThreads, int kColumns, int kLeast, int kCluster>
struct Layout {
  using A = ComputeType<T>;
  using U = Unit<T, kUnit>;
  using Group = RowGroup<kThreads, kCluster>;
  static constexpr int kUnits = kColumns / U::kSize;  // per thread
  static constexpr int kLeastUnits = kLeast / U::kSize;
  static constexpr int kWorkers = kThreads <= kWarpSize ? kBlock / kWarpSize : 1;
  static constexpr int kWorkerThreads = kBlock / kWorkers;
  static constexpr int kRowLanes = kThreads < kWarpSize ? kWarpSize / kThreads : 1;
  // Number of rows that a thread holds at once: as many as make 64 bytes of an array per thread, at
  // least one.
  static constexpr int kRepeat =
      kCluster == 1 && kColumns * sizeof(T) < 64 ? 64 / (kColumns * sizeof(T)) : 1;
  static constexpr int kTile = kRepeat * kRowLanes;
  // Columns per thread that warps exchange through shared memory at once when they add up a partial
  // sum.
  static constexpr int kMeet = 8 * sizeof(float) / sizeof(A);
  static_assert(kColumns % U::kSize == 0 && (kWorkers == 1 || kColumns % kMeet == 0));
  static_assert(kLeastUnits <= kUnits && kWorkerThreads % kWarpSize == 0);
};

// RowGroup's reduction in a cluster, without a cluster barrier. Values are sent by asynchronous
// stores that complete on an mbarrier of the receiving block. A cluster barrier makes all earlier
// writes visible, so every row would wait until dx of the previous row is written.
template <typename L>
struct ClusterReduction {
  using A = typename L::A;
  static constexpr int kCount = 2 * L::kRepeat;
  static constexpr int kWarps = kBlock / kWarpSize;
  static constexpr int kBlocks = L::Group::kSize / kBlock;
  static constexpr int kSlots = kWarps * kBlocks;

  // Double-buffered. A block that is ahead may send for the next row. It sends for the row after
  // that only when every warp has sent for the next row, which each warp does after it has read the
  // values of this row.
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

// Adds up the contributions of a block's workers to a partial sum and writes it. All threads must
// call it.
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
    __syncthreads();  // after it, the other buffer is free too
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

// Writes a partial sum of which each thread has its own columns, `units` units of them.
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
  __shared__ Source sources[kArrays];  // in shared memory to save registers
  using Scratch = typename Group::template Scratch<A, 2 * kRepeat>;
  __shared__ std::conditional_t<kCluster == 1, Scratch, ClusterReduction<L>> scratch;
  __shared__ A meeting[kWarps ? 2 * L::kWorkers * L::kMeet * kWarpSize / L::kRowLanes : 1];

  const int worker = threadIdx.x / L::kWorkerThreads;
  const int in_worker = threadIdx.x % L::kWorkerThreads;
  const int in_row = threadIdx.x % kThreads;
  const int row_lane = in_worker / kThreads;
  const int first_partial = blockIdx.x / kCluster, stride = gridDim.x / kCluster;

  // The columns of this block, and the number of units of them in this thread.
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
    // One thread per array, from the first ones of the worker, issues its copy.
    if (in_worker < kArrays) {
      const Source source = sources[in_worker];
      if (source.data != nullptr) source.Copy(to, barrier, row, rows, 0, 1);
    }
#else
    for (int array = 0; array < kArrays; ++array) {
      const Source source = sources[array];
      if (source.data == nullptr) continue;
      source.Copy(to, barrier, row, rows, in_worker, L::kWorkerThreads);
      if (in_worker == 0) barrier->Arrive();  // for its own stores; copies arrive below
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

  // The offset of an element from a 16-byte boundary in global memory, which is also its offset in
  // the stage.
  const auto offset = [](const void* array, int64_t index, int size) {
    return static_cast<int>((reinterpret_cast<uintptr_t>(array) + index * size) & 15);
  };

  // A tile in its stage.
  struct Tile {
    char* stage;
    int64_t row;
    int rows;
  };
  const auto stage_at = [&](int stage) { return stages + stage * p.stage_bytes; };
  const auto in_tile = [&](const Tile& tile, int r) { return L::kTile == 1 || r < tile.rows; };
  // The address of the tile's elements of one array.
  const auto elements = [&](const Tile& tile, int slot, const void* array) {
    const int64_t first = tile.row * p.n + first_column;
    return tile.stage + slot + (kUnit == 16 ? 0 : offset(array, first, sizeof(T)));
  };
  // Mean and rstd of row r. Both are 0 if there is no such row, so that it contributes nothing.
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
  // Replaces dy by dy + dy2, rounded, in the stage. Each thread does this for its own units, which
  // no other thread reads. It processes a batch at a time and loads all of it before the first
  // store.
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
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    // Orders these stores before the bulk copy that will fill the stage again.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  };
  // Computes xhat, dy and dy * scale of a unit; 0 if there is no such unit.
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
      // Outside the row a mean that is NaN must not propagate.
      xhat[i] = in ? (ToCompute(s_unit.elements[i]) - stats.mean) * stats.rstd : A(0);
      g[i] = dy[i] * scale[j][i];
    }
  };

  int stage = 0, parity = 0, phase = 0, meeting_phase = 0;
  for (int64_t partial = first_partial; partial < p.partials; partial += stride) {
    const Range range = RowsOf(partial, p.rows, p.sums);
    A dscale[kUnits][kSize] = {}, dbias[kUnits][kSize] = {}, dinput_bias[kUnits][kSize] = {};
    // Values of a tile that stay in registers between the two steps.
    A xhat[kRepeat][kUnits][kSize], g[kRepeat][kUnits][kSize], rstd[kRepeat];

    // First step: add the tile to the sums over rows, and compute its sums along rows.
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
    // Second step: dx of the tile.
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
      // All threads of the worker have read dy and s of the stage now. Only dsum may still be
      // needed.
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
  // Kernels with clusters are never launched on these architectures.
  if constexpr (kCluster == 1)
#endif
    RowsKernelBody<T, kUnit, kThreads, kColumns, kLeast, kCluster>(p);
}

// -------------------------------------------------------------------------------------------------
// Longer rows
//
// Each row is divided into tiles. A first kernel reduces each tile of a row. A second one adds up
// the sums of the tiles for each row. In the third, a block processes the rows of one tile and one
// partial sum. The tile's sums, and later the row's totals, are two values of the accumulator's
// type. They are stored in the place of the tile's dx until that is written.

constexpr int kLongColumns = 16;  // per thread

__device__ __forceinline__ Range TileOf(int64_t tile, int64_t tiles, int64_t n) {
  // Every tile has at least half the maximum length.
  return {tile * n / tiles, (tile + 1) * n / tiles};
}

// Stores or loads two values at an address that is only aligned to an element of dx.
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

  // Loads this thread's xhat and dy of a row. kTwo says whether there is a dy2. A test at run time
  // would take registers and lower the occupancy.
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
    __syncthreads();  // all threads have read the means, which dx overwrites now
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
  int columns;  // most columns of a row in a block
  int least;    // fewest columns
  int cluster;
  int workers;
  int tile;
};

template <typename T, int kUnit, int kThreads, int kColumns, int kLeast, int kCluster = 1>
Form MakeForm() {
  // double takes twice as many registers per column.
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

// From the shortest rows to the longest. If a device has too little shared memory for the rings of
// warps, a form with one worker per block may fit.
template <typename T, int kUnit>
inline const Form kForms[] = {
    MakeForm<T, kUnit, 8, 8, 0>(),       MakeForm<T, kUnit, 32, 8, 0>(),
    MakeForm<T, kUnit, 32, 16, 8>(),     MakeForm<T, kUnit, 32, 24, 16>(),
    MakeForm<T, kUnit, 32, 32, 24>(),    MakeForm<T, kUnit, 256, 8, 0>(),
    MakeForm<T, kUnit, 256, 16, 8>(),    MakeForm<T, kUnit, 256, 32, 16>(),
    MakeForm<T, kUnit, 256, 32, 8, 2>(), MakeForm<T, kUnit, 256, 32, 8, 4>(),
    MakeForm<T, kUnit, 256, 32, 8, 8>(),
};

// The widest unit. For 8-byte elements, single elements are as fast.
template <typename T>
constexpr int kWideUnit = sizeof(T) == 8 ? 8 : 16;

// Shared memory for the rings of a block, unless two stages need more. Larger rings are 2 to 6%
// slower: tiles only wait longer in the ring, and more of them are left to process after the last
// load.
constexpr int64_t kRing = 64 << 10;
constexpr int64_t kMinStages = 2;

struct Device {
  int processors;
  int shared_memory;  // available to a block
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
  // Code that was compiled for older devices has no clusters, even if it runs on a newer one.
  device.clusters = clusters != 0 && attributes.ptxVersion >= 90;
  device.shared_memory -= static_cast<int>(attributes.sharedSizeBytes);
  return error;
}

// Computes the number of stages that fit. Returns 0 if this form cannot be used.
int PlanStages(const Form& form, int64_t itemsize, int shared_memory, Params& p) {
  const int64_t unit_columns = std::max<int64_t>(1, form.unit / itemsize);
  const int64_t columns = RoundUp(CeilDiv(p.n, form.cluster), unit_columns);
  if (columns > form.columns || p.n - (form.cluster - 1) * columns < form.least) return 0;
  const int64_t accumulator = std::max<int64_t>(itemsize, sizeof(float));
  // 16 more bytes per slot, so that the data fits at any offset from a 16-byte boundary.
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
  // Blocks are persistent, one per SM. Not every SM can be in a cluster, so clusters are not
  // persistent: there is one for each partial sum.
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
  return cudaGetLastError();  // clears the error, so that the next launch does not report it
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

// If no sums are requested, the number of partial sums does not limit the parallelism. Redefines a
// partial sum as `rows` rows.
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
    constexpr int kStatic = 20 << 10;  // most static shared memory of a kernel
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

// Calls visit(kernel, ring) for the type's forms, with ring = true, and for its kernels for longer
// rows.
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

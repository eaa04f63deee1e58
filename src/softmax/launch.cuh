// Selects the kernel and the launch configuration of a softmax. The forward and the backward each
// include this file once and are compiled separately.
#ifndef JAX_FASTOPS_SOFTMAX_LAUNCH_CUH_
#define JAX_FASTOPS_SOFTMAX_LAUNCH_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/cuda/load_kernels.h"
#include "core/dtype.h"
#include "core/fast_divide.h"
#include "softmax/column_registers.cuh"
#include "softmax/columns.cuh"
#include "softmax/gang.cuh"
#include "softmax/rows.cuh"
#include "softmax/run.h"
#include "softmax/softmax_cuda.h"

namespace jax_fastops::cuda::softmax {

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline constexpr int64_t kMaxGrid = std::numeric_limits<int32_t>::max();

// -------------------------------------------------------------------------------------------------
// Tables

using RowsFunction = void (*)(Params);
using BlockFunction = void (*)(Params, int);
using GangFunction = void (*)(Params, GangParams);
using LongFunction = void (*)(Params, LongParams);
using ColumnsFunction = void (*)(Params, ColumnsParams);
using ColumnRegistersFunction = void (*)(Params, ColumnRegistersParams);

// A RowsKernel, for rows of up to `units` units.
struct RowsLaunch {
  int units;
  int threads;
  int rows_per_block;
  RowsFunction function;
};

template <typename T, Op kOp, int kBytes, int kLanes, int kUnits, int kRows, bool kAligned = true>
RowsLaunch MakeRows() {
  return {kLanes * kUnits, RowThreads(kLanes), RowThreads(kLanes) / kLanes * kRows,
          RowsKernel<T, kOp, kLanes, kUnits, kRows, kBytes, kAligned>};
}

// A BlockKernel.
struct BlockLaunch {
  int threads;
  int cluster;
  BlockFunction function;
};

template <typename T, Op kOp, int kThreads, int kCluster>
BlockLaunch MakeBlock() {
  return {kThreads, kCluster, BlockKernel<T, kOp, kThreads, kCluster>};
}

inline constexpr int kUnitRows = 10, kRaggedRows = 5, kElementRows = 5, kBlocks = 6;

// A ColumnRegistersKernel.
struct ColumnRegistersLaunch {
  int bytes;  // of a unit
  int size;   // elements of a unit
  int places;
  int threads;  // most per block
  int blocks;   // most per cluster
  bool shares;  // the second array is in shared memory
  ColumnRegistersFunction function;
};

template <typename T, Op kOp, int kBytes, bool kCluster>
ColumnRegistersLaunch MakeColumnRegisters() {
  if constexpr (kCluster && !IsGrad(kOp)) {
    return {};
  } else {
    constexpr int kSize = kBytes / static_cast<int>(sizeof(T));
    return {kBytes,
            kSize,
            kColumnPlaces<T, kBytes>,
            kColumnThreads<kBytes>,
            kCluster ? 8 : 1,
            kSharesSecond<T, kOp, kBytes>,
            ColumnRegistersKernel<T, kOp, kBytes, kCluster>};
  }
}

inline constexpr int kColumnRegisters = 3;

// Bytes of a unit in the column kernels: at most four elements, because each of them needs a
// maximum and a sum in registers.
template <typename T>
inline constexpr int kColumnUnit = sizeof(T) == 2 ? 8 : 16;

template <typename T, Op kOp>
struct Table {
  static constexpr bool kHasUnits = sizeof(T) < 8;  // of 16 bytes, along rows

  RowsLaunch unit_rows[kUnitRows] = {};
  RowsLaunch ragged_rows[kRaggedRows] = {};  // rows that begin or end inside a unit
  BlockLaunch blocks[kBlocks] = {};
  GangFunction gang = nullptr;
  LongFunction long_rows = nullptr;
  RowsLaunch element_rows[kElementRows] = {
      MakeRows<T, kOp, sizeof(T), 4, 1, 4>(), MakeRows<T, kOp, sizeof(T), 4, 4, 1>(),
      MakeRows<T, kOp, sizeof(T), 32, 1, 4>(), MakeRows<T, kOp, sizeof(T), 32, 4, 1>(),
      MakeRows<T, kOp, sizeof(T), 32, 16, 1>()};
  ColumnRegistersLaunch column_registers[kColumnRegisters] = {
      MakeColumnRegisters<T, kOp, 16, false>(), MakeColumnRegisters<T, kOp, 16, true>(),
      MakeColumnRegisters<T, kOp, sizeof(T), false>()};
  ColumnsFunction unit_columns = ColumnsKernel<T, kOp, kColumnUnit<T>>;
  ColumnsFunction element_columns = ColumnsKernel<T, kOp, sizeof(T)>;

  Table() {
    if constexpr (kHasUnits) {
      const RowsLaunch rows[] = {
          MakeRows<T, kOp, 16, 2, 1, 4>(),   MakeRows<T, kOp, 16, 4, 1, 4>(),
          MakeRows<T, kOp, 16, 8, 1, 4>(),   MakeRows<T, kOp, 16, 8, 2, 2>(),
          MakeRows<T, kOp, 16, 8, 4, 1>(),   MakeRows<T, kOp, 16, 16, 4, 1>(),
          MakeRows<T, kOp, 16, 32, 4, 1>(),  MakeRows<T, kOp, 16, 64, 4, 1>(),
          MakeRows<T, kOp, 16, 128, 4, 1>(), MakeRows<T, kOp, 16, 256, 4, 1>()};
      std::copy(std::begin(rows), std::end(rows), unit_rows);
      const RowsLaunch ragged[] = {
          MakeRows<T, kOp, 16, 16, 4, 1, false>(), MakeRows<T, kOp, 16, 32, 4, 1, false>(),
          MakeRows<T, kOp, 16, 64, 4, 1, false>(), MakeRows<T, kOp, 16, 128, 4, 1, false>(),
          MakeRows<T, kOp, 16, 256, 4, 1, false>()};
      std::copy(std::begin(ragged), std::end(ragged), ragged_rows);
      const BlockLaunch all[] = {MakeBlock<T, kOp, 256, 1>(),  MakeBlock<T, kOp, 256, 2>(),
                                 MakeBlock<T, kOp, 256, 4>(),  MakeBlock<T, kOp, 256, 8>(),
                                 MakeBlock<T, kOp, 256, 16>(), MakeBlock<T, kOp, 512, 16>()};
      std::copy(std::begin(all), std::end(all), blocks);
      gang = GangKernel<T, kOp>;
      long_rows = LongKernel<T, kOp>;
    }
  }
};

template <typename T, Op kOp>
const Table<T, kOp>& TableOf() {
  static const Table<T, kOp> table;
  return table;
}

// Calls `visit` with the table of the dtype and operation.
template <bool kGrad, typename Visit>
cudaError_t WithTable(DType dtype, bool log, const Visit& visit) {
  constexpr Op kPlain = kGrad ? Op::kSoftmaxGrad : Op::kSoftmax;
  constexpr Op kLog = kGrad ? Op::kLogSoftmaxGrad : Op::kLogSoftmax;
  switch (dtype) {
    case DType::kF32:
      return log ? visit(TableOf<float, kLog>()) : visit(TableOf<float, kPlain>());
    case DType::kBF16:
      return log ? visit(TableOf<__nv_bfloat16, kLog>()) : visit(TableOf<__nv_bfloat16, kPlain>());
    case DType::kF16:
      return log ? visit(TableOf<__half, kLog>()) : visit(TableOf<__half, kPlain>());
    case DType::kF64:
      return log ? visit(TableOf<double, kLog>()) : visit(TableOf<double, kPlain>());
  }
  return cudaErrorInvalidValue;
}

// -------------------------------------------------------------------------------------------------
// Launches

// As a cluster size: a cooperative launch, in which all blocks run at once.
inline constexpr int kCooperative = 0;

template <typename... Arguments>
cudaError_t Launch(void (*function)(Arguments...), dim3 grid, int threads, int shared_bytes,
                   int cluster, cudaStream_t stream, Arguments... arguments) {
  void* pointers[] = {&arguments...};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  if (cluster == kCooperative) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  config.attrs = &attribute;
  config.numAttrs = cluster == 1 ? 0 : 1;
  static_cast<void>(
      cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(function), pointers));
  return cudaGetLastError();  // clears the error, so that the next launch does not report it
}

inline cudaError_t LaunchRows(const RowsLaunch& launch, const Params& p, cudaStream_t stream) {
  const int64_t blocks = CeilDiv(p.outer, launch.rows_per_block);
  if (blocks > kMaxGrid) return cudaErrorInvalidConfiguration;
  return Launch(launch.function, dim3(static_cast<unsigned>(blocks)), launch.threads, 0, 1, stream,
                p);
}

inline cudaError_t LaunchBlock(const BlockLaunch& launch, const Params& p, int block_units,
                               int shared_bytes, cudaStream_t stream) {
  const int64_t blocks = p.outer * launch.cluster;
  if (blocks > kMaxGrid) return cudaErrorInvalidConfiguration;
  return Launch(launch.function, dim3(static_cast<unsigned>(blocks)), launch.threads, shared_bytes,
                launch.cluster, stream, p, block_units);
}

// Whether gangs can hold a row of `row_units` on the device.
inline bool HasGangs(int64_t row_units, const Limits& limits) {
  return limits.shared_bytes >= kGangShared &&
         CeilDiv(row_units, kGangBlockUnits) <= std::min(limits.processors, kMostGangBlocks);
}

inline cudaError_t LaunchGang(GangFunction function, const Params& p, int64_t row_units,
                              int processors, bool grad, void* workspace, cudaStream_t stream) {
  // Choose the number of gangs that leaves the fewest gangs idle in the last round. Among equals
  // take the largest number, because then fewer blocks exchange sums.
  const int64_t most = std::min(p.outer, processors / CeilDiv(row_units, kGangBlockUnits));
  const auto places = [&](int64_t gangs) { return CeilDiv(p.outer, gangs) * gangs; };
  int64_t gangs = 1;
  for (int64_t g = 2; g <= most; ++g) {
    if (places(g) <= places(gangs)) gangs = g;
  }
  GangParams q;
  q.gangs = static_cast<int>(gangs);
  const int64_t needed = CeilDiv(row_units, kGangBlockUnits);
  const int64_t room = p.n / 2048;  // blocks per row for which the workspace has room
  q.blocks = static_cast<int>(
      std::min({processors / gangs, std::max(needed, room), int64_t{kMostGangBlocks}}));
  q.block_units = static_cast<int>(CeilDiv(row_units, q.blocks));
  q.partials = static_cast<uint32_t*>(workspace);
  if (q.blocks > 1) {
    const int64_t values = p.outer * q.blocks * (grad ? 1 : 2);
    const cudaError_t error = cudaMemsetAsync(workspace, 0xff, values * sizeof(uint32_t), stream);
    if (error != cudaSuccess) return error;
  }
  return Launch(function, dim3(static_cast<unsigned>(q.blocks * q.gangs)), kGangThreads,
                kGangShared, q.blocks > 1 ? kCooperative : 1, stream, p, q);
}

template <typename A>
cudaError_t LaunchLong(LongFunction function, const Params& p, int64_t row_units, int processors,
                       void* workspace, cudaStream_t stream) {
  LongParams q;
  // Four batches per chunk. With one batch (16 KB) the tickets were the bottleneck: 2.2 times the
  // copy floor for float32 (8, 4194304) on an H100, and 1.6 times with four. Leads of half as many
  // chunks measured 5 to 10% slower.
  q.batches = 4;
  q.chunks = CeilDiv(row_units, q.batches * kBatchUnits);
  const int64_t jobs = p.outer * q.chunks;
  if (2 * jobs > kMaxGrid) return cudaErrorInvalidConfiguration;
  int resident = 0;
  cudaError_t error =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, function, kLongThreads, 0);
  if (error != cudaSuccess) return error;
  const int64_t blocks = std::min<int64_t>(2 * jobs, int64_t{processors} * resident);
  q.lead = std::min(jobs, q.chunks + blocks);

  // The counters come first, then the data, which is aligned to 8 bytes.
  const int64_t counters = (1 + 2 * p.outer + 1) / 2 * 2;
  q.ticket = static_cast<uint32_t*>(workspace);
  q.done = q.ticket + 1;
  q.ready = q.done + p.outer;
  q.results = q.ticket + counters;
  q.partials = static_cast<A*>(q.results) + 2 * p.outer;
  error = cudaMemsetAsync(workspace, 0, counters * sizeof(uint32_t), stream);
  if (error != cudaSuccess) return error;
  return Launch(function, dim3(static_cast<unsigned>(blocks)), kLongThreads, 0, 1, stream, p, q);
}

inline int Log2(int64_t power) {
  int log = 0;
  while (int64_t{1} << log < power) ++log;
  return log;
}

// A unit has `bytes` bytes and `size` elements. `accumulator` is in bytes.
inline cudaError_t LaunchColumns(ColumnsFunction function, const Params& p, int bytes, int size,
                                 int accumulator, bool grad, const Limits& limits, void* workspace,
                                 cudaStream_t stream) {
  ColumnsParams q;
  const int64_t row_units = p.inner / size;
  q.row_units = FastDivisor64(static_cast<uint64_t>(row_units));
  q.columns = p.outer * row_units;
  q.stage = Stage::kAll;
  q.chunk = p.n;
  q.chunks = 1;
  q.partials = workspace;
  const int threads = ColumnThreads(grad);
  const int log_threads = Log2(threads);

  const auto scratch_bytes = [&](int log_width) {
    const int64_t parts = threads >> std::max(log_width, 5);
    return parts == 1 ? 0 : (parts << log_width) * size * accumulator;
  };
  const auto held_bytes = [&](int log_width) {
    const int64_t places = CeilDiv(p.n, threads >> log_width) * threads;
    return (places * bytes * (grad ? 2 : 1) + 15) / 16 * 16;
  };
  const auto tiles = [&](int log_width) { return CeilDiv(q.columns, int64_t{1} << log_width); };
  // A tile is no wider than a row of inner elements, unless it would have more lanes than n has
  // elements. It is at least 64 bytes wide, unless the row is narrower: with 32 bytes (a sector),
  // the backward measured 1.29 times the copy floor instead of 1.10.
  const int narrow = std::max(0, log_threads - Log2(p.n));
  const int widest = std::min(log_threads, std::max(narrow, Log2(row_units)));
  const int sector = std::min(widest, std::max(narrow, Log2(64 / bytes)));
  const auto fits = [&](int log_width, int64_t bytes_there) {
    return held_bytes(log_width) + scratch_bytes(log_width) <= bytes_there;
  };
  int width = widest;
  while (width > sector && (!fits(width, kThirdOfShared) || tiles(width) < 2 * limits.processors)) {
    --width;
  }
  q.held = fits(width, limits.shared_bytes);
  if (!q.held) width = std::min(widest, std::max(narrow, Log2(128 / bytes)));
  q.log_width = width;
  const int64_t held = q.held ? held_bytes(width) : 0;
  q.scratch = static_cast<int>(held / 16);
  const int shared_bytes = static_cast<int>(held + scratch_bytes(width));
  if (tiles(width) > kMaxGrid) return cudaErrorInvalidConfiguration;
  dim3 grid(static_cast<unsigned>(tiles(width)));

  constexpr int64_t kMinChunk = 4096, kMaxChunks = 1024;
  const int64_t wanted = std::min(kMaxChunks, CeilDiv(4 * limits.processors, tiles(width)));
  if (!q.held && p.n > kSoftmaxWorkspace && wanted > 1) {
    q.chunk = std::max(kMinChunk, CeilDiv(p.n, wanted));
    q.chunks = CeilDiv(p.n, q.chunk);
    grid.y = static_cast<unsigned>(q.chunks);
    q.stage = Stage::kReduce;
    const cudaError_t error = Launch(function, grid, threads, shared_bytes, 1, stream, p, q);
    if (error != cudaSuccess) return error;
    q.stage = Stage::kWrite;
  }
  return Launch(function, grid, threads, shared_bytes, 1, stream, p, q);
}

// The launch configuration of a ColumnRegistersKernel.
struct ColumnRegistersPlan {
  ColumnRegistersParams q;
  int threads;
  unsigned blocks;
  int shared_bytes;
};

// Returns false if the kernel cannot hold a column. `accumulator` is in bytes.
inline bool PlanColumnRegisters(const ColumnRegistersLaunch& launch, const Params& p,
                                int accumulator, const Limits& limits, ColumnRegistersPlan* plan) {
  ColumnRegistersParams& q = plan->q;
  const int64_t row_units = p.inner / launch.size;
  q.row_units = FastDivisor64(static_cast<uint64_t>(row_units));
  q.columns = p.outer * row_units;
  // The least width of a tile, for tiles of a warp and for tiles of blocks, unless a row is
  // narrower: 128 bytes. With 64 bytes the backward for n = 500 measured 1.22 times the copy floor
  // instead of 1.03. For units of one element, the ends of a tile share sectors with other tiles.
  // Tiles of blocks are then 256 bytes wide, or 32 elements for 16-bit types.
  const auto width_of = [&](int units) { return Log2(std::min<int64_t>(row_units, units)); };
  const int warp_width = width_of(std::min(32, 128 / launch.bytes));
  const int block_width = width_of(launch.size > 1    ? 128 / launch.bytes
                                   : launch.bytes > 2 ? 256 / launch.bytes
                                                      : 32);
  constexpr int kLogThreads = 8, kLogWarp = 5;
  int log_lanes = Log2(CeilDiv(p.n, launch.places));
  // Small arrays use more lanes per column than are needed to hold it, within a warp, so that all
  // SMs have work.
  const auto few = [&] { return q.columns << log_lanes < int64_t{512} * limits.processors; };
  const auto in_warp = [&](int more) {
    const int width = few() ? std::min(warp_width, 2) : warp_width;
    return log_lanes == 0 || log_lanes + more + width <= kLogWarp;
  };
  while (few() && in_warp(1) && (int64_t{1} << log_lanes) < p.n) ++log_lanes;
  int log_threads = kLogThreads;
  q.log_blocks = 0;
  if (in_warp(0)) {
    q.log_threads = kLogWarp;
    const int64_t threads = q.columns << log_lanes;
    while (log_threads > 6 && threads >> log_threads < 4 * limits.processors) --log_threads;
  } else {
    const int log_tile = std::max(kLogThreads, log_lanes + block_width);
    log_threads = std::min(log_tile, Log2(launch.threads));
    q.log_threads = log_threads;
    q.log_blocks = log_tile - log_threads;
    if (1 << q.log_blocks > std::min(launch.blocks, limits.cluster)) return false;
    // Tiles would share sectors. That measured 1.64 times the copy floor, and 1.23 times with
    // ColumnsKernel.
    if (q.log_blocks > 0 && p.inner * (launch.bytes / launch.size) % 64 != 0) return false;
  }
  q.places = static_cast<int>(CeilDiv(p.n, int64_t{1} << log_lanes));
  q.log_width = q.log_threads + q.log_blocks - log_lanes;
  plan->threads = 1 << log_threads;
  const int64_t tiles = CeilDiv(q.columns, int64_t{1} << (log_threads + q.log_blocks - log_lanes));
  if (tiles << q.log_blocks > kMaxGrid) return false;
  plan->blocks = static_cast<unsigned>(tiles << q.log_blocks);

  const int values = (launch.size * accumulator) << q.log_width;  // bytes, of a tile
  const int parts = 1 << (q.log_threads - std::max(q.log_width, kLogWarp));
  int bytes = launch.shares ? plan->threads * q.places * launch.bytes : 0;
  const auto take = [&](int more) {
    const int at = bytes / 16;
    bytes += (more + 15) / 16 * 16;
    return at;
  };
  q.scratch = take(parts == 1 ? 0 : parts * values);
  q.exchange = take(q.log_blocks > 0 ? 2 * values : 0);
  plan->shared_bytes = bytes;
  return bytes <= limits.shared_bytes;
}

// Whether the mask can be loaded `size` elements at a time (size >= 1).
inline bool MaskHasUnits(const Params& p, int size) {
  int64_t bits = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.mask));
  for (int i = 0; i < p.mask_outer.rank; ++i) bits |= p.mask_outer.stride[i];
  if (p.inner == 1) return p.mask_stride == 1 && (bits | p.n) % size == 0;
  return p.mask_inner.rank == 1 && p.mask_inner.stride[0] == 1 &&
         (bits | p.mask_stride) % size == 0;
}

template <bool kGrad>
cudaError_t Run(const Params& params, DType dtype, bool log, void* workspace, cudaStream_t stream) {
  Params p = params;
  if (p.outer == 0 || p.n == 0 || p.inner == 0) return cudaSuccess;
  Limits limits;
  const cudaError_t error = GetLimits(&limits);
  if (error != cudaSuccess) return error;

  const int itemsize = static_cast<int>(DTypeSize(dtype));
  const int size = 16 / itemsize;
  const auto misalignment = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16;
  };
  const bool alike = misalignment(p.a) == misalignment(p.out) &&
                     (!kGrad || misalignment(p.a) == misalignment(p.b));
  const bool aligned = alike && misalignment(p.a) == 0 && p.n % size == 0;
  const auto column_units = [&](int64_t unit) {
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(p.a) |
                                reinterpret_cast<uintptr_t>(p.b) |
                                reinterpret_cast<uintptr_t>(p.out);
    return p.inner % unit == 0 && addresses % (unit * itemsize) == 0 &&
           (p.mask == nullptr || p.mask_inner.rank == 0 || unit == 1 ||
            MaskHasUnits(p, static_cast<int>(unit)));
  };

  return WithTable<kGrad>(dtype, log, [&](const auto& table) {
    const auto columns = [&] {
      const int accumulator = std::max<int>(itemsize, sizeof(float));
      const bool mask_inner = p.mask != nullptr && p.mask_inner.rank > 0;
      const int column_size = itemsize == 8 ? 2 : 4;
      const bool units = p.inner > 1 && column_units(column_size);
      for (const ColumnRegistersLaunch& launch : table.column_registers) {
        if (launch.function == nullptr || p.inner == 1 || !column_units(launch.size)) continue;
        // For columns of more than a few elements, ColumnsKernel with wider units is faster than
        // single elements.
        if (launch.size == 1 && units && p.n > 32) continue;
        ColumnRegistersPlan plan;
        if (!PlanColumnRegisters(launch, p, accumulator, limits, &plan)) continue;
        p.mask_units = mask_inner && launch.size > 1;
        return Launch(launch.function, dim3(plan.blocks), plan.threads, plan.shared_bytes,
                      1 << plan.q.log_blocks, stream, p, plan.q);
      }
      p.mask_units = mask_inner && units;
      return units ? LaunchColumns(table.unit_columns, p, column_size * itemsize, column_size,
                                   accumulator, kGrad, limits, workspace, stream)
                   : LaunchColumns(table.element_columns, p, itemsize, 1, accumulator, kGrad,
                                   limits, workspace, stream);
    };
    if (p.inner > 1) return columns();

    constexpr int64_t kFewElements = 64;
    if (!table.kHasUnits || !alike || (!aligned && p.n <= kFewElements)) {
      p.mask_units = false;
      for (const RowsLaunch& launch : table.element_rows) {
        if (p.n <= launch.units) return LaunchRows(launch, p, stream);
      }
      return columns();
    }

    p.mask_units = p.mask != nullptr && aligned && MaskHasUnits(p, size);
    const int64_t units = aligned ? p.n / size : (p.n + 2 * size - 2) / size;
    for (const RowsLaunch& launch : table.unit_rows) {
      if (aligned && units <= launch.units) return LaunchRows(launch, p, stream);
    }
    for (const RowsLaunch& launch : table.ragged_rows) {
      if (units <= launch.units) return LaunchRows(launch, p, stream);
    }
    // Gangs are faster than large clusters for very long rows. For float32 (512, 262144), relative
    // to the copy floor, the forward measured 1.12 with a cluster and 1.07 with a gang, the
    // backward 1.31 and 1.05. The backward of log_softmax stays with clusters: in a gang it would
    // compute its exponentials between two rows, which takes longer.
    constexpr int64_t kGangRow = kGrad ? 32768 : 30000;  // units
    const auto gang = [&] {
      return LaunchGang(table.gang, p, units, limits.processors, kGrad, workspace, stream);
    };
    const bool has_gangs = HasGangs(units, limits);
    if (has_gangs && units > kGangRow && !(kGrad && log)) return gang();
    // Take the smallest cluster that leaves room for a second one on the same SMs. With twice as
    // many blocks of half the size, rows of 50257 and of 128256 elements measured 1 to 8% slower.
    for (const BlockLaunch& launch : table.blocks) {
      const int64_t block_units = CeilDiv(units, launch.cluster);
      const int64_t bytes = block_units * 16 * (kGrad ? 2 : 1);
      const int64_t most = launch.threads == 256 ? kHalfOfShared : kMostOfShared;
      if (launch.cluster <= limits.cluster &&
          bytes <= std::min<int64_t>(most, limits.shared_bytes)) {
        return LaunchBlock(launch, p, static_cast<int>(block_units), static_cast<int>(bytes),
                           stream);
      }
    }
    if (p.n <= kSoftmaxWorkspace) return columns();
    if (has_gangs) return gang();
    return LaunchLong<float>(table.long_rows, p, units, limits.processors, workspace, stream);
  });
}

template <bool kGrad>
cudaError_t LoadKernels() {
  static KernelLoader loader;
  Limits limits;
  const cudaError_t error = GetLimits(&limits);
  if (error != cudaSuccess) return error;
  return loader.Load([&limits](const auto& load) {
    const auto load_shared = [&](auto function, bool cluster) {
      const void* kernel = reinterpret_cast<const void*>(function);
      load(kernel);
      if (kernel == nullptr || load.failed()) return;
      load.Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      limits.shared_bytes));
      if (cluster) {
        load.Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
      }
    };
    for (int i = 0; i < kNumDTypes; ++i) {
      for (const bool log : {false, true}) {
        WithTable<kGrad>(static_cast<DType>(i), log, [&](const auto& table) {
          for (const RowsLaunch& launch : table.unit_rows) {
            load(reinterpret_cast<const void*>(launch.function));
          }
          for (const RowsLaunch& launch : table.ragged_rows) {
            load(reinterpret_cast<const void*>(launch.function));
          }
          for (const RowsLaunch& launch : table.element_rows) {
            load(reinterpret_cast<const void*>(launch.function));
          }
          for (const BlockLaunch& launch : table.blocks) {
            if (launch.cluster <= limits.cluster) load_shared(launch.function, launch.cluster > 8);
          }
          load_shared(table.gang, false);
          load(reinterpret_cast<const void*>(table.long_rows));
          for (const ColumnRegistersLaunch& launch : table.column_registers) {
            // Plans also use clusters smaller than `blocks`, so load the kernel if there are any
            // clusters.
            if (launch.blocks == 1 || limits.cluster > 1) load_shared(launch.function, false);
          }
          load_shared(table.unit_columns, false);
          load_shared(table.element_columns, false);
          return cudaSuccess;
        });
      }
    }
  });
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_LAUNCH_CUH_

// Splits features into attention heads, with or without a bias, and merges heads into features,
// with or without the sums that give the bias gradient. One launch does all of this, also for the
// three parts of QKV.
//
// Every element moves once, so the kernel is bound by memory. One kernel works in both directions,
// and only its memory accesses determine its shape.
//
// - The kernel moves *units* of 1 to 16 bytes: the largest unit that divides a head's row and to
//   which the pointers are aligned. For heads of 64 elements it is 16 bytes. With arithmetic, it is
//   16 bytes or an element. Units are contiguous along a row of x (all features), and along a head
//   of y (all rows).
// - A thread stays in one column of units, so it computes part, head and bias once. It takes at
//   least four rows of the column, and loads all of them before it stores the first. To saturate an
//   H100's memory, about 3.35 TB/s times 0.8 us = 20 KB must be in flight per SM. With 16-byte
//   units, 80 KB or more are.
// - A block takes a tile: a run of rows times a number of columns, with `row_lanes` threads per
//   column. A warp that covers 32 columns moves 512 contiguous bytes of x, and one or more pieces
//   of a head's row of y. Columns are numbered across runs, so that no lane is idle at the end of a
//   row.
// - If units have less than 16 bytes, rows of y or x share sectors, the 32 bytes in which memory is
//   written. Writing a sector in two pieces is cheap only if the second piece follows soon. So
//   these tiles are as wide as a block. If a head is smaller than a sector, a warp takes several
//   rows of fewer columns.
// - Sums: a thread adds up the rows that it moves, in registers. A tile is as long as the run that
//   is summed, so its row lanes combine once in shared memory and write the sum. Without atomics,
//   the same input gives the same bits. Sums of 128 rows add 0.8% of traffic for bfloat16, and 0.4%
//   for float32.
#include "heads/heads.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/alignment.h"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/partial_sums.cuh"
#include "core/cuda/vec.cuh"
#include "heads/plan.h"

namespace jax_fastops::cuda {
namespace {

struct Heads;  // the family of the kernels

struct HeadsArrays {
  char* x;  // read by a split, written by a merge
  char* y[kMaxHeadParts];
  const void* bias;
  void* sums;
  bool split;
  bool wide_bias;  // in float32, while x has 16 bits
};

// The columns of a block's slab.
struct Slab {
  int64_t first_batch, first_run;
  uint32_t columns;

  __device__ __forceinline__ explicit Slab(const HeadsTiles& t)
      : first_batch(blockIdx.y * t.slab_batches),
        first_run(int64_t{blockIdx.z} * t.slab_runs.divisor),
        columns(static_cast<uint32_t>(min(t.slab_batches, t.batch - first_batch)) *
                static_cast<uint32_t>(min(int64_t{t.slab_runs.divisor}, t.runs - first_run)) *
                t.row.divisor) {}
};

// The rows of one column that a thread moves.
struct Rows {
  char* x = nullptr;  // the unit in the first row
  char* y = nullptr;
  uint32_t in_row = 0;  // the column's index in a row of x
  int count = 0;
};

// Finds the rows of a thread in column `index` of the slab.
template <int kUnit>
__device__ __forceinline__ Rows FindRows(const HeadsTiles& t, const HeadsArrays& arrays,
                                         const Slab& slab, uint32_t index, int row_lane) {
  Rows rows;
  const uint32_t slab_run = Divide(index, t.row);
  rows.in_row = index - slab_run * t.row.divisor;
  const uint32_t slab_batch = Divide(slab_run, t.slab_runs);
  const uint32_t run =
      static_cast<uint32_t>(slab.first_run) + slab_run - slab_batch * t.slab_runs.divisor;
  const uint32_t group = Divide(run, t.subgroups);
  const int64_t in_group = (run - group * t.subgroups.divisor) * t.run_rows;
  const uint32_t any_head = Divide(rows.in_row, t.head);
  const uint32_t in_head = rows.in_row - any_head * t.head.divisor;
  const uint32_t part = Divide(any_head, t.heads);
  const uint32_t head = any_head - part * t.heads.divisor;

  const int64_t batch = slab.first_batch + slab_batch;
  const int64_t row = group * t.group_rows + in_group + row_lane;
  rows.x = arrays.x + ((batch * t.sequence + row) * t.row.divisor + rows.in_row) * kUnit;
  // Selected, not indexed: an index into the parameters would need a copy of them in local memory.
  rows.y = part == 0 ? arrays.y[0] : part == 1 ? arrays.y[1] : arrays.y[2];
  rows.y +=
      (((batch * t.heads.divisor + head) * t.sequence + row) * t.head.divisor + in_head) * kUnit;

  // The run may be shorter than others, or empty.
  const int64_t left =
      min(t.run_rows, t.group_rows - in_group) - row_lane + (1 << t.log_row_lanes) - 1;
  rows.count = left > 0 ? static_cast<int>(left >> t.log_row_lanes) : 0;
  return rows;
}

// Adds up the totals of a tile's row lanes and writes them. All threads of the block call it.
template <typename A, int kSize>
__device__ __forceinline__ void StoreSums(const HeadsTiles& t, const HeadsArrays& arrays,
                                          const Slab& slab, uint32_t tile, int column, int row_lane,
                                          const A (&totals)[kSize]) {
  __shared__ A shared[kHeadsThreads * kSize];  // [row_lanes][columns][kSize]
  const int columns = 1 << t.log_columns, row_lanes = 1 << t.log_row_lanes;
#pragma unroll
  for (int i = 0; i < kSize; ++i) shared[(row_lane * columns + column) * kSize + i] = totals[i];
  const uint32_t live =
      tile < slab.columns ? min(slab.columns - tile, uint32_t{1} << t.log_columns) : 0;
  AddParts<kHeadsThreads>(shared, row_lanes, columns * kSize, live * kSize, [&](int i, A sum) {
    const int64_t first = (slab.first_batch * t.runs + slab.first_run) * t.row.divisor + tile;
    static_cast<A*>(arrays.sums)[first * kSize + i] = sum;
  });
}

// T is the element type. A move needs only its size, so it takes the whole unit as one element.
template <typename T, int kUnit, HeadsWork kWork>
__device__ __forceinline__ void MoveRows(const HeadsTiles& t, const HeadsArrays& arrays) {
  using U = Unit<T, kUnit>;
  constexpr bool kBias = kWork == HeadsWork::kAddBias, kSums = kWork == HeadsWork::kSum;
  constexpr int kInFlight = HeadsInFlight(kUnit, kWork);

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int log_warp_columns = 5 - t.log_warp_rows;
  const int column = (lane & ((1 << log_warp_columns) - 1)) |
                     ((warp << log_warp_columns) & ((1 << t.log_columns) - 1));
  const int row_lane = lane >> log_warp_columns | warp >> (t.log_columns - log_warp_columns)
                                                              << t.log_warp_rows;
  const Slab slab(t);
  const uint32_t tile = blockIdx.x << t.log_columns;
  Rows rows;
  if (tile + column < slab.columns) {
    rows = FindRows<kUnit>(t, arrays, slab, tile + column, row_lane);
  } else if constexpr (!kSums) {
    return;
  }
  const bool split = kBias || (!kSums && arrays.split);
  const char* from = split ? rows.x : rows.y;
  char* to = split ? rows.y : rows.x;
  const int64_t from_step = split ? t.x_step : t.y_step, to_step = split ? t.y_step : t.x_step;

  [[maybe_unused]] ComputeType<T> bias[U::kSize], totals[U::kSize] = {};
  if constexpr (kBias) {
    const int64_t first = int64_t{rows.in_row} * U::kSize;
    if (sizeof(T) == 2 && arrays.wide_bias) {
      LoadParameter<T, float>(arrays.bias, first, bias);
    } else {
      LoadParameter<T, T>(arrays.bias, first, bias);
    }
  }

  for (int pass = 0; pass < (kSums ? t.passes : 1); ++pass) {
    // The narrow units of a tile share sectors.
    if (kSums && pass > 0) KeepWarpsTogether();
    U values[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (k < rows.count) {
        values[k] = U::Load(from);
      } else if constexpr (kSums) {
        memset(&values[k], 0, sizeof(U));
      }
      from += from_step;
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if constexpr (kBias) {
#pragma unroll
        for (int i = 0; i < U::kSize; ++i) {
          values[k].elements[i] = FromCompute<T>(ToCompute(values[k].elements[i]) + bias[i]);
        }
      } else if constexpr (kSums) {
#pragma unroll
        for (int i = 0; i < U::kSize; ++i) totals[i] += ToCompute(values[k].elements[i]);
      }
      if (k < rows.count) values[k].Store(to);
      to += to_step;
    }
    rows.count -= kInFlight;
  }
  if constexpr (kSums) StoreSums(t, arrays, slab, tile, column, row_lane, totals);
}

template <typename T, int kUnit, HeadsWork kWork>
__global__ void __launch_bounds__(kHeadsThreads)
    HeadsKernel(const HeadsTiles t, const HeadsArrays arrays) {
  MoveRows<T, kUnit, kWork>(t, arrays);
}

// Moves of narrow units, of rows that are not aligned: one kernel.
__global__ void __launch_bounds__(kHeadsThreads)
    NarrowHeadsKernel(const HeadsTiles t, const HeadsArrays arrays, int unit) {
  constexpr HeadsWork kMove = HeadsWork::kMove;
  if (unit == 8) return MoveRows<Word<8>, 8, kMove>(t, arrays);
  if (unit == 4) return MoveRows<Word<4>, 4, kMove>(t, arrays);
  if (unit == 2) return MoveRows<Word<2>, 2, kMove>(t, arrays);
  MoveRows<Word<1>, 1, kMove>(t, arrays);
}

// Arithmetic on units of an element.
template <HeadsWork kWork>
struct ElementRows {
  static constexpr int kBlocks = 0;
  HeadsTiles t;
  HeadsArrays arrays;

  template <typename T>
  __device__ __forceinline__ void Run() const {
    MoveRows<T, sizeof(T), kWork>(t, arrays);
  }
};

// -------------------------------------------------------------------------------------------------
// Launches

using Kernel = void (*)(HeadsTiles, HeadsArrays);

// `call` has no alignments yet.
template <HeadsWork kWork>
cudaError_t Run(HeadsCall call, DType dtype, const void* x, const void* const* y, const void* bias,
                void* sums, cudaStream_t stream) {
  if (call.shape.size() == 0) return cudaSuccess;
  // The kernel decides which arrays are read and which are written.
  HeadsArrays arrays = {static_cast<char*>(const_cast<void*>(x)), {}, bias, sums, call.split,
                        call.bias_itemsize > call.itemsize};
  call.work = kWork;
  call.alignment = CommonAlignment({x});
  for (int64_t part = 0; part < call.shape.parts; ++part) {
    arrays.y[part] = static_cast<char*>(const_cast<void*>(y[part]));
    call.alignment = std::min(call.alignment, CommonAlignment({y[part]}));
  }
  if (bias != nullptr) call.bias_alignment = CommonAlignment({bias});
  const HeadsPlan plan = PlanHeads(call);
  if (!plan.valid) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.batch_slabs),
                  static_cast<unsigned>(plan.run_slabs));
  const LaunchConfig config = {.grid = grid, .block = dim3(kHeadsThreads)};
  if constexpr (kWork == HeadsWork::kMove) {
    if (plan.unit < 16) {
      return Launch(KernelOf<Heads, NarrowHeadsKernel>(), config, stream, plan.tiles, arrays,
                    plan.unit);
    }
    return Launch(KernelOf<Heads, HeadsKernel<Word<16>, 16, kWork>>(), config, stream, plan.tiles,
                  arrays);
  } else {
    return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
      if constexpr (sizeof(T) < 8) {
        const Kernel kernel = KernelOf<Heads, HeadsKernel<T, 16, kWork>>();
        if (plan.unit == 16) return Launch(kernel, config, stream, plan.tiles, arrays);
      }
      return LaunchAnyType<Heads, kHeadsThreads>(dtype, config, stream,
                                                 ElementRows<kWork>{plan.tiles, arrays});
    });
  }
}

}  // namespace

cudaError_t SplitHeads(const HeadsShape& shape, int64_t itemsize, const void* x, void* const* y,
                       cudaStream_t stream) {
  return Run<HeadsWork::kMove>({.shape = shape, .itemsize = itemsize}, DType::kF32, x, y, nullptr,
                               nullptr, stream);
}

cudaError_t SplitHeadsAddBias(const HeadsShape& shape, DType dtype, bool wide_bias, const void* x,
                              const void* bias, void* const* y, cudaStream_t stream) {
  const int64_t itemsize = DTypeSize(dtype);
  const int64_t bias_itemsize = wide_bias ? std::max<int64_t>(itemsize, 4) : itemsize;
  return Run<HeadsWork::kAddBias>(
      {.shape = shape, .itemsize = itemsize, .bias_itemsize = bias_itemsize}, dtype, x, y, bias,
      nullptr, stream);
}

cudaError_t MergeHeads(const HeadsShape& shape, int64_t itemsize, const void* const* y, void* x,
                       cudaStream_t stream) {
  return Run<HeadsWork::kMove>({.shape = shape, .split = false, .itemsize = itemsize}, DType::kF32,
                               x, y, nullptr, nullptr, stream);
}

cudaError_t MergeHeadsWithSums(const HeadsShape& shape, DType dtype, const void* const* y, void* x,
                               const HeadsSums& layout, void* sums, cudaStream_t stream) {
  const int64_t itemsize = DTypeSize(dtype);
  if (shape.size() == 0) {
    const int64_t count = shape.batch * layout.groups * layout.subgroups * shape.features();
    if (count == 0) return cudaSuccess;
    return cudaMemsetAsync(sums, 0, count * std::max<int64_t>(itemsize, sizeof(float)), stream);
  }
  return Run<HeadsWork::kSum>(
      {.shape = shape, .split = false, .itemsize = itemsize, .sums = layout}, dtype, x, y, nullptr,
      sums, stream);
}

cudaError_t LoadHeadsKernels() { return LoadKernels<Heads>(); }

}  // namespace jax_fastops::cuda

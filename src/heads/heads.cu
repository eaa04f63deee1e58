// Splits features into attention heads, with or without a bias, and merges heads into features,
// with or without the sums that give the bias gradient. One launch does all of this, also for the
// three parts of QKV.
//
// Every element moves once, so the kernel is bound by memory. One kernel works in both directions,
// and only its memory accesses determine its shape.
//
// - The kernel moves *units* of 1 to 16 bytes: the largest unit that divides a head's row and to
//   which the pointers are aligned. For heads of 64 elements it is 16 bytes. Units are contiguous
//   along a row of x (all features), and along a head of y (all rows).
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
#include "heads/heads_cuda.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/alignment.h"
#include "core/cuda/divide.cuh"
#include "core/cuda/load_kernels.h"
#include "core/cuda/packed.cuh"
#include "core/cuda/unit.cuh"
#include "core/fast_divide.h"

namespace jax_fastops::cuda {
namespace {

// -------------------------------------------------------------------------------------------------
// Kernels

constexpr int kThreads = 256;
constexpr int kWarpSize = 32;

struct HeadsParams {
  char* x;  // read by a split, written by a merge
  char* y[kMaxHeadParts];
  const void* bias;
  void* sums;

  // In units: the sizes of a row of x, and of a row of a head.
  FastDivisor row;
  FastDivisor head;
  FastDivisor heads;
  int64_t batch;
  int64_t sequence;

  // A sequence has groups of `group_rows` rows. A group has `subgroups` runs of `run_rows` rows.
  FastDivisor subgroups;
  int64_t group_rows;
  int64_t run_rows;
  int64_t runs;  // per sequence

  // The tile is 1 << log_columns units wide, with 1 << log_row_lanes threads per column. 1 <<
  // log_warp_rows of these threads are in one warp.
  int log_columns;
  int log_row_lanes;
  int log_warp_rows;
  int passes;      // with sums: the number of batches of in-flight rows per thread
  int64_t x_step;  // bytes between a thread's consecutive rows
  int64_t y_step;

  // Columns are counted in 32 bits. So the grid has one plane for each slab, which has a number of
  // batches and of runs of each. There is more than one slab if all runs together have more than
  // 2^31 columns.
  int64_t slab_batches;
  FastDivisor slab_runs;
};

enum class Work { kSplit, kSplitAddBias, kMerge, kMergeWithSums };

constexpr bool IsSplit(Work work) { return work == Work::kSplit || work == Work::kSplitAddBias; }

// The number of rows that a thread has in flight. For units of 16 bytes, four rows measured 1 to 2%
// faster than eight. With sums it is eight, so that 16 row lanes process 128 rows in one pass. For
// narrow units, more rows share the instructions that compute the column.
constexpr int InFlight(int unit, bool sums) {
  if (unit <= 2) return 16;
  return unit < 16 || sums ? 8 : 4;
}

// The maximum width of a tile, in columns. With sums it is more important to process a run in one
// pass: four passes measured 2% (float32) to 7% (bfloat16) slower than one.
constexpr int MaxColumns(int unit, bool sums) {
  if (unit < 16) return kThreads;
  return sums ? 16 : 32;
}

// T is the element type and B the type of the bias. Without arithmetic, both are the unit's bits.
template <Work kWork, typename T, typename B, int kUnit,
          int kInFlight = InFlight(kUnit, kWork == Work::kMergeWithSums)>
__global__ void __launch_bounds__(kThreads) HeadsKernel(const HeadsParams p) {
  using U = Unit<T, kUnit>;
  constexpr bool kBias = kWork == Work::kSplitAddBias;
  constexpr bool kSums = kWork == Work::kMergeWithSums;

  const int columns = 1 << p.log_columns;
  const int row_lanes = 1 << p.log_row_lanes;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int log_warp_columns = 5 - p.log_warp_rows;
  const int column =
      (lane & ((1 << log_warp_columns) - 1)) | ((warp << log_warp_columns) & (columns - 1));
  const int row_lane = lane >> log_warp_columns | warp >> (p.log_columns - log_warp_columns)
                                                              << p.log_warp_rows;

  // The slab, and the number of its columns.
  const int64_t first_batch = blockIdx.y * p.slab_batches;
  const int64_t first_run = int64_t{blockIdx.z} * p.slab_runs.divisor;
  const uint32_t slab_columns =
      static_cast<uint32_t>(min(p.slab_batches, p.batch - first_batch)) *
      static_cast<uint32_t>(min(int64_t{p.slab_runs.divisor}, p.runs - first_run)) * p.row.divisor;
  const uint32_t tile = blockIdx.x << p.log_columns;

  [[maybe_unused]] ComputeType<std::conditional_t<kSums, T, float>> totals[U::kSize] = {};

  char* x = nullptr;
  char* y = nullptr;
  int left = 0;  // rows of this thread
  [[maybe_unused]] uint32_t in_row = 0;

  const uint32_t index = tile + column;
  if (index < slab_columns) {
    const uint32_t slab_run = Divide(index, p.row);
    in_row = index - slab_run * p.row.divisor;
    const uint32_t slab_batch = Divide(slab_run, p.slab_runs);
    const uint32_t run =
        static_cast<uint32_t>(first_run) + slab_run - slab_batch * p.slab_runs.divisor;
    const uint32_t group = Divide(run, p.subgroups);
    const int64_t in_group = (run - group * p.subgroups.divisor) * p.run_rows;
    const uint32_t any_head = Divide(in_row, p.head);
    const uint32_t in_head = in_row - any_head * p.head.divisor;
    const uint32_t part = Divide(any_head, p.heads);
    const uint32_t head = any_head - part * p.heads.divisor;

    const int64_t batch = first_batch + slab_batch;
    const int64_t row = group * p.group_rows + in_group + row_lane;
    x = p.x + ((batch * p.sequence + row) * p.row.divisor + in_row) * kUnit;
    // Selected, not indexed: an index into the parameters would need a copy of them in local
    // memory.
    y = part == 0 ? p.y[0] : part == 1 ? p.y[1] : p.y[2];
    y += (((batch * p.heads.divisor + head) * p.sequence + row) * p.head.divisor + in_head) * kUnit;

    // The run may be shorter than others, or empty.
    const int64_t rows = min(p.run_rows, p.group_rows - in_group) - row_lane + row_lanes - 1;
    left = rows > 0 ? static_cast<int>(rows >> p.log_row_lanes) : 0;
  } else if constexpr (!kSums) {
    return;
  }

  [[maybe_unused]] ComputeType<std::conditional_t<kBias, T, float>> bias[U::kSize];
  if constexpr (kBias) LoadParameter<T, B>(p.bias, int64_t{in_row} * U::kSize, bias);

  for (int pass = 0; pass < (kSums ? p.passes : 1); ++pass) {
    // Not for communication: it keeps the warps of a tile close together, because their narrow
    // units share sectors. On an H100, heads of 127 floats and 512 rows in 32 passes take 1.34 of
    // the floor with it, and 1.72 without.
    if (kSums && pass > 0) __syncthreads();
    U values[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (k < left) {
        values[k] = U::Load(IsSplit(kWork) ? x : y);
      } else if constexpr (kSums) {
        memset(&values[k], 0, sizeof(U));
      }
      (IsSplit(kWork) ? x : y) += IsSplit(kWork) ? p.x_step : p.y_step;
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
      if (k < left) values[k].Store(IsSplit(kWork) ? y : x);
      (IsSplit(kWork) ? y : x) += IsSplit(kWork) ? p.y_step : p.x_step;
    }
    left -= kInFlight;
  }

  if constexpr (kSums) {
    using Sum = ComputeType<T>;
    constexpr int kLanesPerRun = 8;
    __shared__ Sum shared[kThreads * U::kSize];  // [row_lanes][columns][kSize]
#pragma unroll
    for (int i = 0; i < U::kSize; ++i)
      shared[(row_lane * columns + column) * U::kSize + i] = totals[i];
    __syncthreads();

    if (tile >= slab_columns) return;
    const int width = columns * U::kSize;
    const int live = min(slab_columns - tile, static_cast<uint32_t>(columns)) * U::kSize;
    Sum* sums = static_cast<Sum*>(p.sums) +
                ((first_batch * p.runs + first_run) * p.row.divisor + tile) * U::kSize;
    for (int i = threadIdx.x; i < live; i += kThreads) {
      // In runs of 8: a single sum of up to 256 lanes would have a larger rounding error.
      Sum sum = 0;
      for (int first = 0; first < row_lanes; first += kLanesPerRun) {
        Sum run = shared[first * width + i];
#pragma unroll
        for (int lane = 1; lane < kLanesPerRun; ++lane) {
          if (first + lane < row_lanes) run += shared[(first + lane) * width + i];
        }
        sum += run;
      }
      sums[i] = sum;
    }
  }
}

// -------------------------------------------------------------------------------------------------
// Launches

using Kernel = void (*)(HeadsParams);

template <Work kWork, int kUnit>
Kernel MoveKernel() {
  using Bits = Word<kUnit>;
  return HeadsKernel<kWork, Bits, Bits, kUnit>;
}

// Returns null if the unit is smaller than an element.
template <Work kWork, typename T, typename B, int kUnit>
Kernel TypedKernel() {
  if constexpr (kUnit < static_cast<int>(sizeof(T))) {
    return nullptr;
  } else {
    return HeadsKernel<kWork, T, B, kUnit>;
  }
}

template <Work kWork, int kUnit>
Kernel KernelOfUnit([[maybe_unused]] DType dtype, [[maybe_unused]] bool wide_bias) {
  if constexpr (kWork == Work::kSplit || kWork == Work::kMerge) {
    return MoveKernel<kWork, kUnit>();
  } else {
    // The merge with sums has no bias, so it has no wide bias.
    constexpr bool kBias = kWork == Work::kSplitAddBias;
    switch (dtype) {
      case DType::kF32:
        return TypedKernel<kWork, float, float, kUnit>();
      case DType::kBF16:
        if constexpr (kBias) {
          if (wide_bias) return TypedKernel<kWork, __nv_bfloat16, float, kUnit>();
        }
        return TypedKernel<kWork, __nv_bfloat16, __nv_bfloat16, kUnit>();
      case DType::kF16:
        if constexpr (kBias) {
          if (wide_bias) return TypedKernel<kWork, __half, float, kUnit>();
        }
        return TypedKernel<kWork, __half, __half, kUnit>();
      case DType::kF64:
        return TypedKernel<kWork, double, double, kUnit>();
    }
    return nullptr;
  }
}

template <Work kWork>
Kernel KernelOf(int unit, DType dtype, bool wide_bias) {
  switch (unit) {
    case 1:
      return KernelOfUnit<kWork, 1>(dtype, wide_bias);
    case 2:
      return KernelOfUnit<kWork, 2>(dtype, wide_bias);
    case 4:
      return KernelOfUnit<kWork, 4>(dtype, wide_bias);
    case 8:
      return KernelOfUnit<kWork, 8>(dtype, wide_bias);
    default:
      return KernelOfUnit<kWork, 16>(dtype, wide_bias);
  }
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t PowerOfTwoFrom(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

int Log2(int64_t power) {
  int log = 0;
  while (int64_t{1} << log < power) ++log;
  return log;
}

// The largest possible unit, in bytes.
int UnitOf(const HeadsShape& shape, int64_t itemsize, const void* x, const void* const* y) {
  int64_t bits = 16 | shape.head_size * itemsize;
  bits |= CommonAlignment({x});
  for (int64_t part = 0; part < shape.parts; ++part) bits |= CommonAlignment({y[part]});
  return static_cast<int>(bits & -bits);
}

// The parameters of a launch, without its pointers.
struct Plan {
  HeadsParams params;
  dim3 grid;
  bool valid = false;
};

// `sums` is null without sums. The lengths of the runs are then free.
Plan MakePlan(const HeadsShape& shape, int64_t itemsize, int unit, bool split,
              const HeadsSums* sums) {
  Plan plan;
  HeadsParams& p = plan.params;
  const int64_t head = shape.head_size * itemsize / unit;
  const int64_t row = shape.parts * shape.heads * head;
  // Columns are counted in 32 bits, and a tile may extend past the last one.
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max() - kThreads;
  if (row > kLimit) return plan;

  // The tile. There should be enough row lanes to take the run at once, at least as many as a warp
  // has rows, and enough that a tile is not wider than x, but no more than there are rows.
  const int64_t run_rows =
      sums == nullptr ? shape.sequence : CeilDiv(shape.sequence / sums->groups, sums->subgroups);
  const int in_flight = InFlight(unit, sums != nullptr);
  // If a head is smaller than a sector, a warp takes enough rows to fill a sector of y. If x is
  // written, it keeps at least one sector of width in x.
  int64_t warp_rows = 1;
  while (warp_rows < 8 && warp_rows * head * unit < 32) warp_rows *= 2;
  if (!split) warp_rows = std::min<int64_t>(warp_rows, unit);
  int64_t row_lanes = std::min<int64_t>(kThreads / MaxColumns(unit, sums != nullptr),
                                        PowerOfTwoFrom(CeilDiv(run_rows, in_flight)));
  row_lanes = std::max<int64_t>(
      {row_lanes, warp_rows, kThreads / std::min<int64_t>(kThreads, PowerOfTwoFrom(row))});
  row_lanes = std::min(row_lanes, PowerOfTwoFrom(run_rows));
  const int64_t columns = kThreads / row_lanes;
  warp_rows = std::max(std::min(warp_rows, row_lanes), kWarpSize / columns);
  p.log_columns = Log2(columns);
  p.log_row_lanes = Log2(row_lanes);
  p.log_warp_rows = Log2(warp_rows);
  p.x_step = row_lanes * row * unit;
  p.y_step = row_lanes * head * unit;

  // The runs: those of the sums, or runs of equal length close to the rows that a tile has in
  // flight.
  int64_t groups = 1, subgroups;
  p.run_rows = run_rows;
  if (sums == nullptr) {
    subgroups = CeilDiv(shape.sequence, row_lanes * in_flight);
    p.run_rows = CeilDiv(shape.sequence, subgroups);
    subgroups = CeilDiv(shape.sequence, p.run_rows);
  } else {
    groups = sums->groups;
    p.passes = static_cast<int>(CeilDiv(run_rows, row_lanes * in_flight));
    subgroups = sums->subgroups;
  }
  p.group_rows = shape.sequence / groups;
  p.runs = groups * subgroups;
  // Rows of a run are counted in 32 bits, too.
  if (p.runs > kLimit || p.run_rows > kLimit) return plan;

  const int64_t slab_runs = std::min(p.runs, kLimit / row);
  const int64_t run_slabs = CeilDiv(p.runs, slab_runs);
  p.slab_batches =
      run_slabs > 1 ? 1 : std::min(shape.batch, std::max<int64_t>(1, kLimit / (slab_runs * row)));
  const int64_t batch_slabs = CeilDiv(shape.batch, p.slab_batches);
  if (run_slabs > 65535 || batch_slabs > 65535) return plan;

  p.batch = shape.batch;
  p.sequence = shape.sequence;
  p.row = FastDivisor(static_cast<uint32_t>(row));
  p.head = FastDivisor(static_cast<uint32_t>(head));
  p.heads = FastDivisor(static_cast<uint32_t>(shape.heads));
  p.subgroups = FastDivisor(static_cast<uint32_t>(subgroups));
  p.slab_runs = FastDivisor(static_cast<uint32_t>(slab_runs));
  const int64_t blocks = CeilDiv(p.slab_batches * slab_runs * row, columns);
  plan.grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(batch_slabs),
                   static_cast<unsigned>(run_slabs));
  plan.valid = true;
  return plan;
}

// An equivalent shape with fewer and longer sequences.
HeadsShape Simplify(HeadsShape shape) {
  if (shape.sequence == 1) {
    shape.head_size *= shape.heads;
    shape.heads = 1;
  }
  if (shape.heads == 1) {
    shape.sequence *= shape.batch;
    shape.batch = 1;
  }
  return shape;
}

cudaError_t Launch(Kernel kernel, Plan plan, const void* x, const void* const* y, int64_t parts,
                   const void* bias, void* sums, cudaStream_t stream) {
  if (!plan.valid) return cudaErrorInvalidConfiguration;
  // The kernel decides which arrays are read and which are written.
  plan.params.x = static_cast<char*>(const_cast<void*>(x));
  for (int part = 0; part < kMaxHeadParts; ++part) {
    plan.params.y[part] = part < parts ? static_cast<char*>(const_cast<void*>(y[part])) : nullptr;
  }
  plan.params.bias = bias;
  plan.params.sums = sums;
  void* arguments[] = {&plan.params};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), plan.grid, dim3(kThreads),
                          arguments, 0, stream);
}

template <Work kWork>
cudaError_t Move(HeadsShape shape, int64_t itemsize, const void* x, const void* const* y,
                 cudaStream_t stream) {
  if (shape.size() == 0) return cudaSuccess;
  shape = Simplify(shape);
  const int unit = UnitOf(shape, itemsize, x, y);
  return Launch(KernelOf<kWork>(unit, DType::kF32, false),
                MakePlan(shape, itemsize, unit, IsSplit(kWork), nullptr), x, y, shape.parts,
                nullptr, nullptr, stream);
}

}  // namespace

cudaError_t SplitHeads(const HeadsShape& shape, int64_t itemsize, const void* x, void* const* y,
                       cudaStream_t stream) {
  return Move<Work::kSplit>(shape, itemsize, x, y, stream);
}

cudaError_t SplitHeadsAddBias(const HeadsShape& shape, DType dtype, bool wide_bias, const void* x,
                              const void* bias, void* const* y, cudaStream_t stream) {
  if (shape.size() == 0) return cudaSuccess;
  const int64_t itemsize = DTypeSize(dtype);
  wide_bias = wide_bias && itemsize == 2;
  const HeadsShape simple = Simplify(shape);
  int unit = UnitOf(simple, itemsize, x, y);
  // A unit's bias is loaded in pieces of 16 bytes, or at once if it is smaller.
  const int64_t bias_alignment = CommonAlignment({bias});
  const int64_t bias_ratio = wide_bias ? 2 : 1;
  while (std::min<int64_t>(16, unit * bias_ratio) > bias_alignment) unit /= 2;
  return Launch(KernelOf<Work::kSplitAddBias>(unit, dtype, wide_bias),
                MakePlan(simple, itemsize, unit, true, nullptr), x, y, simple.parts, bias, nullptr,
                stream);
}

cudaError_t MergeHeads(const HeadsShape& shape, int64_t itemsize, const void* const* y, void* x,
                       cudaStream_t stream) {
  return Move<Work::kMerge>(shape, itemsize, x, y, stream);
}

cudaError_t MergeHeadsWithSums(const HeadsShape& shape, DType dtype, const void* const* y, void* x,
                               const HeadsSums& layout, void* sums, cudaStream_t stream) {
  const int64_t itemsize = DTypeSize(dtype);
  if (shape.size() == 0) {
    const int64_t count = shape.batch * layout.groups * layout.subgroups * shape.features();
    if (count == 0) return cudaSuccess;
    return cudaMemsetAsync(sums, 0, count * std::max<int64_t>(itemsize, sizeof(float)), stream);
  }
  const int unit = UnitOf(shape, itemsize, x, y);
  return Launch(KernelOf<Work::kMergeWithSums>(unit, dtype, false),
                MakePlan(shape, itemsize, unit, false, &layout), x, y, shape.parts, nullptr, sums,
                stream);
}

cudaError_t LoadHeadsKernels() {
  static KernelLoader loader;
  return loader.Load([](const auto& load) {
    for (int unit = 1; unit <= 16; unit *= 2) {
      for (int i = 0; i < kNumDTypes; ++i) {
        const DType dtype = static_cast<DType>(i);
        for (const Kernel kernel : {KernelOf<Work::kSplit>(unit, dtype, false),
                                    KernelOf<Work::kSplitAddBias>(unit, dtype, false),
                                    KernelOf<Work::kSplitAddBias>(unit, dtype, true),
                                    KernelOf<Work::kMerge>(unit, dtype, false),
                                    KernelOf<Work::kMergeWithSums>(unit, dtype, false)}) {
          load(reinterpret_cast<const void*>(kernel));
        }
      }
    }
  });
}

}  // namespace jax_fastops::cuda

// Kernels over rows that an op reduces and then writes, such as softmax and norms: a row stays on
// chip between its reductions and its results, so it is read once and written once. An op is a
// functor, and does not know where the row is:
//
// - RegisterRowsKernel holds a row in the registers of a part of a warp up to a block: up to 16 KB.
//   A thread has up to kWords aligned words of 16 bytes, which are all loaded before the first is
//   used, and at most one element of those before the first word and after the last, the edges.
// - SharedRows holds a row in the shared memory of a block or a cluster. A thread accesses
//   only what it has copied itself, so the reductions are the only barriers.
// - ShortRowsHeldKernel is for rows of up to 256 bytes that are no whole number of words. The rows
//   of a block are contiguous: it copies them to shared memory in words, and the results back.
// - StreamedRows reads a row twice, which fits nowhere. A cluster takes a row, whose second
//   reads are from the L2 cache. If rows are few, more blocks share a row: one launch reduces it,
//   and another one writes it.
//
// The number of lanes is known at run time; kWords and the functor are compiled. plan_rows.h
// chooses. All arrays of a call have the same misalignment, except in short rows.
//
//   template <typename T>
//   struct Functor {
//     using A = ComputeType<T>;
//     using Params = ...;                     // of all rows
//     static constexpr int kInputs = 2;       // arrays that are read, 1 or 2
//     static constexpr int kReductions = 1;   // that Reduce or Combine does, each of one value
//     static constexpr bool kStreams = true;  // has kSums, and Add to Settle
//     static constexpr int kSums = 1;
//     static constexpr int MinBlocks(int words);  // of kMaxHeldThreads, on an SM, in registers
//     Functor(const Params&, int64_t row);
//     T Outside(int input) const;             // an element that is masked, or is none
//     T Masked() const;                       // the result of a masked element
//     void Prepare(row);                      // before the mask
//     void Reduce(row, group);
//     bool Undefined() const;                 // masked elements are overwritten by Masked()
//     void Write(row);
//     void Add(row);                          // a part of the row
//     void Join(const A (&sums)[kSums]);      // the sums of another part
//     void Collect(A (&sums)[kSums]) const;   // those of this part
//     void Combine(group);                    // the sums of all lanes
//     void Settle();                          // they are those of the whole row
//   };
//
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/cuda/dispatch.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/row_holders.cuh"
#include "core/plan_rows.h"

namespace jax_fastops::cuda {

// How the threads of a launch share the rows.
struct HeldLaunch {
  int log_lanes;       // of a block, for a row
  int words_of_block;  // of a row, in SharedRows
  int rows;            // of a block, in ShortRowsHeldKernel
  bool same;           // words of the result are aligned where those of the operand are
  DType dtype;
  FastDivisor blocks;  // that share a row, in StreamedRows
  RowStage stage;
  void* partials;  // sums of each block of each row
};

// -------------------------------------------------------------------------------------------------
// Kernels

// One value is reduced at a time.
template <typename F>
using HeldGroup = Group<typename F::A, 1>;

// Loads a row, or a part of it. `number` is that of the row.
template <typename F, typename T, typename Row>
__device__ __forceinline__ void LoadRow(const F& functor, const HeldRows& rows, int64_t number,
                                        Row& row) {
  T outside[F::kInputs];
#pragma unroll
  for (int i = 0; i < F::kInputs; ++i) outside[i] = functor.Outside(i);
  row.Load(outside);
  functor.Prepare(row);
  if (rows.mask.data != nullptr) {
    row.slice.SetMask(rows.mask, number);
    row.Exclude(rows.mask, outside);
  }
  row.Await();
  row.Forget();
}

template <typename F, typename Row>
__device__ __forceinline__ void WriteRow(F& functor, const HeldRows& rows, int64_t number,
                                         Row& row) {
  functor.Write(row);
  if (rows.mask.data != nullptr && functor.Undefined()) {
    row.slice.SetMask(rows.mask, number);
    row.slice.Overwrite(rows.mask, functor.Masked());
  }
}

template <template <typename> typename Functor, typename T, int kWords, bool kEdges>
__global__ void __launch_bounds__(kMaxHeldThreads, Functor<T>::MinBlocks(kWords))
    RegisterRowsKernel(const __grid_constant__ HeldRows rows,
                       const __grid_constant__ HeldLaunch launch,
                       const __grid_constant__ typename Functor<T>::Params params) {
  using F = Functor<T>;
  __shared__ typename HeldGroup<F>::Scratch scratch[F::kReductions];
  const int lanes = 1 << launch.log_lanes, lane = threadIdx.x & (lanes - 1);
  const int64_t number =
      int64_t{blockIdx.x} * (blockDim.x >> launch.log_lanes) + (threadIdx.x >> launch.log_lanes);
  const bool exists = number < rows.count;
  F functor(params, exists ? number : 0);
  RegisterRow<T, F::kInputs, 16, kWords, kEdges> row;
  row.slice = RowSlice<T, F::kInputs>(rows, kEdges, number, exists, lane, lanes);
  LoadRow<F, T>(functor, rows, exists ? number : 0, row);
  HeldGroup<F> group{scratch, lanes};
  functor.Reduce(row, group);
  if (exists) WriteRow(functor, rows, number, row);
}

template <template <typename> typename Functor, typename T>
__device__ __forceinline__ void SharedRows(const HeldRows& rows, const HeldLaunch& launch,
                                           const typename Functor<T>::Params& params) {
  using F = Functor<T>;
  __shared__ typename HeldGroup<F>::Scratch scratch[F::kReductions];
  extern __shared__ uint4 shared[];
  const int threads = blockDim.x, begin = BlockOfCluster() * launch.words_of_block;
  const int64_t number = ClusterIndex();
  F functor(params, number);
  SharedRow<T, F::kInputs> row;
  // The first block of a cluster has the edges.
  row.slice =
      RowSlice<T, F::kInputs>(rows, true, number, true, static_cast<int>(threadIdx.x), threads);
  row.slice.first += begin;
  row.slice.end = min(row.slice.end, begin + launch.words_of_block);
  row.slice.has_edge = row.slice.has_edge && begin == 0;
#pragma unroll
  for (int i = 0; i < F::kInputs; ++i) {
    row.words[i] = reinterpret_cast<Vec<T, 16>*>(shared + i * launch.words_of_block) + threadIdx.x;
  }
  HeldGroup<F> group{scratch, threads};
  group.Begin();
  LoadRow<F, T>(functor, rows, number, row);
  functor.Reduce(row, group);
  WriteRow(functor, rows, number, row);
}

// A row takes as few lanes as can hold it, so that what a thread does once per row is shared by
// many elements.
template <template <typename> typename Functor, typename T>
__global__ void __launch_bounds__(kShortHeldThreads, 6)
    ShortRowsHeldKernel(const __grid_constant__ HeldRows rows,
                        const __grid_constant__ HeldLaunch launch,
                        const __grid_constant__ typename Functor<T>::Params params) {
  using F = Functor<T>;
  using Row = RegisterRow<T, F::kInputs, sizeof(T), kShortHeldElements, false>;
  extern __shared__ uint4 shared[];
  const int n = rows.n, lanes = 1 << launch.log_lanes, lane = threadIdx.x & (lanes - 1);
  const int64_t first_row = int64_t{blockIdx.x} * launch.rows;
  const int count = static_cast<int>(min(int64_t{launch.rows}, rows.count - first_row));
  const RowsInShared<T> x(rows.in[0], first_row * n, count * n, shared);
  const RowsInShared<T> y(rows.in[F::kInputs - 1], first_row * n, count * n,
                          shared + (F::kInputs - 1) * launch.words_of_block);
  x.Read();
  if constexpr (F::kInputs == 2) y.Read();
  AwaitAllCopies();
  __syncthreads();
  const int groups = kShortHeldThreads >> launch.log_lanes;
#pragma unroll 1
  for (int base = 0; base < count; base += groups) {
    const int here = base + (threadIdx.x >> launch.log_lanes);
    const bool exists = here < count;
    const int at = exists ? here * n : 0;
    F functor(params, first_row + (exists ? here : 0));
    Row row;
    row.count = (n + lanes - 1) >> launch.log_lanes;
    row.slice.in[0] = x.copy + at;
    row.slice.in[F::kInputs - 1] = y.copy + at;
    row.slice.out = x.copy + at;  // a thread writes only what it has read itself
    row.slice.head = 0;
    row.slice.first = lane;
    row.slice.step = lanes;
    row.slice.end = exists ? n : 0;
    row.slice.has_edge = false;
    LoadRow<F, T>(functor, rows, first_row + (exists ? here : 0), row);
    HeldGroup<F> group{nullptr, lanes};
    functor.Reduce(row, group);
    if (exists) WriteRow(functor, rows, first_row + here, row);
  }
  __syncthreads();
  x.Write(static_cast<T*>(rows.out) + first_row * n, launch.same);
}

// The chunks that a block takes of a row are those of all `blocks` in turn. A chunk is held in
// registers.
template <template <typename> typename Functor, typename T>
__device__ __forceinline__ void StreamedRows(const HeldRows& rows, const HeldLaunch& launch,
                                             const typename Functor<T>::Params& params) {
  using F = Functor<T>;
  using A = ComputeType<T>;
  __shared__ typename HeldGroup<F>::Scratch scratch[F::kReductions];
  // What was read last by the launch that reduces is still in the cache.
  const bool writes_only = launch.stage == RowStage::kWrite;
  const uint32_t here = writes_only ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t number = Divide(here, launch.blocks);
  const int blocks = static_cast<int>(launch.blocks.divisor);
  const int block = static_cast<int>(here - number * blocks);  // of a cluster, if there is one
  HeldGroup<F> group{scratch, kStreamedThreads};
  group.Begin();
  F functor(params, number);
  const RowSlice<T, F::kInputs> whole(rows, true, number, true, static_cast<int>(threadIdx.x),
                                      kStreamedThreads);
  constexpr int kChunk = kStreamedThreads * kRowWords;
  const int chunks = max(1, (whole.end + kChunk - 1) / kChunk);  // of the row
  const auto load = [&](int chunk) {
    RegisterRow<T, F::kInputs, 16, kRowWords, true, false> part;
    part.slice = whole;
    part.slice.first += chunk * kChunk;
    part.slice.end = min(whole.end, (chunk + 1) * kChunk);
    part.slice.has_edge = whole.has_edge && chunk == 0;
    LoadRow<F, T>(functor, rows, number, part);
    return part;
  };

  A* const partials = static_cast<A*>(launch.partials) + number * blocks * F::kSums;
  if (writes_only) {
    for (int i = threadIdx.x; i < blocks; i += kStreamedThreads) {
      A sums[F::kSums];
#pragma unroll
      for (int k = 0; k < F::kSums; ++k) sums[k] = partials[i * F::kSums + k];
      functor.Join(sums);
    }
  } else {
    for (int chunk = block; chunk < chunks; chunk += blocks) {
      auto part = load(chunk);
      functor.Add(part);
    }
  }
  functor.Combine(group);
  if (launch.stage == RowStage::kReduce) {
    if (threadIdx.x != 0) return;
    A sums[F::kSums];
    functor.Collect(sums);
#pragma unroll
    for (int k = 0; k < F::kSums; ++k) partials[block * F::kSums + k] = sums[k];
    return;
  }
  functor.Settle();
  for (int chunk = block + (chunks - 1 - block) / blocks * blocks; chunk >= 0; chunk -= blocks) {
    auto part = load(chunk);
    WriteRow(functor, rows, number, part);
  }
}

// Long rows have one kernel for all types but float64.
template <template <typename> typename Functor, bool kShared>
__global__ void __launch_bounds__(kShared ? kMaxSharedThreads : kStreamedThreads, 3)
    LongRowsKernel(const __grid_constant__ HeldRows rows, const __grid_constant__ HeldLaunch launch,
                   const __grid_constant__ typename Functor<float>::Params params) {
  ForTypesOf<float>(launch.dtype, [&]<typename T>(TypeTag<T>) {
    if constexpr (kShared) {
      SharedRows<Functor, T>(rows, launch, params);
    } else {
      StreamedRows<Functor, T>(rows, launch, params);
    }
  });
}

// -------------------------------------------------------------------------------------------------
// Launches

// Calls the kernels of one functor on rows of T, of a family that lists them (KernelOf). `partials`
// has room for what the plan asks for.
template <typename Family, template <typename> typename Functor, typename T>
cudaError_t LaunchHeldRows(const HeldPlan& plan, const HeldRows& rows,
                           const typename Functor<T>::Params& params, void* partials,
                           cudaStream_t stream) {
  using F = Functor<T>;
  const uintptr_t apart =
      reinterpret_cast<uintptr_t>(rows.out) - reinterpret_cast<uintptr_t>(rows.in[0]);
  const bool streamed = plan.holder == RowHolder::kStreamed, twice = streamed && !plan.one_launch;
  const HeldLaunch launch = {.log_lanes = plan.log_lanes,
                             .words_of_block = plan.words_of_block,
                             .rows = plan.rows_of_block,
                             .same = apart % 16 == 0,
                             .dtype = kDTypeOf<T>,
                             .blocks = FastDivisor(static_cast<uint32_t>(plan.blocks_of_row)),
                             .stage = twice ? RowStage::kReduce : RowStage::kAll,
                             .partials = partials};
  const bool cluster = plan.holder == RowHolder::kShared || (streamed && !twice);
  const LaunchConfig config =
      Grid(plan.blocks, plan.threads, plan.shared_bytes, cluster ? plan.blocks_of_row : 1);
  const auto run = [&](auto kernel) {
    return LaunchStages(kernel, config, stream, rows, launch, params);
  };
  if (plan.holder == RowHolder::kRegisters) {
    if (plan.edges) return run(KernelOf<Family, RegisterRowsKernel<Functor, T, 4, true>>());
    if (plan.words == 4) return run(KernelOf<Family, RegisterRowsKernel<Functor, T, 4, false>>());
    if (plan.words == 2) return run(KernelOf<Family, RegisterRowsKernel<Functor, T, 2, false>>());
  }
  if constexpr (F::kStreams) {
    switch (plan.holder) {
      case RowHolder::kRegisters:
        return run(KernelOf<Family, RegisterRowsKernel<Functor, T, 1, false>>());
      case RowHolder::kShort:
        return run(KernelOf<Family, ShortRowsHeldKernel<Functor, T>>());
      case RowHolder::kShared:
        return run(KernelOf<Family, LongRowsKernel<Functor, true>>());
      case RowHolder::kStreamed:
        return run(KernelOf<Family, LongRowsKernel<Functor, false>>());
      default:
        break;
    }
  }
  return cudaErrorInvalidValue;
}

// Represents SharedRows in queries for the largest cluster.
template <typename Family>
__global__ void __launch_bounds__(kMaxSharedThreads) HeldProbeKernel() {}

// Also loads the family's kernels.
template <typename Family>
cudaError_t GetHeldLimits(HeldLimits* limits) {
  return GetLimits<Family, HeldProbeKernel<Family>>(kMaxSharedThreads, kMaxSharedBytes,
                                                    kMaxHeldCluster, limits);
}

}  // namespace jax_fastops::cuda

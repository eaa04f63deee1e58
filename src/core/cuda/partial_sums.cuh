// The second kernel of a sum over blocks: adds up the partial sums that a first kernel has written,
// in an order that depends only on the shape. Results are numbered within sets, of which all have
// the same shape if kPlans is 1. An op is a functor:
//
//   struct Sums {
//     using Value = float;               // of partial sums
//     static constexpr int kValues = 1;  // sums of a result
//     static constexpr int kPlans = 1;   // shapes: 1, or one for each set
//     // The partial sums of a result: an object with At(term), the place of one, which is negative
//     // if there is none, and Load(place, values). Also called for results after the last one, and
//     // before the first kernel has ended, so it reads no memory.
//     Terms TermsOf(int64_t set, int64_t result) const;
//     // Writes a result. `writers` threads call it, which are numbered by `writer`.
//     void Write(int64_t set, int64_t result, const Value (&sums)[kValues], int writer,
//                int writers) const;
//   };
//
// The kernel is bound by latency, so a thread has several loads under way, and the launch is a
// dependent of the first kernel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/cuda/dependent.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "core/plan_sums.h"

namespace jax_fastops::cuda {

// Adds the terms `first`, first + step, ... below `count` to `sums`, and loads kBatch of them at
// once.
template <int kBatch, typename Terms, typename V, int kValues>
__device__ __forceinline__ void AddTerms(const Terms& terms, uint32_t first, uint32_t step,
                                         uint32_t count, V (&sums)[kValues]) {
  for (uint32_t term = first; term < count; term += kBatch * step) {
    decltype(terms.At(term)) at[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      at[k] = term + k * step < count ? terms.At(term + k * step) : -1;
    }
    V batch[kBatch][kValues] = {};
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (at[k] >= 0) terms.Load(at[k], batch[k]);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) sums[i] += batch[k][i];
    }
  }
}

// Adds up the values of a block's parts. Value i of part p is values[p * width + i], in shared
// memory. Calls write(i, sum) for the first `count` sums. All threads of the block call it, after
// their own values are stored. With kReused, `values` may be written again after it.
template <int kThreads, bool kReused = false, typename V, typename Write>
__device__ __forceinline__ void AddParts(const V* values, int parts, int width, int count,
                                         const Write& write) {
  // In runs of 8: a single sum of up to 256 parts would have a larger rounding error.
  constexpr int kRun = 8;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    V sum = 0;
    for (int first = 0; first < parts; first += kRun) {
      V run = values[first * width + i];
#pragma unroll
      for (int part = 1; part < kRun; ++part) {
        if (first + part < parts) run += values[(first + part) * width + i];
      }
      sum += run;
    }
    write(i, sum);
  }
  if constexpr (kReused) __syncthreads();
}

// Adds up `terms` terms of each of `results` results. load(result, term, values) sets a term, and
// write(result, sums) gets the sums. All threads of the block call it. It begins and ends with a
// barrier, so `load` may read what other threads stored before, and others what `write` stores.
template <int kThreads, typename V, int kValues, typename Load, typename Write>
__device__ __forceinline__ void SumTerms(int results, int terms,
                                         V (&scratch)[kValues][kThreads / kWarpSize],
                                         const Load& load, const Write& write) {
  static_assert((kThreads & (kThreads - 1)) == 0);
  const auto ceil_log = [](int n) { return 32 - __clz(n - 1); };
  // Of the threads of a result.
  const int log_share =
      max(0, min(ceil_log(max(terms, 1)), 31 - __clz(kThreads) - ceil_log(max(results, 1))));
  const int share = 1 << log_share, rank = static_cast<int>(threadIdx.x) & (share - 1);
  __syncthreads();
  for (int first = 0; first < results; first += kThreads >> log_share) {
    const int result = first + (static_cast<int>(threadIdx.x) >> log_share);
    V sums[kValues] = {};
    if (result < results) {
#pragma unroll 8
      for (int term = rank; term < terms; term += share) {
        V values[kValues];
        load(result, term, values);
#pragma unroll
        for (int i = 0; i < kValues; ++i) sums[i] += values[i];
      }
    }
    ReduceNeighbors(Sum(), sums, share, scratch);
    if (rank == 0 && result < results) write(result, sums);
  }
  __syncthreads();
}

// Which result of the block a thread has, or -1, and its number among the threads that have it.
struct SumsOwner {
  int result, writer, writers;
};

// Adds `values` over the threads that share a result. Thread t of the block has a part of result
// t % (1 << log_width) before. All threads of the block must call it. `scratch` is in shared memory
// and has room for the values of the results of each warp, and one result more.
template <typename V, int kValues>
__device__ __forceinline__ SumsOwner CombineShares(int log_width, int log_share,
                                                   V (&values)[kValues], V* scratch) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  if (log_share == 0) return {thread, 0, 1};
  const int width = 1 << log_width, log_warps = log_width + log_share - 5;
  const int warps = 1 << log_warps, row = width + 1;  // no bank conflicts
  Butterfly(Sum(), values, 32, width);
  if (lane < width) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      scratch[(i * warps + thread / 32) * row + lane] = values[i];
    }
  }
  __syncthreads();
  // One thread for each warp's sum of each result.
  const int result = thread >> log_warps, warp = thread & (warps - 1);
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    values[i] = result < width ? scratch[(i * warps + warp) * row + result] : V(0);
  }
  Butterfly(Sum(), values, warps);
  return {result < width ? result : -1, warp, warps};
}

template <int kPlans>
struct SumsLaunch {
  SumsPlan plan[kPlans];
  uint32_t blocks;  // of a set
};

template <typename Sums>
__global__ void __launch_bounds__(kMaxSumsThreads)
    FinishSumsKernel(const __grid_constant__ Sums sums,
                     const __grid_constant__ SumsLaunch<Sums::kPlans> launch) {
  using V = typename Sums::Value;
  constexpr int kValues = Sums::kValues;
  // A block of more than two warps has at most 8 results.
  __shared__ V scratch[kValues * kMaxSumsThreads / 32 * 9];

  LetDependentsStart();
  const uint32_t set = blockIdx.x / launch.blocks;
  const SumsPlan& plan = launch.plan[Sums::kPlans > 1 ? set : 0];
  const int width = 1 << plan.log_width, thread = static_cast<int>(threadIdx.x);
  const int64_t first = int64_t{blockIdx.x - set * launch.blocks} << plan.log_width;
  if (first >= plan.results) return;
  const int64_t result = first + (thread & (width - 1));
  const auto terms = sums.TermsOf(set, result);
  AwaitPredecessors();
  V values[kValues] = {};
  AddTerms<4>(terms, thread >> plan.log_width, 1u << plan.log_share,
              result < plan.results ? plan.terms : 0, values);
  const SumsOwner owner = CombineShares(plan.log_width, plan.log_share, values, scratch);
  if (owner.result >= 0 && first + owner.result < plan.results) {
    sums.Write(set, first + owner.result, values, owner.writer, owner.writers);
  }
}

// Results and terms of a set.
struct SumsShape {
  int64_t results, terms;
};

// Enqueues the kernel after the one that writes the partial sums of `sets` sets.
template <typename Family, typename Sums>
cudaError_t FinishSums(const Sums& sums, int64_t sets, const SumsShape (&shapes)[Sums::kPlans],
                       cudaStream_t stream) {
  const int plans = Sums::kPlans == 1 ? 1 : static_cast<int>(sets);
  SumsLaunch<Sums::kPlans> launch = {};
  int log_threads = 0;
  for (int i = 0; i < plans; ++i) {
    if (shapes[i].terms > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
    launch.plan[i] = PlanSums(shapes[i].results, shapes[i].terms);
    log_threads = std::max(log_threads, launch.plan[i].log_threads());
  }
  int64_t blocks = 0;
  for (int i = 0; i < plans; ++i) {
    if (launch.plan[i].log_threads() < log_threads) Widen(&launch.plan[i], log_threads);
    blocks = std::max(blocks, launch.plan[i].blocks());
  }
  if (blocks > std::numeric_limits<int32_t>::max() / std::max<int64_t>(sets, 1)) {
    return cudaErrorInvalidConfiguration;
  }
  if (blocks == 0 || sets == 0) return cudaSuccess;
  launch.blocks = static_cast<uint32_t>(blocks);
  return Launch(KernelOf<Family, FinishSumsKernel<Sums>>(),
                {.grid = dim3(static_cast<unsigned>(blocks * sets)),
                 .block = dim3(1u << log_threads),
                 .dependent = true},
                stream, sums, launch);
}

}  // namespace jax_fastops::cuda

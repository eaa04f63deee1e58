// Softmax along the minor axis for rows that a block, or a cluster of up to 16 blocks (sm_90 and
// later), holds in shared memory.
//
// The copies are asynchronous and take no registers. A thread accesses only data that it has copied
// itself, so the reductions are the only barriers. Several blocks share an SM: some load while
// others compute or store.
#ifndef JAX_FASTOPS_SOFTMAX_BLOCK_CUH_
#define JAX_FASTOPS_SOFTMAX_BLOCK_CUH_

#include <cstdint>

#include "core/cuda/async_copy.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/unit.cuh"
#include "softmax/math.cuh"
#include "softmax/plan.h"
#include "softmax/rows.cuh"

namespace jax_fastops::cuda::softmax {

// Begins the copies of a thread's units into shared memory.
template <typename T>
__device__ __forceinline__ void CopyUnits(const Stretch<T, 16>& part, const void* array, T outside,
                                          Vec<T, 16>* to) {
  const int units = part.units(), threads = blockDim.x;
#pragma unroll 4
  for (int u = threadIdx.x; u < units; u += threads) {
    if (part.IsWhole(u)) {
      CopyAsync<16, true>(to + u, part.Address(array, u));
    } else {
      part.CopyEnd(array, u, outside, reinterpret_cast<T*>(to + u));
    }
  }
}

// The first pass over a block's part: applies the mask and a scale of zero, and finds the top
// element, or in the backward adds up the terms. The mask is loaded before the thread waits for its
// copies.
template <typename T, bool kGrad>
__device__ __forceinline__ void FirstPass(const Params& p, const Stretch<T, 16>& part,
                                          Vec<T, 16>* a, Vec<T, 16>* b, Top<T, 16>& top,
                                          ComputeType<T>& total) {
  using Part = Stretch<T, 16>;
  using H = typename Part::H;
  constexpr int kUnroll = sizeof(T) == 2 ? 2 : 4;
  const T excluded = Excluded<T, kGrad>(p.log, p);
  [[maybe_unused]] const T zero = FromCompute<T>(0);
  const int units = part.units(), threads = blockDim.x;
  const bool masked = p.mask != nullptr;
  for (int first = threadIdx.x; first < units; first += kUnroll * threads) {
    typename Part::Keep keep[kUnroll];
    if (masked && p.mask_units) {
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) keep[k] = part.LoadMask(first + k * threads);
    }
    AwaitAllCopies();
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int u = first + k * threads;
      if (u >= units) break;
      H held = H::Load(a + u), other;
      if constexpr (kGrad) other = H::Load(b + u);
      if (!kGrad && p.zero_scale) {
        part.TimesZero(u, held, excluded);
        held.Store(a + u);
      }
      if (masked) {
        if (!p.mask_units) keep[k] = part.GatherMask(p, u);
        held.Exclude(keep[k], excluded);
        held.Store(a + u);
        if constexpr (kGrad) {
          other.Exclude(keep[k], zero);
          other.Store(b + u);
        }
      }
      if constexpr (kGrad) {
        AddTerms(p.log, held, other, p.skip_zeros, total);
      } else {
        top.Add(held);
      }
    }
  }
}

// `block_units` is the number of a row's units per block of the cluster.
template <typename T, bool kGrad>
__global__ void __launch_bounds__(kMostBlockThreads, 1536 / kMostBlockThreads)
    BlockKernel(const __grid_constant__ Params p, const __grid_constant__ BlockParams q) {
  using A = ComputeType<T>;
  using Part = Stretch<T, 16>;
  using H = typename Part::H;
  using Threads = RowThreads<A, 1, kMostBlockThreads / 32 * kMostCluster>;
  constexpr int kUnroll = sizeof(T) == 2 ? 2 : 4;

  extern __shared__ uint4 shared[];
  __shared__ typename Threads::Scratch scratch;
  const int threads = blockDim.x;
  Threads row_threads{scratch, threads, q.cluster};

  const int64_t row = blockIdx.x >> q.log_cluster;
  const int64_t begin = (blockIdx.x & (q.cluster - 1)) * int64_t{q.block_units};
  const Part part =
      PartOfRow<T, 16>(p, row, begin, min(begin + q.block_units, UnitsOfRow<T, 16>(p, row)));
  const A scale = static_cast<A>(p.scale);
  const int units = part.units();
  H* const a = reinterpret_cast<H*>(shared);
  [[maybe_unused]] H* const b = a + q.block_units;
  CopyUnits<T>(part, p.a, Excluded<T, kGrad>(p.log, p), a);
  if constexpr (kGrad) CopyUnits<T>(part, p.b, FromCompute<T>(0), b);
  row_threads.Begin();

  Top<T, 16> top(scale);
  A total[1] = {};
  FirstPass<T, kGrad>(p, part, a, b, top, total[0]);
  if constexpr (kGrad) {
    row_threads.AllReduce(Sum(), total);
    if (IsUndefined<true, T>(p, total[0])) {
      return StoreUndefined<true>(p, part, threadIdx.x, threads, total[0]);
    }
    const Gradient<T> gradient(p.log, scale, total[0], p.skip_zeros);
#pragma unroll kUnroll
    for (int u = threadIdx.x; u < units; u += threads) {
      H held = H::Load(a + u);
      ToGradient(gradient, held, H::Load(b + u));
      part.Store(p.out, u, held);
    }
  } else {
    A tops[1] = {top.Get()};
    row_threads.AllReduce(Max(), tops);
    Normalizer<T> normalize(p.log, scale, TopElement(tops[0], scale));
#pragma unroll kUnroll
    for (int u = threadIdx.x; u < units; u += threads) {
      H held = H::Load(a + u);
      AddPowers(normalize, held, total[0]);
      if (kKeepsPowers<T> && !p.log) held.Store(a + u);
    }
    row_threads.AllReduce(Sum(), total);
    if (IsUndefined<false, T>(p, total[0])) {
      return StoreUndefined<false>(p, part, threadIdx.x, threads, total[0]);
    }
    normalize.SetTotal(total[0]);
#pragma unroll kUnroll
    for (int u = threadIdx.x; u < units; u += threads) {
      H held = H::Load(a + u);
      ToResult<kKeepsPowers<T>>(normalize, held);
      part.Store(p.out, u, held);
    }
  }
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_BLOCK_CUH_

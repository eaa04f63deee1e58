// Softmax along any axis except the minor one, if the axis is short enough that registers hold it.
//
// As in ColumnsKernel, a tile is a few adjacent units of inner elements by all of n, and a thread
// stays in one column of units. It holds a few units of that column in registers and loads all of
// them before it uses the first. A column takes no more lanes than are needed to hold it. For a
// short column these are one or a few lanes of a warp; each warp then has its own tile and needs no
// other warp. For a long column they are lanes of a whole block.
//
// Data in registers needs no further memory access in each pass. The backward has two arrays; with
// 16-byte units it holds the second one in shared memory, so that each memory holds half of the
// tile.
#ifndef JAX_FASTOPS_SOFTMAX_COLUMN_REGISTERS_CUH_
#define JAX_FASTOPS_SOFTMAX_COLUMN_REGISTERS_CUH_

#include <cooperative_groups.h>

#include <cstdint>

#include "core/cuda/async_copy.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/vec.cuh"
#include "core/fast_divide.h"
#include "softmax/column.cuh"
#include "softmax/math.cuh"
#include "softmax/plan.h"

namespace jax_fastops::cuda::softmax {

// Loads or stores a unit as 32-bit words. If the compiler saw 16-bit elements in a conditional load
// or update, it would split the unit into elements and wait for each load before issuing the next
// one.
template <typename H>
__device__ __forceinline__ H LoadWords(const void* p) {
  constexpr int kBytes = sizeof(H::words);
  const auto unit = Unit<typename H::W, kBytes>::Load(p);
  H held;
#pragma unroll
  for (int i = 0; i < H::kWords; ++i) held.words[i] = unit.elements[i];
  return held;
}
template <typename H>
__device__ __forceinline__ void StoreWords(void* p, const H& held) {
  constexpr int kBytes = sizeof(H::words);
  Unit<typename H::W, kBytes> unit;
#pragma unroll
  for (int i = 0; i < H::kWords; ++i) unit.elements[i] = held.words[i];
  unit.Store(p);
}

// Clusters need sm_90.
__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ __forceinline__ void ArriveAtCluster() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void AwaitCluster() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Reduces the results of ReduceLanes over the blocks of a cluster, in the order of their ranks.
// `exchange` has room for the `values` of all columns of the tile. No block may exit before all
// have read.
template <typename Op, typename A, int kSize>
__device__ __forceinline__ void ReduceBlocks(Op op, A (&values)[kSize], A* exchange, int log_width,
                                             int blocks) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kPiece = kSize * sizeof(A) < 16 ? kSize * sizeof(A) : 16;
  using Piece = Unit<A, kPiece>;
  const int width = 1 << log_width;
  A* const own = exchange + (threadIdx.x & (width - 1)) * kSize;
  if (threadIdx.x < width) {
#pragma unroll
    for (int at = 0; at < kSize; at += Piece::kSize) {
      Piece piece;
#pragma unroll
      for (int i = 0; i < Piece::kSize; ++i) piece.elements[i] = values[at + i];
      piece.Store(own + at);
    }
  }
  ArriveAtCluster();
  AwaitCluster();
#pragma unroll
  for (int i = 0; i < kSize; ++i) values[i] = Op::template Identity<A>();
#pragma unroll 1
  for (int rank = 0; rank < blocks; ++rank) {
    const A* const other = cooperative_groups::this_cluster().map_shared_rank(own, rank);
#pragma unroll
    for (int at = 0; at < kSize; at += Piece::kSize) {
      const Piece piece = Piece::Load(other + at);
#pragma unroll
      for (int i = 0; i < Piece::kSize; ++i) {
        values[at + i] = op(values[at + i], piece.elements[i]);
      }
    }
  }
#endif
}

// A thread's units of a column, and the passes over them. log_softmax is not a flag here, because
// registers are short.
template <typename T, bool kGrad, bool kLog, int kBytes>
struct HeldColumn {
  using A = ComputeType<T>;
  using Part = Column<T, kGrad, kBytes>;
  using H = typename Part::H;
  static constexpr int kPlaces = ColumnPlaces(sizeof(T), kBytes);
  static constexpr bool kShares = SharesSecond(sizeof(T), kBytes, kGrad);
  static constexpr int kSize = H::kSize;

  const Params& p;
  Part part;
  int places;
  // The column goes from the end of n to its start. Then only the thread's first unit may be
  // outside, and only that one needs a check.
  bool has_first;
  H* shared_b;
  H a[kPlaces];
  H b[kGrad && !kShares ? kPlaces : 1];

  __device__ __forceinline__ HeldColumn(const Params& p, const Part& part, int places,
                                        bool has_first, uint4* shared)
      : p(p),
        part(part),
        places(places),
        has_first(has_first),
        shared_b(reinterpret_cast<H*>(shared) + threadIdx.x) {}

  __device__ __forceinline__ bool Has(int k) const { return k < places && (k > 0 || has_first); }

  // The k-th unit of the second array.
  __device__ __forceinline__ H Second(int k) const {
    if constexpr (kShares) {
      return LoadWords<H>(shared_b + k * blockDim.x);
    } else {
      return b[kGrad ? k : 0];
    }
  }

  __device__ __forceinline__ void Load() {
    const T* from_a = part.Address(p.a, 0);
    [[maybe_unused]] const T* from_b = kGrad ? part.Address(p.b, 0) : nullptr;
    a[0] = H::Filled(part.excluded);
    a[0].Forget();
    H empty = H::Filled(FromCompute<T>(0));
    empty.Forget();
    if constexpr (kGrad && !kShares) b[0] = empty;
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      if (k >= places) break;
      if (k > 0 || has_first) {
        a[k] = LoadWords<H>(from_a);
        if constexpr (kShares) {
          CopyAsync<kBytes, kBytes == 16>(shared_b + k * blockDim.x, from_b);
        } else if constexpr (kGrad) {
          b[k] = LoadWords<H>(from_b);
        }
      } else if constexpr (kShares) {
        StoreWords(shared_b, empty);
      }
      from_a += part.step;
      if constexpr (kGrad) from_b += part.step;
    }
    if constexpr (kShares) AwaitAllCopies();
  }

  __device__ __forceinline__ void TimesZero() {
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      if (k >= places) break;
      if (k == 0 && !has_first) continue;
      H zeros = a[k];
      part.TimesZero(zeros);
      zeros.Forget();
      a[k] = zeros;
    }
  }

  __device__ __forceinline__ void Exclude() {
    constexpr int kBatch = kPlaces < 4 ? kPlaces : 4;
    const T zero = FromCompute<T>(0);
#pragma unroll
    for (int from = 0; from < kPlaces; from += kBatch) {
      if (from >= places) break;
      typename Part::Keep keep[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (Has(from + k)) keep[k] = part.LoadMask(from + k);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (!Has(from + k)) continue;
        a[from + k].Exclude(keep[k], part.excluded);
        if constexpr (kShares) {
          H of_b = Second(from + k);
          of_b.Exclude(keep[k], zero);
          StoreWords(shared_b + (from + k) * blockDim.x, of_b);
        } else if constexpr (kGrad) {
          b[from + k].Exclude(keep[k], zero);
        }
      }
    }
  }

  __device__ __forceinline__ void ForgetUnits() {
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) a[k].Forget();
    if constexpr (kGrad && !kShares) {
#pragma unroll
      for (int k = 0; k < kPlaces; ++k) b[k].Forget();
    }
  }

  __device__ __forceinline__ void AddTerms(A (&totals)[kSize]) const {
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      if (k >= places) break;
      AddColumnTerms(kLog, a[k], Second(k), p.skip_zeros, totals);
    }
  }

  __device__ __forceinline__ void FindTops(A (&tops)[kSize]) const {
    ColumnTops<T, kBytes> largest(static_cast<A>(p.scale));
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      if (k >= places) break;
      largest.Add(a[k]);
    }
    largest.Get(tops);
  }

  __device__ __forceinline__ void AddPowers(const A (&tops)[kSize], A (&totals)[kSize]) {
    const A scale = static_cast<A>(p.scale);
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      if (k >= places) break;
      A powers[kSize];
      a[k].Unpack(powers);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        powers[i] = Normalizer<T>(kLog, scale, tops[i]).Power(powers[i]);
        totals[i] += powers[i];
      }
      if (kKeepsPowers<T> && !kLog) a[k].Pack(powers);
    }
  }

  __device__ __forceinline__ void Store(const A (&tops)[kSize], const A (&factors)[kSize],
                                        bool live) {
    T* to = part.Address(p.out, 0);
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      if (k >= places) break;
      ToColumnResults<kGrad>(
          p, kLog, kKeepsPowers<T>, factors, [&](int i) { return tops[i]; }, a[k],
          kGrad ? Second(k) : a[k]);
      if (live && (k > 0 || has_first)) StoreWords(to, a[k]);
      to += part.step;
    }
  }

  // Rare: the excluded elements of an undefined row are known only from the mask.
  __device__ __forceinline__ void StoreExcluded(uint32_t undefined) const {
#pragma unroll 1
    for (int k = has_first ? 0 : 1; k < places; ++k) {
      const typename Part::Keep keep = part.LoadMask(k);
      T* const at = part.Address(p.out, k);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if ((undefined >> i & 1) != 0 && keep.elements[i] == 0) {
          at[i] = ExcludedResult<T, kGrad>(kLog);
        }
      }
    }
  }
};

// A cluster may hold a tile (q.log_blocks > 0). Only the backward with 16-byte units uses this: it
// measured 1.05 times the copy floor, and 1.10 with ColumnsKernel. The forward ran out of registers
// and measured 1.3, against 1.14 with ColumnsKernel.
template <typename T, bool kGrad, bool kLog, int kBytes>
__global__ void __launch_bounds__(ColumnRegisterThreads(kBytes),
                                  1024 / ColumnRegisterThreads(kBytes))
    ColumnRegistersKernel(const __grid_constant__ Params p,
                          const __grid_constant__ ColumnRegistersParams q) {
  using A = ComputeType<T>;
  using Column = HeldColumn<T, kGrad, kLog, kBytes>;
  constexpr int kSize = Column::kSize;
  constexpr bool kCluster = ColumnsInClusters(kBytes, kGrad);

  extern __shared__ uint4 shared[];
  A* const scratch = reinterpret_cast<A*>(shared + q.scratch);
  [[maybe_unused]] A* const exchange = reinterpret_cast<A*>(shared + q.exchange);
  const int threads = 1 << q.log_threads;
  const int thread = threadIdx.x & (threads - 1);
  const int block_lanes = 1 << (q.log_threads - q.log_width);
  const int log_blocks = kCluster ? q.log_blocks : 0;
  const int lanes = block_lanes << log_blocks;
  const int lane = (thread >> q.log_width) + (log_blocks > 0 ? ClusterRank() * block_lanes : 0);
  const int64_t tile =
      (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) >> (q.log_threads + log_blocks);
  const int64_t column = (tile << q.log_width) + (thread & ((1 << q.log_width) - 1));
  // Threads after the last column compute the last column again and store nothing.
  const bool live = column < q.columns;
  const int first = (q.places - 1) * lanes + lane;
  const typename Column::Part part(p, kLog, q.row_units, live ? column : q.columns - 1, first,
                                   -lanes);
  Column held(p, part, q.places, first < p.n, shared);
  held.Load();
  if (!kGrad && p.zero_scale) held.TimesZero();
  if ((!kGrad || kLog) && p.mask != nullptr) held.Exclude();
  held.ForgetUnits();

  A tops[kSize] = {};
  A totals[kSize] = {};
  if constexpr (kGrad) {
    held.AddTerms(totals);
  } else {
    held.FindTops(tops);
    ReduceLanes(Max(), tops, scratch, q.log_width, threads);
#pragma unroll
    for (int i = 0; i < kSize; ++i) tops[i] = TopElement(tops[i], static_cast<A>(p.scale));
    held.ForgetUnits();
    held.AddPowers(tops, totals);
  }
  ReduceLanes(Sum(), totals, scratch, q.log_width, threads);
  if constexpr (kCluster) {
    if (log_blocks > 0) {
      ReduceBlocks(Sum(), totals, exchange, q.log_width, 1 << log_blocks);
      ArriveAtCluster();
    }
  }
  held.ForgetUnits();
  const uint32_t undefined = ToFactors<kGrad, T>(p, kLog, [&](int i) { return tops[i]; }, totals);
  held.Store(tops, totals, live);
  if (log_blocks > 0) AwaitCluster();
  if (undefined != 0 && live) held.StoreExcluded(undefined);
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_COLUMN_REGISTERS_CUH_

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

#include "core/cuda/row_group.cuh"
#include "core/cuda/unit.cuh"
#include "core/fast_divide.h"
#include "softmax/columns.cuh"
#include "softmax/math.cuh"
#include "softmax/rows.cuh"

namespace jax_fastops::cuda::softmax {

struct ColumnRegistersParams {
  FastDivisor64 row_units;  // units of inner elements
  int64_t columns;          // units of all of outer and inner
  int log_width;            // a tile is 1 << log_width units wide
  int log_threads;          // of a tile: 5 (a tile per warp), or the whole block
  int log_blocks;           // blocks that hold a tile together, as a cluster
  int places;               // most units per thread
  int scratch;              // shared memory for the reduction over lanes: offset in 16 bytes
  int exchange;             // and for the one over the blocks of a cluster
};

// 1024 threads per SM with 64 registers each have 128 KB of elements in flight. With four blocks
// per SM, some load while others compute: with blocks of twice the size, the forward for n = 500
// measured 1.39 times the copy floor. Units of one element need the larger blocks, so that tiles
// are wide enough.
template <int kBytes>
inline constexpr int kColumnThreads = kBytes == 16 ? 256 : 512;

// The most units that a thread holds.
template <typename T, int kBytes>
inline constexpr int kColumnPlaces = sizeof(T) == 8 ? 64 / kBytes
                                     : kBytes == 16 ? 8
                                                    : 16;

// Whether the second array of a backward is in shared memory.
template <typename T, Op kOp, int kBytes>
inline constexpr bool kSharesSecond = IsGrad(kOp) && kColumnPlaces<T, kBytes> * kBytes > 64;

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
// Each call needs its own `exchange`, with room for the `values` of all columns of the tile, so
// that no block waits until the others have read an earlier one. No block may exit before all have
// read.
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

// 1 / x for a sum of exponentials of a 16-bit type, which is NaN or far from 0 and infinity. The
// result is accurate to about one unit in the last place and takes a tenth of the instructions of a
// division.
__device__ __forceinline__ float Reciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

// With kCluster, a cluster may hold a tile (q.log_blocks > 0). Only the backward uses this: it
// measured 1.05 times the copy floor, and 1.10 with ColumnsKernel. The forward ran out of registers
// and measured 1.3, against 1.14 with ColumnsKernel.
template <typename T, Op kOp, int kBytes, bool kCluster>
__global__ void __launch_bounds__(kColumnThreads<kBytes>, 1024 / kColumnThreads<kBytes>)
    ColumnRegistersKernel(const __grid_constant__ Params p,
                          const __grid_constant__ ColumnRegistersParams q) {
  using A = ComputeType<T>;
  using Part = Column<T, kOp, kBytes>;
  using H = typename Part::H;
  constexpr bool kGrad = IsGrad(kOp);
  constexpr bool kLog = IsLog(kOp);
  constexpr bool kShares = kSharesSecond<T, kOp, kBytes>;
  constexpr int kPlaces = kColumnPlaces<T, kBytes>;
  constexpr int kSize = H::kSize;
  using Normalize = Normalizer<T, kLog>;

  extern __shared__ uint4 shared[];
  A* const scratch = reinterpret_cast<A*>(shared + q.scratch);
  A* const exchange = reinterpret_cast<A*>(shared + q.exchange);

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
  // Go from the end of n to its start. Then only the thread's first unit may be outside, and only
  // that one needs a check.
  const int first = (q.places - 1) * lanes + lane;
  const bool has_first = first < p.n;
  const Part part(p, q.row_units, live ? column : q.columns - 1, first, -lanes);
  const A scale = static_cast<A>(p.scale);
  [[maybe_unused]] const T zero = FromCompute<T>(0);

  H a[kPlaces];
  [[maybe_unused]] H b[kGrad && !kShares ? kPlaces : 1];
  [[maybe_unused]] H* const shared_b = reinterpret_cast<H*>(shared) + threadIdx.x;
  const T* from_a = part.Address(p.a, 0);
  [[maybe_unused]] const T* from_b = kGrad ? part.Address(p.b, 0) : nullptr;
  a[0] = H::Filled(part.excluded);
  a[0].Forget();
  [[maybe_unused]] H empty = H::Filled(zero);
  empty.Forget();
  if constexpr (kGrad && !kShares) b[0] = empty;
#pragma unroll
  for (int k = 0; k < kPlaces; ++k) {
    if (k >= q.places) break;
    if (k > 0 || has_first) {
      a[k] = LoadWords<H>(from_a);
      if constexpr (kShares) {
        CopyAsync<kBytes>(shared_b + k * blockDim.x, from_b);
      } else if constexpr (kGrad) {
        b[k] = LoadWords<H>(from_b);
      }
    } else if constexpr (kShares) {
      StoreWords(shared_b, empty);
    }
    from_a += part.step;
    if constexpr (kGrad) from_b += part.step;
  }
  if constexpr (kShares) AwaitCopies();
  const auto second = [&](int k) {
    if constexpr (kShares) {
      return LoadWords<H>(shared_b + k * blockDim.x);
    } else if constexpr (kGrad) {
      return b[k];
    }
  };

  if (!kGrad && p.zero_scale) {
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      if (k >= q.places) break;
      if (k == 0 && !has_first) continue;
      H zeros = a[k];
      part.TimesZero(zeros);
      zeros.Forget();
      a[k] = zeros;
    }
  }
  if (part.mask != nullptr) {
    constexpr int kBatch = kPlaces < 4 ? kPlaces : 4;
#pragma unroll
    for (int from = 0; from < kPlaces; from += kBatch) {
      if (from >= q.places) break;
      typename Part::Keep keep[kBatch];
      const auto has = [&](int k) { return k < q.places && (k > 0 || has_first); };
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (has(from + k)) keep[k] = part.LoadMask(from + k);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (!has(from + k)) continue;
        a[from + k].Exclude(keep[k], part.excluded);
        if constexpr (kShares) {
          H of_b = second(from + k);
          of_b.Exclude(keep[k], zero);
          StoreWords(shared_b + (from + k) * blockDim.x, of_b);
        } else if constexpr (kGrad) {
          b[from + k].Exclude(keep[k], zero);
        }
      }
    }
  }
  const auto forget = [&] {
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) a[k].Forget();
    if constexpr (kGrad && !kShares) {
#pragma unroll
      for (int k = 0; k < kPlaces; ++k) b[k].Forget();
    }
  };
  forget();

  // The top elements, and the sums; the derived factors replace the sums later.
  [[maybe_unused]] A tops[kSize];
  A totals[kSize] = {};
  if constexpr (kGrad) {
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      if (k >= q.places) break;
      AddColumnTerms<kLog>(a[k], second(k), p.skip_zeros, totals);
    }
  } else {
    ColumnTops<T, kBytes> largest(scale);
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      if (k >= q.places) break;
      largest.Add(a[k]);
    }
    largest.Get(tops);
    ReduceLanes(Max(), tops, scratch, q.log_width, threads);
    if (log_blocks > 0) {
      ReduceBlocks(Max(), tops, exchange + (kSize << q.log_width), q.log_width, 1 << log_blocks);
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) tops[i] = TopElement(tops[i], scale);
    forget();
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      if (k >= q.places) break;
      A powers[kSize];
      a[k].Unpack(powers);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        powers[i] = Normalize(scale, tops[i]).Power(powers[i]);
        totals[i] += powers[i];
      }
      if constexpr (kKeepsPowers<T, kLog>) a[k].Pack(powers);
    }
  }
  ReduceLanes(Sum(), totals, scratch, q.log_width, threads);
  if (log_blocks > 0) {
    ReduceBlocks(Sum(), totals, exchange, q.log_width, 1 << log_blocks);
    ArriveAtCluster();
  }
  forget();

  uint32_t undefined = 0;
  if (part.mask != nullptr) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      bool is_undefined;
      if constexpr (kGrad) {
        is_undefined = Gradient<T, kLog>::Undefined(totals[i], scale);
      } else {
        is_undefined = Normalize::Undefined(totals[i]);
      }
      undefined |= uint32_t{is_undefined} << i;
    }
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if constexpr (kGrad) {
      totals[i] = Gradient<T, kLog>(scale, totals[i], false).sum;
    } else if constexpr (Normalize::kShifted) {
      totals[i] = Reciprocal(totals[i]);
    } else {
      Normalize normalize(scale, tops[i]);
      normalize.SetTotal(totals[i]);
      totals[i] = normalize.last;
    }
  }
  T* to = part.Address(p.out, 0);
#pragma unroll
  for (int k = 0; k < kPlaces; ++k) {
    if (k >= q.places) break;
    A results[kSize];
    a[k].Unpack(results);
    if constexpr (kGrad) {
      A bs[kSize];
      second(k).Unpack(bs);
      Gradient<T, kLog> gradient(scale, A(0), p.skip_zeros);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        gradient.sum = totals[i];
        results[i] = gradient(results[i], bs[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        Normalize normalize(scale, tops[i]);
        normalize.last = totals[i];
        results[i] = kKeepsPowers<T, kLog> ? results[i] * normalize.last : normalize(results[i]);
      }
    }
    a[k].Pack(results);
    if (live && (k > 0 || has_first)) StoreWords(to, a[k]);
    to += part.step;
  }
  if (log_blocks > 0) AwaitCluster();
  if (undefined == 0 || !live) return;
  // Rare: the excluded elements of an undefined row are known only from the mask.
#pragma unroll 1
  for (int k = has_first ? 0 : 1; k < q.places; ++k) {
    const typename Part::Keep keep = part.LoadMask(k);
    T* const at = part.Address(p.out, k);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if ((undefined >> i & 1) != 0 && keep.elements[i] == 0) at[i] = ExcludedResult<T, kOp>();
    }
  }
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_COLUMN_REGISTERS_CUH_

// Softmax along any but the minor axis, where it is short enough that registers hold it.
//
// As in ColumnsKernel a tile is a few neighbouring units of inner elements by all of n, and a
// thread keeps to one column of units. It holds a few places of that column in registers, all of
// which are loaded before the first is used. A column is dealt out to no more lanes than it takes:
// a short one to one or a few of a warp, which then has a tile of its own and meets no other warp;
// a long one to those of a block.
//
// Registers hold twice what shared memory does, and need no second access per pass. A backward with
// two arrays of units of 16 bytes holds the second in shared memory: half of its tile each.
#ifndef JAX_FASTOPS_CUDA_SOFTMAX_COLUMN_REGISTERS_CUH_
#define JAX_FASTOPS_CUDA_SOFTMAX_COLUMN_REGISTERS_CUH_

#include <cooperative_groups.h>

#include <cstdint>

#include "cuda/row_group.cuh"
#include "cuda/softmax_columns.cuh"
#include "cuda/softmax_math.cuh"
#include "cuda/softmax_rows.cuh"
#include "cuda/unit.cuh"

namespace jax_fastops::cuda::softmax {

struct ColumnRegistersParams {
  FastDivisor64 row_units;  // units of inner elements
  int64_t columns;          // units of all of outer and inner
  int log_width;            // a tile is 1 << log_width units wide
  int log_threads;          // of a tile: 5, with several to a block, or the whole block
  int log_blocks;           // that hold a tile together, as a cluster
  int places;               // of each thread, at most
  int scratch;              // where in shared memory, in units of 16 bytes, lanes meet
  int exchange;             // and where the blocks of a cluster do
};

// 64 registers a thread, so that an SM has 128 KB of elements in flight. Four blocks share an SM,
// and some load while others compute: a forward of 500 measured 1.39 of the floor with blocks of
// twice the size. Units of one element need those, for tiles wide enough.
template <int kBytes>
inline constexpr int kColumnThreads = kBytes == 16 ? 256 : 512;

// How many units a thread may hold.
template <typename T, int kBytes>
inline constexpr int kColumnPlaces = sizeof(T) == 8 ? 64 / kBytes
                                     : kBytes == 16 ? 8
                                                    : 16;

// Whether the second array of a backward is in shared memory.
template <typename T, Op kOp, int kBytes>
inline constexpr bool kSharesSecond = IsGrad(kOp) && kColumnPlaces<T, kBytes> * kBytes > 64;

// A unit, by its words: units that are loaded only under a condition, or changed only under one,
// would be taken apart by the compiler if it saw elements of 16 bits move, and it would wait for
// one load before the next.
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

// Older devices have no clusters.
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

// Reduces what ReduceLanes has left over the blocks of a cluster, in the order of their ranks. Each
// call has an `exchange` of its own, of as many of `values` as the tile has columns: so no block
// has to wait for others to have read what is there. None may end before all have read.
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

// 1 / x for a sum of powers of types of 16 bits, which is far from 0 and from infinity, or NaN: to
// the last bit but one, with a tenth of a division's instructions.
__device__ __forceinline__ float Reciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

// kCluster: q.log_blocks may be more than 0. Forward it took more registers than there are, and 1.3
// of the floor where ColumnsKernel took 1.14; backward 1.05, not 1.10.
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
  // The others go along with the last column, and store nothing.
  const bool live = column < q.columns;
  // From the end of n on, so that only the first place may be outside, and is asked about.
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

  // The top elements; in the place of the sums, in the end, what comes of them.
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
  // Rare: what the mask leaves out of an undefined row is known by its bytes alone.
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

#endif  // JAX_FASTOPS_CUDA_SOFTMAX_COLUMN_REGISTERS_CUH_

// Kernels over the rows of an array, of any length and at any address. An op is a functor.
//
// A row is a run of aligned 16-byte words, and at most 14 elements before and after it, its edges.
// If the result is aligned otherwise than the operand, all elements are edges. The lanes of a group
// (group.cuh) take words in turn, kWords of them at once: that many loads of a thread are under way
// together. What a group takes at once is a chunk. If several blocks share a row, they take chunks
// in turn.
//
// The number of lanes is known at run time; kWords and the functor are compiled. plan_rows.h
// chooses both. A functor has:
//
//   template <typename T>
//   struct Functor {
//     using A = ComputeType<T>;
//     using Params = ...;                    // of all rows
//     static constexpr int kReduced = 2;     // values of a row that are reduced; 0: none
//     static constexpr bool kWrites = true;  // a result for each element
//     // Returns whether the elements of the row matter. Otherwise they count as 0, and at most the
//     // first chunk is read. One lane of each row is the first.
//     bool Begin(const Params&, const Rows&, int64_t row, bool first);
//     void Add(const Params&, const Chunk& chunk);  // elements of this lane. With kReduced
//     // Called by all lanes after the last chunk. With kReduced.
//     void Finish(const Params&, const Rows&, int64_t row, bool read, bool first,
//                 Group<A, kReduced>& group);
//     A Result(A x, int index);                 // of an element. With kWrites
//     void Results(A (&x)[kSize], int index);   // of a word's elements, in place. With kWrites
//   };
//
// A functor reduces or writes, not both.
//
// A chunk is a WordChunk or an ElementChunk. It has `Max(start)`, and `Each(visit)`, which calls
// visit(x) for each element.
//
// ShortRowsKernel is for rows that are short and no whole number of words, so that most of their
// accesses would be edges. The rows of a block are contiguous: it copies them to shared memory in
// aligned words, and the results back.
#pragma once

#include <cstdint>

#include "core/cuda/dispatch.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/row_holders.cuh"
#include "core/cuda/vec.cuh"
#include "core/plan_rows.h"

namespace jax_fastops::cuda {

// Rows in contiguous memory. n < 2^31.
struct Rows {
  const void* in;
  void* out;  // null if the functor writes no elements
  int64_t count;
  int n;
};

// How the threads of a launch share the rows.
struct RowsLaunch {
  int log_lanes;  // of a block, for a row
  bool words;     // words of the result are aligned where those of the operand are
  bool edges;     // rows may have edges
  DType dtype;
  FastDivisor blocks;  // that share a row
  int rows;            // of a block, in ShortRowsKernel
};

// The group of a functor. Without a reduction, it is not used.
template <typename F>
using GroupOf = Group<typename F::A, F::kReduced == 0 ? 1 : F::kReduced>;

// Words that a lane has loaded.
template <typename T, int kWords>
struct WordChunk {
  using A = ComputeType<T>;
  static constexpr int kSize = 16 / sizeof(T);

  Vec<T, 16> words[kWords];
  int lanes, left;  // the row has `left` words from this lane's first one on

  __device__ __forceinline__ bool Has(int k) const { return k * lanes < left; }

  template <typename Visit>
  __device__ __forceinline__ void Each(const Visit& visit) const {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      if (!Has(k)) break;
      A values[kSize];
      words[k].Unpack(values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) visit(values[i]);
    }
  }

  __device__ __forceinline__ A Max(A most) const {
    if constexpr (sizeof(T) == 2) {  // two elements with one instruction
      if (!Has(0)) return most;
      PairOf<T> pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = words[0].Pair(i);
#pragma unroll
      for (int k = 1; k < kWords; ++k) {
        if (!Has(k)) break;
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = __hmax2(pairs[i], words[k].Pair(i));
      }
      const PairOf<T> pair = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
      return fmaxf(most, fmaxf(ToCompute(pair.x), ToCompute(pair.y)));
    } else {
      Each([&](A x) { most = cuda::Max()(most, x); });
      return most;
    }
  }
};

// Elements in memory: every `step`-th one from `first` to `end`, of which `skip` are left out after
// the first `head`.
template <typename T>
struct ElementChunk {
  using A = ComputeType<T>;

  const T* x;
  int first, step, end, head, skip;

  template <typename Visit>
  __device__ __forceinline__ void Each(const Visit& visit) const {
    for (int i = first; i < end; i += step) visit(ToCompute(x[i < head ? i : i + skip]));
  }
  __device__ __forceinline__ A Max(A most) const {
    Each([&](A x) { most = cuda::Max()(most, x); });
    return most;
  }
};

template <template <typename> typename Functor, typename T>
__device__ __forceinline__ void TakeRows(const Rows& rows, const RowsLaunch& launch,
                                         const typename Functor<T>::Params& params) {
  using A = ComputeType<T>;
  using F = Functor<T>;
  static_assert((F::kReduced > 0) != F::kWrites, "a functor reduces a row or writes its elements");
  constexpr int kSize = 16 / sizeof(T), kWords = kRowWords;
  __shared__ typename GroupOf<F>::Scratch scratch;

  const int lanes = 1 << launch.log_lanes, lane = threadIdx.x & (lanes - 1);
  int block = 0, blocks = 1;  // of those that share the row
  uint32_t rows_block = blockIdx.x;
  if constexpr (F::kReduced > 0) {
    if (lanes > 32) {
      block = BlockOfCluster();
      blocks = BlocksOfCluster();
      rows_block = ClusterIndex();
    }
  } else if (launch.blocks.divisor > 1) {
    rows_block = Divide(blockIdx.x, launch.blocks);
    blocks = static_cast<int>(launch.blocks.divisor);
    block = static_cast<int>(blockIdx.x - rows_block * launch.blocks.divisor);
  }
  const int64_t row =
      int64_t{rows_block} * (blockDim.x >> launch.log_lanes) + (threadIdx.x >> launch.log_lanes);
  const bool exists = row < rows.count, is_first = lane == 0 && block == 0;
  GroupOf<F> group{&scratch, lanes};
  if constexpr (F::kReduced > 0) group.Begin();

  const T* const x = static_cast<const T*>(rows.in) + row * rows.n;
  T* const y = static_cast<T*>(rows.out) + row * rows.n;
  const int n = exists ? rows.n : 0;
  int head = 0;
  if (launch.edges) {
    const int past = static_cast<int>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
    head = launch.words ? min(n, (kSize - past) % kSize) : n;
  }
  const int words = (n - head) / kSize, edges = launch.edges ? n - words * kSize : 0;
  const int chunk_words = kWords * lanes;

  WordChunk<T, kWords> chunk;
  chunk.lanes = lanes;
  int first = block * chunk_words + lane;  // this lane's first word of the chunk
  const auto load = [&](bool read) {
    chunk.left = words - first;
    const T* const from = x + head + int64_t{first} * kSize;
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      chunk.words[k] = Vec<T, 16>::LoadOr(read && chunk.Has(k), from + k * lanes * kSize);
    }
  };
  F functor;
  if constexpr (F::kReduced > 0) {
    // The first chunk is loaded before it is known whether the row is read, which hides the latency
    // of what the functor reads. If each lane has a row, the loads of a warp are so scattered that
    // those of the functor wait for them.
    const bool early = lanes > 1;
    if (early) load(exists);
    const bool read = exists && functor.Begin(params, rows, row, is_first);
    if (!early) load(read);
    while (read && first - lane < words) {
      functor.Add(params, chunk);
      first += blocks * chunk_words;
      if (first - lane < words) load(true);
    }
    const int edge = block * lanes + lane;
    if (launch.edges && read && edge < edges) {
      functor.Add(params, ElementChunk<T>{x, edge, blocks * lanes, edges, head, words * kSize});
    }
    functor.Finish(params, rows, row, read, exists && is_first, group);
  } else {
    const bool read = exists && functor.Begin(params, rows, row, is_first);
    // A chunk has an edge of each lane, too. Edges that are written later than the words next to
    // them cost up to 15%.
    const auto has_edge = [&](unsigned edge) {
      return launch.edges && edge < static_cast<unsigned>(edges);
    };
    for (unsigned edge = block * lanes + lane; first - lane < words || has_edge(edge - lane);
         first += blocks * chunk_words, edge += blocks * lanes) {
      const int edge_at = static_cast<int>(edge) < head ? edge : edge + words * kSize;
      T loaded_edge = FromCompute<T>(0);
      load(read);
      if (has_edge(edge) && read) loaded_edge = x[edge_at];
      const int64_t at = head + int64_t{first} * kSize;
#pragma unroll
      for (int k = 0; k < kWords; ++k) {
        if (!chunk.Has(k)) break;
        const int more = k * lanes * kSize;
        A values[kSize];
        chunk.words[k].Unpack(values);
        functor.Results(values, static_cast<int>(at) + more);
        chunk.words[k].Pack(values);
        chunk.words[k].StoreWord(y + at + more);
      }
      if (has_edge(edge)) {
        y[edge_at] = FromCompute<T>(functor.Result(ToCompute(loaded_edge), edge_at));
      }
    }
  }
}

template <template <typename> typename Functor, typename A>
__global__ void __launch_bounds__(kMaxRowThreads)
    RowsKernel(const __grid_constant__ Rows rows, const __grid_constant__ RowsLaunch launch,
               const __grid_constant__ typename Functor<A>::Params params) {
  ForTypesOf<A>(launch.dtype,
                [&]<typename T>(TypeTag<T>) { TakeRows<Functor, T>(rows, launch, params); });
}

template <template <typename> typename Functor, typename T>
__global__ void __launch_bounds__(kShortRowThreads)
    ShortRowsKernel(const __grid_constant__ Rows rows, const __grid_constant__ RowsLaunch launch,
                    const __grid_constant__ typename Functor<T>::Params params) {
  using A = ComputeType<T>;
  using F = Functor<T>;
  extern __shared__ uint4 words[];

  const int n = rows.n, lanes = 1 << launch.log_lanes, lane = threadIdx.x & (lanes - 1);
  const int64_t first_row = int64_t{blockIdx.x} * launch.rows;
  const int count = static_cast<int>(min(int64_t{launch.rows}, rows.count - first_row)) * n;
  const RowsInShared<T> held(rows.in, first_row * n, count, words);
  held.Read();
  AwaitAllCopies();
  __syncthreads();
  const int groups = kShortRowThreads >> launch.log_lanes;
#pragma unroll 1
  for (int base = 0; base < launch.rows; base += groups) {
    const int here = base + (threadIdx.x >> launch.log_lanes);
    const int64_t row = first_row + here;
    const bool exists = here < launch.rows && row < rows.count;
    F functor;
    const bool read = exists && functor.Begin(params, rows, row, lane == 0);
    T* const elements = held.copy + here * n;
    if constexpr (F::kReduced > 0) {
      functor.Add(params, ElementChunk<T>{elements, lane, lanes, read ? n : 0, n, 0});
      GroupOf<F> group{nullptr, lanes};
      functor.Finish(params, rows, row, read, exists && lane == 0, group);
    }
    if constexpr (F::kWrites) {
      for (int i = lane; exists && i < n; i += lanes) {
        elements[i] = FromCompute<T>(functor.Result(read ? ToCompute(elements[i]) : A(0), i));
      }
    }
  }
  if constexpr (!F::kWrites) return;
  __syncthreads();
  held.Write(static_cast<T*>(rows.out) + first_row * n, launch.words);
}

// -------------------------------------------------------------------------------------------------
// Launches

// Calls the kernels of one functor on rows of T, of a family that lists them (KernelOf).
template <typename Family, template <typename> typename Functor, typename T>
cudaError_t LaunchRows(const RowsPlan& plan, const Rows& rows,
                       const typename Functor<T>::Params& params, cudaStream_t stream) {
  if (rows.n < 0) return cudaErrorInvalidConfiguration;
  using F = Functor<T>;
  const uintptr_t apart =
      reinterpret_cast<uintptr_t>(rows.out) - reinterpret_cast<uintptr_t>(rows.in);
  RowsLaunch launch;
  launch.log_lanes = plan.log_lanes;
  launch.dtype = kDTypeOf<T>;
  launch.words = !F::kWrites || apart % 16 == 0;
  launch.edges = !launch.words || reinterpret_cast<uintptr_t>(rows.in) % 16 != 0 ||
                 rows.n * sizeof(T) % 16 != 0;
  launch.blocks = FastDivisor(static_cast<uint32_t>(plan.blocks_of_row));
  launch.rows = plan.rows_of_block;
  LaunchConfig config = Grid(plan.blocks, plan.threads);
  if constexpr (MayBeShort(F::kReduced > 0, sizeof(T))) {
    if (plan.is_short) {
      config.shared = static_cast<size_t>(plan.rows_of_block) * rows.n * sizeof(T) + 32;
      return Launch(KernelOf<Family, ShortRowsKernel<Functor, T>>(), config, stream, rows, launch,
                    params);
    }
  }
  if (F::kReduced > 0) config.cluster = plan.blocks_of_row;
  return Launch(KernelOf<Family, RowsKernel<Functor, ComputeType<T>>>(), config, stream, rows,
                launch, params);
}

// Also loads the family's kernels.
template <typename Family, template <typename> typename Functor>
cudaError_t GetRowsLimits(HeldLimits* limits) {
  return GetLimits<Family, RowsKernel<Functor, float>>(kMaxRowThreads, 0, kMaxRowCluster, limits);
}

}  // namespace jax_fastops::cuda

// Kernels over columns that an op reduces and then writes, such as softmax along any axis except
// the minor one: adjacent elements belong to different columns.
//
// A tile is a few adjacent words of inner elements, usually at least 64 bytes, by all of n, which
// is distributed over lanes. A thread stays in one column of words, and its functor has sums for
// each element of a word. There are two forms of the kernel:
//
// - Columns in registers: a thread has a few words, which are all loaded before the first is
//   used. A column takes no more lanes than can hold it. For a short column these are one or a few
//   lanes of a warp; each warp then has its own tile and needs no other warp. For a long column
//   they are lanes of a block, or of a cluster.
// - Longer columns: a tile that fits into shared memory is copied there at once, and a thread
//   accesses only what it has copied itself. A larger tile is read twice. If there are few such
//   tiles, several blocks share a tile, in two launches.
//
// With words of one element the second form takes any array, also rows along the minor axis.
//
// A functor is that of held_rows.cuh for kColumns columns: element i of a word belongs to column i.
// Its kSums are a multiple of kColumns, a group reduces kColumns values at once, and
// Undefined(column) is that of one column. It says whether there may be a mask (kMasks). An op
// chooses it on the device, and on the host for words of 16 bytes in registers, where no register
// is left for that:
//
//   struct Functors {
//     using Params = ...;                // with the functor's arguments
//     static constexpr int kInputs = 2;  // arrays that are read, 1 or 2
//     template <typename Run>
//     static cudaError_t Choose(const Params&, const Run& run);  // calls run(other functors)
//     template <typename T, int kColumns, typename Run>
//     static void With(const Params&, const Run& run);  // calls run(functor)
//   };
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "core/cuda/column_holders.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "core/plan_columns.h"

namespace jax_fastops::cuda {

// The lanes of a column, which are 1 << log_width threads apart, or adjacent.
template <typename A, int kColumns, bool kMayBeAdjacent, bool kMayCluster>
struct ColumnGroup {
  // Values are exchanged by accesses of up to 16 bytes.
  using Access = Unit<A, kColumns * sizeof(A) < 16 ? kColumns * sizeof(A) : 16>;

  const ColumnsLaunch& launch;
  uint4* shared;

  // Reduces each value over the lanes. All threads call it; in a cluster, once.
  template <typename Op>
  __device__ __forceinline__ void All(Op op, A (&values)[kColumns]) const {
    const int threads = 1 << launch.log_threads;
    int width = 1 << launch.log_width;
    asm volatile("" : "+r"(width));  // no address is held until the next reduction
    if (kMayBeAdjacent && launch.adjacent) {
      return Butterfly(op, values, threads >> launch.log_width);
    }
    Butterfly(op, values, kWarpSize, width);
    const int parts = threads >> max(launch.log_width, 5);  // warps, or lanes
    if (parts > 1) AllOfBlock(op, values, width, threads, parts);
    if constexpr (kMayCluster && kHopper) {
      if (launch.log_blocks > 0) AllOfCluster(op, values, width);
    }
  }

  // No block of a cluster may exit before all have read. All threads call both after the
  // reductions.
  __device__ __forceinline__ void Arrive() const {
    if constexpr (kMayCluster && kHopper) {
      if (launch.log_blocks > 0) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    }
  }
  __device__ __forceinline__ void Await() const {
    if constexpr (kMayCluster && kHopper) {
      if (launch.log_blocks > 0) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
    }
  }

 private:
  static __device__ __forceinline__ void Put(A* to, const A (&values)[kColumns]) {
#pragma unroll
    for (int at = 0; at < kColumns; at += Access::kSize) {
      Access piece;
#pragma unroll
      for (int i = 0; i < Access::kSize; ++i) piece[i] = values[at + i];
      piece.Store(to + at);
    }
  }
  // Calls each(i, value).
  template <typename Each>
  static __device__ __forceinline__ void Take(const A* from, const Each& each) {
#pragma unroll
    for (int at = 0; at < kColumns; at += Access::kSize) {
      const Access piece = Access::Load(from + at);
#pragma unroll
      for (int i = 0; i < Access::kSize; ++i) each(at + i, piece[i]);
    }
  }

  // Through the sums of the tile, once per warp or once per lane, whichever is fewer.
  template <typename Op>
  __device__ __forceinline__ void AllOfBlock(Op op, A (&values)[kColumns], int width, int threads,
                                             int parts) const {
    A* const scratch = reinterpret_cast<A*>(shared + launch.scratch);
    const int column = threadIdx.x & (width - 1), size = width * kColumns;
    const int part = threadIdx.x >> max(launch.log_width, 5);
    __syncthreads();  // others may still read the values of the last reduction
    if (threadIdx.x % kWarpSize < width) Put(scratch + part * size + column * kColumns, values);
    __syncthreads();
    // One thread combines each value. If every thread combined all that it needs, the number of
    // instructions would multiply.
    for (int at = threadIdx.x; at < size; at += threads) {
      A value = scratch[at];
#pragma unroll 4
      for (int other = 1; other < parts; ++other) value = op(value, scratch[other * size + at]);
      scratch[at] = value;
    }
    __syncthreads();
    Take(scratch + column * kColumns, [&](int i, A value) { values[i] = value; });
  }

  // In the order of the blocks' ranks.
  template <typename Op>
  __device__ __forceinline__ void AllOfCluster(Op op, A (&values)[kColumns], int width) const {
    A* const own =
        reinterpret_cast<A*>(shared + launch.exchange) + (threadIdx.x & (width - 1)) * kColumns;
    if (threadIdx.x < width) Put(own, values);
    Arrive();
    Await();
#pragma unroll
    for (A& value : values) value = Op::template Identity<A>();
#pragma unroll 1
    for (int rank = 0; rank < 1 << launch.log_blocks; ++rank) {
      Take(cooperative_groups::this_cluster().map_shared_rank(own, rank),
           [&](int i, A value) { values[i] = op(values[i], value); });
    }
  }
};

template <typename F, typename T, typename C>
__device__ __forceinline__ void LoadColumn(const F& functor, C& column) {
  T outside[F::kInputs];
#pragma unroll
  for (int i = 0; i < F::kInputs; ++i) outside[i] = functor.Outside(i);
  column.Load(outside);
  functor.Prepare(column);
  if (F::kMasks && column.slice.of.mask.data != nullptr) column.Exclude(outside);
  column.Forget();
}

// Calls after() between the results and what is rare.
template <typename F, typename C, typename After>
__device__ __forceinline__ void WriteColumn(F& functor, C& column, const After& after) {
  uint32_t undefined = 0;
  if (F::kMasks && column.slice.of.mask.data != nullptr) {
#pragma unroll
    for (int i = 0; i < C::kSize; ++i) undefined |= uint32_t{functor.Undefined(i)} << i;
  }
  functor.Write(column);
  after();
  if (F::kMasks && undefined != 0) column.Overwrite(undefined, functor.Masked());
}

template <typename Functors, typename T, int kBytes, bool kRegisters>
__device__ __forceinline__ void TakeColumns(const HeldColumns& columns, const ColumnsLaunch& launch,
                                            const typename Functors::Params& params) {
  using A = ComputeType<T>;
  constexpr int kInputs = Functors::kInputs, kSize = kBytes / sizeof(T);
  constexpr bool kMayCluster = kRegisters && ColumnsInClusters(kBytes, kInputs);
  using Slice = ColumnSlice<T, kBytes>;

  extern __shared__ uint4 shared[];
  Functors::template With<T, kSize>(params, [&](auto functor) {
    using F = decltype(functor);
    static_assert(!kMayCluster || F::kReductions == 1, "blocks of a cluster exchange values once");
    const int log_blocks = kMayCluster ? launch.log_blocks : 0;
    const int threads = 1 << launch.log_threads, width = 1 << launch.log_width;
    const int thread = threadIdx.x & (threads - 1), lanes = threads >> launch.log_width;
    const int64_t tile =
        (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) >> (launch.log_threads + log_blocks);
    const bool adjacent = !kRegisters && launch.adjacent;
    const int64_t number =
        (tile << launch.log_width) +
        (adjacent ? thread >> (launch.log_threads - launch.log_width) : thread & (width - 1));
    const bool exists = number < launch.columns;
    const int64_t own = exists ? number : 0;  // and then no words
    const int lane = adjacent ? thread & (lanes - 1) : thread >> launch.log_width;
    ColumnGroup<A, kSize, !kRegisters, kMayCluster> group{launch, shared};

    if constexpr (kRegisters) {
      // The column goes from the end of n to its start, so at most the thread's first word is
      // outside. A thread without a column has no words.
      const int all_lanes = lanes << log_blocks;
      const int first =
          (launch.words - 1) * all_lanes + lane + (log_blocks > 0 ? BlockOfCluster() * lanes : 0);
      using Words = WordsInRegisters<T, kInputs, kBytes, HeldColumnWords(kBytes), true>;
      const int begin = exists ? static_cast<int>(first >= columns.n) : launch.words;
      const Slice slice(columns, launch.row_words, own, first, -all_lanes);
      Column<T, kInputs, kBytes, Words> column(slice, launch.words, begin, Words(shared));
      LoadColumn<F, T>(functor, column);
      functor.Reduce(column, group);
      group.Arrive();
      column.Forget();
      WriteColumn(functor, column, [&] { group.Await(); });
    } else {
      const int64_t begin = blockIdx.y * launch.chunk + lane;
      const int64_t end = exists ? min(columns.n, (blockIdx.y + 1) * launch.chunk) : 0;
      const int64_t count = end > begin ? (end - begin + lanes - 1) / lanes : 0;
      const Slice slice(columns, launch.row_words, own, begin, lanes);
      if (launch.held) {
        using Words = WordsInShared<T, kInputs, kBytes>;
        Column<T, kInputs, kBytes, Words> column(slice, static_cast<int>(count), 0,
                                                 Words(shared, launch.words));
        LoadColumn<F, T>(functor, column);
        functor.Reduce(column, group);
        WriteColumn(functor, column, [] {});
        return;
      }
      constexpr int kWords = LoadedColumnWords(kBytes, kInputs);
      const auto load = [&](int64_t first) {
        using Words = WordsInRegisters<T, kInputs, kBytes, kWords, false>;
        static_assert(!Words::kSplit, "there is no shared memory for the second array");
        Column<T, kInputs, kBytes, Words> part(
            slice.After(first), static_cast<int>(min(int64_t{kWords}, count - first)), 0,
            Words(nullptr));
        LoadColumn<F, T>(functor, part);
        return part;
      };
      const auto partial = [&](int64_t chunk) {
        return static_cast<A*>(launch.partials) + (chunk * launch.columns + number) * F::kSums;
      };
      if (launch.stage == RowStage::kWrite) {
        for (int64_t chunk = exists ? lane : launch.chunks; chunk < launch.chunks; chunk += lanes) {
          A sums[F::kSums];
#pragma unroll
          for (int i = 0; i < F::kSums; ++i) sums[i] = partial(chunk)[i];
          functor.Join(sums);
        }
      } else {
        for (int64_t first = 0; first < count; first += kWords) {
          auto part = load(first);
          functor.Add(part);
        }
      }
      functor.Combine(group);
      if (launch.stage == RowStage::kReduce) {
        if (lane != 0 || !exists) return;
        A sums[F::kSums];
        functor.Collect(sums);
#pragma unroll
        for (int i = 0; i < F::kSums; ++i) partial(blockIdx.y)[i] = sums[i];
        return;
      }
      functor.Settle();
      for (int64_t first = 0; first < count; first += kWords) {
        auto part = load(first);
        WriteColumn(functor, part, [] {});
      }
    }
  });
}

// Single elements of 16 bits have one kernel for both types.
template <typename Functors, typename T, int kBytes, bool kRegisters>
__global__ void __launch_bounds__(ColumnThreads(kRegisters, kBytes, Functors::kInputs),
                                  MinColumnBlocks(kRegisters, kBytes, Functors::kInputs))
    ColumnsKernel(const __grid_constant__ HeldColumns columns,
                  const __grid_constant__ ColumnsLaunch launch,
                  const __grid_constant__ typename Functors::Params params) {
  ForCommonTypes<T, kBytes == 2>(launch.dtype, [&]<typename U>(TypeTag<U>) {
    TakeColumns<Functors, U, kBytes, kRegisters>(columns, launch, params);
  });
}

// Calls the kernels on columns of T, of a family that lists them (KernelOf). `partials` has room
// for what the plan asks for.
template <typename Family, typename Functors, typename T>
cudaError_t LaunchHeldColumns(const ColumnsPlan& plan, const HeldColumns& columns,
                              const typename Functors::Params& params, void* partials,
                              cudaStream_t stream) {
  using Single = CommonType<T, true>;
  constexpr int kSingle = sizeof(T), kWide = ColumnBytes(sizeof(T));
  if (plan.blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  ColumnsLaunch launch = plan.launch;
  launch.partials = partials;
  launch.dtype = kDTypeOf<T>;
  const LaunchConfig config = {
      .grid = dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(launch.chunks)),
      .block = dim3(static_cast<unsigned>(plan.threads)),
      .shared = static_cast<size_t>(plan.shared_bytes),
      .cluster = plan.cluster};
  const auto run = [&](auto kernel) {
    return LaunchStages(kernel, config, stream, columns, launch, params);
  };
  if constexpr (sizeof(T) < 8) {
    if (plan.registers && plan.bytes == 16) {
      return Functors::Choose(params, [&](auto chosen) {
        return run(KernelOf<Family, ColumnsKernel<decltype(chosen), T, 16, true>>());
      });
    }
    if (plan.registers) {
      return run(KernelOf<Family, ColumnsKernel<Functors, Single, kSingle, true>>());
    }
    if (plan.bytes > kSingle) {
      return run(KernelOf<Family, ColumnsKernel<Functors, T, kWide, false>>());
    }
  }
  return run(KernelOf<Family, ColumnsKernel<Functors, Single, kSingle, false>>());
}

}  // namespace jax_fastops::cuda

// Sums of rows by segment, from ids in ascending order.
//
// The rows and the ends of the segments are merged into one sequence, in which each row comes
// before the end of its segment: a merge path. A group of threads takes `tile` successive items of
// it: it reads each row once, and writes each segment that ends. So a segment with half of the
// rows, and a long run of empty segments, are divided like everything else, and nothing has to be
// set to 0 before. A binary search in the ids finds where a tile begins.
//
// A segment that began in an earlier tile is not written by the tile in which it ends: its sums go
// through shared memory within a block, and through `parts` between blocks. A second kernel adds up
// the latter. For each block there are three rows of `parts`: the sum of the segment that is open
// at the block's end, the sum of the segment that was open at its beginning and ends in it, and the
// number of the former segment, or -1.
#include "segment_sum/segment_sum.h"

#include <algorithm>
#include <limits>

#include "core/alignment.h"
#include "core/cuda/dependent.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/partial_sums.cuh"
#include "core/cuda/vec.cuh"

namespace jax_fastops::cuda {
namespace {

struct SegmentSumFamily;

constexpr int kThreads = 256;
enum Part { kCarry, kHead, kOpen, kParts };

struct Params : SegmentSumCall {
  int log_lanes;       // threads of a group, which share a row
  uint32_t chunks;     // of the columns: what a group has at a time
  uint32_t row_bytes;  // of x
};

// The columns of a thread, 16 bytes of x. With kWhole they are neighbors, and rows are aligned.
// Rows are those of the pointer of the thread's first column.
template <typename T, bool kWhole>
struct Columns {
  using A = ComputeType<T>;
  static constexpr int kSize = 16 / sizeof(T);

  int64_t first, count;
  int step;

  __device__ __forceinline__ int At(int k) const { return k * (kWhole ? 1 : step); }
  __device__ __forceinline__ bool Has(int k) const { return first + At(kWhole ? 0 : k) < count; }

  __device__ __forceinline__ Vec<T> Load(const char* row) const {
    const T* const x = reinterpret_cast<const T*>(row);
    if constexpr (kWhole) {
      return Vec<T>::template Load<CacheHint::kNoAllocate>(x);
    } else {
      T elements[kSize];
#pragma unroll
      for (int k = 0; k < kSize; ++k) elements[k] = Has(k) ? x[At(k)] : FromCompute<T>(0);
      return Vec<T>(elements);
    }
  }

  // `wide`: the row has the accumulator's type.
  __device__ __forceinline__ void Store(const A (&values)[kSize], char* row, bool wide) const {
    if (wide) {
      StoreAs(values, reinterpret_cast<A*>(row));
    } else {
      StoreAs(values, reinterpret_cast<T*>(row));
    }
  }

  template <typename U>
  __device__ __forceinline__ void StoreAs(const A (&values)[kSize], U* row) const {
    if constexpr (kWhole) {
      if (Has(0)) Vec<U, kSize * sizeof(U)>::Packed(values).Store(row);
    } else {
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        if (Has(k)) row[At(k)] = FromCompute<U>(values[k]);
      }
    }
  }
};

// The ids of an index of the batch.
struct Ids {
  const Params& p;
  const char* first;
  int64_t step;  // in bytes

  __device__ __forceinline__ Ids(const Params& p, int64_t list)
      : p(p),
        first(static_cast<const char*>(p.ids) + list * p.id_bytes),
        step(p.step * p.id_bytes) {}

  // At both ends, ids may be out of bounds.
  __device__ __forceinline__ int Of(int row) const {
    const char* const at = first + row * step;
    return p.id_bytes == 2 ? *reinterpret_cast<const uint16_t*>(at)
                           : *reinterpret_cast<const int32_t*>(at);
  }
};

// A place in the merged sequence: after `row` rows and `segment` ends. `open` is this segment if
// it has rows before the place, otherwise -1.
struct Boundary {
  int row, segment, open;
};

// The place after so many items. Item i + (id of row i, within bounds) is row i.
__device__ __forceinline__ Boundary FindBoundary(const Ids& ids, int64_t item) {
  constexpr int kProbes = 7;  // loads under way together: a binary search would wait 2.8 times more
  const uint32_t rows = static_cast<uint32_t>(ids.p.rows);
  const int segments = static_cast<int>(ids.p.segments);
  const uint32_t after = static_cast<uint32_t>(min(item, int64_t{rows} + segments));
  int low = static_cast<int>(after > segments ? after - segments : 0);
  int high = static_cast<int>(min(after, rows));
  while (low < high) {
    const int step = (high - low) / (kProbes + 1) + 1;
    int id[kProbes], before = 0;
#pragma unroll
    for (int k = 0; k < kProbes; ++k) id[k] = ids.Of(min(low + (k + 1) * step, high) - 1);
#pragma unroll
    for (int k = 0; k < kProbes; ++k) {
      const int row = low + (k + 1) * step - 1;
      const uint32_t place = static_cast<uint32_t>(row) + min(max(id[k], 0), segments);
      before += row < high && place < after;
    }
    low += before * step;
    high = min(high, low + step - 1);
  }
  const int segment = static_cast<int>(after - low);
  const bool open = low > 0 && segment < segments && ids.Of(low - 1) == segment;
  return {low, segment, open ? segment : -1};
}

template <typename A>
__device__ __forceinline__ A* PartOf(const Params& p, int64_t batch, int64_t tile, Part part) {
  return static_cast<A*>(p.parts) + ((batch * p.tiles + tile) * kParts + part) * p.columns;
}

// Shared memory: sums of each thread, and the boundaries of the groups.
template <typename T, bool kWhole>
__device__ __forceinline__ void SumSegments(const Params& p, ComputeType<T>* carries,
                                            ComputeType<T>* heads, Boundary* boundary) {
  using A = ComputeType<T>;
  using Own = Columns<T, kWhole>;
  constexpr int kSize = Own::kSize;
  constexpr int kRows = 4;  // loads under way together
  auto* const carry = reinterpret_cast<A(*)[kSize]>(carries);
  auto* const head = reinterpret_cast<A(*)[kSize]>(heads);

  LetDependentsStart();
  const uint32_t block = blockIdx.x / p.chunks, chunk = blockIdx.x - block * p.chunks;
  const uint32_t batch = block / static_cast<uint32_t>(p.tiles);
  const uint32_t tile = block - batch * static_cast<uint32_t>(p.tiles);
  const int thread = static_cast<int>(threadIdx.x), lanes = 1 << p.log_lanes;
  const int group = thread >> p.log_lanes, groups = kThreads >> p.log_lanes;
  const int lane = thread & (lanes - 1);
  const Own own = {int64_t{chunk} * lanes * kSize + lane * (kWhole ? kSize : 1), p.columns, lanes};

  AwaitPredecessors();
  const int64_t list = FirstId(p, batch);
  const Ids ids(p, list);
  // One thread searches for one boundary, because all of a group would take its instructions.
  for (int i = thread; i <= groups; i += kThreads) {
    boundary[i] = FindBoundary(ids, (int64_t{tile} * groups + i) * p.tile);
  }
  __syncthreads();
  const Boundary begin = boundary[group], end = boundary[group + 1];

  // Lanes without columns load those of the first ones.
  const int64_t column = own.Has(0) ? own.first : 0;
  const char* const x =
      static_cast<const char*>(p.x) + batch * p.rows * p.row_bytes + column * int64_t{sizeof(T)};
  const int64_t y_bytes = p.wide ? sizeof(A) : sizeof(T), y_step = p.columns * y_bytes;
  char* y = static_cast<char*>(p.y) +
            ((batch * p.segments + begin.segment) * p.columns + column) * y_bytes;
  A sum[kSize] = {};
  int segment = begin.segment;
  // Ends this segment, and those without rows before `next`.
  const auto finish = [&](int next) {
    constexpr A kZeros[kSize] = {};
    if (segment == begin.open) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) head[thread][i] = sum[i];
    } else {
      own.Store(sum, y, p.wide);
    }
#pragma unroll 1
    for (y += y_step; ++segment < next; y += y_step) own.Store(kZeros, y, p.wide);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] = 0;
  };
  // The ids of the next rows, and where they are in x, are loaded before the rows are added. A row
  // in no sum has the segment -1. After the last row, the first one of x is loaded.
  struct Rows {
    int segment[kRows], place[kRows];
  };
  const char* id = ids.first + begin.row * ids.step;
  const int64_t order_step = p.step * int64_t{sizeof(int32_t)};
  const char* order = reinterpret_cast<const char*>(p.order + list) + begin.row * order_step;
  const auto read = [&](int first) {
    Rows rows;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      rows.segment[k] = -1;
      rows.place[k] = first + k < end.row ? first + k : 0;
    }
    const auto load = [&]<typename Id>(Id) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const Id* const at = reinterpret_cast<const Id*>(id + k * ids.step);
        if (first + k < end.row) rows.segment[k] = static_cast<int>(*at);
      }
    };
    if (p.id_bytes == 2) {
      load(uint16_t());
    } else {
      load(int32_t());
    }
    if (p.order != nullptr) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const int* const at = reinterpret_cast<const int*>(order + k * order_step);
        if (first + k < end.row) rows.place[k] = *at;
      }
    }
    id += kRows * ids.step;
    order += kRows * order_step;
    return rows;
  };
  Rows next = read(begin.row);
  for (int row = begin.row; row < end.row; row += kRows) {
    const Rows now = next;
    Vec<T> elements[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const uint64_t at = static_cast<uint64_t>(static_cast<uint32_t>(now.place[k])) *
                          static_cast<uint64_t>(p.row_bytes);
      elements[k] = own.Load(x + at);
    }
    next = read(row + kRows);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int of = now.segment[k];
      if (static_cast<uint32_t>(of) >= static_cast<uint32_t>(p.segments)) continue;
      if (segment < of) finish(of);
      A values[kSize];
      elements[k].Unpack(values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[i] += values[i];
    }
  }
  if (segment < end.segment) finish(end.segment);

#pragma unroll
  for (int i = 0; i < kSize; ++i) carry[thread][i] = sum[i];
  __syncthreads();
  // Adds the sums of an open segment of the groups from `last` back. Returns the first one that
  // has none, or -1.
  const auto add_carries = [&](int last, int segment, A(&sum)[kSize]) {
    for (; last >= 0 && boundary[last + 1].open == segment; --last) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[i] += carry[last * lanes + lane][i];
    }
    return last;
  };
  const auto store_part = [&](Part part, const A(&values)[kSize]) {
    own.StoreAs(values, PartOf<A>(p, batch, tile, part) + own.first);
  };
  if (begin.open >= 0 && begin.open != end.open) {  // the segment ends here
    A whole[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) whole[i] = head[thread][i];
    if (add_carries(group - 1, begin.open, whole) < 0 && boundary[0].open == begin.open) {
      store_part(kHead, whole);
    } else {
      y = static_cast<char*>(p.y) +
          ((batch * p.segments + begin.open) * p.columns + column) * y_bytes;
      own.Store(whole, y, p.wide);
    }
  }
  if (group == groups - 1) {
    A whole[kSize] = {}, number[kSize] = {};
    if (end.open >= 0) add_carries(group, end.open, whole);
#pragma unroll
    for (int i = 0; i < kSize; ++i) memcpy(&number[i], &end.open, sizeof(end.open));
    store_part(kCarry, whole);
    store_part(kOpen, number);
  }
}

// Rows that are not aligned have one kernel for all types that are summed in T.
template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads, kWhole ? 3 : 2)
    SegmentSumKernel(const __grid_constant__ Params p) {
  constexpr int kSize = kWhole ? 16 / sizeof(T) : sizeof(T) == 8 ? 2 : 8;
  __shared__ ComputeType<T> carry[kThreads * kSize], head[kThreads * kSize];
  __shared__ Boundary boundary[kThreads + 1];
  if constexpr (kWhole) {
    SumSegments<T, true>(p, carry, head, boundary);
  } else {
    ForTypesOf<T>(p.dtype,
                  [&]<typename U>(TypeTag<U>) { SumSegments<U, false>(p, carry, head, boundary); });
  }
}

// Adds up the sums of a segment that is open at the end of a block. The blocks of this launch have
// 1 << log_width columns of a segment that ends in another block. `A` is the type of sums.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    OpenSegmentsKernel(const __grid_constant__ Params p, int log_width) {
  constexpr int kLoads = 4;  // under way together
  __shared__ A scratch[kThreads / 32 * 33];

  const uint32_t block = blockIdx.x / p.chunks, chunk = blockIdx.x - block * p.chunks;
  const int64_t ends = p.tiles - 1, batch = block / ends, tile = block - batch * ends + 1;
  const int width = 1 << log_width, thread = static_cast<int>(threadIdx.x);
  const int share = thread >> log_width, shares = kThreads >> log_width;
  const int64_t first = int64_t{chunk} * width;
  const int64_t column = min(first + (thread & (width - 1)), p.columns - 1);
  const auto part = [&](int64_t tile, Part which) {
    return PartOf<A>(p, batch, tile, which)[column];
  };
  const auto open = [&](int64_t tile) {
    const A number = part(tile, kOpen);
    int segment;
    memcpy(&segment, &number, sizeof(segment));
    return segment;
  };

  AwaitPredecessors();
  const int segment = open(tile - 1);
  if (segment < 0 || open(tile) == segment) return;
  A sum[1] = {share == 0 ? part(tile, kHead) : A(0)};
  bool more = true;
  for (int64_t last = tile - 1 - share; more && last >= 0; last -= kLoads * shares) {
    A values[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int64_t from = last - k * shares;
      more = from >= 0 && open(from) == segment;
      values[k] = more ? part(from, kCarry) : A(0);
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) sum[0] += values[k];
  }
  const SumsOwner owner = CombineShares(log_width, 8 - log_width, sum, scratch);
  const int64_t to = first + owner.result;
  if (owner.result < 0 || owner.writer != 0 || to >= p.columns) return;
  const int64_t at = (batch * p.segments + segment) * p.columns + to;
  if (p.wide || sizeof(A) == 8 || p.dtype == DType::kF32) {
    static_cast<A*>(p.y)[at] = sum[0];
  } else if (p.dtype == DType::kBF16) {
    static_cast<__nv_bfloat16*>(p.y)[at] = FromCompute<__nv_bfloat16>(static_cast<float>(sum[0]));
  } else {
    static_cast<__half*>(p.y)[at] = FromCompute<__half>(static_cast<float>(sum[0]));
  }
}

// Enqueues a kernel with `blocks` blocks for `columns` columns of each index of the batch.
template <typename... More>
cudaError_t LaunchBlocks(void (*kernel)(Params, More...), Params p, int64_t blocks, int64_t columns,
                         cudaStream_t stream, More... more) {
  const int64_t chunks = CeilDiv(p.columns, columns), all = p.batch * blocks * chunks;
  if (all > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
  if (all == 0) return cudaSuccess;
  p.chunks = static_cast<uint32_t>(chunks);
  return Launch(
      kernel,
      {.grid = dim3(static_cast<unsigned>(all)), .block = dim3(kThreads), .dependent = true},
      stream, p, more...);
}

}  // namespace

cudaError_t SegmentSum(const SegmentSumCall& call, cudaStream_t stream) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max() - 64;
  if (call.rows > kMax || call.segments > kMax) return cudaErrorInvalidValue;
  const int64_t row_bytes = call.columns * static_cast<int64_t>(DTypeSize(call.dtype));
  if (row_bytes > std::numeric_limits<uint32_t>::max()) return cudaErrorInvalidValue;
  Params p = {call, 0, 1, static_cast<uint32_t>(row_bytes)};
  while (p.log_lanes < 5 && (int64_t{16} << p.log_lanes) < row_bytes) ++p.log_lanes;
  const int64_t groups = kThreads >> p.log_lanes;
  if (call.tiles < CeilDiv(call.rows + call.segments, call.tile * groups)) {
    return cudaErrorInvalidValue;
  }
  const bool whole = row_bytes % 16 == 0 && CommonAlignment({call.x, call.y, call.parts}) == 16;
  return ForDType(call.dtype, [&]<typename T>(TypeTag<T>) {
    const int64_t columns = (int64_t{16} << p.log_lanes) / static_cast<int64_t>(sizeof(T));
    auto* const kernel =
        whole ? KernelOf<SegmentSumFamily, SegmentSumKernel<T, true>>()
              : KernelOf<SegmentSumFamily, SegmentSumKernel<ComputeType<T>, false>>();
    const cudaError_t error = LaunchBlocks(kernel, p, p.tiles, columns, stream);
    if (error != cudaSuccess) return error;
    // With few columns, threads share the blocks whose sums are added up.
    const int log_width = p.columns < 256 ? 5 : 8;
    return LaunchBlocks(KernelOf<SegmentSumFamily, OpenSegmentsKernel<ComputeType<T>>>(), p,
                        p.tiles - 1, int64_t{1} << log_width, stream, log_width);
  });
}

cudaError_t LoadSegmentSumKernels() { return LoadKernels<SegmentSumFamily>(); }

}  // namespace jax_fastops::cuda

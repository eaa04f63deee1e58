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
  int log_lanes;    // threads of a group, which share a row
  uint32_t chunks;  // of the columns: what a group has at a time
};

// The columns of a thread, 16 bytes of x. With kWhole they are neighbors, and rows are aligned.
template <typename T, bool kWhole>
struct Columns {
  using A = ComputeType<T>;
  static constexpr int kSize = 16 / sizeof(T);

  int64_t first, count;
  int step;

  __device__ __forceinline__ int64_t At(int k) const { return first + k * (kWhole ? 1 : step); }
  __device__ __forceinline__ bool Has(int k) const { return At(kWhole ? 0 : k) < count; }

  // Zeros where there is nothing to load.
  __device__ __forceinline__ Vec<T> Load(bool load, const T* row) const {
    if constexpr (kWhole) {
      return Vec<T>::LoadIf(load && Has(0), row + first);
    } else {
      T elements[kSize];
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        elements[k] = load && Has(k) ? row[At(k)] : FromCompute<T>(0);
      }
      return Vec<T>(elements);
    }
  }

  __device__ __forceinline__ void Store(const A (&values)[kSize], const Params& p,
                                        int64_t row) const {
    const int64_t at = row * count;
    if (p.wide) {
      StoreAs(values, static_cast<A*>(p.y) + at);
    } else {
      StoreAs(values, static_cast<T*>(p.y) + at);
    }
  }

 private:
  template <typename U>
  __device__ __forceinline__ void StoreAs(const A (&values)[kSize], U* row) const {
    if constexpr (kWhole) {
      using Out = Vec<U, kSize * sizeof(U)>;
      if (Has(0)) Out::Packed(values).Store(row + first);
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
  int64_t first;

  __device__ __forceinline__ Ids(const Params& p, int64_t batch) : p(p), first(FirstId(p, batch)) {}
  __device__ __forceinline__ int64_t At(int64_t row) const { return first + row * p.step; }
  // From -1 to the number of segments: at both ends, the row has no segment.
  __device__ __forceinline__ int Segment(int64_t row) const {
    const int64_t at = At(row);
    const int id = p.id_bytes == 2 ? static_cast<const uint16_t*>(p.ids)[at]
                                   : static_cast<const int32_t*>(p.ids)[at];
    return min(max(id, -1), static_cast<int>(p.segments));
  }
};

// A place in the merged sequence: after `row` rows and `segment` ends.
struct Place {
  int row, segment;
};

// Finds the places after so many items. Item i + max(Segment(i), 0) is row i.
template <int kCount>
__device__ __forceinline__ void FindPlaces(const Ids& ids, int64_t (&item)[kCount],
                                           Place (&places)[kCount]) {
  constexpr int kProbes = 7;  // loads under way together: a binary search would wait 2.8 times more
  int64_t low[kCount], high[kCount];
  bool searching = false;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    item[i] = min(item[i], ids.p.rows + ids.p.segments);
    low[i] = max(item[i] - ids.p.segments, int64_t{0});
    high[i] = min(item[i], ids.p.rows);
    searching |= low[i] < high[i];
  }
  while (searching) {
    searching = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int64_t step = (high[i] - low[i]) / (kProbes + 1) + 1;
      int before = 0;
#pragma unroll
      for (int k = 1; k <= kProbes; ++k) {
        const int64_t row = low[i] + k * step - 1;
        if (row < high[i]) before += row + max(ids.Segment(row), 0) < item[i];
      }
      low[i] += before * step;
      high[i] = min(high[i], low[i] + step - 1);
      searching |= low[i] < high[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    places[i] = {static_cast<int>(low[i]), static_cast<int>(item[i] - low[i])};
  }
}

// The segment that has rows before and after a place, or ends after it; or -1.
__device__ __forceinline__ int OpenAt(const Ids& ids, const Place& place) {
  const bool open = place.row > 0 && place.segment < ids.p.segments &&
                    ids.Segment(place.row - 1) == place.segment;
  return open ? place.segment : -1;
}

template <typename A>
__device__ __forceinline__ A* PartOf(const Params& p, int64_t batch, int64_t tile, Part part) {
  return static_cast<A*>(p.parts) + ((batch * p.tiles + tile) * kParts + part) * p.columns;
}

template <typename T, bool kWhole>
__global__ void __launch_bounds__(kThreads, 2) SegmentSumKernel(const __grid_constant__ Params p) {
  using A = ComputeType<T>;
  using Own = Columns<T, kWhole>;
  constexpr int kSize = Own::kSize;
  constexpr int kRows = kWhole ? 8 : 4;  // loads under way together
  __shared__ A carry[kThreads][kSize], head[kThreads][kSize];
  __shared__ int open[kThreads + 1];  // the segment that is open where each group begins

  LetDependentsStart();
  const uint32_t block = blockIdx.x / p.chunks, chunk = blockIdx.x - block * p.chunks;
  const uint32_t batch = block / static_cast<uint32_t>(p.tiles);
  const uint32_t tile = block - batch * static_cast<uint32_t>(p.tiles);
  const int thread = static_cast<int>(threadIdx.x), lanes = 1 << p.log_lanes;
  const int group = thread >> p.log_lanes, groups = kThreads >> p.log_lanes;
  const int lane = thread & (lanes - 1);
  const Own own = {int64_t{chunk} * lanes * kSize + lane * (kWhole ? kSize : 1), p.columns, lanes};
  const T* const x = static_cast<const T*>(p.x) + batch * p.rows * p.columns;

  AwaitPredecessors();
  const Ids ids(p, batch);
  const int64_t item = (int64_t{tile} * groups + group) * p.tile;
  int64_t items[2] = {item, item + p.tile};
  Place places[2];
  FindPlaces(ids, items, places);
  const int begun = OpenAt(ids, places[0]), open_here = OpenAt(ids, places[1]);

  A sum[kSize] = {};
  int segment = places[0].segment;
  const auto finish = [&] {
    if (segment == begun) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) head[thread][i] = sum[i];
    } else {
      own.Store(sum, p, batch * p.segments + segment);
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] = 0;
    ++segment;
  };
  // The ids of the next rows, and where they are in x, are loaded before the rows are added.
  struct Rows {
    int segment[kRows];  // -1: the row is in no sum
    int place[kRows];
  };
  const auto read = [&](int first) {
    Rows rows;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int row = first + k;
      const bool has = row < places[1].row;
      const int found = has ? ids.Segment(row) : -1;
      rows.segment[k] = found < p.segments ? found : -1;
      rows.place[k] = has && p.order != nullptr ? p.order[ids.At(row)] : row;
    }
    return rows;
  };
  Rows next = read(places[0].row);
  for (int row = places[0].row; row < places[1].row; row += kRows) {
    const Rows now = next;
    Vec<T> elements[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      elements[k] = own.Load(now.segment[k] >= 0, x + int64_t{now.place[k]} * p.columns);
    }
    next = read(row + kRows);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (now.segment[k] < 0) continue;
      while (segment < now.segment[k]) finish();
      A values[kSize];
      elements[k].Unpack(values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[i] += values[i];
    }
  }
  while (segment < places[1].segment) finish();

#pragma unroll
  for (int i = 0; i < kSize; ++i) carry[thread][i] = sum[i];
  if (group == 0) open[0] = begun;
  open[group + 1] = open_here;
  __syncthreads();
  // Adds the sums of an open segment of the groups from `last` back. Returns the first one that
  // has none, or -1.
  const auto add_carries = [&](int last, int segment, A(&sum)[kSize]) {
    for (; last >= 0 && open[last + 1] == segment; --last) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[i] += carry[last * lanes + lane][i];
    }
    return last;
  };
  const auto store_part = [&](Part part, const A(&values)[kSize]) {
    A* const to = PartOf<A>(p, batch, tile, part);
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      if (own.Has(k)) to[own.At(k)] = values[k];
    }
  };
  if (begun >= 0 && begun != open_here) {  // the segment ends here
    A whole[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) whole[i] = head[thread][i];
    if (add_carries(group - 1, begun, whole) < 0 && open[0] == begun) {
      store_part(kHead, whole);
    } else {
      own.Store(whole, p, batch * p.segments + begun);
    }
  }
  if (group == groups - 1) {
    A whole[kSize] = {}, number[kSize] = {};
    if (open_here >= 0) add_carries(group, open_here, whole);
#pragma unroll
    for (int i = 0; i < kSize; ++i) memcpy(&number[i], &open_here, sizeof(open_here));
    store_part(kCarry, whole);
    store_part(kOpen, number);
  }
}

// Adds up the sums of a segment that is open at the end of a block. The blocks of this launch have
// 1 << log_width columns of a segment that ends in another block.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    OpenSegmentsKernel(const __grid_constant__ Params p, int log_width) {
  using A = ComputeType<T>;
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
  if (p.wide) {
    static_cast<A*>(p.y)[at] = sum[0];
  } else {
    static_cast<T*>(p.y)[at] = FromCompute<T>(sum[0]);
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
  Params p = {call, 0, 1};
  const int64_t row_bytes = call.columns * static_cast<int64_t>(DTypeSize(call.dtype));
  while (p.log_lanes < 5 && (int64_t{16} << p.log_lanes) < row_bytes) ++p.log_lanes;
  const int64_t groups = kThreads >> p.log_lanes;
  if (call.tiles < CeilDiv(call.rows + call.segments, call.tile * groups)) {
    return cudaErrorInvalidValue;
  }
  const bool whole = row_bytes % 16 == 0 && CommonAlignment({call.x, call.y}) == 16;
  return ForDType(call.dtype, [&]<typename T>(TypeTag<T>) {
    const int64_t columns = (int64_t{16} << p.log_lanes) / static_cast<int64_t>(sizeof(T));
    auto* const kernel = whole ? KernelOf<SegmentSumFamily, SegmentSumKernel<T, true>>()
                               : KernelOf<SegmentSumFamily, SegmentSumKernel<T, false>>();
    const cudaError_t error = LaunchBlocks(kernel, p, p.tiles, columns, stream);
    if (error != cudaSuccess) return error;
    // With few columns, threads share the blocks whose sums are added up.
    const int log_width = p.columns < 256 ? 5 : 8;
    return LaunchBlocks(KernelOf<SegmentSumFamily, OpenSegmentsKernel<T>>(), p, p.tiles - 1,
                        int64_t{1} << log_width, stream, log_width);
  });
}

cudaError_t LoadSegmentSumKernels() { return LoadKernels<SegmentSumFamily>(); }

}  // namespace jax_fastops::cuda

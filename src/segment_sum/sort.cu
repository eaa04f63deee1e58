// A stable radix sort of ids, from the lowest digit to the highest. A pass over a digit has three
// kernels:
//
//   Count    counts the digits of each tile of rows;
//   Scan     adds up, for each digit, the counts of the tiles before each tile;
//   Scatter  ranks the rows of a tile by digit, and moves each to its place in the whole list.
//
// Ranks in a tile follow from the order of rows, not of threads: in a warp by ballots, between
// warps by sums of their counts. So the sort is stable, and its result has the same bits in every
// run. Rows go to their places through shared memory, where those of a digit are neighbors.
//
// Few tiles need no Scan, because Scatter adds up their counts itself. A single tile needs no
// counts: one kernel takes it through all passes in shared memory. The first pass reads ids, and
// knows that row i is at place i. No memory has to be set before.
//
// Source: Merrill and Grimshaw, "High performance and scalable radix sorting" (2011).
#include "segment_sum/sort.h"

#include <limits>

#include "core/cuda/dependent.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "core/integer.h"

namespace jax_fastops::cuda {
namespace {

struct SegmentSortFamily;

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kItems = 16;  // rows of a thread, at most
constexpr int kMinBits = 3, kMaxBits = 10;
constexpr int kDigits = 1 << kMaxBits, kDigitsOfThread = kDigits / kThreads;
constexpr uint32_t kUnscanned = 32;  // tiles whose counts Scatter adds up itself
constexpr int kScanThreads = 1024, kScanWidth = 1 << kMinBits;  // threads and digits of a block

// Lists of keys and of the places of their rows. Steps between lists are in bytes.
struct Pairs {
  char* keys;
  int key_bytes;
  char* places;  // null: row i is at place i
  int64_t key_step, place_step;
};

struct Params {
  uint32_t rows, segments, tile, tiles;
  int bits, shift, end_shift;  // Scatter takes the digits between the two shifts
  bool scanned;
  Pairs from, to;
  // Of a list: tiles x digits, and then the sum over the tiles of each digit if `scanned`.
  uint32_t* counts;
  int64_t counts_step;
};

// The list and the tile of this block.
struct Tile {
  uint32_t list, index, first, count;

  __device__ __forceinline__ explicit Tile(const Params& p)
      : list(blockIdx.x / p.tiles),
        index(blockIdx.x - list * p.tiles),
        first(index * p.tile),
        count(min(p.tile, p.rows - first)) {}
};

// The keys of the rows index, index + kStep, ... of a tile, as many as are below index + count.
template <int kStep>
__device__ __forceinline__ void LoadKeys(const Params& p, const Tile& tile, uint32_t index,
                                         int count, uint32_t (&keys)[kItems]) {
  const char* const list = p.from.keys + tile.list * p.from.key_step;
  const auto load = [&]<typename Key>(Key) {
    const Key* const from = reinterpret_cast<const Key*>(list) + tile.first + index;
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      // A negative id is a large number.
      keys[k] = k * kStep < count ? min(uint32_t{from[k * kStep]}, p.segments) : 0;
    }
  };
  if (p.from.key_bytes == 2) {
    load(uint16_t());
  } else {
    load(uint32_t());
  }
}

__global__ void __launch_bounds__(kThreads) CountKernel(const __grid_constant__ Params p) {
  __shared__ uint32_t counts[kDigits];

  LetDependentsStart();
  const int thread = static_cast<int>(threadIdx.x), digits = 1 << p.bits;
  for (int d = thread; d < digits; d += kThreads) counts[d] = 0;
  __syncthreads();
  AwaitPredecessors();
  const Tile tile(p);
  const int count = static_cast<int>(tile.count) - thread;
  uint32_t keys[kItems];
  LoadKeys<kThreads>(p, tile, thread, count, keys);
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if (k * kThreads < count) atomicAdd(&counts[keys[k] >> p.shift & (digits - 1)], 1);
  }
  __syncthreads();
  uint32_t* const to = p.counts + tile.list * p.counts_step + (int64_t{tile.index} << p.bits);
  for (int d = thread; d < digits; d += kThreads) to[d] = counts[d];
}

// Replaces the count of a digit in a tile by the sum over the tiles before it. A block has
// kScanWidth digits of a list, and each of its threads successive tiles of a digit.
__global__ void __launch_bounds__(kScanThreads) ScanKernel(const __grid_constant__ Params p) {
  constexpr int kShares = kScanThreads / kScanWidth, kLoads = 8;
  __shared__ uint32_t sums[kScanThreads / kWarpSize][kScanWidth];  // of the threads of a warp

  LetDependentsStart();
  const uint32_t thread = threadIdx.x, lane = thread % kWarpSize, warp = thread / kWarpSize;
  const uint32_t log_blocks = p.bits - kMinBits, list = blockIdx.x >> log_blocks;
  const uint32_t column = thread % kScanWidth;
  const uint32_t digit = (blockIdx.x - (list << log_blocks)) * kScanWidth + column;
  const uint32_t size = (p.tiles + kShares - 1) / kShares;
  const uint32_t begin = min(thread / kScanWidth * size, p.tiles);
  const uint32_t end = min(begin + size, p.tiles);
  uint32_t* const counts = p.counts + list * p.counts_step + digit;

  AwaitPredecessors();
  uint32_t own = 0;
#pragma unroll 8
  for (uint32_t t = begin; t < end; ++t) own += counts[int64_t{t} << p.bits];
  uint32_t sum = own;  // over the threads up to this one
#pragma unroll
  for (int step = kScanWidth; step < kWarpSize; step *= 2) {
    const uint32_t other = __shfl_up_sync(kFullWarp, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane >= kWarpSize - kScanWidth) sums[warp][column] = sum;
  __syncthreads();
  uint32_t before = sum - own;
  for (uint32_t w = 0; w < warp; ++w) before += sums[w][column];
  for (uint32_t first = begin; first < end; first += kLoads) {
    uint32_t loaded[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (first + k < end) loaded[k] = counts[int64_t{first + k} << p.bits];
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (first + k < end) {
        counts[int64_t{first + k} << p.bits] = before;
        before += loaded[k];
      }
    }
  }
  if (thread / kScanWidth == kShares - 1) counts[int64_t{p.tiles} << p.bits] = before;
}

// The lanes of a warp whose digit has the same bits.
__device__ __forceinline__ uint32_t LanesOf(uint32_t digit, int bits) {
  uint32_t lanes = kFullWarp;
  const auto match = [&](int bit) {
    const bool one = digit >> bit & 1;
    const uint32_t ones = __ballot_sync(kFullWarp, one);
    lanes &= one ? ones : ~ones;
  };
#pragma unroll
  for (int bit = 0; bit < 8; ++bit) match(bit);
  if (bits > 8) {
#pragma unroll
    for (int bit = 8; bit < kMaxBits; ++bit) match(bit);
  }
  return lanes;
}

// The sum of a value over the threads of the block before this one. Has one barrier, after which
// `scratch` may not be written before the next one.
__device__ __forceinline__ uint32_t SumBefore(uint32_t value, uint32_t (&scratch)[kWarps]) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  uint32_t sum = value;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const uint32_t other = __shfl_up_sync(kFullWarp, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == kWarpSize - 1) scratch[warp] = sum;
  __syncthreads();
  uint32_t before = sum - value;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) before += w < warp ? scratch[w] : 0;
  return before;
}

// The rows of a digit in the tiles before a tile, and in all tiles.
struct DigitCounts {
  uint32_t before, all;
};

__device__ __forceinline__ DigitCounts CountsOf(const Params& p, const Tile& tile, uint32_t digit) {
  const uint32_t* const counts = p.counts + tile.list * p.counts_step + digit;
  if (p.scanned) {
    return {counts[int64_t{tile.index} << p.bits], counts[int64_t{p.tiles} << p.bits]};
  }
  DigitCounts sums = {};
#pragma unroll 8
  for (uint32_t t = 0; t < p.tiles; ++t) {
    const uint32_t count = counts[t << p.bits];
    sums.all += count;
    if (t < tile.index) sums.before += count;
  }
  return sums;
}

__global__ void __launch_bounds__(kThreads, 4) ScatterKernel(const __grid_constant__ Params p) {
  extern __shared__ uint32_t shared[];
  __shared__ uint32_t scratch[kWarps];

  LetDependentsStart();
  const uint32_t thread = threadIdx.x, lane = thread % kWarpSize, warp = thread / kWarpSize;
  const uint32_t digits = 1u << p.bits, items = p.tile / kThreads;
  uint32_t* const keys = shared;            // the tile in the order of its digits
  uint32_t* const places = keys + p.tile;   // of its rows
  uint32_t* const start = places + p.tile;  // of each digit: from here to the list `to`
  uint16_t* const ranks = reinterpret_cast<uint16_t*>(start + digits);  // of each warp and digit
  uint16_t* const own = ranks + warp * digits;
  // The threads have successive digits.
  const uint32_t per_thread = digits > kThreads ? digits / kThreads : 1;
  const auto for_digits = [&](const auto& visit) {
#pragma unroll
    for (uint32_t j = 0; j < kDigitsOfThread; ++j) {
      const uint32_t d = thread * per_thread + j;
      if (j < per_thread && d < digits) visit(j, d);
    }
  };

  AwaitPredecessors();
  const Tile tile(p);
  // A warp has successive rows of the tile, and its lanes successive ones of those.
  uint32_t index = warp * items * kWarpSize + lane;
  int count = static_cast<int>(min(tile.count, (warp + 1) * items * kWarpSize) - index);
  const auto has = [&](int k) { return k * kWarpSize < count; };
  uint32_t key[kItems], position[kItems];
  LoadKeys<kWarpSize>(p, tile, index, count, key);
  if (p.tiles > 1) {
    uint32_t all = 0, in_list[kDigitsOfThread];
    for_digits([&](uint32_t j, uint32_t d) {
      const DigitCounts counts = CountsOf(p, tile, d);
      start[d] = counts.before;
      all += in_list[j] = counts.all;
    });
    all = SumBefore(all, scratch);
    for_digits([&](uint32_t j, uint32_t d) {
      start[d] += all;
      all += in_list[j];
    });
  }

  int shift = p.shift;
  const auto digit_of = [&](uint32_t key) { return key >> shift & (digits - 1); };
  while (true) {
    // The ranks of rows among those of the same digit and warp.
    for (uint32_t i = lane; i < digits / 2; i += kWarpSize) reinterpret_cast<uint32_t*>(own)[i] = 0;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const uint32_t present = __ballot_sync(kFullWarp, has(k));
      if (present == 0) break;
      const uint32_t digit = digit_of(key[k]), before = own[digit];
      const uint32_t same = LanesOf(digit, p.bits) & present;
      const uint32_t rank = __popc(same & ((1u << lane) - 1));
      __syncwarp();
      if (has(k) && rank == 0) own[digit] = static_cast<uint16_t>(before + __popc(same));
      __syncwarp();
      position[k] = before + rank;
    }
    __syncthreads();

    // Then counts become the position of the first row of each digit and warp.
    uint32_t first = 0;
    for_digits([&](uint32_t, uint32_t d) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) first += ranks[w * digits + d];
    });
    first = SumBefore(first, scratch);
    for_digits([&](uint32_t, uint32_t d) {
      start[d] = p.tiles > 1 ? start[d] - first : 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const uint32_t count = ranks[w * digits + d];
        ranks[w * digits + d] = static_cast<uint16_t>(first);
        first += count;
      }
    });
    __syncthreads();

    // What follows from these is computed again, because it would take too many registers.
    asm volatile("" : "+r"(index), "+r"(count));
#pragma unroll
    for (uint32_t& each : key) asm volatile("" : "+r"(each));
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (!has(k)) continue;
      position[k] += own[digit_of(key[k])];
      keys[position[k]] = key[k];
    }
    uint32_t (&place)[kItems] = key;
    const auto load_places = [&](const auto& place_of) {
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        if (has(k)) place[k] = place_of(index + k * kWarpSize);
      }
    };
    const bool later = shift != p.shift;
    if (later) {
      load_places([&](uint32_t i) { return places[i]; });
    } else if (p.from.places == nullptr) {
      load_places([&](uint32_t i) { return tile.first + i; });
    } else {
      const char* const list = p.from.places + tile.list * p.from.place_step;
      const uint32_t* const from = reinterpret_cast<const uint32_t*>(list) + tile.first;
      load_places([&](uint32_t i) { return from[i]; });
    }
    if (later) __syncthreads();
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (has(k)) places[position[k]] = place[k];
    }
    __syncthreads();
    if (shift + p.bits >= p.end_shift) break;
    shift += p.bits;
#pragma unroll
    for (int k = 0; k < kItems; ++k) key[k] = has(k) ? keys[index + k * kWarpSize] : 0;
  }

  char* const to_keys = p.to.keys + tile.list * p.to.key_step;
  char* const to_places = p.to.places + tile.list * p.to.place_step;
#pragma unroll 4
  for (uint32_t i = thread; i < tile.count; i += kThreads) {
    const uint32_t moved = keys[i], at = start[digit_of(moved)] + i;
    if (p.to.key_bytes == 2) {
      reinterpret_cast<uint16_t*>(to_keys)[at] = static_cast<uint16_t>(moved);
    } else {
      reinterpret_cast<uint32_t*>(to_keys)[at] = moved;
    }
    reinterpret_cast<uint32_t*>(to_places)[at] = places[i];
  }
}

}  // namespace

cudaError_t SegmentSort(const SegmentSortCall& call, cudaStream_t stream) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max() - 64;
  const int64_t tiles = call.tile > 0 ? CeilDiv(call.rows, call.tile) : 0;
  if (call.rows == 0 || call.lists == 0) return cudaSuccess;
  if (call.rows > kMax || call.segments > kMax || call.bits < kMinBits || call.bits > kMaxBits ||
      call.tile % kThreads != 0 || call.tile < kThreads || call.tile > kThreads * kItems ||
      (call.key_bytes == 2 && call.segments > std::numeric_limits<uint16_t>::max())) {
    return cudaErrorInvalidValue;
  }
  int width = 1;  // bits of a key
  while (call.segments >> width != 0) ++width;
  const int bits = static_cast<int>(call.bits), passes = (width + bits - 1) / bits;
  const int64_t pairs = passes > 1 ? 2 * call.rows : 0;
  if (tiles > 1 && call.work_size < pairs + ((tiles + 1) << bits)) return cudaErrorInvalidValue;
  if (call.lists * tiles > kMax || (tiles > kUnscanned && call.lists << (bits - kMinBits) > kMax)) {
    return cudaErrorInvalidConfiguration;
  }

  const int64_t key_step = call.rows * call.key_bytes, id_step = call.rows * 4;
  const int64_t work_step = call.work_size * 4;
  char* const work = reinterpret_cast<char*>(call.work);
  const Pairs ids = {reinterpret_cast<char*>(const_cast<int32_t*>(call.ids)), 4, nullptr, id_step,
                     0};
  const Pairs results = {static_cast<char*>(call.keys), call.key_bytes,
                         reinterpret_cast<char*>(call.order), key_step, id_step};
  const Pairs between = {work, call.key_bytes, work + id_step, work_step, work_step};
  Params p = {};
  p.rows = static_cast<uint32_t>(call.rows);
  p.segments = static_cast<uint32_t>(call.segments);
  p.tile = static_cast<uint32_t>(call.tile);
  p.tiles = static_cast<uint32_t>(tiles);
  p.bits = bits;
  p.scanned = tiles > kUnscanned;
  p.to = ids;
  p.counts = call.work + pairs;
  p.counts_step = call.work_size;
  const auto launch = [&](auto* kernel, int64_t blocks, int threads, size_t shared) {
    return Launch(kernel,
                  {.grid = dim3(static_cast<unsigned>(blocks)),
                   .block = dim3(static_cast<unsigned>(threads)),
                   .shared = shared,
                   .dependent = true},
                  stream, p);
  };
  const int64_t blocks = call.lists * tiles;
  const size_t shared = sizeof(uint32_t) * ((size_t{2} * p.tile) + (size_t{1} << bits)) +
                        (sizeof(uint16_t) * kWarps << bits);
  auto* const count = KernelOf<SegmentSortFamily, CountKernel>();
  auto* const scan = KernelOf<SegmentSortFamily, ScanKernel>();
  auto* const scatter = KernelOf<SegmentSortFamily, ScatterKernel>();
  cudaError_t error = cudaSuccess;
  for (int pass = 0; pass < passes && error == cudaSuccess; ++pass) {
    const bool whole = tiles == 1;  // one launch for all passes
    p.from = p.to;
    p.to = whole || (passes - pass) % 2 == 1 ? results : between;
    p.shift = pass * bits;
    p.end_shift = (whole ? passes : pass + 1) * bits;
    if (!whole) error = launch(count, blocks, kThreads, 0);
    if (p.scanned && error == cudaSuccess) {
      error = launch(scan, call.lists << (bits - kMinBits), kScanThreads, 0);
    }
    if (error == cudaSuccess) error = launch(scatter, blocks, kThreads, shared);
    if (whole) break;
  }
  return error;
}

cudaError_t LoadSegmentSortKernels() { return LoadKernels<SegmentSortFamily>(); }

}  // namespace jax_fastops::cuda

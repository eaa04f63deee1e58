// How batch norm's CUDA kernels distribute an array over blocks and threads, and which kernels run.
// Plain C++: the device calls the constexpr functions too.
//
// The elements of a group are a flat array. A row of it has channels * inner elements. A *long row*
// is the smallest number of rows that makes whole units of 8 elements, or a multiple of that. A
// position in a long row belongs to the same channel in every long row. So a thread owns the unit
// at one position and strides from long row to long row, and it keeps the parameters and sums of
// its channels in registers. This holds whether neighboring elements have different channels (NHWC)
// or the same one (NCHW), and for any number of channels. The mask bits of a unit are one byte.
//
// A block covers one tile, which is `width` units of the long row, in `lanes` long rows at a time.
// The blocks of the same tile are its `parts`. Their long rows are interleaved, so that all blocks
// sweep through memory together. The last long row may be incomplete, and the last unit of the
// group may be partial ("cut").
//
// The cooperative kernels have a second way, for channels first with long runs of whole units: a
// tile is all of a channel, whose units the threads of its parts take in turn. All lanes are busy
// then, whatever the number of channels, and a block has the sums of one channel.
#ifndef JAX_FASTOPS_BATCH_NORM_PLAN_H_
#define JAX_FASTOPS_BATCH_NORM_PLAN_H_

#include <cstdint>

#include "batch_norm/shape.h"
#include "core/fast_divide.h"

namespace jax_fastops::cuda::batch_norm {

inline constexpr int kLogThreads = 8;
inline constexpr int kThreads = 1 << kLogThreads;
inline constexpr int kUnit = 8;            // elements
inline constexpr int kMinLogWidth = 5;     // a warp accesses neighboring units
inline constexpr int kManyRows = 1 << 20;  // more elements than a tile has, and far from overflow

// -------------------------------------------------------------------------------------------------
// Distribution

struct Geometry {
  int64_t channels = 1;
  int64_t inner = 1;
  int64_t length = 0;      // elements of a long row
  int64_t rest = 0;        // elements after the complete long rows
  int64_t tiles = 0;       // tiles that have elements
  int64_t group_size = 0;  // elements
  int32_t full_rows = 0;   // complete long rows; of whole channels: units of a channel
  int32_t repeats = 1;     // occurrences of a channel in a long row; 1 if there is only one tile
  int32_t log_width = 0;   // log2 of the units of a tile
  int32_t parts = 1;       // blocks of a tile
  int32_t cut_part = 0;    // the part and the lane that take the cut unit
  int32_t cut_lane = 0;
  int32_t slots = 1;      // most channels that a tile has; the block has a sum for each
  int32_t log_share = 0;  // log2 of the threads that sum one slot
  int32_t log_run = 0;    // log2 of those that share one run; the others take other runs
  int32_t run_units = 0;  // tiles are whole channels, with runs of so many units; 0: they are not
  FastDivisor by_run;     // by run_units
  bool small = false;     // positions fit into 31 bits

  constexpr int log_lanes() const { return kLogThreads - log_width; }
  constexpr int tile_size() const { return kUnit << log_width; }
  // The first element of a tile in the long row.
  constexpr int64_t tile_begin(int64_t tile) const {
    return run_units > 0 ? tile * inner : tile * tile_size();
  }
  // Entries that each of the two sums takes in a group's workspace.
  constexpr int64_t plane() const { return int64_t{parts} * tiles * slots; }
};

// n / d. A 64-bit division takes about a hundred instructions.
constexpr int64_t DividePosition(const Geometry& g, int64_t n, int64_t d) {
  return g.small ? static_cast<int64_t>(static_cast<uint32_t>(n) / static_cast<uint32_t>(d))
                 : n / d;
}

// The tile, part and group of a block.
struct Place {
  int64_t tile;
  int32_t part;
  int32_t group;
};
constexpr Place PlaceOf(const Geometry& g, uint32_t block) {
  const uint32_t tiles = static_cast<uint32_t>(g.tiles), parts = static_cast<uint32_t>(g.parts);
  const uint32_t rest = block / tiles;
  return {block - rest * tiles, static_cast<int32_t>(rest % parts),
          static_cast<int32_t>(rest / parts)};
}

// The work of a thread: `count` units, `stride` elements apart, the first at element `first` of the
// group. In tiles that are whole channels, the elements of other channels between two runs come in
// addition. If cut > 0, the thread also has the group's partial unit, which is the `cut` elements
// from group_size - cut.
struct Share {
  int64_t position;  // of the thread's units in the long row
  int64_t first;
  int64_t stride;
  int32_t count;
  int32_t cut;
};
constexpr Share ShareOf(const Geometry& g, const Place& place, int thread) {
  Share share = {};
  if (g.run_units > 0) {
    const int unit = place.part << kLogThreads | thread, step = g.parts << kLogThreads;
    share.position = g.tile_begin(place.tile);
    share.first = share.position + int64_t{unit} * kUnit;
    share.stride = int64_t{step} * kUnit;
    share.count = unit < g.full_rows ? (g.full_rows - 1 - unit) / step + 1 : 0;
    return share;
  }
  const int unit = thread & ((1 << g.log_width) - 1), lane = thread >> g.log_width;
  share.position = (place.tile << g.log_width | unit) * kUnit;
  const bool live = share.position < g.length;
  const int rows = live ? g.full_rows + (share.position + kUnit <= g.rest) : 0;
  const int row = place.part << g.log_lanes() | lane;
  const int step = g.parts << g.log_lanes();
  share.count = row < rows ? static_cast<int>(static_cast<uint32_t>(rows - 1 - row) / step) + 1 : 0;
  share.first = row * g.length + share.position;
  share.stride = step * g.length;
  const int tail = static_cast<int>(g.rest % kUnit);
  const bool cut =
      live && share.position == g.rest - tail && place.part == g.cut_part && lane == g.cut_lane;
  share.cut = cut ? tail : 0;
  return share;
}

// The channels of a tile. The tile consists of runs of elements of one channel: the first run has
// `head` elements, the others `inner`. Several runs of the same channel share a slot.
struct TileRuns {
  int64_t first;  // index of the first run in the long row
  int32_t head;
  int32_t inner;
  int32_t size;  // elements
  int32_t runs;
  int32_t slots;
  int32_t period;  // distance between runs that share a slot
};
constexpr TileRuns RunsOf(const Geometry& g, int64_t tile) {
  const auto least = [](int64_t a, int64_t b) { return static_cast<int32_t>(a < b ? a : b); };
  const int64_t begin = g.tile_begin(tile);
  TileRuns runs = {};
  runs.first = DividePosition(g, begin, g.inner);
  runs.head = least(g.inner - (begin - runs.first * g.inner), kManyRows);
  runs.inner = least(g.inner, kManyRows);
  runs.size = g.run_units > 0 ? 1 : least(g.length - begin, g.tile_size());
  runs.runs =
      runs.size <= runs.head ? 1 : 1 + (runs.size - runs.head + runs.inner - 1) / runs.inner;
  runs.period = least(g.channels, kManyRows);
  runs.slots = runs.runs < runs.period ? runs.runs : runs.period;
  return runs;
}

// The elements of a tile that belong to one of its runs.
struct Run {
  int32_t begin, end;
};
constexpr Run RunOf(const TileRuns& runs, int run) {
  const int begin = run == 0 ? 0 : runs.head + (run - 1) * runs.inner;
  const int end = run == 0 ? runs.head : begin + runs.inner;
  return {begin, end < runs.size ? end : runs.size};
}

// The tiles that contain elements of the channel's `repeat`-th run in the long row, except those
// before `done`, which earlier runs of the channel cover.
struct TileRange {
  int64_t begin, end;
};
constexpr TileRange TilesOf(const Geometry& g, int64_t channel, int repeat, int64_t done) {
  if (g.run_units > 0) return {channel, channel + 1};
  const int log_size = g.log_width + 3;
  const int64_t first = (channel + repeat * g.channels) * g.inner;
  const int64_t begin = first >> log_size, end = ((first + g.inner - 1) >> log_size) + 1;
  return {begin > done ? begin : done, end < g.tiles ? end : g.tiles};
}

// In a plane of the workspace, the index of the first part of the `nth` tile of a channel's
// `repeat`-th run, or -1 if there are fewer tiles. All tiles of a run, except the one in which it
// begins, begin inside the run, so it has slot 0 there.
constexpr int64_t IndexOf(const Geometry& g, int64_t channel, int repeat, uint32_t nth) {
  const int log_size = g.log_width + 3;
  const int64_t run = channel + repeat * g.channels, before = run - g.channels;
  const int64_t done = repeat == 0 ? 0 : ((before * g.inner + g.inner - 1) >> log_size) + 1;
  const TileRange range = TilesOf(g, channel, repeat, done);
  const int64_t tile = range.begin + nth;
  if (tile >= range.end) return -1;
  // The elements of the tile before the run. The slot is the number of runs that they belong to.
  const int64_t skipped = run * g.inner - g.tile_begin(tile);
  const uint32_t slot =
      skipped <= 0 ? 0
      : g.inner < skipped
          ? (static_cast<uint32_t>(skipped) - 1) / static_cast<uint32_t>(g.inner) + 1
          : 1;
  return tile * g.slots + slot;
}

// What a kernel requires of its geometry.
struct BlockWish {
  int64_t resident;   // blocks that the device runs at once
  int start;          // cost of starting and ending a block, in turns (see TurnsOf)
  int64_t max_plane;  // limit of Geometry::plane(), set by the workspace
};

// The number of turns that the parts of a tile divide among themselves. In one turn a block
// processes one long row per lane; of a whole channel, a unit per thread.
int64_t TurnsOf(const Geometry& g);

// For the kernels that run separately. Returns false if the number of blocks or rows overflows.
bool MakeGeometry(const BatchNormShape& shape, const BlockWish& wish, Geometry* geometry);

inline bool IsEmpty(const BatchNormShape& shape) { return shape.groups * shape.group_size() == 0; }

inline unsigned BlocksOf(const BatchNormShape& shape, const Geometry& g) {
  return static_cast<unsigned>(g.tiles * g.parts * shape.groups);
}

// -------------------------------------------------------------------------------------------------
// Finish: from the partial sums of the blocks to two values for each channel

inline constexpr int kMaxLogFinishThreads = 10;
inline constexpr int kMaxFinishThreads = 1 << kMaxLogFinishThreads;

// A block handles 1 << log_width channels, and 1 << log_share threads share the parts of each
// channel. The entries of a channel enumerate its parts as if each of its runs touched `tiles`
// tiles; entries without a part are skipped.
struct Finish {
  Geometry geometry;
  const void* workspace = nullptr;
  int64_t workspace_size = 0;  // of a group, in accumulators
  const void* x = nullptr;
  void* out[2] = {};
  int64_t out_stride = 0;  // distance between groups
  double n = 0;            // elements of a channel
  int32_t log_width = 0;
  int32_t log_share = 0;
  uint32_t group_blocks = 0;
  uint32_t tiles = 0;
  uint32_t entries = 0;

  int threads() const { return 1 << (log_width + log_share); }
};

// Sets everything except the pointers and strides. Returns false if the number of blocks overflows.
bool MakeFinish(const BatchNormShape& shape, const Geometry& g, Finish* finish, unsigned* blocks);

// -------------------------------------------------------------------------------------------------
// The cooperative kernels, which keep arrays on the chip between two passes (resident.cuh)

inline constexpr int kResidentBlocks = 2;  // per SM
inline constexpr int kResidentWords = 8;   // 16-byte words that a thread keeps in registers
inline constexpr int kRingAhead = 3;       // steps of copies in flight
inline constexpr int kRingStep = 4;        // 16-byte words that a thread copies in a step
// A block reads all sums of its tile's channels by itself if there are at most so many.
inline constexpr int kMaxOwnEntries = 2048;

// Shared memory in which a block reduces its sums, which are of `size` bytes: two for each of
// a thread's elements with padding, and two for each warp.
inline constexpr int kFoldRow = kThreads + kThreads / 8 + 4;
constexpr int FoldBytes(int size) { return (2 * kUnit * kFoldRow + 2 * kThreads / 32) * size; }

struct ResidentDevice {
  int processors = 1;            // SMs
  int shared_per_block = 0;      // bytes
  int shared_per_processor = 0;  // bytes
  bool cooperative = false;
};

struct ResidentPlan {
  Finish finish;
  uint32_t finish_blocks = 0;
  bool plain = false;  // FoldPlain applies
  bool own = false;    // each block finishes the channels of its tile; otherwise the first blocks
                       // finish all channels, and the others wait for them
  int32_t slots = 0;   // of a thread's ring
  unsigned blocks = 0;
  int shared_bytes = 0;
  double kept = 0;    // fraction of the arrays that stays on the chip
  double spread = 0;  // fraction of the possible block time in which blocks have work
  double idle = 0;    // turns that an average block waits for the one with the most work
};

// Whether the cooperative kernel of the forward or the gradient is faster than the separate kernels
// for arrays whose elements have `size` bytes (2 or 4). If so, sets `plan`. A group's workspace has
// `workspace_size` accumulators.
bool PlanForward(const BatchNormShape& shape, int size, bool residual, const ResidentDevice& device,
                 int64_t workspace_size, ResidentPlan* plan);
bool PlanGradient(const BatchNormShape& shape, int size, bool mask, const ResidentDevice& device,
                  int64_t workspace_size, ResidentPlan* plan);

}  // namespace jax_fastops::cuda::batch_norm

#endif  // JAX_FASTOPS_BATCH_NORM_PLAN_H_

// How batch norm distributes an array over blocks and threads. The scheme is the same for every
// layout, and is computed on the host and on the device.
//
// The elements of a group are treated as a flat array. A row of it has channels * inner elements. A
// *long row* is the smallest number of rows that makes whole units of 8 elements, or a multiple of
// that. A position in a long row belongs to the same channel in every long row. So a thread owns
// the unit at one position and strides from long row to long row, and it keeps the parameters and
// sums of its channels in registers. This holds whether neighboring elements have different
// channels (NHWC) or the same one (NCHW), and for any number of channels. The mask bits of a unit
// are one byte.
//
// A block covers one tile, which is `width` units of the long row, in `lanes` long rows at a time.
// The blocks of the same tile are its `parts`. Their long rows are interleaved, so that all blocks
// sweep through memory together. The last long row may be incomplete, and the last unit of the
// group may be partial ("cut").
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>

#include "batch_norm/shape.h"
#include "core/integer.h"

namespace jax_fastops::cuda::batch_norm {

inline constexpr int kThreads = 256;
inline constexpr int kUnit = 8;            // elements
inline constexpr int kMinLogWidth = 5;     // a warp accesses neighboring units
inline constexpr int kMaxLogWidth = 8;     // kThreads
inline constexpr int kManyRows = 1 << 20;  // more elements than a tile has, and far from overflow

struct Geometry {
  int64_t channels;
  int64_t inner;
  int64_t length;      // elements of a long row
  int64_t rest;        // elements after the complete long rows
  int64_t tiles;       // tiles that have elements
  int64_t group_size;  // elements
  int32_t full_rows;   // complete long rows
  int32_t repeats;     // occurrences of a channel in a long row; 1 if there is only one tile
  int32_t log_width;   // log2 of the units of a tile
  int32_t parts;       // blocks of a tile
  int32_t cut_part;    // the part and the lane that take the cut unit
  int32_t cut_lane;
  int32_t slots;      // most channels that a tile has; the block has a sum for each
  int32_t log_share;  // log2 of the threads that sum one slot
  int32_t log_run;    // log2 of those that share one run; the others take other runs
  bool small;         // positions fit into 31 bits

  __host__ __device__ int log_lanes() const { return kMaxLogWidth - log_width; }
  __host__ __device__ int tile_size() const { return kUnit << log_width; }
  // Entries that each of the two sums takes in a group's workspace.
  __host__ __device__ int64_t plane() const { return int64_t{parts} * tiles * slots; }
};

// n / d. A 64-bit division takes about a hundred instructions.
__host__ __device__ inline int64_t DividePosition(const Geometry& g, int64_t n, int64_t d) {
  return g.small ? static_cast<int64_t>(static_cast<uint32_t>(n) / static_cast<uint32_t>(d))
                 : n / d;
}

// The tile, part and group of a block.
struct Place {
  int64_t tile;
  int32_t part;
  int32_t group;
};
__host__ __device__ inline Place PlaceOf(const Geometry& g, uint32_t block) {
  const uint32_t tiles = static_cast<uint32_t>(g.tiles), parts = static_cast<uint32_t>(g.parts);
  const uint32_t rest = block / tiles;
  return {block - rest * tiles, static_cast<int32_t>(rest % parts),
          static_cast<int32_t>(rest / parts)};
}

// The work of a thread: `count` units, `stride` elements apart, the first at element `first` of the
// group. If cut > 0, the thread also has the group's partial unit, which is the `cut` elements from
// group_size - cut.
struct Share {
  int64_t position;  // of the thread's units in the long row
  int64_t first;
  int64_t stride;
  int32_t count;
  int32_t cut;
};
__host__ __device__ inline Share ShareOf(const Geometry& g, const Place& place, int thread) {
  const int unit = thread & ((1 << g.log_width) - 1), lane = thread >> g.log_width;
  Share share;
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
__host__ __device__ inline TileRuns RunsOf(const Geometry& g, int64_t tile) {
  const auto least = [](int64_t a, int64_t b) { return static_cast<int32_t>(a < b ? a : b); };
  const int64_t begin = tile * g.tile_size();
  TileRuns runs;
  runs.first = DividePosition(g, begin, g.inner);
  runs.head = least(g.inner - (begin - runs.first * g.inner), kManyRows);
  runs.inner = least(g.inner, kManyRows);
  runs.size = least(g.length - begin, g.tile_size());
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
__host__ __device__ inline Run RunOf(const TileRuns& runs, int run) {
  const int begin = run == 0 ? 0 : runs.head + (run - 1) * runs.inner;
  const int end = run == 0 ? runs.head : begin + runs.inner;
  return {begin, end < runs.size ? end : runs.size};
}

// The tiles that contain elements of the channel's `repeat`-th run in the long row, except those
// before `done`, which earlier runs of the channel cover.
struct TileRange {
  int64_t begin, end;
};
__host__ __device__ inline TileRange TilesOf(const Geometry& g, int64_t channel, int repeat,
                                             int64_t done) {
  const int log_size = g.log_width + 3;
  const int64_t first = (channel + repeat * g.channels) * g.inner;
  const int64_t begin = first >> log_size, end = ((first + g.inner - 1) >> log_size) + 1;
  return {begin > done ? begin : done, end < g.tiles ? end : g.tiles};
}

// What a kernel requires of its geometry.
struct BlockWish {
  int64_t resident;   // blocks that the device runs at once
  int start;          // cost of starting and ending a block, in turns (see TurnsOf)
  int64_t max_plane;  // limit of Geometry::plane(), set by the workspace
};

// Computes everything except the parts, for tiles of 1 << log_width units. Returns false if the
// number of rows overflows.
inline bool MakeTiles(const BatchNormShape& shape, int log_width, Geometry* geometry) {
  Geometry& g = *geometry;
  g = {};
  g.channels = shape.channels;
  g.inner = shape.inner;
  g.group_size = shape.group_size();
  g.log_width = log_width;

  const int64_t row = shape.channels * shape.inner;
  const int64_t least_units = row / std::gcd(row, int64_t{kUnit});  // of the shortest long row
  const int64_t width = int64_t{1} << log_width;
  const int64_t units = std::max<int64_t>(1, width / least_units) * least_units;
  g.length = units * kUnit;
  g.tiles = CeilDiv(std::min(units, CeilDiv(g.group_size, kUnit)), width);
  const int64_t rows = g.group_size / g.length;
  if (rows > std::numeric_limits<int32_t>::max() - 2 * kThreads) return false;
  g.full_rows = static_cast<int32_t>(rows);
  g.rest = g.group_size - rows * g.length;
  g.repeats = g.tiles == 1 ? 1 : static_cast<int32_t>(g.length / row);
  g.small = g.length < int64_t{1} << 31;

  const int64_t size = g.tile_size();
  const int64_t runs = shape.inner == 1 ? size : (size - 2) / shape.inner + 2;
  g.slots = static_cast<int32_t>(std::min(shape.channels, runs));
  while (g.slots << (g.log_share + 1) <= kThreads) ++g.log_share;
  const int64_t run = std::min<int64_t>(shape.inner, size) << g.log_lanes();
  while (g.log_run < g.log_share && int64_t{1} << g.log_run < run) ++g.log_run;
  return true;
}

// The number of turns that the parts of a tile divide among themselves. In one turn a block
// processes one long row per lane.
inline int64_t TurnsOf(const Geometry& g) {
  return CeilDiv(g.full_rows + int64_t{g.rest > 0}, int64_t{1} << g.log_lanes());
}

inline void SetParts(int64_t parts, Geometry* g) {
  g->parts = static_cast<int32_t>(parts);
  g->cut_lane = g->full_rows & ((1 << g->log_lanes()) - 1);
  g->cut_part = (g->full_rows >> g->log_lanes()) % g->parts;
}

// Returns false if the number of blocks or rows overflows.
inline bool MakeGeometry(const BatchNormShape& shape, const BlockWish& wish, Geometry* geometry) {
  // Choose the narrowest tile that leaves few threads idle. Then a block covers more long rows and
  // fewer channels. With long runs of a channel, the width only changes the cost at the two ends of
  // a tile, so only the widest tile is tried.
  Geometry& g = *geometry;
  double best = 0;
  for (int log_width = shape.inner >= 1024 ? kMaxLogWidth : kMinLogWidth; log_width <= kMaxLogWidth;
       ++log_width) {
    Geometry tiled;
    if (!MakeTiles(shape, log_width, &tiled)) continue;
    const int64_t units = std::min(tiled.length, shape.group_size() + kUnit - 1) / kUnit;
    const int64_t rows = tiled.full_rows + int64_t{tiled.rest > 0};
    const double efficiency = static_cast<double>(units) / (tiled.tiles << log_width) *
                              static_cast<double>(rows) / (TurnsOf(tiled) << tiled.log_lanes());
    // If a channel occurs several times in a long row, prefer a tile that covers the whole long
    // row, because the channel's parts are then easy to locate.
    const bool simpler = shape.channels * shape.inner % kUnit != 0 && best >= 0.93 &&
                         efficiency >= 0.93 && tiled.tiles == 1 && g.tiles > 1;
    if (!simpler && (best >= 0.93 || efficiency <= best * 1.001)) continue;
    best = efficiency;
    g = tiled;
  }
  if (best == 0) return false;

  // Choose the number of parts with the shortest estimated time, assuming that a turn takes the
  // same time in every block.
  const int64_t turns = TurnsOf(g), blocks = g.tiles * shape.groups;
  if (blocks > std::numeric_limits<int32_t>::max()) return false;
  const int64_t most =
      std::max<int64_t>(1, std::min({turns, wish.max_plane / (g.tiles * g.slots),
                                     std::numeric_limits<int32_t>::max() / blocks}));
  int64_t best_parts = 1, least_time = std::numeric_limits<int64_t>::max();
  for (int waves = 1; waves <= 8; ++waves) {
    const int64_t wanted = std::min(std::max<int64_t>(1, waves * wish.resident / blocks), most);
    const int64_t longest = CeilDiv(turns, wanted);
    const int64_t parts = CeilDiv(turns, longest);
    const int64_t time = CeilDiv(parts * blocks, wish.resident) * (longest + wish.start);
    if (time >= least_time) continue;
    least_time = time;
    best_parts = parts;
  }
  SetParts(best_parts, &g);
  return true;
}

}  // namespace jax_fastops::cuda::batch_norm

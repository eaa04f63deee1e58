#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>

#include "batch_norm/plan.h"
#include "core/integer.h"

namespace jax_fastops::cuda::batch_norm {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

// What does not depend on the tiles.
Geometry GeometryOf(const BatchNormShape& shape) {
  Geometry g;
  g.channels = shape.channels;
  g.inner = shape.inner;
  g.group_size = shape.group_size();
  return g;
}

// Computes everything except the parts, for tiles of 1 << log_width units. Returns false if the
// number of rows overflows.
bool MakeTiles(const BatchNormShape& shape, int log_width, Geometry* geometry) {
  Geometry& g = *geometry;
  g = GeometryOf(shape);
  g.log_width = log_width;

  const int64_t row = shape.channels * shape.inner;
  const int64_t least_units = row / std::gcd(row, int64_t{kUnit});  // of the shortest long row
  const int64_t width = int64_t{1} << log_width;
  const int64_t units = std::max<int64_t>(1, width / least_units) * least_units;
  g.length = units * kUnit;
  g.tiles = CeilDiv(std::min(units, CeilDiv(g.group_size, kUnit)), width);
  const int64_t rows = g.group_size / g.length;
  if (rows > kMaxInt - 2 * kThreads) return false;
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

// The same for tiles that are whole channels. Returns false if the shape does not suit them.
bool MakeChannelTiles(const BatchNormShape& shape, Geometry* geometry) {
  // In shorter runs, the 32 units that a warp accesses are in more than two places.
  constexpr int64_t kMinRun = kUnit << kMinLogWidth;
  const int64_t units = shape.outer * (shape.inner / kUnit);  // of a channel
  if (shape.inner % kUnit != 0 || shape.inner < kMinRun || units > kMaxInt / 2) return false;
  Geometry& g = *geometry;
  g = GeometryOf(shape);
  g.log_width = kLogThreads;
  g.length = shape.channels * shape.inner;
  g.tiles = shape.channels;
  g.full_rows = static_cast<int32_t>(units);
  g.small = g.length < int64_t{1} << 31;
  g.log_share = kLogThreads;
  g.run_units = static_cast<int32_t>(shape.inner / kUnit);
  g.by_run = FastDivisor(static_cast<uint32_t>(g.run_units));
  return true;
}

void SetParts(int64_t parts, Geometry* g) {
  g->parts = static_cast<int32_t>(parts);
  g->cut_lane = g->full_rows & ((1 << g->log_lanes()) - 1);
  g->cut_part = (g->full_rows >> g->log_lanes()) % g->parts;
}

}  // namespace

int64_t TurnsOf(const Geometry& g) {
  if (g.run_units > 0) return CeilDiv(g.full_rows, kThreads);
  return CeilDiv(g.full_rows + int64_t{g.rest > 0}, int64_t{1} << g.log_lanes());
}

bool MakeGeometry(const BatchNormShape& shape, const BlockWish& wish, Geometry* geometry) {
  // Choose the narrowest tile that leaves few threads idle. Then a block covers more long rows and
  // fewer channels. With long runs of a channel, the width only changes the cost at the two ends of
  // a tile, so only the widest tile is tried.
  Geometry& g = *geometry;
  double best = 0;
  for (int log_width = shape.inner >= 1024 ? kLogThreads : kMinLogWidth; log_width <= kLogThreads;
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
  if (blocks > kMaxInt) return false;
  const int64_t most = std::max<int64_t>(
      1, std::min({turns, wish.max_plane / (g.tiles * g.slots), kMaxInt / blocks}));
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

bool MakeFinish(const BatchNormShape& shape, const Geometry& g, Finish* finish, unsigned* blocks) {
  finish->geometry = g;
  finish->n = static_cast<double>(shape.outer) * static_cast<double>(shape.inner);
  const bool single = g.inner == 1 || g.run_units > 0;
  const int64_t tiles = single ? 1 : std::min(g.tiles, g.inner / g.tile_size() + 2);
  const int64_t entries = g.repeats * tiles * g.parts;
  finish->tiles = static_cast<uint32_t>(tiles);
  finish->entries = static_cast<uint32_t>(entries);  // not many more than there are blocks
  // Each thread has about two entries, if the block can have that many threads. A block handles 8
  // channels, whose floats are one memory sector, but only one channel if there are very many
  // entries. It has at least two warps.
  int log_width = entries > 4096 ? 0 : 3;
  while (log_width > 0 && shape.channels <= int64_t{1} << (log_width - 1)) --log_width;
  int log_share = 0;
  while (log_share < kMaxLogFinishThreads - log_width && int64_t{2} << log_share < entries) {
    ++log_share;
  }
  log_width = std::max(log_width, 6 - log_share);
  finish->log_width = log_width;
  finish->log_share = log_share;
  const int64_t group_blocks = CeilDiv(shape.channels, int64_t{1} << log_width);
  finish->group_blocks = static_cast<uint32_t>(group_blocks);
  if (group_blocks * shape.groups > kMaxInt) return false;
  *blocks = static_cast<unsigned>(group_blocks * shape.groups);
  return true;
}

namespace {

// Finds a geometry for a single wave of at most `blocks` blocks and at most `max_plane` pairs of
// workspace: the one with the fewest turns per block. Among such, tiles of whole channels come
// first, and then narrow tiles. Returns false if there is none.
bool MakeResidentGeometry(const BatchNormShape& shape, int64_t blocks, int64_t max_plane,
                          Geometry* geometry) {
  double best = 0;
  for (int log_width = kMinLogWidth - 1; log_width <= kLogThreads; ++log_width) {
    Geometry g;
    const bool made =
        log_width < kMinLogWidth ? MakeChannelTiles(shape, &g) : MakeTiles(shape, log_width, &g);
    if (!made) continue;
    const int64_t turns = TurnsOf(g);
    const int64_t most = std::min({turns, max_plane / (g.tiles * g.slots),
                                   blocks / std::max<int64_t>(1, g.tiles * shape.groups)});
    if (most < 1) continue;
    const int64_t longest = CeilDiv(turns, most);
    // Channels that occur several times in a long row are slower to finish.
    const double speed = 1.0 / static_cast<double>(longest) / (g.repeats > 1 ? 1.1 : 1.0);
    if (speed <= best * 1.03) continue;
    best = speed;
    SetParts(CeilDiv(turns, longest), &g);
    *geometry = g;
  }
  return best > 0;
}

// What the plans of the two cooperative kernels differ in.
struct ResidentKind {
  int sum_size;     // bytes of a partial sum
  int unit_words;   // 16-byte words of a unit, in all arrays that stay on the chip
  bool mask_words;  // a slot of the ring has a word of the mask for each thread
};

// Returns false if there is no plan.
bool MakeResidentPlan(const BatchNormShape& shape, const ResidentDevice& device,
                      int64_t workspace_size, const ResidentKind& kind, ResidentPlan* plan) {
  if (!device.cooperative || IsEmpty(shape)) return false;
  const int64_t blocks = int64_t{device.processors} * kResidentBlocks;
  // One pair of sums must stay free for the counter.
  const int64_t pairs = workspace_size / (2 * kind.sum_size / static_cast<int>(sizeof(float)));
  Geometry g;
  unsigned ignored;
  Finish& f = plan->finish;
  if (!MakeResidentGeometry(shape, blocks, pairs - 1, &g) || !MakeFinish(shape, g, &f, &ignored)) {
    return false;
  }
  f.workspace_size = workspace_size;
  plan->blocks = BlocksOf(shape, g);
  plan->own = int64_t{g.slots} * f.entries <= kMaxOwnEntries;

  // Finish as few channels per block as the number of blocks allows, but at least 4 if there are
  // that many, because neighboring channels share a memory sector.
  constexpr int kLogChannels = 2;
  const auto group_blocks = [&](int log_width) {
    return CeilDiv(shape.channels, int64_t{1} << log_width);
  };
  f.log_width = 0;
  while (f.log_width < kLogChannels && shape.channels >> (f.log_width + 1) > 0) ++f.log_width;
  while (f.log_width <= kMinLogWidth && group_blocks(f.log_width) * shape.groups > plan->blocks) {
    ++f.log_width;
  }
  if (f.log_width > kMinLogWidth && !plan->own) return false;
  f.log_share = kLogThreads - f.log_width;
  f.group_blocks = static_cast<uint32_t>(group_blocks(f.log_width));
  plan->finish_blocks = static_cast<uint32_t>(f.group_blocks * shape.groups);

  constexpr int kReserved = 1024;  // bytes that CUDA takes of an SM's shared memory for each block
  const int shared =
      std::min(device.shared_per_block, device.shared_per_processor / kResidentBlocks - kReserved);
  const int fold = static_cast<int>(RoundUp(FoldBytes(kind.sum_size), 16));
  const int slot = kThreads * (16 * kind.unit_words + (kind.mask_words ? 4 : 0));
  const int64_t in_registers = kResidentWords / kind.unit_words;
  const int64_t least = kRingAhead * kRingStep / kind.unit_words;
  const int64_t turns = TurnsOf(g), longest = CeilDiv(turns, g.parts);
  const int64_t most = (shared / 128 * 128 - fold) / slot;
  if (most < least) return false;
  plan->slots = static_cast<int32_t>(std::max(least, std::min(most, longest - in_registers)));
  plan->shared_bytes = fold + plan->slots * slot;
  plan->kept = std::min(1.0, static_cast<double>(plan->slots + in_registers) / longest);
  const double average = static_cast<double>(turns * g.tiles * shape.groups) / blocks;
  plan->spread = average / longest;
  plan->idle = longest - average;
  plan->plain = g.run_units == 0 && g.inner == 1 && g.log_width == kMinLogWidth &&
                g.length % kThreads == 0 && kThreads % g.slots == 0;
  return true;
}

// In smaller arrays, the barriers dominate the time of a cooperative kernel. A kernel whose blocks
// finish their own channels has only one.
bool LargeEnough(const ResidentPlan& plan, int64_t bytes) {
  return bytes >= (plan.own ? 512 << 10 : 4 << 20);
}

// Whether the blocks wait for the one with the most work for less time than a barrier takes.
// `unit` is the bytes of a unit in all arrays that stay on the chip.
bool ShortWait(const ResidentPlan& plan, int unit) { return plan.own && plan.idle * unit <= 64; }

}  // namespace

// The limits of both plans were measured on an H100.

bool PlanForward(const BatchNormShape& shape, int size, bool residual, const ResidentDevice& device,
                 int64_t workspace_size, ResidentPlan* plan) {
  if (size > 4) return false;
  const int unit = kUnit * size;
  const ResidentKind kind = {.sum_size = 8, .unit_words = unit / 16, .mask_words = false};
  if (!MakeResidentPlan(shape, device, workspace_size, kind, plan)) return false;
  // With a low `spread`, many blocks are idle. The busy blocks then have too few loads of the
  // residual in flight, so a residual requires a higher spread.
  return LargeEnough(*plan, shape.groups * shape.group_size() * size) && plan->kept >= 0.1 &&
         (plan->spread >= (residual ? 0.85 : 0.7) || ShortWait(*plan, unit));
}

bool PlanGradient(const BatchNormShape& shape, int size, bool mask, const ResidentDevice& device,
                  int64_t workspace_size, ResidentPlan* plan) {
  if (size > 4) return false;
  const int unit = 2 * kUnit * size;  // of x and dy
  const ResidentKind kind = {.sum_size = 4, .unit_words = unit / 16, .mask_words = mask};
  if (!MakeResidentPlan(shape, device, workspace_size, kind, plan)) return false;
  // Types of 16 bits do the same arithmetic for half the bytes. They lose more time to the loads of
  // mask words and to the block with the most work, so their limits are higher.
  const bool narrow = size < 4;
  return LargeEnough(*plan, 2 * shape.groups * shape.group_size() * size) &&
         plan->kept >= (narrow && mask ? 0.13 : 0.05) &&
         (plan->spread >= (narrow ? 0.86 : 0.78) || ShortWait(*plan, unit));
}

}  // namespace jax_fastops::cuda::batch_norm

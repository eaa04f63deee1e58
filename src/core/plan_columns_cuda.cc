#include "core/plan_columns.h"

#include <algorithm>

#include "core/integer.h"

namespace jax_fastops {
namespace {

constexpr int kLogWarp = 5;
constexpr int kThirdOfShared = 72 << 10;  // of an SM of an H100
constexpr int64_t kMaxBlocks = 0x7fffffff;

// Words of `size` elements, each of which has a sum of `sum` bytes.
struct WordsOfColumns {
  int bytes, size, sum;
  int64_t row_words;
};

WordsOfColumns WordsOf(const ColumnsShape& shape, int bytes) {
  const int size = bytes / shape.itemsize;
  return {bytes, size, size * std::max(shape.itemsize, 4), shape.inner / size};
}

bool HasWords(const ColumnsShape& shape, int bytes) {
  const int size = bytes / shape.itemsize;
  return shape.inner % size == 0 && shape.addresses % bytes == 0 && shape.mask_bits % size == 0;
}

ColumnsPlan Begin(const ColumnsShape& shape, const WordsOfColumns& words, bool registers) {
  ColumnsPlan plan = {};
  plan.registers = registers;
  plan.bytes = words.bytes;
  plan.launch.row_words = FastDivisor64(static_cast<uint64_t>(words.row_words));
  plan.launch.columns = shape.outer * words.row_words;
  plan.launch.chunk = shape.n;
  return plan;
}

// Bytes for the sums of the warps, or lanes, of a block.
int64_t ScratchBytes(const WordsOfColumns& words, int log_threads, int log_width) {
  const int log_parts = log_threads - std::min(log_threads, std::max(log_width, kLogWarp));
  return log_parts == 0 ? 0 : int64_t{words.sum} << (log_width + log_parts);
}

ColumnsPlan PlanLong(const ColumnsShape& shape, const WordsOfColumns& words,
                     const HeldLimits& limits) {
  ColumnsPlan plan = Begin(shape, words, false);
  ColumnsLaunch& launch = plan.launch;
  plan.threads = ColumnThreads(false, words.bytes, shape.inputs);
  const int log_threads = CeilLog2(plan.threads);
  launch.log_threads = log_threads;
  const auto words_of = [&](int log_width) { return CeilDiv(shape.n, plan.threads >> log_width); };
  const auto held_bytes = [&](int log_width) {
    return RoundUp(words_of(log_width) * plan.threads * words.bytes * shape.inputs, 16);
  };
  const auto scratch_bytes = [&](int log_width) {
    return launch.adjacent ? 0 : ScratchBytes(words, log_threads, log_width);
  };
  const auto tiles = [&](int log_width) {
    return CeilDiv(launch.columns, int64_t{1} << log_width);
  };
  const auto fits = [&](int log_width, int64_t bytes) {
    return held_bytes(log_width) + scratch_bytes(log_width) <= bytes;
  };
  // A tile is no wider than a row of inner elements, unless it would have more lanes than n has
  // elements. It is at least 64 bytes wide, unless the row is narrower: 32 bytes (a sector) are
  // slower.
  const int narrow = std::max(0, log_threads - CeilLog2(shape.n));
  const int widest = std::min(log_threads, std::max(narrow, CeilLog2(words.row_words)));
  const int sector = std::min(widest, std::max(narrow, CeilLog2(64 / words.bytes)));
  int width = widest;
  const int log_lanes = std::min(kLogWarp, CeilLog2(CeilDiv(shape.n, 4)));
  if (shape.inner == 1 && fits(log_threads - log_lanes, kThirdOfShared)) {
    // Adjacent columns are adjacent rows, so adjacent lanes access adjacent elements.
    launch.adjacent = true;
    width = log_threads - log_lanes;
  }
  while (!launch.adjacent && width > sector &&
         (!fits(width, kThirdOfShared) || tiles(width) < 2 * limits.processors)) {
    --width;
  }
  launch.held = fits(width, limits.shared_bytes);
  if (!launch.held) width = std::min(widest, std::max(narrow, CeilLog2(128 / words.bytes)));
  launch.log_width = width;
  launch.words = launch.held ? static_cast<int>(words_of(width)) : 0;
  const int64_t held = launch.held ? held_bytes(width) : 0;
  launch.scratch = static_cast<int>(held / 16);
  plan.shared_bytes = held + scratch_bytes(width);
  plan.blocks = tiles(width);

  constexpr int64_t kMinChunk = 4096, kMaxChunks = 1024;
  const int64_t chunks = std::min(kMaxChunks, CeilDiv(4 * limits.processors, tiles(width)));
  if (!launch.held && shape.long_workspace && chunks > 1) {
    launch.chunk = std::max(kMinChunk, CeilDiv(shape.n, chunks));
    launch.chunks = CeilDiv(shape.n, launch.chunk);
    if (launch.chunks > 1) launch.stage = RowStage::kReduce;
  }
  return plan;
}

// Returns false if registers cannot hold a column.
bool PlanRegisters(const ColumnsShape& shape, const WordsOfColumns& words, const HeldLimits& limits,
                   ColumnsPlan* result) {
  ColumnsPlan plan = Begin(shape, words, true);
  ColumnsLaunch& launch = plan.launch;
  // The least width of a tile, for tiles of a warp and for tiles of blocks, unless a row is
  // narrower: 128 bytes. For words of one element, the ends of a tile share sectors with other
  // tiles. Tiles of blocks are then 256 bytes wide, or 32 elements for 16-bit types.
  const int bytes = words.bytes;
  const auto width_of = [&](int max_words) {
    return CeilLog2(std::min<int64_t>(words.row_words, max_words));
  };
  const int warp_width = width_of(std::min(32, 128 / bytes));
  const int block_width = width_of(words.size > 1 ? 128 / bytes : bytes > 2 ? 256 / bytes : 32);
  constexpr int kLogThreads = 8;
  int log_lanes = CeilLog2(CeilDiv(shape.n, HeldColumnWords(bytes)));
  // Small arrays use more lanes per column than are needed to hold it, within a warp, so that all
  // SMs have work.
  const auto few = [&] { return launch.columns << log_lanes < int64_t{512} * limits.processors; };
  const auto in_warp = [&](int more) {
    const int width = few() ? std::min(warp_width, 2) : warp_width;
    return log_lanes == 0 || log_lanes + more + width <= kLogWarp;
  };
  while (few() && in_warp(1) && (int64_t{1} << log_lanes) < shape.n) ++log_lanes;
  int log_threads = kLogThreads;  // of a block
  if (in_warp(0)) {
    launch.log_threads = kLogWarp;
    const int64_t threads = launch.columns << log_lanes;
    while (log_threads > 6 && threads >> log_threads < 4 * limits.processors) --log_threads;
  } else {
    const int log_tile = std::max(kLogThreads, log_lanes + block_width);
    log_threads = std::min(log_tile, CeilLog2(ColumnThreads(true, bytes, shape.inputs)));
    launch.log_threads = log_threads;
    launch.log_blocks = log_tile - log_threads;
    const int cluster =
        ColumnsInClusters(bytes, shape.inputs) ? std::min(8, limits.max_cluster) : 1;
    if (launch.log_blocks > 3 || 1 << launch.log_blocks > cluster) return false;
    // Tiles would share sectors.
    if (launch.log_blocks > 0 && shape.inner * shape.itemsize % 64 != 0) return false;
  }
  launch.words = static_cast<int>(CeilDiv(shape.n, int64_t{1} << log_lanes));
  launch.log_width = launch.log_threads + launch.log_blocks - log_lanes;
  plan.threads = 1 << log_threads;
  plan.cluster = 1 << launch.log_blocks;
  const int log_columns = log_threads + launch.log_blocks - log_lanes;  // of a block or cluster
  plan.blocks = CeilDiv(launch.columns, int64_t{1} << log_columns) << launch.log_blocks;
  const auto take = [&](int64_t more) {
    const int64_t at = plan.shared_bytes / 16;
    plan.shared_bytes += RoundUp(more, 16);
    return static_cast<int>(at);
  };
  const bool second = SecondInShared(HeldColumnWords(bytes), bytes, shape.inputs);
  take(second ? int64_t{plan.threads} * launch.words * bytes : 0);
  launch.scratch = take(ScratchBytes(words, launch.log_threads, launch.log_width));
  launch.exchange = take(launch.log_blocks > 0 ? int64_t{words.sum} << launch.log_width : 0);
  if (plan.blocks > kMaxBlocks || plan.shared_bytes > limits.shared_bytes) return false;
  *result = plan;
  return true;
}

}  // namespace

ColumnsPlan PlanColumns(const ColumnsShape& shape, const HeldLimits& limits) {
  const WordsOfColumns single = WordsOf(shape, shape.itemsize);
  const int wide = ColumnBytes(shape.itemsize);
  const bool has_wide = shape.itemsize < 8 && shape.inner > 1 && HasWords(shape, wide);
  ColumnsPlan plan;
  if (shape.itemsize < 8 && shape.inner > 1) {
    if (HasWords(shape, 16) && PlanRegisters(shape, WordsOf(shape, 16), limits, &plan)) return plan;
    // Columns of more than a few elements are faster in wider words than in registers.
    if (!(has_wide && shape.n > 32) && PlanRegisters(shape, single, limits, &plan)) return plan;
  }
  return PlanLong(shape, has_wide ? WordsOf(shape, wide) : single, limits);
}

}  // namespace jax_fastops

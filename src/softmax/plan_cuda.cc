#include "softmax/plan.h"

#include <algorithm>

#include "core/integer.h"

namespace jax_fastops::cuda::softmax {
namespace {

int Log2(int64_t power) {
  int log = 0;
  while (int64_t{1} << log < power) ++log;
  return log;
}

uint64_t MaskAddress(const SoftmaxMask& mask) { return reinterpret_cast<uintptr_t>(mask.data); }

// Whether the mask can be loaded `size` elements at a time (size >= 1).
bool MaskHasUnits(const SoftmaxShape& shape, const SoftmaxMask& mask, int size) {
  int64_t bits = static_cast<int64_t>(MaskAddress(mask));
  for (int i = 0; i < mask.outer.rank; ++i) bits |= mask.outer.stride[i];
  if (shape.inner == 1) return mask.stride == 1 && (bits | shape.n) % size == 0;
  return mask.inner.rank == 1 && mask.inner.stride[0] == 1 && (bits | mask.stride) % size == 0;
}

// A unit has `bytes` bytes and `size` elements.
void PlanColumns(const Call& call, int bytes, int size, const HeldLimits& limits, Plan* plan) {
  ColumnsParams& q = plan->columns;
  const SoftmaxShape& shape = call.shape;
  const int accumulator = std::max(call.itemsize, 4);
  const int64_t row_units = shape.inner / size;
  q.row_units = FastDivisor64(static_cast<uint64_t>(row_units));
  q.columns = shape.outer * row_units;
  q.stage = RowStage::kAll;
  q.chunk = shape.n;
  q.chunks = 1;
  const int threads = ColumnThreads(call.grad), log_threads = Log2(threads);
  plan->kernel = size > 1 ? Kernel::kColumns : Kernel::kElementColumns;
  plan->threads = threads;

  const auto scratch_bytes = [&](int log_width) {
    const int64_t parts = threads >> std::max(log_width, 5);
    return parts == 1 || q.adjacent ? 0 : (parts << log_width) * size * accumulator;
  };
  const auto held_bytes = [&](int log_width) {
    const int64_t places = CeilDiv(shape.n, threads >> log_width) * threads;
    return RoundUp(places * bytes * (call.grad ? 2 : 1), 16);
  };
  const auto tiles = [&](int log_width) { return CeilDiv(q.columns, int64_t{1} << log_width); };
  // A tile is no wider than a row of inner elements, unless it would have more lanes than n has
  // elements. It is at least 64 bytes wide, unless the row is narrower: with 32 bytes (a sector),
  // the backward measured 1.29 times the copy floor instead of 1.10.
  const int narrow = std::max(0, log_threads - Log2(shape.n));
  const int widest = std::min(log_threads, std::max(narrow, Log2(row_units)));
  const int sector = std::min(widest, std::max(narrow, Log2(64 / bytes)));
  const auto fits = [&](int log_width, int64_t bytes_there) {
    return held_bytes(log_width) + scratch_bytes(log_width) <= bytes_there;
  };
  int width = widest;
  const int log_lanes = std::min(5, Log2(CeilDiv(shape.n, 4)));
  if (shape.inner == 1 && fits(log_threads - log_lanes, kThirdOfShared)) {
    // Adjacent columns are adjacent rows, so adjacent lanes access adjacent elements.
    q.adjacent = true;
    width = log_threads - log_lanes;
  }
  while (!q.adjacent && width > sector &&
         (!fits(width, kThirdOfShared) || tiles(width) < 2 * limits.processors)) {
    --width;
  }
  q.held = fits(width, limits.shared_bytes);
  if (!q.held) width = std::min(widest, std::max(narrow, Log2(128 / bytes)));
  q.log_width = width;
  const int64_t held = q.held ? held_bytes(width) : 0;
  q.scratch = static_cast<int>(held / 16);
  plan->shared_bytes = held + scratch_bytes(width);
  plan->blocks = tiles(width);

  constexpr int64_t kMinChunk = 4096, kMaxChunks = 1024;
  const int64_t wanted = std::min(kMaxChunks, CeilDiv(4 * limits.processors, tiles(width)));
  if (!q.held && shape.n > kWorkspaceRow && wanted > 1) {
    q.chunk = std::max(kMinChunk, CeilDiv(shape.n, wanted));
    q.chunks = CeilDiv(shape.n, q.chunk);
    plan->blocks_y = q.chunks;
    q.stage = q.chunks > 1 ? RowStage::kReduce : RowStage::kAll;
  }
}

// Returns false if the kernel cannot hold a column.
bool PlanColumnRegisters(const Call& call, int bytes, int size, const HeldLimits& limits,
                         Plan* plan) {
  ColumnRegistersParams q;
  const SoftmaxShape& shape = call.shape;
  const int accumulator = std::max(call.itemsize, 4);
  const int64_t row_units = shape.inner / size;
  q.row_units = FastDivisor64(static_cast<uint64_t>(row_units));
  q.columns = shape.outer * row_units;
  // The least width of a tile, for tiles of a warp and for tiles of blocks, unless a row is
  // narrower: 128 bytes. With 64 bytes the backward for n = 500 measured 1.22 times the copy floor
  // instead of 1.03. For units of one element, the ends of a tile share sectors with other tiles.
  // Tiles of blocks are then 256 bytes wide, or 32 elements for 16-bit types.
  const auto width_of = [&](int units) { return Log2(std::min<int64_t>(row_units, units)); };
  const int warp_width = width_of(std::min(32, 128 / bytes));
  const int block_width = width_of(size > 1 ? 128 / bytes : bytes > 2 ? 256 / bytes : 32);
  constexpr int kLogThreads = 8, kLogWarp = 5;
  int log_lanes = Log2(CeilDiv(shape.n, ColumnPlaces(call.itemsize, bytes)));
  // Small arrays use more lanes per column than are needed to hold it, within a warp, so that all
  // SMs have work.
  const auto few = [&] { return q.columns << log_lanes < int64_t{512} * limits.processors; };
  const auto in_warp = [&](int more) {
    const int width = few() ? std::min(warp_width, 2) : warp_width;
    return log_lanes == 0 || log_lanes + more + width <= kLogWarp;
  };
  while (few() && in_warp(1) && (int64_t{1} << log_lanes) < shape.n) ++log_lanes;
  int log_threads = kLogThreads;
  q.log_blocks = 0;
  if (in_warp(0)) {
    q.log_threads = kLogWarp;
    const int64_t threads = q.columns << log_lanes;
    while (log_threads > 6 && threads >> log_threads < 4 * limits.processors) --log_threads;
  } else {
    const int log_tile = std::max(kLogThreads, log_lanes + block_width);
    log_threads = std::min(log_tile, Log2(ColumnRegisterThreads(bytes)));
    q.log_threads = log_threads;
    q.log_blocks = log_tile - log_threads;
    const int most = ColumnsInClusters(bytes, call.grad) ? std::min(8, limits.max_cluster) : 1;
    if (q.log_blocks > 3 || 1 << q.log_blocks > most) return false;
    // Tiles would share sectors. That measured 1.64 times the copy floor, and 1.23 times with
    // ColumnsKernel.
    if (q.log_blocks > 0 && shape.inner * (bytes / size) % 64 != 0) return false;
  }
  q.places = static_cast<int>(CeilDiv(shape.n, int64_t{1} << log_lanes));
  q.log_width = q.log_threads + q.log_blocks - log_lanes;
  const int64_t tiles = CeilDiv(q.columns, int64_t{1} << (log_threads + q.log_blocks - log_lanes));
  const int threads = 1 << log_threads;
  const int values = (size * accumulator) << q.log_width;  // bytes, of a tile
  const int parts = 1 << (q.log_threads - std::min(q.log_threads, std::max(q.log_width, kLogWarp)));
  int64_t taken = SharesSecond(call.itemsize, bytes, call.grad) ? threads * q.places * bytes : 0;
  const auto take = [&](int64_t more) {
    const int at = static_cast<int>(taken / 16);
    taken += RoundUp(more, 16);
    return at;
  };
  q.scratch = take(parts == 1 ? 0 : parts * values);
  q.exchange = take(q.log_blocks > 0 ? values : 0);
  if (tiles << q.log_blocks > kMostBlocks || taken > limits.shared_bytes) return false;
  plan->registers = q;
  plan->kernel = size > 1 ? Kernel::kColumnRegisters : Kernel::kElementColumnRegisters;
  plan->threads = threads;
  plan->blocks = tiles << q.log_blocks;
  plan->cluster = 1 << q.log_blocks;
  plan->shared_bytes = taken;
  return true;
}

// An axis that is not the minor one, or rows that no kernel for rows takes (see PlanRowsOf).
void PlanAxis(const Call& call, const HeldLimits& limits, Plan* plan) {
  const SoftmaxShape& shape = call.shape;
  const SoftmaxMask& mask = call.mask;
  const bool mask_inner = mask.data != nullptr && mask.inner.rank > 0;
  const auto has_units = [&](int size) {
    const uint64_t addresses = call.a | call.b | call.out;
    return shape.inner % size == 0 && addresses % (size * call.itemsize) == 0 &&
           (!mask_inner || size == 1 || MaskHasUnits(shape, mask, size));
  };
  const int unit = ColumnUnitBytes(call.itemsize), size = unit / call.itemsize;
  const bool units = size > 1 && shape.inner > 1 && has_units(size);
  if (call.itemsize < 8 && shape.inner > 1) {
    plan->mask_units = mask_inner;
    if (has_units(16 / call.itemsize) &&
        PlanColumnRegisters(call, 16, 16 / call.itemsize, limits, plan)) {
      return;
    }
    plan->mask_units = false;
    // For columns of more than a few elements, ColumnsKernel with wider units is faster than single
    // elements.
    if (!(units && shape.n > 32) && PlanColumnRegisters(call, call.itemsize, 1, limits, plan)) {
      return;
    }
  }
  plan->mask_units = mask_inner && units;
  PlanColumns(call, units ? unit : call.itemsize, units ? size : 1, limits, plan);
}

}  // namespace

HeldPlan PlanRowsOf(const Call& call, const HeldLimits& limits) {
  if (call.shape.inner > 1 || call.itemsize == 8) return {};
  if (call.dropout && call.shape.n > kSoftmaxDropoutRow) return {};
  const int64_t n = call.shape.n;
  const bool alike = (call.a ^ call.out) % 16 == 0 && (call.a ^ call.b) % 16 == 0;
  return PlanHeldRows({.rows = call.shape.outer,
                       .n = n,
                       .itemsize = call.itemsize,
                       .inputs = call.grad ? 2 : 1,
                       .alike = alike,
                       .aligned = alike && call.a % 16 == 0 && n * call.itemsize % 16 == 0,
                       .registers_only = call.dropout,
                       // The forward has two sums of a block, a maximum among them.
                       .room = n > kWorkspaceRow ? CeilDiv(n, 1024) / (call.grad ? 1 : 2) : 0},
                      limits);
}

bool MaskHasWords(const Call& call) {
  const int size = 16 / call.itemsize;
  return call.mask.data != nullptr && (call.a | call.out) % 16 == 0 &&
         MaskHasUnits(call.shape, call.mask, size);
}

Plan MakePlan(const Call& call, const HeldLimits& limits) {
  Plan plan;
  PlanAxis(call, limits, &plan);
  return plan;
}

}  // namespace jax_fastops::cuda::softmax

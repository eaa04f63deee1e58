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

// -------------------------------------------------------------------------------------------------
// Along the minor axis. A unit has 16 bytes.

// Rows of `units` units. If they are not aligned, of up to as many whole ones, or with dropout of
// up to as many that they overlap.
void PlanRows(const Call& call, int64_t units, bool aligned, Plan* plan) {
  RowsParams& q = plan->rows;
  int rows = 1, per_thread = kRowUnits;
  plan->kernel = aligned ? Kernel::kRows : Kernel::kRaggedRows;
  if (aligned && units <= 8 && !call.dropout) {
    plan->kernel = Kernel::kTinyRows;
    rows = 4;
    per_thread = 1;
  } else if (aligned && units <= 16) {
    plan->kernel = Kernel::kShortRows;
    rows = per_thread = 2;
  }
  const int least = plan->kernel == Kernel::kTinyRows || call.dropout ? 1 : 3;
  q.log_lanes = std::max(Log2(CeilDiv(units, per_thread)), least);
  // A thread for each element outside whole units.
  const int64_t ends = std::min<int64_t>(call.shape.n, 2 * (16 / call.itemsize - 1));
  if (!aligned && !call.dropout) q.log_lanes = std::max(q.log_lanes, Log2(ends));
  q.lanes = 1 << q.log_lanes;
  if (q.lanes > 32 && !aligned) q.lanes = static_cast<int>(RoundUp(CeilDiv(units, kRowUnits), 32));
  q.units = static_cast<int>(CeilDiv(units, q.lanes));
  plan->threads = std::max(128, q.lanes);
  if (q.lanes > 32) plan->threads = q.lanes;
  q.groups = plan->threads / q.lanes;
  plan->blocks = CeilDiv(call.shape.outer, int64_t{q.groups} * rows);
}

void PlanSpan(const Call& call, const Limits& limits, Plan* plan) {
  SpanParams& q = plan->span;
  const int64_t n = call.shape.n, outer = call.shape.outer;
  // A row that begins in the middle of a unit has one more.
  const int64_t units = call.itemsize == 2 ? n / 2 + 1 : n;
  q.log_lanes = Log2(CeilDiv(units, kSpanUnits));
  // Small arrays use more lanes than are needed to hold a row, so that all SMs have work.
  while (q.log_lanes < 5 && int64_t{1} << q.log_lanes < units &&
         outer << q.log_lanes < int64_t{256} * limits.processors) {
    ++q.log_lanes;
  }
  q.units = static_cast<int>(CeilDiv(units, int64_t{1} << q.log_lanes));
  const int groups = kSpanThreads >> q.log_lanes;
  // Spans of 8 KB, so that many blocks fit on an SM. Some load while others compute or store.
  constexpr int64_t kSpanBytes = 8192;
  const int64_t most = std::max<int64_t>(1, kSpanBytes / (groups * n * call.itemsize));
  const int64_t enough = CeilDiv(outer, int64_t{8} * limits.processors * groups);
  q.rows = static_cast<int>(groups * std::min(most, enough));
  q.words = static_cast<int>(CeilDiv(q.rows * n * call.itemsize, 16) + 1);
  plan->kernel = Kernel::kSpan;
  plan->threads = kSpanThreads;
  plan->shared_bytes = int64_t{q.words} * 16 * (call.grad ? 3 : 2);
  plan->blocks = CeilDiv(outer, q.rows);
}

// Whether gangs can hold a row of `units` units on the device.
bool HasGangs(int64_t units, const Limits& limits) {
  return limits.shared_bytes >= kGangShared &&
         CeilDiv(units, kGangBlockUnits) <= std::min(limits.processors, kMostGangBlocks);
}

void PlanGang(const Call& call, int64_t units, const Limits& limits, Plan* plan) {
  // Choose the number of gangs that leaves the fewest gangs idle in the last round. Among equals
  // take the largest number, because then fewer blocks exchange sums.
  const int64_t outer = call.shape.outer, needed = CeilDiv(units, kGangBlockUnits);
  const int64_t most = std::min(outer, limits.processors / needed);
  const auto places = [&](int64_t gangs) { return RoundUp(outer, gangs); };
  int64_t gangs = 1;
  for (int64_t g = 2; g <= most; ++g) {
    if (places(g) <= places(gangs)) gangs = g;
  }
  GangParams& q = plan->gang;
  q.gangs = static_cast<int>(gangs);
  const int64_t room = call.shape.n / 2048;  // blocks per row for which the workspace has room
  q.blocks = static_cast<int>(
      std::min({limits.processors / gangs, std::max(needed, room), int64_t{kMostGangBlocks}}));
  q.block_units = static_cast<int>(CeilDiv(units, q.blocks));
  plan->kernel = Kernel::kGang;
  plan->blocks = int64_t{q.blocks} * q.gangs;
  plan->threads = kGangThreads;
  plan->shared_bytes = kGangShared;
  plan->cooperative = q.blocks > 1;
  plan->ones = q.blocks > 1 ? outer * q.blocks * (call.grad ? 1 : 2) : 0;
}

// Takes the smallest cluster that leaves room for a second one on the same SMs. With twice as many
// blocks of half the size, rows of 50257 and of 128256 elements measured 1 to 8% slower. Returns
// false if no cluster holds a row.
bool PlanBlock(const Call& call, int64_t units, const Limits& limits, Plan* plan) {
  for (int log_cluster = 0; log_cluster <= 5; ++log_cluster) {
    const bool large = log_cluster == 5;  // the largest cluster again, with larger blocks
    const int log = large ? 4 : log_cluster, cluster = 1 << log;
    const int64_t block_units = CeilDiv(units, cluster);
    const int64_t bytes = block_units * 16 * (call.grad ? 2 : 1);
    const int most = std::min(large ? kMostOfShared : kHalfOfShared, limits.shared_bytes);
    if (cluster > limits.cluster || bytes > most) continue;
    plan->kernel = Kernel::kBlock;
    plan->block = {static_cast<int>(block_units), cluster, log};
    plan->blocks = call.shape.outer * cluster;
    plan->threads = large ? kMostBlockThreads : 256;
    plan->shared_bytes = bytes;
    plan->cluster = cluster;
    return true;
  }
  return false;
}

// -------------------------------------------------------------------------------------------------
// Along other axes

// A unit has `bytes` bytes and `size` elements.
void PlanColumns(const Call& call, int bytes, int size, const Limits& limits, Plan* plan) {
  ColumnsParams& q = plan->columns;
  const SoftmaxShape& shape = plan->shape;
  const int accumulator = std::max(call.itemsize, 4);
  const int64_t row_units = shape.inner / size;
  q.row_units = FastDivisor64(static_cast<uint64_t>(row_units));
  q.columns = shape.outer * row_units;
  q.stage = Stage::kAll;
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
  if (!q.held && shape.n * (q.fold ? size : 1) > kWorkspaceRow && wanted > 1) {
    q.chunk = std::max(kMinChunk, CeilDiv(shape.n, wanted));
    q.chunks = CeilDiv(shape.n, q.chunk);
    plan->blocks_y = q.chunks;
    q.stage = q.chunks > 1 ? Stage::kReduce : Stage::kAll;
  }
}

// Returns false if the kernel cannot hold a column.
bool PlanColumnRegisters(const Call& call, int bytes, int size, const Limits& limits, Plan* plan) {
  ColumnRegistersParams q;
  const SoftmaxShape& shape = plan->shape;
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
    const int most = ColumnsInClusters(bytes, call.grad) ? std::min(8, limits.cluster) : 1;
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

// An axis that is not the minor one, or rows that no kernel for rows takes.
void PlanAxis(const Call& call, const Limits& limits, Plan* plan) {
  const SoftmaxShape& shape = plan->shape;
  const SoftmaxMask& mask = plan->mask;
  const bool mask_inner = mask.data != nullptr && mask.inner.rank > 0;
  const auto has_units = [&](int size) {
    const uint64_t addresses = call.a | call.b | call.out;
    return shape.inner % size == 0 && addresses % (size * call.itemsize) == 0 &&
           (!mask_inner || size == 1 || MaskHasUnits(shape, mask, size));
  };
  const int unit = ColumnUnitBytes(call.itemsize), size = unit / call.itemsize;
  const bool units = size > 1 && shape.inner > 1 && has_units(size);
  if (call.itemsize < 8 && shape.inner > 1 && !plan->columns.fold) {
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

// Views aligned rows as columns of units, if ColumnsKernel can read their mask in this way.
void Fold(const Call& call, Plan* plan) {
  const int size = ColumnUnitBytes(call.itemsize) / call.itemsize;
  SoftmaxMask& mask = plan->mask;
  if (size == 1 || call.shape.n % size != 0) return;
  if (mask.data != nullptr && mask.stride != 0) {
    if (!MaskHasUnits(call.shape, mask, size)) return;
    mask.inner.rank = 1;
    mask.inner.size[0] = size;
    mask.inner.stride[0] = 1;
    mask.stride = size;
  }
  plan->columns.fold = true;
  plan->shape.n /= size;
  plan->shape.inner = size;
}

}  // namespace

Plan MakePlan(const Call& call, const Limits& limits) {
  Plan plan;
  plan.shape = call.shape;
  plan.mask = call.mask;
  const int64_t n = call.shape.n, row_bytes = n * call.itemsize;
  const bool alike = (call.a ^ call.out) % 16 == 0 && (call.a ^ call.b) % 16 == 0;
  const bool aligned = alike && call.a % 16 == 0 && row_bytes % 16 == 0;
  if (call.shape.inner > 1 || call.itemsize == 8) {
    PlanAxis(call, limits, &plan);
    return plan;
  }

  // SpanKernel needs rows that begin alike within 4 bytes. RowsKernel is faster for longer rows:
  // for bfloat16 rows of 197 elements by 15% forward and 13% backward.
  constexpr int64_t kSpanRow = 256;  // bytes
  if (!aligned && !call.dropout && row_bytes <= kSpanRow && (call.a ^ call.out) % 4 == 0 &&
      (call.a ^ call.b) % 4 == 0) {
    PlanSpan(call, limits, &plan);
    return plan;
  }
  const int size = 16 / call.itemsize;
  plan.mask_units =
      call.mask.data != nullptr && aligned && MaskHasUnits(call.shape, call.mask, size);
  const int64_t units = aligned ? n / size : (n + 2 * size - 2) / size;
  const bool gangs = alike && HasGangs(units, limits);
  // Gangs are faster than large clusters for very long rows. For float32 (512, 262144), relative to
  // the copy floor, the forward measured 1.12 with a cluster and 1.07 with a gang, the
  // backward 1.31 and 1.05. The backward of log_softmax stays with clusters: in a gang it would
  // compute its exponentials between two rows, which takes longer.
  const bool very_long = units > (call.grad ? 32768 : 30000) && !(call.grad && call.log);
  const int64_t held = call.dropout ? units : n / size;  // by threads, as units
  if (alike && held <= kRowThreads * kRowUnits) {
    PlanRows(call, held, aligned, &plan);
  } else if (gangs && very_long) {
    PlanGang(call, units, limits, &plan);
  } else if (alike && PlanBlock(call, units, limits, &plan)) {
  } else if (gangs && n > kWorkspaceRow) {
    PlanGang(call, units, limits, &plan);
  } else {
    plan.mask_units = false;
    if (aligned) Fold(call, &plan);
    PlanAxis(call, limits, &plan);
  }
  return plan;
}

}  // namespace jax_fastops::cuda::softmax

#include "heads/plan.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "core/integer.h"

namespace jax_fastops {
namespace {

// Columns and rows are counted in 32 bits, and a tile may extend past the last column.
constexpr int64_t kLimit = std::numeric_limits<int32_t>::max() - kHeadsThreads;
constexpr int64_t kMaxSlabs = 65535;
constexpr int64_t kSector = 32;  // bytes
constexpr int64_t kWarp = 32;

int64_t PowerOfTwoFrom(int64_t n) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n)));
}

int Log2(int64_t power) { return std::countr_zero(static_cast<uint64_t>(power)); }

// The maximum width of a tile, in columns. With sums it is more important to process a run in one
// pass.
int64_t MaxColumns(int unit, HeadsWork work) {
  if (unit < 16) return kHeadsThreads;
  return work == HeadsWork::kSum ? 16 : 32;
}

// An equivalent shape with fewer and longer sequences.
HeadsShape Simplify(HeadsShape shape) {
  if (shape.sequence == 1) {
    shape.head_size *= shape.heads;
    shape.heads = 1;
  }
  if (shape.heads == 1) {
    shape.sequence *= shape.batch;
    shape.batch = 1;
  }
  return shape;
}

// The largest unit that there is a kernel for, in bytes. Arithmetic has units of 16 bytes, which
// are those of most models, and of an element.
int UnitOf(const HeadsCall& call, const HeadsShape& shape) {
  const int64_t bits = 16 | shape.head_size * call.itemsize | call.alignment;
  const int unit = static_cast<int>(bits & -bits);
  if (call.work == HeadsWork::kMove) return unit;
  const bool whole = unit == 16 && call.itemsize < 8;
  const bool bias = call.work != HeadsWork::kAddBias || call.bias_alignment == 16;
  return whole && bias ? 16 : static_cast<int>(call.itemsize);
}

// Sets the tile for runs of `run_rows` rows. There should be enough row lanes to take the run at
// once, at least as many as a warp has rows, and enough that a tile is not wider than x, but no
// more than there are rows.
void SetTile(const HeadsCall& call, int unit, int64_t run_rows, HeadsTiles* tiles) {
  const int64_t row = tiles->row.divisor, head = tiles->head.divisor;
  // If a head is smaller than a sector, a warp takes enough rows to fill a sector of y. If x is
  // written, it keeps at least one sector of width in x.
  int64_t warp_rows = 1;
  while (warp_rows < 8 && warp_rows * head * unit < kSector) warp_rows *= 2;
  if (!call.split) warp_rows = std::min<int64_t>(warp_rows, unit);
  const int64_t wanted = PowerOfTwoFrom(CeilDiv(run_rows, HeadsInFlight(unit, call.work)));
  const int64_t narrow = kHeadsThreads / std::min<int64_t>(kHeadsThreads, PowerOfTwoFrom(row));
  int64_t row_lanes = std::min(kHeadsThreads / MaxColumns(unit, call.work), wanted);
  row_lanes = std::max({row_lanes, warp_rows, narrow});
  row_lanes = std::min(row_lanes, PowerOfTwoFrom(run_rows));
  const int64_t columns = kHeadsThreads / row_lanes;
  warp_rows = std::max(std::min(warp_rows, row_lanes), kWarp / columns);
  tiles->log_columns = Log2(columns);
  tiles->log_row_lanes = Log2(row_lanes);
  tiles->log_warp_rows = Log2(warp_rows);
  tiles->x_step = row_lanes * row * unit;
  tiles->y_step = row_lanes * head * unit;
}

}  // namespace

HeadsPlan PlanHeads(const HeadsCall& call) {
  const bool sums = call.work == HeadsWork::kSum;
  const HeadsShape shape = sums ? call.shape : Simplify(call.shape);
  HeadsPlan plan;
  plan.unit = UnitOf(call, shape);
  const int64_t head = shape.head_size * call.itemsize / plan.unit;
  const int64_t row = shape.parts * shape.heads * head;
  if (row > kLimit) return plan;

  HeadsTiles& t = plan.tiles;
  t.row = FastDivisor(static_cast<uint32_t>(row));
  t.head = FastDivisor(static_cast<uint32_t>(head));
  t.heads = FastDivisor(static_cast<uint32_t>(shape.heads));
  t.batch = shape.batch;
  t.sequence = shape.sequence;

  // The runs: those of the sums, or runs of equal length close to the rows that a tile has in
  // flight.
  const int64_t groups = sums ? call.sums.groups : 1;
  t.group_rows = shape.sequence / groups;
  t.run_rows = sums ? CeilDiv(t.group_rows, call.sums.subgroups) : shape.sequence;
  SetTile(call, plan.unit, t.run_rows, &t);
  const int64_t tile_rows = int64_t{HeadsInFlight(plan.unit, call.work)} << t.log_row_lanes;
  int64_t subgroups = call.sums.subgroups;
  if (sums) {
    t.passes = static_cast<int>(CeilDiv(t.run_rows, tile_rows));
  } else {
    t.run_rows = CeilDiv(shape.sequence, CeilDiv(shape.sequence, tile_rows));
    subgroups = CeilDiv(shape.sequence, t.run_rows);
  }
  t.runs = groups * subgroups;
  if (t.runs > kLimit || t.run_rows > kLimit) return plan;
  t.subgroups = FastDivisor(static_cast<uint32_t>(subgroups));

  const int64_t slab_runs = std::min(t.runs, kLimit / row);
  t.slab_runs = FastDivisor(static_cast<uint32_t>(slab_runs));
  plan.run_slabs = CeilDiv(t.runs, slab_runs);
  t.slab_batches = plan.run_slabs > 1
                       ? 1
                       : std::min(shape.batch, std::max<int64_t>(1, kLimit / (slab_runs * row)));
  plan.batch_slabs = CeilDiv(shape.batch, t.slab_batches);
  plan.blocks = CeilDiv(t.slab_batches * slab_runs * row, int64_t{1} << t.log_columns);
  plan.valid = plan.run_slabs <= kMaxSlabs && plan.batch_slabs <= kMaxSlabs;
  return plan;
}

}  // namespace jax_fastops

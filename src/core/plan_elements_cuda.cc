#include "core/plan_elements.h"

#include <algorithm>
#include <numeric>

#include "core/integer.h"
#include "core/strided_index.h"

namespace jax_fastops::cuda {
namespace {

constexpr int64_t kTripsOfKernel = 4;
constexpr int64_t kMaxIndex = int64_t{1} << 31;  // of what 31 bits count

int OuterRank(const BroadcastShape& shape) { return std::max(shape.rank - 1, 0); }

// Whether a pass with these planes can sum the gradient that is this array.
bool Fits(const BroadcastShape& shape, int array, uint32_t planes) {
  const uint32_t all = (1u << OuterRank(shape)) - 1, rows = all & ~planes;
  const uint32_t kept = KeptDims(shape, array), of_planes = kept & planes, of_rows = kept & rows;
  if (of_planes != 0 && of_planes != planes) return false;
  return of_rows == 0 || (of_rows == rows && shape.InnerStride(array) == 0);
}

}  // namespace

void DimSet::Add(int64_t its_size, const int64_t* strides, int arrays) {
  length *= its_size;
  AppendDim(its_size, strides, arrays, &rank, size, stride);
}

bool DimSet::IsFixed(int a) const {
  return std::all_of(stride[a], stride[a] + rank, [](int64_t step) { return step == 0; });
}

RowClass RowsSplit::ClassOf(int array) const {
  if (full[array]) return RowClass::kFull;
  if (inner_stride[array] == 0) return RowClass::kColumn;
  return rows.IsFixed(1 + array) ? RowClass::kRow : RowClass::kStrided;
}

RowsSplit SplitRows(const BroadcastShape& shape, uint32_t planes, int64_t flat_row) {
  RowsSplit split;
  split.arrays = shape.arrays;
  for (int a = 0; a < shape.arrays; ++a) {
    split.full[a] = shape.IsFull(a);
    split.inner_stride[a] = split.full[a] ? 1 : shape.InnerStride(a);
  }
  int64_t strides[1 + kMaxBroadcastArrays];
  if (shape.rank <= 1) {
    const int64_t elements = shape.elements(), rows = CeilDiv(elements, flat_row);
    split.n = flat_row;
    split.last_n = elements - (rows - 1) * flat_row;
    strides[0] = flat_row;
    for (int a = 0; a < shape.arrays; ++a) strides[1 + a] = flat_row * shape.InnerStride(a);
    split.rows.Add(rows, strides, 1 + shape.arrays);
    return split;
  }
  split.n = split.last_n = shape.inner();
  int64_t dense[kMaxBroadcastRank], step = 1;
  for (int d = shape.rank - 1; d >= 0; --d) {
    dense[d] = step;
    step *= shape.size[d];
  }
  for (int d = 0; d < shape.rank - 1; ++d) {
    strides[0] = dense[d];
    for (int a = 0; a < shape.arrays; ++a) strides[1 + a] = shape.stride[a][d];
    (planes >> d & 1 ? split.planes : split.rows).Add(shape.size[d], strides, 1 + shape.arrays);
  }
  return split;
}

uint32_t KeptDims(const BroadcastShape& shape, int array) {
  uint32_t kept = 0;
  for (int d = 0; d < OuterRank(shape); ++d) kept |= (shape.stride[array][d] != 0) << d;
  return kept;
}

uint32_t ChoosePlanes(const BroadcastShape& shape, const int* arrays, int count, uint32_t* chosen) {
  uint32_t best = 0;
  int most = 0;
  *chosen = 0;
  for (int candidate = -1; candidate < count; ++candidate) {
    const uint32_t planes = candidate < 0 ? 0 : KeptDims(shape, arrays[candidate]);
    uint32_t taken = 0;
    int number = 0;
    for (int i = 0; i < count; ++i) {
      if (!Fits(shape, arrays[i], planes)) continue;
      taken |= 1u << i;
      ++number;
    }
    if (number <= most) continue;
    most = number;
    best = planes;
    *chosen = taken;
  }
  return best;
}

int64_t SumLayout::Partial(const RowsSplit& split) const {
  const int64_t results = its_class == RowClass::kRow ? split.n : per_row ? split.rows.length : 1;
  return direct ? 0 : split.planes.length * parts * results;
}

FinishSum FinishOf(const RowsSplit& split, const SumLayout& layout) {
  FinishSum sum = {};
  const int64_t planes = split.planes.length, rows = split.rows.length;
  const bool is_row = layout.its_class == RowClass::kRow;
  sum.kept[0] = layout.keeps_planes ? planes : 1;
  sum.kept[1] = layout.per_row ? rows : 1;
  sum.kept[2] = is_row ? split.n : 1;
  // The layouts of SumLayout. Planes that are added are terms too, next to the parts.
  sum.terms = layout.parts * (layout.keeps_planes ? 1 : planes);
  sum.step[0] = is_row ? layout.parts * split.n : layout.per_row ? rows : layout.parts;
  sum.step[1] = sum.step[2] = 1;
  sum.term_step = is_row            ? split.n
                  : !layout.per_row ? 1
                                    : rows * (layout.keeps_planes ? planes : 1);
  const DimSet* const sets[2] = {&split.planes, &split.rows};
  const bool kept[2] = {layout.keeps_planes, layout.per_row};
  for (int i = 0; i < 2; ++i) {
    sum.rank[i] = kept[i] ? sets[i]->rank : 0;
    for (int d = 0; d < sum.rank[i]; ++d) {
      sum.size[i][d] = sets[i]->size[d];
      sum.stride[i][d] = sets[i]->stride[1 + layout.array][d];
    }
  }
  return sum;
}

PassPlan PlanPass(const RowsSplit& split, SumLayout* sums, int count, const PassLimits& limits) {
  PassPlan plan;
  const int64_t unit = limits.unit, rows = split.rows.length;
  plan.planes = split.planes.length;
  if (rows >= kMaxIndex || plan.planes >= kMaxIndex || split.n < unit) return plan;

  // ---- how rows lie in words
  // The first elements of all rows are a multiple of `gap` elements after a word begins.
  int64_t gap = unit;
  for (const DimSet* set : {&split.planes, &split.rows}) {
    for (int d = 0; d < set->rank; ++d) gap = std::gcd(gap, set->stride[0][d]);
  }
  if (split.rows.rank > 0) {
    plan.period = unit / std::gcd(unit, split.rows.stride[0][split.rows.rank - 1]);
  }
  // Else a class is not every period-th row.
  if (gap != unit && split.rows.rank > 1) return plan;
  plan.classes = std::min(plan.period, rows);
  // A row that begins or ends within a word has one more word.
  const int64_t words = CeilDiv(split.n + unit - gap, unit);
  int64_t lanes = 2;
  if (words <= 32) {
    while (lanes < words) lanes *= 2;
  } else {
    const int64_t warps = CeilDiv(words, 32);
    plan.strips = CeilDiv(warps, kSumsThreads / 32);
    lanes = CeilDiv(warps, plan.strips) * 32;
  }

  // ---- how blocks share rows
  const int64_t of_class = CeilDiv(rows, plan.period);
  int64_t side_by_side = kSumsThreads / lanes;
  // No lanes without work, but whole warps.
  while (side_by_side % 2 == 0 && side_by_side / 2 * lanes >= 32 && side_by_side / 2 >= of_class) {
    side_by_side /= 2;
  }
  plan.lanes = static_cast<int>(lanes);
  plan.threads = static_cast<int>(lanes * side_by_side);
  const int64_t trips = CeilDiv(of_class, side_by_side * limits.rows_in_flight);
  const int64_t at_once =
      int64_t{limits.processors} * (limits.blocks_of_processor * kSumsThreads / plan.threads);
  const int64_t fixed = plan.classes * plan.strips * plan.planes;
  plan.boxes = std::max<int64_t>(1, std::min(trips, at_once / fixed));
  plan.boxes = CeilDiv(trips, CeilDiv(trips, plan.boxes));  // no box without work
  // A second kernel takes as long as several trips.
  if (trips <= kTripsOfKernel && plan.classes * plan.strips == 1) plan.boxes = 1;

  // ---- partial sums
  const int64_t sub = lanes < 32 ? 1 : plan.strips * lanes / 32;
  for (;; plan.boxes = CeilDiv(plan.boxes, 2)) {
    int64_t used = 0;
    for (int i = 0; i < count; ++i) {
      SumLayout& sum = sums[i];
      const int a = 1 + sum.array;
      sum.its_class = split.ClassOf(sum.array);
      sum.per_row = sum.its_class == RowClass::kColumn && !split.rows.IsFixed(a);
      sum.keeps_planes = plan.planes == 1 || !split.planes.IsFixed(a);
      sum.parts = sum.its_class == RowClass::kRow ? plan.classes * plan.boxes
                  : sum.per_row                   ? sub
                                                  : plan.blocks_of_plane();
      sum.direct = sum.parts == 1 && sum.keeps_planes;
      const int64_t partial = sum.Partial(split);
      if (unit > 1 && partial >= kMaxIndex) return plan;  // offsets of 32 bits
      used += partial;
    }
    if (used <= limits.workspace) break;
    if (plan.boxes == 1) return plan;
  }
  plan.valid = plan.blocks() < kMaxIndex;
  return plan;
}

}  // namespace jax_fastops::cuda

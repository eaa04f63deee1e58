// Property test of the launch plans for attention heads: every unit of x is moved once, to and from
// the place that the shape says.
#include "heads/plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/integer.h"
#include "property.h"

namespace jax_fastops {
namespace {

constexpr int64_t kInt = std::numeric_limits<int32_t>::max();

HeadsCall RandomCall(Random& random, int64_t most) {
  HeadsCall call;
  call.itemsize = int64_t{1} << random.Below(5);
  call.shape = {.batch = random.Size(most),
                .sequence = random.Size(most),
                .parts = random.Coin() ? 3 : 1,
                .heads = random.Size(most),
                .head_size = random.Size(most)};
  call.split = random.Coin();
  const int64_t kind = random.Below(3);
  if (kind > 0) {  // arithmetic
    call.itemsize = int64_t{2} << random.Below(3);
    call.split = kind == 1;
    call.work = call.split ? HeadsWork::kAddBias : HeadsWork::kSum;
    call.bias_itemsize = call.itemsize == 2 && random.Coin() ? 4 : call.itemsize;
    call.bias_alignment = std::min<int64_t>(16, call.bias_itemsize << random.Below(5));
  }
  if (call.work == HeadsWork::kSum) {
    while (call.shape.sequence % (call.sums.groups = random.Size(call.shape.sequence)) != 0) {
    }
    call.sums.subgroups = random.Size(call.shape.sequence / call.sums.groups + 2);
  }
  call.alignment = std::min<int64_t>(16, call.itemsize << random.Below(5));
  return call;
}

#define CHECK_CALL(condition)                                                                     \
  CHECK(condition,                                                                                \
        "batch %lld sequence %lld parts %lld heads %lld head size %lld, %lld bytes, "             \
        "alignment %lld, work %d, split %d, groups %lld of %lld, unit %d",                        \
        (long long)call.shape.batch, (long long)call.shape.sequence, (long long)call.shape.parts, \
        (long long)call.shape.heads, (long long)call.shape.head_size, (long long)call.itemsize,   \
        (long long)call.alignment, (int)call.work, (int)call.split, (long long)call.sums.groups,  \
        (long long)call.sums.subgroups, plan.unit)

// What holds for every shape. Returns whether the plan is valid.
bool CheckLimits(const HeadsCall& call) {
  const HeadsPlan plan = PlanHeads(call);
  const HeadsTiles& t = plan.tiles;
  const HeadsShape& s = call.shape;
  CHECK_CALL((plan.unit & (plan.unit - 1)) == 0 && plan.unit <= 16);
  CHECK_CALL(plan.unit <= call.alignment);
  CHECK_CALL(s.heads * s.head_size * call.itemsize % plan.unit == 0);
  // There are no other kernels.
  CHECK_CALL(call.work == HeadsWork::kMove || plan.unit == call.itemsize ||
             (plan.unit == 16 && call.itemsize < 8));
  if (call.work == HeadsWork::kAddBias) {
    const int64_t bias_bytes = plan.unit / call.itemsize * call.bias_itemsize;
    CHECK_CALL(std::min<int64_t>(16, bias_bytes) <= call.bias_alignment);
  }
  const int64_t row = s.features() * call.itemsize / plan.unit;
  if (!plan.valid) {
    CHECK_CALL(row > (1 << 24) || s.sequence * s.batch > (1 << 24));
    return false;
  }
  CHECK_CALL(t.row.divisor == static_cast<uint64_t>(row));
  CHECK_CALL(t.batch * t.sequence == s.batch * s.sequence);
  CHECK_CALL(t.heads.divisor * int64_t{t.head.divisor} * s.parts == row);
  CHECK_CALL(t.log_columns + t.log_row_lanes == 8);
  CHECK_CALL(t.log_warp_rows >= 0 && t.log_warp_rows <= t.log_row_lanes);
  CHECK_CALL(t.log_warp_rows <= 5 && 5 - t.log_warp_rows <= t.log_columns);
  CHECK_CALL(t.x_step == (row * plan.unit) << t.log_row_lanes);
  CHECK_CALL(t.y_step == (int64_t{t.head.divisor} * plan.unit) << t.log_row_lanes);
  // Every row of a run is taken, and every run and batch belongs to a slab.
  const int64_t in_flight = HeadsInFlight(plan.unit, call.work);
  CHECK_CALL((t.passes * in_flight) << t.log_row_lanes >= t.run_rows);
  CHECK_CALL(t.run_rows > 0 && t.run_rows <= kInt && t.runs > 0 && t.runs <= kInt);
  CHECK_CALL(t.runs % t.subgroups.divisor == 0);
  CHECK_CALL(t.runs / t.subgroups.divisor * t.group_rows == t.sequence);
  CHECK_CALL(t.subgroups.divisor * t.run_rows >= t.group_rows);
  CHECK_CALL(plan.batch_slabs * t.slab_batches >= t.batch);
  CHECK_CALL(plan.run_slabs * t.slab_runs.divisor >= t.runs);
  // Columns fit in 32 bits, and the grid in its limits.
  const int64_t columns = t.slab_batches * t.slab_runs.divisor * row;
  CHECK_CALL(columns > 0 && columns <= kInt - kHeadsThreads);
  CHECK_CALL(plan.blocks << t.log_columns >= columns && plan.blocks <= kInt);
  CHECK_CALL(plan.batch_slabs <= 65535 && plan.run_slabs <= 65535);
  return true;
}

// Follows every thread of a small shape.
void CheckCoverage(const HeadsCall& call) {
  const HeadsPlan plan = PlanHeads(call);
  const HeadsTiles& t = plan.tiles;
  const HeadsShape& s = call.shape;
  const int64_t row_units = t.row.divisor, per_head = s.head_size * call.itemsize;
  std::vector<uint8_t> moved(s.batch * s.sequence * row_units);
  const int64_t in_flight = HeadsInFlight(plan.unit, call.work);
  for (int64_t index = 0; index < t.batch * t.runs * row_units; ++index) {
    const int64_t in_row = index % row_units, run = index / row_units % t.runs;
    const int64_t batch = index / row_units / t.runs;
    const int64_t group = run / t.subgroups.divisor;
    const int64_t in_group = (run - group * t.subgroups.divisor) * t.run_rows;
    const int64_t head = in_row / t.head.divisor, in_head = in_row % t.head.divisor;
    const int64_t part = head / t.heads.divisor;
    for (int64_t lane = 0; lane < int64_t{1} << t.log_row_lanes; ++lane) {
      const int64_t left = std::min(t.run_rows, t.group_rows - in_group) - lane +
                           (int64_t{1} << t.log_row_lanes) - 1;
      const int64_t count = left > 0 ? left >> t.log_row_lanes : 0;
      CHECK_CALL(count <= t.passes * in_flight);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t row = group * t.group_rows + in_group + lane + (k << t.log_row_lanes);
        const int64_t x = (batch * t.sequence + row) * row_units + in_row;
        const int64_t y =
            ((batch * t.heads.divisor + head - part * t.heads.divisor) * t.sequence + row) *
                t.head.divisor +
            in_head;
        CHECK_CALL(x >= 0 && x < static_cast<int64_t>(moved.size()) && moved[x] == 0);
        moved[x] = 1;
        // The same place by the shape's own definition.
        const int64_t byte = x * plan.unit, feature = byte % (s.features() * call.itemsize);
        const int64_t line = byte / (s.features() * call.itemsize);
        const int64_t any = feature / per_head, of_part = any % s.heads;
        CHECK_CALL(part == any / s.heads);
        CHECK_CALL(y * plan.unit ==
                   ((line / s.sequence * s.heads + of_part) * s.sequence + line % s.sequence) *
                           per_head +
                       feature % per_head);
      }
    }
  }
  CHECK_CALL(std::count(moved.begin(), moved.end(), 1) == static_cast<int64_t>(moved.size()));
}

}  // namespace
}  // namespace jax_fastops

int main() {
  using namespace jax_fastops;
  Random random(1);
  int valid = 0;
  for (int i = 0; i < kShapes; ++i) {
    const HeadsCall call = RandomCall(random, i % 2 == 0 ? int64_t{1} << 14 : 600);
    valid += CheckLimits(call);
  }
  CHECK(valid > kShapes * 9 / 10, "%d of %d plans are valid", valid, kShapes);
  for (int followed = 0; followed < kShapes / 20;) {
    const HeadsCall call = RandomCall(random, 300);
    if (call.shape.size() > (1 << 14)) continue;
    CheckCoverage(call);
    ++followed;
  }
}

// Plans of group norm: every shape gets a plan whose threads have each element once, within the
// limits of the device and of the workspace.
#include "group_norm/plan.h"

#include <algorithm>
#include <cstdint>

#include "property.h"

using namespace jax_fastops::group_norm;
using jax_fastops::CeilDiv;

namespace {

void CheckPlan(Random& random) {
  Shape shape;
  shape.channels = random.Size(random.Coin() ? 2048 : 64);
  shape.groups = random.Size(64);
  shape.positions = random.Size(int64_t{1} << 24);
  shape.samples = random.Size(int64_t{1} << 10);
  shape.last = random.Coin();
  shape.item = 2 << random.Below(3);
  shape.accumulator = std::max(shape.item, 4);
  if (random.Coin()) shape.channels = jax_fastops::RoundUp(shape.channels, 8) % 2048 + 8;
  if (random.Coin()) shape.positions = jax_fastops::RoundUp(shape.positions, 8);
  shape.arrays = 1 + static_cast<int>(random.Below(2));
  shape.backward = shape.arrays == 2 && random.Coin();
  const bool clusters = random.Coin();
  const int alignment = 1 << random.Below(5);
  Limits limits = {132, (clusters ? 226 : 162) << 10, (clusters ? 228 : 164) << 10,
                   clusters ? 16 : 1};
  for (auto& sizes : limits.clusters) {
    for (int& resident : sizes) resident = static_cast<int>(random.Size(200));
  }
  const int64_t max_parts = random.Size(256);
  const Plan plan = MakePlan(shape, alignment, max_parts, limits);
#define PLAN(condition)                                                                     \
  CHECK(condition,                                                                          \
        "%lld x %lld x %lld x %lld, last %d, %d bytes, %d arrays, aligned %d, clusters %d", \
        (long long)shape.samples, (long long)shape.groups, (long long)shape.channels,       \
        (long long)shape.positions, shape.last, shape.item, shape.arrays, alignment, clusters)
  PLAN(plan.sets >= 1 && plan.parts >= 1 && plan.passes >= 1);
  PLAN(int64_t{plan.sets} * plan.set_groups >= shape.groups);
  PLAN(int64_t{plan.sets - 1} * plan.set_groups < shape.groups);
  PLAN(plan.parts * plan.part_units >= plan.units &&
       (plan.parts - 1) * plan.part_units < plan.units);
  PLAN(plan.units * (shape.last ? 1 : plan.unit) == shape.positions);
  PLAN(plan.unit == 1 || alignment % (plan.unit * shape.item) == 0);
  PLAN(plan.tiles == shape.samples * plan.sets && plan.clusters >= 1 &&
       plan.clusters <= plan.tiles);
  // Units are whole words in the array, and in each set.
  PLAN((shape.last ? plan.channels : shape.positions) % plan.unit == 0);
  PLAN(!shape.last || plan.sets == 1 || plan.set_channels() % plan.unit == 0);
  PLAN(plan.width * plan.lanes <= kThreads && plan.width >= 1 && plan.lanes >= 1);
  PLAN(plan.passes * plan.width >= plan.slots());
  // A thread that has several passes has one group, and lanes that are reduced are a power of two.
  PLAN(plan.passes == 1 || plan.set_groups == 1);
  PLAN(shape.last || (plan.lanes & (plan.lanes - 1)) == 0);
  const SharedLayout layout = LayoutOf(plan, shape);
  PLAN(layout.bytes <= limits.shared_per_block && layout.statistics % 8 == 0);
  PLAN(layout.kept % 16 == 0 && layout.table % 16 == 0 && layout.coefficients % 16 == 0);
  PLAN(layout.inbox % 16 == 0 && layout.inbox_bytes % 8 == 0 && layout.group_sums % 8 == 0);
  PLAN(layout.base % shape.accumulator == 0);
  if (plan.kept_units > 0) {
    PLAN(plan.parts <= limits.max_cluster && (plan.parts & (plan.parts - 1)) == 0);
    PLAN(plan.kept_units >= plan.passes * CeilDiv(plan.part_units, plan.lanes));
  } else {
    PLAN(plan.parts <= max_parts);
  }
}

}  // namespace

int main() {
  Random random(1);
  for (int i = 0; i < kShapes; ++i) CheckPlan(random);
}

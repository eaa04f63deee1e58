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
  if (shape.item == 8) shape.channels = std::min<int64_t>(shape.channels, 1024);
  if (random.Coin()) shape.positions = jax_fastops::RoundUp(shape.positions, 8);
  shape.arrays = 1 + static_cast<int>(random.Below(2));
  const int alignment = 1 << random.Below(5);
  const int64_t max_parts = random.Size(256);
  Limits limits = {.processors = static_cast<int>(random.Size(160)),
                   .blocks = static_cast<int>(random.Size(kMaxBlocks)),
                   .shared_per_block = (random.Coin() ? random.Coin() ? 226 : 162 : 99) << 10,
                   .shared_per_processor = 228 << 10,
                   .cooperative = random.Coin()};
  const int64_t clusters = random.Below(kMaxLogCluster + 1);
  for (int log = 0; log <= clusters; ++log) {
    for (int blocks = 1; blocks <= kMaxBlocks; ++blocks) {
      limits.resident[log][blocks - 1] = blocks * limits.processors >> log << log;
    }
  }
  const Plan plan = MakePlan(shape, alignment, max_parts, limits);
#define PLAN(condition)                                                                   \
  CHECK(condition, "%lld x %lld x %lld x %lld, last %d, %d bytes, %d arrays, aligned %d", \
        (long long)shape.samples, (long long)shape.groups, (long long)shape.channels,     \
        (long long)shape.positions, shape.last, shape.item, shape.arrays, alignment)
  PLAN(plan.sets >= 1 && plan.parts >= 1 && plan.passes >= 1);
  PLAN(int64_t{plan.sets} * plan.set_groups >= shape.groups);
  PLAN(int64_t{plan.sets - 1} * plan.set_groups < shape.groups);
  PLAN(plan.parts * plan.part_units >= plan.units &&
       (plan.parts - 1) * plan.part_units < plan.units);
  PLAN(plan.units * (shape.last ? 1 : plan.unit) == shape.positions);
  PLAN(plan.unit == 1 || alignment % (plan.unit * shape.item) == 0);
  // Units are whole words in the array, and in each set.
  PLAN((shape.last ? plan.channels : shape.positions) % plan.unit == 0);
  PLAN(!shape.last || plan.sets == 1 || plan.set_channels() % plan.unit == 0);
  PLAN(plan.width * plan.lanes <= kThreads && plan.width >= 1 && plan.lanes >= 1);
  PLAN(plan.passes * plan.width >= plan.slots());
  PLAN(plan.shared_bytes <= limits.shared_per_block);
  // Blocks that wait for each other run at once: they are a cluster, or all are resident.
  const int64_t blocks = CeilDiv(shape.samples * plan.sets * plan.parts, limits.processors);
  PLAN(plan.clusters
           ? plan.parts > 1 && plan.parts <= 1 << clusters && (plan.parts & (plan.parts - 1)) == 0
           : plan.parts == 1 ||
                 (limits.cooperative && plan.parts <= max_parts && blocks <= limits.blocks &&
                  blocks * (plan.shared_bytes + kBlockShared) <= limits.shared_per_processor));
  PLAN(plan.kept >= 0 && plan.kept_at % 16 == 0);
  PLAN(plan.row % 4 == 0 && plan.row >= plan.set_channels() && plan.row >= plan.set_groups);
}

}  // namespace

int main() {
  Random random(1);
  for (int i = 0; i < kShapes; ++i) CheckPlan(random);
}

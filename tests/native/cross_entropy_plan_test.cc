// Property test of the launch plans of cross entropy: every row has threads, as many as its words
// need, and the kernel that the plan names accepts the shape.
#include "cross_entropy/plan.h"

#include <cstdint>

#include "core/integer.h"
#include "property.h"

namespace jax_fastops {
namespace {

using enum CrossEntropyKernel;

#define CHECK_PLAN(condition)                                                           \
  CHECK(condition,                                                                      \
        "%lld rows of %lld elements, %d bytes, backward %d, %d SMs: kernel %d, %lld "   \
        "blocks, %d lanes, cluster %d",                                                 \
        (long long)shape.rows, (long long)shape.n, shape.itemsize, (int)shape.backward, \
        processors, (int)plan.kernel, (long long)plan.blocks, 1 << plan.log_lanes, plan.cluster)

void CheckPlan(const CrossEntropyShape& shape, int processors, int most_blocks) {
  const CrossEntropyPlan plan = PlanCrossEntropy(shape, processors, most_blocks);
  const int64_t words = CeilDiv(shape.n * shape.itemsize, 16);
  const bool power = (plan.cluster & (plan.cluster - 1)) == 0;
  CHECK_PLAN(plan.blocks >= 1 && plan.cluster >= 1 && plan.cluster <= most_blocks && power);
  CHECK_PLAN(plan.cluster == 1 || plan.kernel == kWide);
  CHECK_PLAN(plan.cluster == 1 || 4 * plan.blocks <= 3 * processors);
  CHECK_PLAN(plan.threads == (plan.kernel == kWide ? kCrossEntropyWide : kCrossEntropyThreads));
  if (plan.kernel == kLanes) {
    const int64_t per_block = kCrossEntropyThreads >> plan.log_lanes;
    CHECK_PLAN(plan.log_lanes >= 0 && plan.log_lanes <= 5);
    CHECK_PLAN(plan.blocks == CeilDiv(shape.rows, per_block));
    CHECK_PLAN(plan.log_lanes == 0 || int64_t{1} << (plan.log_lanes - 1) < words);  // none is idle
    // Up to four words for a lane, and one if there are few of them.
    const int64_t lanes = int64_t{1} << plan.log_lanes;
    CHECK_PLAN(lanes == 32 || kCrossEntropyTogether * lanes >= words);
    if (shape.rows * words < 512 * processors) CHECK_PLAN(lanes == 32 || lanes >= words);
  } else {
    CHECK_PLAN(shape.itemsize < 8 && shape.backward == (plan.kernel == kTiles));
    CHECK_PLAN(plan.blocks == shape.rows * plan.tiles * plan.cluster);
    CHECK_PLAN(plan.tiles * kCrossEntropyTile >= (plan.kernel == kTiles ? words : 1));
  }
  if (plan.kernel == kWide) CHECK_PLAN(shape.rows <= processors);
}

}  // namespace
}  // namespace jax_fastops

int main() {
  using namespace jax_fastops;
  Random random(1);
  for (int i = 0; i < kShapes; ++i) {
    CrossEntropyShape shape;
    shape.itemsize = 2 << random.Below(3);
    shape.rows = random.Size(random.Coin() ? 256 : int64_t{1} << 31);
    shape.n = random.Size(int64_t{1} << 30);
    shape.backward = random.Coin();
    CheckPlan(shape, static_cast<int>(random.Size(200)), 1 << random.Below(4));
  }
}

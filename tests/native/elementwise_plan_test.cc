// Every shape has a valid plan of the backward: every row is taken once, and limits are kept.
#include <algorithm>
#include <string>
#include <vector>

#include "core/integer.h"
#include "elementwise/broadcast.cc"  // the plan stands on it
#include "elementwise/plan.h"
#include "property.h"

using namespace jax_fastops;

namespace {

std::string Text(const BroadcastShape& shape) {
  std::string text;
  for (int d = 0; d < shape.rank; ++d) {
    text += (d == 0 ? "(" : ", ") + std::to_string(shape.size[d]);
    for (int a = 0; a < shape.arrays; ++a) text += shape.stride[a][d] == 0 ? '-' : '+';
  }
  return text + ")";
}

// A result and arrays that are broadcast along random dimensions, as after Collapse.
BroadcastShape RandomShape(Random& random, int arrays) {
  std::vector<int64_t> sizes(random.Below(5) + 1);
  int64_t most = int64_t{1} << random.Below(36);
  for (int64_t& size : sizes) {
    size = random.Size(most);
    most = std::max<int64_t>(most / size, 1);
  }
  std::vector<ArrayStrides> strides(arrays);
  for (ArrayStrides& array : strides) {
    std::vector<int64_t> own = sizes;
    for (int64_t& size : own) {
      if (random.Coin()) size = 1;
    }
    if (random.Below(4) == 0) own = sizes;
    BroadcastStrides(sizes, own, &array);
  }
  BroadcastShape shape;
  CHECK(Collapse(sizes, strides.data(), arrays, &shape), "rank %zu", sizes.size());
  return shape;
}

void CheckPlan(const BroadcastShape& shape, const GradientShape* gradients, int count,
               const BackwardLimits& limits, const BackwardPlan& plan) {
  const std::string text = Text(shape);
  const char* const name = text.c_str();
  // The dimensions are sorted into A and B.
  std::vector<int> dims(plan.dims, plan.dims + plan.rank);
  std::sort(dims.begin(), dims.end());
  int64_t lengths[2] = {1, 1};
  for (int i = 0; i < plan.rank; ++i) {
    CHECK(dims[i] == i, "%s", name);
    lengths[i < plan.rank_a ? 0 : 1] *= shape.size[plan.dims[i]];
  }
  CHECK(plan.rank == std::max(shape.rank - 1, 0), "%s", name);
  CHECK(plan.length_a == lengths[0] && plan.length_b == lengths[1], "%s", name);
  // A row is covered, wherever it begins in a unit.
  const int64_t wide = plan.strips * plan.segments * plan.lanes * limits.unit;
  const bool ragged = shape.inner() % limits.unit != 0;
  CHECK(wide >= shape.inner() + (ragged && shape.rank > 1 ? 1 : 0), "%s", name);
  CHECK(plan.lanes >= kBackwardRows && plan.threads % plan.lanes == 0, "%s", name);
  CHECK(plan.threads <= kBackwardThreads && plan.threads % 32 == 0, "%s", name);
  CHECK(plan.lanes % 32 == 0 || 32 % plan.lanes == 0, "%s", name);
  CHECK(plan.strips == 1 || plan.segments == 1, "%s", name);
  CHECK(!plan.over_a || plan.lanes <= 32, "%s", name);
  CHECK(plan.boxes_a >= 1 && plan.boxes_b >= 1 && plan.blocks() < int64_t{1} << 31, "%s", name);
  CHECK(plan.classes >= 1 && plan.classes <= std::min<int64_t>(limits.unit, plan.length_b), "%s",
        name);
  if (plan.crossed) {
    CHECK(plan.slots <= limits.slots && plan.slots * plan.groups() <= kBackwardTable, "%s", name);
    CHECK(plan.boxes_b * plan.slots * plan.groups() >= plan.length_b, "%s", name);
  }
  int64_t used = 0;
  for (int g = 0; g < count; ++g) {
    const SumPlan& sum = plan.sum[g];
    CHECK((sum.kind == SumKind::kNone) == !gradients[g].wanted, "%s", name);
    if (sum.kind == SumKind::kColumns) CHECK(plan.columns >> g & 1, "%s", name);
    if (sum.complete) continue;
    CHECK(sum.offset == used, "%s", name);  // partial sums do not overlap
    used += sum.parts * sum.plane;
    const FinishPlan finish = PlanFinish(shape, plan, sum, gradients[g].array);
    int64_t elements = 1;
    for (int d = 0; d < shape.rank; ++d) {
      if (shape.stride[gradients[g].array][d] != 0) elements *= shape.size[d];
    }
    CHECK(finish.elements == elements, "%s", name);
    CHECK(finish.elements * finish.terms == sum.parts * sum.plane, "%s", name);
    int64_t last = 0;
    for (int i = 0; i < finish.kept; ++i) last += (finish.kept_size[i] - 1) * finish.kept_stride[i];
    for (int i = 0; i < finish.added; ++i)
      last += (finish.added_size[i] - 1) * finish.added_stride[i];
    CHECK(last + 1 == sum.parts * sum.plane, "%s", name);
  }
  CHECK(used == plan.workspace && used <= limits.workspace, "%s", name);
}

}  // namespace

int main() {
  Random random(1);
  for (int i = 0; i < kShapes; ++i) {
    const int count = 1 + static_cast<int>(random.Below(3));
    const BroadcastShape shape = RandomShape(random, count);
    GradientShape gradients[kMaxSums];
    for (int g = 0; g < count; ++g) {
      gradients[g].wanted = random.Below(4) != 0;
      gradients[g].array = g;
      gradients[g].operand = random.Coin() ? g : -1;
    }
    BackwardLimits limits;
    const bool general = random.Below(4) == 0;
    limits.unit = general ? 1 : random.Coin() ? 4 : 8;
    limits.columns = general ? 1 : 2;
    limits.crossed = !general;
    limits.slots = 8;
    limits.workspace = CeilDiv(shape.elements(), 8);
    limits.processors = static_cast<int>(random.Below(160)) + 1;
    limits.blocks = random.Coin() ? 2 : 3;
    const BackwardPlan plan = PlanBackward(shape, gradients, count, limits);
    if (plan.valid) CheckPlan(shape, gradients, count, limits, plan);
    // The launcher's last resort.
    BackwardLimits last = limits;
    last.unit = last.columns = 1;
    last.crossed = false;
    for (int g = 0; g < count; ++g) {
      const BackwardPlan alone = PlanBackward(shape, gradients + g, 1, last);
      CHECK(alone.valid, "%s, gradient %d", Text(shape).c_str(), g);
      CheckPlan(shape, gradients + g, 1, last, alone);
    }
  }
}

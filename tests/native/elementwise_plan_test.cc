// Property test of the plan of an element-wise backward: every index of every dimension is taken
// once, the limits are kept, and a single sum always has a plan.
#include <algorithm>
#include <string>
#include <vector>

#include "core/broadcast.h"
#include "core/integer.h"
#include "elementwise/plan.h"
#include "property.h"

using namespace jax_fastops;
using namespace jax_fastops::cuda;

namespace {

std::string Text(const BroadcastShape& shape) {
  std::string text;
  for (int d = 0; d < shape.rank; ++d) {
    text += (d == 0 ? "(" : ", ") + std::to_string(shape.size[d]);
    for (int a = 0; a < shape.arrays; ++a) text += shape.stride[a][d] == 0 ? '-' : '+';
  }
  return text + ")";
}

// A result, and gradients that are summed along random dimensions, at least one each.
BroadcastShape RandomShape(Random& random, int gradients) {
  std::vector<int64_t> sizes(random.Below(5) + 1);
  int64_t most = int64_t{1} << (random.Below(36) + 1);
  for (int64_t& size : sizes) {
    size = random.Size(most);
    most = std::max<int64_t>(most / size, 1);
  }
  sizes[random.Below(sizes.size())] += 1;
  std::vector<ArrayStrides> strides(gradients);
  for (ArrayStrides& array : strides) {
    std::vector<int64_t> own = sizes;
    while (own == sizes) {
      for (int64_t& size : own) {
        if (random.Coin()) size = 1;
      }
    }
    BroadcastStrides(sizes, own, &array);
  }
  BroadcastShape shape;
  CHECK(Collapse(sizes, strides.data(), gradients, &shape), "rank %zu", sizes.size());
  return shape;
}

void CheckPlan(const BroadcastShape& shape, const int* arrays, int sums, const BoxLimits& limits,
               const BoxPlan& plan) {
  const std::string text = Text(shape);
  const char* const name = text.c_str();
  std::vector<int> dims(plan.dims_a, plan.dims_a + plan.rank_a);
  dims.insert(dims.end(), plan.dims_b, plan.dims_b + plan.rank_b);
  std::sort(dims.begin(), dims.end());
  CHECK(static_cast<int>(dims.size()) == std::max(shape.rank - 1, 0), "%s", name);
  for (size_t d = 0; d < dims.size(); ++d) CHECK(dims[d] == static_cast<int>(d), "%s", name);
  const auto length = [&](const int* of, int rank) {
    int64_t product = 1;
    for (int i = 0; i < rank; ++i) product *= shape.size[of[i]];
    return product;
  };
  CHECK(plan.length_a == length(plan.dims_a, plan.rank_a), "%s", name);
  CHECK(plan.length_b == length(plan.dims_b, plan.rank_b), "%s", name);

  // Boxes interleave.
  CHECK(CeilDiv(plan.length_a, plan.boxes_a) <= plan.box_a, "%s", name);
  CHECK(CeilDiv(plan.length_b, plan.boxes_b) <= plan.box_b, "%s", name);
  CHECK(plan.blocks() > 0 && plan.blocks() < int64_t{1} << 31, "%s", name);
  const int64_t chunk = int64_t{plan.lanes} * limits.unit * limits.units;
  CHECK(plan.boxes_inner * plan.ranges * plan.range * chunk >= shape.inner(), "%s", name);
  CHECK(plan.range >= 1 && plan.range <= limits.most_range, "%s", name);
  CHECK(32 % plan.lanes == 0 && kBoxThreads / plan.lanes % plan.ranges == 0, "%s", name);
  CHECK(int64_t{plan.box_a + plan.box_b} * limits.table_columns * 8 <= kTableBytes, "%s", name);
  CHECK(int64_t{plan.slot_elements} * limits.accumulator_bytes <= limits.slot_bytes, "%s", name);

  int64_t partial = 0, slots = 0;
  int columns = 0;
  for (int s = 0; s < sums; ++s) {
    const SumPlan& sum = plan.sum[s];
    const int64_t* const stride = shape.stride[arrays[s]];
    for (int i = 0; i < plan.rank_a; ++i)
      CHECK(sum.keeps_a == (stride[plan.dims_a[i]] != 0), "%s", name);
    for (int i = 0; i < plan.rank_b; ++i)
      CHECK(sum.keeps_b == (stride[plan.dims_b[i]] != 0), "%s", name);
    CHECK(sum.keeps_inner == (shape.InnerStride(arrays[s]) != 0), "%s", name);
    int64_t elements = 1;
    for (int d = 0; d < shape.rank; ++d) elements *= stride[d] == 0 ? 1 : shape.size[d];
    CHECK(sum.parts() % elements == 0, "%s", name);
    CHECK(sum.complete == (sum.parts() == elements), "%s", name);
    if (!sum.complete) partial += sum.parts();
    if (sum.in_slots()) {
      CHECK(!plan.groups_over_a, "%s", name);
      slots += plan.box_b * plan.ranges * (sum.keeps_inner ? chunk : 1);
    } else {
      columns += sum.keeps_inner;
    }
    // A kernel for chunks of several ranges has no columns.
    CHECK(plan.range == 1 || !sum.keeps_inner, "%s", name);
  }
  CHECK(partial <= limits.workspace, "%s", name);
  CHECK(slots <= plan.slot_elements && columns <= kMaxColumnSums, "%s", name);
}

}  // namespace

int main() {
  Random random(1);
  for (int i = 0; i < kShapes; ++i) {
    const int sums = 1 + static_cast<int>(random.Below(kMaxSums));
    const BroadcastShape shape = RandomShape(random, sums);
    BoxLimits limits;
    limits.element_bytes = 2 << random.Below(3);
    limits.accumulator_bytes = std::max(limits.element_bytes, 4);
    const bool aligned = shape.inner() * limits.element_bytes % 16 == 0 && random.Below(4) != 0;
    if (!aligned || limits.element_bytes == 8) limits.most_range = 1;
    limits.unit = limits.most_range > 1 ? 16 / limits.element_bytes : 1;
    limits.units = (limits.element_bytes == 8 ? 4 : 8) / limits.unit;
    limits.table_columns = 1 + 3 + sums;
    limits.slot_bytes = kMostSlotBytes;
    limits.workspace = CeilDiv(shape.elements(), 8);
    limits.processors = static_cast<int>(random.Below(160)) + 1;
    const int arrays[kMaxSums] = {0, 1, 2};
    const BoxPlan plan = PlanBoxes(shape, arrays, sums, limits);
    if (plan.valid) CheckPlan(shape, arrays, sums, limits, plan);
    // The launcher's last resort.
    for (int s = 0; s < sums; ++s) {
      const BoxPlan one = PlanBoxes(shape, arrays + s, 1, limits);
      CHECK(one.valid, "%s, gradient %d", Text(shape).c_str(), s);
      CheckPlan(shape, arrays + s, 1, limits, one);
    }
  }
}

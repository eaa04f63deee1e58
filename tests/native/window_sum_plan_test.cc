// Property test of the launch plans of window sums: every sum belongs to one thread, and the kernel
// that the plan names accepts the shape.
#include "window_sum/plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/integer.h"
#include "property.h"

namespace jax_fastops {
namespace {

using enum WindowSumKernel;

constexpr int64_t kInt = std::numeric_limits<int32_t>::max();

WindowSumCall RandomCall(Random& random, int64_t most) {
  WindowSumCall call;
  call.itemsize = 2 << random.Below(3);
  WindowSumSizes& s = call.sizes;
  s.outer = random.Size(most);
  s.n = random.Size(most);
  s.inner = random.Coin() ? 1 : random.Size(most);
  const int64_t radius = random.Below(20) == 0 ? 0 : random.Size(random.Coin() ? 64 : most);
  s.window = 2 * radius + 1;
  const int64_t pads[] = {0, radius, 2 * radius, random.Below(2 * radius + 1)};
  s.pad = pads[random.Below(4)];
  s.m = s.n + 2 * s.pad - 2 * radius;
  if (s.m <= 0) {
    s.pad = radius;
    s.m = s.n;
  }
  if (random.Coin()) s.m = random.Size(s.m);  // a piece of the sums
  call.x_shift =
      static_cast<int>(random.Coin() ? 0 : random.Below(16 / call.itemsize)) * call.itemsize;
  call.y_shift =
      static_cast<int>(random.Coin() ? 0 : random.Below(16 / call.itemsize)) * call.itemsize;
  call.workspace = s.window > kWindowSumLongWindow && s.n > kWindowSumShortAxis && random.Coin();
  call.processors = static_cast<int>(random.Size(200));
  const int shared[] = {48 << 10, 99 << 10, 163 << 10, 227 << 10};
  call.shared_per_block = shared[random.Below(4)];
  return call;
}

#define CHECK_CALL(condition)                                                                     \
  CHECK(                                                                                          \
      condition,                                                                                  \
      "outer %lld n %lld inner %lld window %lld pad %lld, %d bytes, shifts %d %d, workspace %d, " \
      "%d bytes of shared memory: kernel %d, units of %d",                                        \
      (long long)call.sizes.outer, (long long)call.sizes.n, (long long)call.sizes.inner,          \
      (long long)call.sizes.window, (long long)call.sizes.pad, call.itemsize, call.x_shift,       \
      call.y_shift, (int)call.workspace, call.shared_per_block, (int)plan.kernel, plan.unit)

void CheckWarps(const WindowSumCall& call, const WindowSumPlan& plan) {
  const WindowSumSizes& s = call.sizes;
  const WindowSumWarps& tiles = plan.warps;
  const int64_t size = 16 / call.itemsize, chunks = tiles.chunks.divisor;
  CHECK_CALL(s.inner == 1 && s.window <= kWindowSumLongWindow);
  CHECK_CALL(tiles.total == s.outer * chunks && tiles.total <= kInt - kWindowSumThreads);
  CHECK_CALL(plan.blocks * kWindowSumThreads / 32 * kWarpsUnits >= tiles.total);
  // A row of y may begin at any element of a unit, unless all of them are aligned.
  const bool whole = call.y_shift == 0 && (s.outer == 1 || s.m % size == 0);
  CHECK_CALL(chunks * 32 * size >= s.m + (whole ? 0 : size - 1));
  // A group is shorter than a window.
  const int64_t group = size << tiles.log_lanes;
  CHECK_CALL(tiles.log_lanes >= 0 && tiles.log_lanes <= 5);
  if (plan.kernel == kWarpsNear) {
    CHECK_CALL(s.window <= size + 1);
  } else {
    CHECK_CALL(group < s.window);
  }
  if (plan.kernel == kWarpsAligned) {
    for (int64_t row = 0; row < std::min<int64_t>(s.outer, 3); ++row) {
      const int64_t x = call.x_shift + (row * s.n - s.pad) * call.itemsize;
      const int64_t y = call.y_shift + row * s.m * call.itemsize;
      CHECK_CALL((x - y) % 16 == 0 && (s.window - 1) * call.itemsize % 16 == 0);
    }
  }
}

void CheckColumns(const WindowSumCall& call, const WindowSumPlan& plan) {
  const WindowSumSizes& s = call.sizes;
  const WindowSumColumns& tiles = plan.columns;
  const int64_t size = plan.unit / call.itemsize, width = int64_t{1} << tiles.log_width;
  const int64_t rows = (kWindowSumThreads >> tiles.log_width) * ColumnsRows(plan.unit);
  CHECK_CALL(s.inner > 1 && s.window <= kWindowSumLongWindow);
  CHECK_CALL(plan.unit == 16 || plan.unit == 4 || plan.unit == call.itemsize);
  CHECK_CALL((call.x_shift | call.y_shift | s.inner * call.itemsize) % plan.unit == 0);
  const int64_t strips = tiles.strips.divisor;  // they cover the row
  CHECK_CALL(strips * width * size >= s.inner);
  const int64_t segments = tiles.segments.divisor;
  CHECK_CALL(tiles.segment > 0 && segments * tiles.segment >= s.m);
  CHECK_CALL((segments - 1) * tiles.segment < s.m);
  CHECK_CALL(tiles.blocks == s.outer * strips * segments);
  CHECK_CALL(plan.blocks == std::min(tiles.blocks, kInt));
  // The ring holds a window before the step's rows; a group is shorter than a window and in a warp.
  CHECK_CALL(tiles.ring >= s.window - 1 + rows);
  CHECK_CALL(tiles.log_width + tiles.log_group <= 5);
  const int64_t group = ColumnsRows(plan.unit) << tiles.log_group;
  CHECK_CALL(group < s.window || tiles.log_group == 0);
  CHECK_CALL(plan.shared == tiles.ring * width * size * std::max(call.itemsize, 4));
  CHECK_CALL(plan.shared <= call.shared_per_block);
}

void CheckTree(const WindowSumCall& call, const WindowSumPlan& plan) {
  const WindowSumSizes& s = call.sizes;
  CHECK_CALL(s.window >= kTreeFan - 1);
  const int levels = plan.tree.levels;
  CHECK_CALL(plan.tree.count[0] == s.n && levels < kTreeLevels);
  int64_t nodes = 0;
  for (int level = 1; level <= levels; ++level) {
    CHECK_CALL(plan.tree.count[level] == CeilDiv(plan.tree.count[level - 1], kTreeFan));
    nodes += plan.tree.count[level];
  }
  CHECK_CALL(nodes <= CeilDiv(s.n, 8));
  CHECK_CALL(levels == 0 || plan.tree.count[levels] <= kTreeFan);
  CHECK_CALL((levels == 0) == !call.workspace);
}

void CheckPlan(const WindowSumCall& call) {
  const WindowSumPlan plan = PlanWindowSum(call);
  const WindowSumSizes& s = call.sizes;
  CHECK_CALL((plan.kernel == kCopy) == (s.window == 1));
  if (plan.kernel == kCopy) return;
  CHECK_CALL(plan.blocks > 0 && plan.blocks <= kInt);
  CHECK_CALL(call.itemsize < 8 || plan.kernel == kDirect || plan.kernel == kTree ||
             plan.kernel == kWarpsShifted);
  switch (plan.kernel) {
    case kDirect:
      CHECK_CALL(plan.unit == call.itemsize || plan.unit == 16);
      CHECK_CALL((call.x_shift | call.y_shift | s.inner * call.itemsize) % plan.unit == 0);
      CHECK_CALL(s.n <= 64 || s.window < kTreeFan);
      break;
    case kTree:
      CheckTree(call, plan);
      break;
    case kColumns:
      CheckColumns(call, plan);
      break;
    default:
      CheckWarps(call, plan);
  }
}

}  // namespace
}  // namespace jax_fastops

int main() {
  using namespace jax_fastops;
  Random random(1);
  for (int i = 0; i < kShapes; ++i) CheckPlan(RandomCall(random, i % 2 == 0 ? 1 << 17 : 3000));
}

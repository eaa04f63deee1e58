// Property test of batch norm's plans: every element belongs to one thread, the partial sums of
// every channel are found, and all limits are kept.
#include <algorithm>
#include <cstdint>
#include <set>

#include "batch_norm/plan.h"
#include "property.h"

using namespace jax_fastops;                    // NOLINT: a test
using namespace jax_fastops::cuda::batch_norm;  // NOLINT

namespace {

BatchNormShape shape;

#define EXPECT(condition)                                                                         \
  CHECK(condition, "groups %lld, outer %lld, channels %lld, inner %lld", (long long)shape.groups, \
        (long long)shape.outer, (long long)shape.channels, (long long)shape.inner)

// The thread that has an element of the group, found from the element.
void CheckOwner(const Geometry& g, int64_t element) {
  const int64_t unit_begin = element / kUnit * kUnit;
  const bool cut = unit_begin + kUnit > g.group_size;
  Place place = {0, 0, 0};
  int thread = 0;
  if (g.run_units > 0) {
    const int64_t run = element / g.inner, outer = run / g.channels;
    const int64_t unit = outer * g.run_units + element % g.inner / kUnit;
    place.tile = run % g.channels;
    place.part = static_cast<int32_t>(unit / kThreads % g.parts);
    thread = static_cast<int>(unit % kThreads);
  } else {
    const int64_t row = element / g.length, unit = element % g.length / kUnit;
    place.tile = unit >> g.log_width;
    place.part = static_cast<int32_t>((row >> g.log_lanes()) % g.parts);
    thread = static_cast<int>(unit & ((1 << g.log_width) - 1)) |
             static_cast<int>(row & ((1 << g.log_lanes()) - 1)) << g.log_width;
  }
  EXPECT(place.tile < g.tiles);
  const Share share = ShareOf(g, place, thread);
  if (cut) {
    EXPECT(share.cut == g.group_size % kUnit && g.group_size - share.cut == unit_begin);
    return;
  }
  bool found = false;
  if (g.run_units > 0) {
    const int64_t unit = element / g.inner / g.channels * g.run_units + element % g.inner / kUnit;
    const int64_t step = share.stride / kUnit, first = (share.first - share.position) / kUnit;
    const int k = static_cast<int>((unit - first) / step);
    found =
        (unit - first) % step == 0 && unit >= first && k < share.count &&
        share.first + k * share.stride + (first + k * step) / g.run_units * (g.length - g.inner) ==
            unit_begin;
  } else {
    const int64_t distance = unit_begin - share.first;
    found = distance >= 0 && distance % share.stride == 0 && distance / share.stride < share.count;
  }
  EXPECT(found);
}

// All units of a small geometry, counted.
void CheckCount(const Geometry& g) {
  int64_t units = 0, cuts = 0;
  for (int64_t block = 0; block < g.tiles * g.parts; ++block) {
    const Place place = PlaceOf(g, static_cast<uint32_t>(block));
    for (int thread = 0; thread < kThreads; ++thread) {
      const Share share = ShareOf(g, place, thread);
      units += share.count;
      cuts += share.cut > 0;
    }
  }
  EXPECT(units == g.group_size / kUnit && cuts == (g.group_size % kUnit > 0));
}

// The entries of an element's channel: each is another place of the workspace, and one of them is
// that of the element's tile.
void CheckEntries(const Finish& f, int64_t element) {
  const Geometry& g = f.geometry;
  const int64_t run = element / g.inner % (g.length / g.inner), channel = run % g.channels;
  const int64_t tile = g.run_units > 0 ? channel : element % g.length / g.tile_size();
  const TileRuns runs = RunsOf(g, tile);
  const int64_t slot = g.run_units > 0 ? 0 : (run - runs.first) % runs.period;
  EXPECT(slot < runs.slots && runs.slots <= g.slots);
  EXPECT(f.entries == static_cast<int64_t>(g.repeats) * f.tiles * g.parts);
  if (g.repeats * int64_t{f.tiles} > 100) return;
  std::set<int64_t> indices;
  for (int repeat = 0; repeat < g.repeats; ++repeat) {
    for (uint32_t nth = 0; nth < f.tiles; ++nth) {
      const int64_t index = IndexOf(g, channel, repeat, nth);
      if (index < 0) continue;
      EXPECT(index < g.tiles * g.slots && indices.insert(index).second);
    }
    EXPECT(IndexOf(g, channel, repeat, f.tiles) < 0 || g.inner == 1 || g.run_units > 0);
  }
  EXPECT(indices.count(tile * g.slots + slot) == 1);
}

void CheckGeometry(Random& random, const Finish& f) {
  const Geometry& g = f.geometry;
  EXPECT(g.parts > 0 && g.slots > 0 && g.tiles * g.parts * shape.groups < int64_t{1} << 31);
  EXPECT(g.slots << g.log_share <= kThreads || g.log_share == 0);
  if (g.tiles * g.parts <= 8) CheckCount(g);
  for (const int64_t element : {int64_t{0}, g.group_size - 1, random.Below(g.group_size)}) {
    CheckOwner(g, element);
    CheckEntries(f, element);
  }
}

void CheckSeparate(Random& random, int64_t pairs) {
  const BlockWish wish = {random.Size(600), 2 + static_cast<int>(random.Below(2)), pairs};
  Finish f;
  Geometry g;
  unsigned blocks = 0;
  EXPECT(MakeGeometry(shape, wish, &g) && MakeFinish(shape, g, &f, &blocks));
  EXPECT(g.run_units == 0 && g.plane() <= pairs);
  EXPECT(f.threads() >= 64 && f.threads() <= kMaxFinishThreads && f.log_width <= 6);
  EXPECT(blocks > 0 && (int64_t{f.group_blocks} << f.log_width) >= shape.channels);
  CheckGeometry(random, f);
}

void CheckResident(Random& random, int64_t workspace) {
  ResidentDevice device;
  device.processors = static_cast<int>(random.Size(200));
  device.shared_per_processor = static_cast<int>((64 + random.Below(200)) << 10);
  device.shared_per_block = std::min(device.shared_per_processor - 1024, 227 << 10);
  device.cooperative = random.Below(10) > 0;
  const int size = 2 << random.Below(3);
  const bool forward = random.Coin(), flag = random.Coin();
  ResidentPlan plan;
  if (!(forward ? PlanForward(shape, size, flag, device, workspace, &plan)
                : PlanGradient(shape, size, flag, device, workspace, &plan))) {
    return;
  }
  const Finish& f = plan.finish;
  const Geometry& g = f.geometry;
  const int sum = forward ? 8 : 4, words = kUnit * size * (forward ? 1 : 2) / 16;
  EXPECT(device.cooperative && size <= 4 && plan.blocks > 0);
  EXPECT(plan.blocks <= static_cast<unsigned>(device.processors) * kResidentBlocks);
  EXPECT(plan.blocks == g.tiles * g.parts * shape.groups);
  // The sums, and after them the counter.
  EXPECT(2 * sum * g.plane() + 4 <= 4 * workspace);
  EXPECT(plan.shared_bytes <= device.shared_per_block);
  EXPECT(kResidentBlocks * (plan.shared_bytes + 1024) <= device.shared_per_processor);
  EXPECT(plan.slots * words >= kRingAhead * kRingStep);
  EXPECT(plan.shared_bytes >= FoldBytes(sum) + plan.slots * words * 16 * kThreads);
  EXPECT(plan.kept > 0 && plan.kept <= 1 && plan.spread > 0 && plan.spread <= 1);
  if (plan.own) {
    EXPECT(int64_t{g.slots} * f.entries <= kMaxOwnEntries);
  } else {
    EXPECT(f.threads() == kThreads && f.log_width <= kMinLogWidth);
    EXPECT(plan.finish_blocks > 0 && plan.finish_blocks <= plan.blocks);
    EXPECT((int64_t{f.group_blocks} << f.log_width) >= shape.channels);
  }
  EXPECT(!plan.plain || g.tile_size() == kThreads);
  CheckGeometry(random, f);
}

}  // namespace

int main() {
  Random random(1);
  for (int i = 0; i < kShapes; ++i) {
    shape.inner = random.Coin() ? 1 : random.Size(1 << 20);
    if (random.Below(4) == 0) shape.inner = (shape.inner + 7) / 8 * 8;
    shape.channels = random.Size(random.Coin() ? 1 << 14 : 64);
    shape.groups = random.Below(4) > 0 ? 1 : random.Size(64);
    shape.outer = random.Size((int64_t{1} << 36) / shape.inner / shape.channels);
    if (random.Coin()) {  // 2^18 to 2^28 elements, which the cooperative kernels take
      const int64_t row = shape.inner * shape.channels * shape.groups;
      shape.outer = ((int64_t{1} << (18 + random.Below(10))) + random.Below(1 << 18)) / row + 1;
    }
    const int64_t workspace =
        BatchNormWorkspace(shape) + (random.Coin() ? 0 : random.Size(3) << 18);
    CheckSeparate(random, workspace / (random.Coin() ? 4 : 2));
    CheckResident(random, workspace);
  }
}

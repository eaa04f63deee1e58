#include "window_sum/plan.h"

#include <algorithm>
#include <limits>

#include "core/integer.h"

namespace jax_fastops {
namespace {

constexpr int64_t kMaxGrid = std::numeric_limits<int32_t>::max();
constexpr int64_t kDirectAxis = 64;       // axes up to this length are summed directly
constexpr int kSharedPerBlock = 1 << 10;  // shared memory that the device reserves for each block
constexpr int kSector = 32;               // bytes

// The general kernels accept any shape. `aligned`: rows consist of aligned units.
WindowSumPlan PlanDirect(const WindowSumCall& call, bool aligned) {
  const WindowSumSizes& s = call.sizes;
  const bool wide = aligned && call.itemsize < 8;  // float64 has one kernel
  WindowSumPlan plan;
  plan.kernel = WindowSumKernel::kDirect;
  plan.unit = wide ? 16 : call.itemsize;
  plan.blocks = WindowSumBlocks(s.outer * s.m * (wide ? s.inner * call.itemsize / 16 : s.inner));
  return plan;
}

WindowSumPlan PlanGeneral(const WindowSumCall& call, bool aligned) {
  const WindowSumSizes& s = call.sizes;
  if (s.window < kTreeFan) return PlanDirect(call, aligned);
  WindowSumPlan plan;
  plan.kernel = WindowSumKernel::kTree;
  plan.blocks = WindowSumBlocks(s.outer * CeilDiv(s.m, kTreeFan) * s.inner);
  WindowSumTree& tree = plan.tree;
  tree.count[0] = s.n;
  // All levels have about n / 15 nodes, less than n / 8 if n > kWindowSumShortAxis.
  if (!call.workspace || s.n <= kWindowSumShortAxis) return plan;
  for (; tree.count[tree.levels] > kTreeFan; ++tree.levels) {
    tree.count[tree.levels + 1] = CeilDiv(tree.count[tree.levels], kTreeFan);
  }
  return plan;
}

// Sums along the last axis.
WindowSumPlan PlanWarps(const WindowSumCall& call) {
  const WindowSumSizes& s = call.sizes;
  const int64_t size = 16 / call.itemsize;
  // A row of y may begin and end within a unit.
  const bool whole = call.y_shift == 0 && s.m * call.itemsize % 16 == 0;
  const int64_t chunks = CeilDiv(s.m + (whole ? 0 : size - 1), 32 * size);
  if (s.n + 2 * s.window >= kWarpsLongest || s.outer > (kMaxGrid - kWindowSumThreads) / chunks) {
    return PlanGeneral(call, false);
  }
  WindowSumPlan plan;
  WindowSumWarps& tiles = plan.warps;
  while (tiles.log_lanes < 5 && size << (tiles.log_lanes + 1) < s.window) ++tiles.log_lanes;
  tiles.chunks = FastDivisor(static_cast<uint32_t>(chunks));
  tiles.total = static_cast<uint32_t>(s.outer * chunks);
  plan.blocks = CeilDiv(tiles.total, kWindowSumThreads / 32 * kWarpsUnits);
  const int64_t distance = call.x_shift - call.y_shift - s.pad * call.itemsize;
  const bool aligned = distance % 16 == 0 &&
                       (s.outer == 1 || (s.n - s.m) * call.itemsize % 16 == 0) &&
                       (s.window - 1) % size == 0;
  const bool general = call.itemsize == 8;  // float64 has one kernel
  plan.kernel = general                ? WindowSumKernel::kWarpsShifted
                : s.window <= size + 1 ? WindowSumKernel::kWarpsNear
                : aligned              ? WindowSumKernel::kWarpsAligned
                                       : WindowSumKernel::kWarpsShifted;
  return plan;
}

// Sums along another axis, by units of `bytes`. Sets kCopy if windows do not fit on the chip.
WindowSumPlan PlanColumns(const WindowSumCall& call, int bytes) {
  const WindowSumSizes& s = call.sizes;
  const int64_t size = bytes / call.itemsize, m = s.m, window = s.window;
  const int64_t compute = std::max(call.itemsize, 4);
  const int64_t units = s.inner / size;
  const int rows = ColumnsRows(bytes);
  WindowSumPlan plan;
  int log_width = bytes == 16 ? 3 : 4;
  const auto step = [&] { return int64_t{kWindowSumThreads >> log_width} * rows; };
  const auto shared = [&] { return (window - 1 + step()) * (size << log_width) * compute; };
  // As wide as fits twice on an SM. If only one block fits, it narrows down to a sector of memory.
  const int of_two = call.shared_per_block / 2 - kSharedPerBlock;
  while (log_width > 0 &&
         shared() > (bytes << log_width > kSector ? of_two : call.shared_per_block)) {
    --log_width;
  }
  while (log_width > 0 && int64_t{1} << (log_width - 1) >= units) --log_width;
  if (shared() > call.shared_per_block) return plan;

  plan.kernel = WindowSumKernel::kColumns;
  plan.unit = bytes;
  plan.shared = shared();
  WindowSumColumns& tiles = plan.columns;
  tiles.log_width = log_width;
  while (log_width + tiles.log_group < 5 && rows << (tiles.log_group + 1) < window) {
    ++tiles.log_group;
  }
  tiles.ring = static_cast<int>(window - 1 + step());

  // A segment reads a window before its first sum, but too few blocks leave SMs idle.
  const int64_t strips = CeilDiv(units, int64_t{1} << log_width);
  const int64_t lines = s.outer * strips;
  const int64_t by_shared = call.shared_per_block / (plan.shared + kSharedPerBlock);
  const int64_t resident = call.processors * std::min<int64_t>(ColumnsBlocks(bytes, call.itemsize),
                                                               std::max<int64_t>(1, by_shared));
  int64_t best = 1;
  double least = std::numeric_limits<double>::infinity();
  const int64_t most = std::min<int64_t>(256, CeilDiv(m, step()));
  for (int64_t segments = 1; segments <= most; ++segments) {
    const double waves = static_cast<double>(CeilDiv(lines * segments, resident));
    const double cost = waves * static_cast<double>(CeilDiv(m, segments) + window - 1 + step() / 2);
    if (cost < least) {
      least = cost;
      best = segments;
    }
  }
  tiles.segment = CeilDiv(m, best);
  const int64_t segments = CeilDiv(m, tiles.segment);
  tiles.strips = FastDivisor64(static_cast<uint64_t>(strips));
  tiles.segments = FastDivisor64(static_cast<uint64_t>(segments));
  tiles.blocks = lines * segments;
  plan.blocks = std::min(tiles.blocks, kMaxGrid);
  return plan;
}

}  // namespace

int64_t WindowSumBlocks(int64_t items) {
  return std::min(CeilDiv(items, kWindowSumThreads), kMaxGrid);
}

WindowSumPlan PlanWindowSum(const WindowSumCall& call) {
  const WindowSumSizes& s = call.sizes;
  if (s.window == 1) return {};
  // The widest unit of inner elements to which all addresses are aligned.
  const int64_t addresses = call.x_shift | call.y_shift | s.inner * call.itemsize;
  const bool aligned = addresses % 16 == 0;
  if (s.n <= kDirectAxis) return PlanDirect(call, aligned);
  if (s.window > kWindowSumLongWindow) return PlanGeneral(call, aligned);
  if (s.inner == 1) return PlanWarps(call);
  if (call.itemsize == 8) return PlanGeneral(call, aligned);
  const int unit = aligned ? 16 : addresses % 4 == 0 ? 4 : call.itemsize;
  const WindowSumPlan plan = PlanColumns(call, unit);
  return plan.kernel == WindowSumKernel::kCopy ? PlanGeneral(call, aligned) : plan;
}

}  // namespace jax_fastops

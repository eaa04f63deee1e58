#include "core/integer.h"
#include "cross_entropy/plan.h"

namespace jax_fastops {
namespace {

constexpr int64_t kLongRow = 16 << 10;  // bytes from which a row has blocks of its own
constexpr int64_t kFewRow = 1 << 10;    // likewise, if there are at most kFew rows for each SM
constexpr int64_t kFew = 4;
constexpr int64_t kMany = 512;  // words for each SM from which a lane has several

}  // namespace

CrossEntropyPlan PlanCrossEntropy(const CrossEntropyShape& shape, int processors, int most_blocks) {
  using enum CrossEntropyKernel;
  const int64_t rows = shape.rows, row_bytes = shape.n * shape.itemsize;
  const int64_t words = CeilDiv(row_bytes, 16);
  const bool few = rows <= kFew * processors && row_bytes >= kFewRow;
  CrossEntropyPlan plan;
  plan.blocks = rows;
  if (shape.itemsize == 8 || (row_bytes < kLongRow && !few)) {
    // Several words for a lane, if that leaves enough threads. On one H100, the forward of (234186,
    // 115) in float32 takes 57 us in place of 146. The stores of a backward are then less
    // coalesced: a step of (218124, 16) takes 28 us, and 21 with two words.
    constexpr int64_t kTogether = kCrossEntropyTogether;
    const bool many = rows * words >= kMany * processors;
    const int64_t each = !many ? 1 : shape.backward && words <= 2 * kTogether ? 2 : kTogether;
    while (plan.log_lanes < 5 && each << plan.log_lanes < words) ++plan.log_lanes;
    plan.blocks = CeilDiv(rows, kCrossEntropyThreads >> plan.log_lanes);
  } else if (shape.backward) {
    plan.kernel = kTiles;
    plan.tiles = CeilDiv(words, kCrossEntropyTile);
    plan.blocks *= plan.tiles;
  } else if (row_bytes < kLongRow || rows > processors) {
    plan.kernel = kBlock;
  } else {
    plan.kernel = kWide;
    plan.threads = kCrossEntropyWide;
    const bool cut = words > kCrossEntropyTogether * kCrossEntropyWide;
    // At most three quarters of the SMs, because a cluster's SMs are in one part of the device: one
    // H100 takes 12 us for (16, 83888) in bfloat16 with 8 blocks, and 8 us with 4.
    while (cut && 2 * plan.cluster <= most_blocks && words > 2 * plan.cluster * kCrossEntropyWide &&
           8 * plan.cluster * rows <= 3 * processors) {
      plan.cluster *= 2;
    }
    plan.blocks *= plan.cluster;
  }
  return plan;
}

}  // namespace jax_fastops

// The numbers are of sweeps on one H100 (docs/dev/log/cross_entropy.md).
#include "core/plan_rows.h"

#include <algorithm>

#include "core/integer.h"

namespace jax_fastops {
namespace {

// Short rows are no whole number of words, and have up to this many bytes.
constexpr int64_t kShortRow = 100;
constexpr int64_t kShortReduced = 64;     // of 16-bit elements; others are faster in registers
constexpr int64_t kShortBlock = 8 << 10;  // bytes of the rows of a block

// Up to this many rows for each SM, more threads share a row than its length asks for.
constexpr int64_t kFew = 4;
// From this many words for each SM on, a lane of a reduction takes two times kRowWords: a reduction
// has a price for each lane.
constexpr int64_t kMany = 4096;

// Bytes of the longest row for the kernel of short ones: for bfloat16 rows of 197 elements, those
// in registers take 15% less forward and 13% less backward.
constexpr int64_t kShortHeldRow = 256;

void PlanShort(const HeldShape& shape, const HeldLimits& limits, HeldPlan* plan) {
  plan->holder = RowHolder::kShort;
  plan->threads = kShortHeldThreads;
  plan->log_lanes = CeilLog2(CeilDiv(shape.n, kShortHeldElements));
  // Small arrays use more lanes than are needed to hold a row, so that all SMs have work.
  while (plan->log_lanes < 5 && int64_t{1} << plan->log_lanes < shape.n &&
         shape.rows << plan->log_lanes < int64_t{256} * limits.processors) {
    ++plan->log_lanes;
  }
  const int groups = kShortHeldThreads >> plan->log_lanes;
  // Many blocks fit on an SM: some load while others compute or store.
  const int64_t most = std::max<int64_t>(1, kShortBlock / (groups * shape.n * shape.itemsize));
  const int64_t enough = CeilDiv(shape.rows, int64_t{8} * limits.processors * groups);
  plan->rows_of_block = static_cast<int>(groups * std::min(most, enough));
  plan->words_of_block =
      static_cast<int>(CeilDiv(plan->rows_of_block * shape.n * shape.itemsize, 16) + 1);
  plan->shared_bytes = int64_t{plan->words_of_block} * 16 * shape.inputs;
  plan->blocks = CeilDiv(shape.rows, plan->rows_of_block);
}

void PlanRegisters(const HeldShape& shape, int64_t words, const HeldLimits& limits,
                   HeldPlan* plan) {
  plan->holder = RowHolder::kRegisters;
  // Small arrays take as many lanes as they can, because the work of a lane is latency. In others,
  // a lane has four words, which are loaded at once, but two adjacent lanes share a sector.
  const bool small = shape.rows * words < int64_t{512} * limits.processors;
  const int64_t one = shape.registers_only ? 0 : small ? kMaxHeldThreads : 2;
  const int64_t two = small ? 2 * kMaxHeldThreads : 4;
  plan->words = plan->edges ? kRowWords : words <= one ? 1 : words <= two ? 2 : kRowWords;
  plan->log_lanes = CeilLog2(CeilDiv(words, plan->words));
  if (plan->edges) {  // a lane for each
    const int64_t edges = std::min<int64_t>(shape.n, 2 * (16 / shape.itemsize - 1));
    plan->log_lanes = std::max(plan->log_lanes, CeilLog2(edges));
  }
  plan->threads = std::max(128, 1 << plan->log_lanes);
  if (plan->log_lanes > 5) plan->threads = 1 << plan->log_lanes;
  plan->blocks = CeilDiv(shape.rows, plan->threads >> plan->log_lanes);
}

// Takes the smallest cluster that leaves room for a second one on the same SMs. Returns false if no
// cluster holds a row.
bool PlanShared(const HeldShape& shape, int64_t words, const HeldLimits& limits, HeldPlan* plan) {
  constexpr int kHalf = 108 << 10;
  for (int log_cluster = 0; log_cluster <= 5; ++log_cluster) {
    const bool large = log_cluster == 5;  // the largest cluster again, with larger blocks
    const int cluster = large ? kMaxHeldCluster : 1 << log_cluster;
    const int64_t bytes = CeilDiv(words, cluster) * 16 * shape.inputs;
    const int most = std::min(large ? kMaxSharedBytes : kHalf, limits.shared_bytes);
    if (cluster > limits.max_cluster || bytes > most) continue;
    plan->holder = RowHolder::kShared;
    plan->threads = large ? kMaxSharedThreads : 256;
    plan->log_lanes = CeilLog2(plan->threads);
    plan->blocks_of_row = cluster;
    plan->words_of_block = static_cast<int>(CeilDiv(words, cluster));
    plan->blocks = shape.rows * cluster;
    plan->shared_bytes = bytes;
    return true;
  }
  return false;
}

// Blocks share a row if there are few rows, and if there is room for the sums of each.
void PlanStreamed(const HeldShape& shape, int64_t words, const HeldLimits& limits, HeldPlan* plan) {
  plan->holder = RowHolder::kStreamed;
  plan->threads = kStreamedThreads;
  plan->log_lanes = CeilLog2(kStreamedThreads);
  const int64_t chunks = CeilDiv(words, kStreamedThreads * kRowWords);
  const int64_t wanted = CeilDiv(int64_t{8} * limits.processors, shape.rows);
  const int64_t shared_by = std::min({wanted, shape.room, chunks});
  plan->one_launch = shared_by <= limits.max_cluster;
  plan->blocks_of_row = static_cast<int>(plan->one_launch ? limits.max_cluster : shared_by);
  plan->blocks = shape.rows * plan->blocks_of_row;
}

}  // namespace

RowsPlan PlanRows(const RowsShape& shape, int processors, int max_cluster) {
  const int64_t rows = shape.rows, row_bytes = shape.n * shape.itemsize;
  const int64_t words = std::max<int64_t>(1, CeilDiv(row_bytes, 16));
  const bool few = rows <= kFew * processors;
  RowsPlan plan;
  const bool may_be_short = MayBeShort(shape.reduces, shape.itemsize) && row_bytes % 16 != 0;
  if (may_be_short && row_bytes <= (shape.reduces ? kShortReduced : kShortRow)) {
    plan.is_short = true;
    plan.threads = kShortRowThreads;
    plan.rows_of_block =
        static_cast<int>(std::min<int64_t>(kShortBlock / row_bytes, kShortRowThreads));
    while (plan.rows_of_block << (plan.log_lanes + 1) <= kShortRowThreads &&
           int64_t{1} << plan.log_lanes < shape.n) {
      ++plan.log_lanes;
    }
    plan.blocks = CeilDiv(rows, plan.rows_of_block);
    return plan;
  }
  // A row has a block, or several, from this many words on.
  const int64_t long_row = few ? 128 : shape.reduces ? 1024 : 512;
  if (words < long_row) {
    const int64_t each = shape.reduces ? (rows * words < kMany * processors ? 1 : 2) * kRowWords
                         : words <= (row_bytes % 16 == 0 ? 1 : 2) * kRowWords ? kRowWords / 2
                                                                              : kRowWords;
    plan.log_lanes = std::min(5, CeilLog2(CeilDiv(words, each)));
    plan.blocks = CeilDiv(rows, plan.threads >> plan.log_lanes);
    return plan;
  }
  if (!shape.reduces) {
    const int64_t chunk = plan.threads * kRowWords;
    const int64_t chunks = rows * CeilDiv(words, 2 * chunk) < kFew * processors ? 1 : 2;
    plan.blocks_of_row = static_cast<int>(CeilDiv(words, chunks * chunk));
  } else {
    const bool cut = few && words >= kRowWords * kMaxRowThreads;
    while (cut && 2 * plan.blocks_of_row <= max_cluster &&
           2 * plan.blocks_of_row * rows <= processors) {
      plan.blocks_of_row *= 2;
    }
    const int64_t each = few ? 7 : 16;  // words of a lane, at least
    const int most = few ? kMaxRowThreads : kMaxRowThreads / 2;
    while (2 * plan.threads <= most && 2 * plan.threads * plan.blocks_of_row * each <= words) {
      plan.threads *= 2;
    }
  }
  plan.log_lanes = CeilLog2(plan.threads);
  plan.blocks = rows * plan.blocks_of_row;
  return plan;
}

HeldPlan PlanHeldRows(const HeldShape& shape, const HeldLimits& limits) {
  HeldPlan plan;
  if (shape.n > kMaxHeldRow) return plan;
  plan.edges = !shape.aligned;
  const int64_t words = shape.n * shape.itemsize / 16;
  if (plan.edges && shape.n * shape.itemsize <= kShortHeldRow && !shape.registers_only) {
    PlanShort(shape, limits, &plan);
  } else if (shape.alike && words <= kMaxHeldThreads * kRowWords) {
    PlanRegisters(shape, words, limits, &plan);
  } else if (shape.alike && !shape.registers_only && !PlanShared(shape, words, limits, &plan)) {
    PlanStreamed(shape, words, limits, &plan);
  }
  return plan;
}

}  // namespace jax_fastops

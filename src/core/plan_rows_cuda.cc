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

int LogOf(int64_t n) {  // ceil(log2(n))
  int log = 0;
  while (int64_t{1} << log < n) ++log;
  return log;
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
    plan.log_lanes = std::min(5, LogOf(CeilDiv(words, each)));
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
  plan.log_lanes = LogOf(plan.threads);
  plan.blocks = rows * plan.blocks_of_row;
  return plan;
}

}  // namespace jax_fastops

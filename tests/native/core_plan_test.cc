// Property tests of the core's plans. Kernels over rows: every row has lanes, the lanes of a row
// are those that its kernel accepts, and no lane is idle that the plan could have left out. Rows
// that are held: their holder has room for them. Partial
// sums: a block has threads, and room for the sums of its warps.
#include "core/plan_rows.h"

#include <algorithm>
#include <cstdint>

#include "core/integer.h"
#include "core/plan_sums.h"
#include "property.h"

namespace jax_fastops {
namespace {

#define CHECK_PLAN(condition)                                                                      \
  CHECK(condition,                                                                                 \
        "%lld rows of %lld elements, %d bytes, reduces %d, %d SMs, cluster %d: short %d, %d "      \
        "lanes, %d threads, %d blocks of a row, %d rows of a block, %lld blocks",                  \
        (long long)shape.rows, (long long)shape.n, shape.itemsize, (int)shape.reduces, processors, \
        max_cluster, (int)plan.is_short, 1 << plan.log_lanes, plan.threads, plan.blocks_of_row,    \
        plan.rows_of_block, (long long)plan.blocks)

void CheckPlan(const RowsShape& shape, int processors, int max_cluster) {
  const RowsPlan plan = PlanRows(shape, processors, max_cluster);
  const int64_t bytes = shape.n * shape.itemsize, words = CeilDiv(bytes, 16);
  const int64_t lanes = int64_t{1} << plan.log_lanes;
  CHECK_PLAN(plan.log_lanes >= 0 && plan.blocks >= 1 && plan.blocks_of_row >= 1);
  CHECK_PLAN(plan.threads >= 32 && plan.threads <= kMaxRowThreads);
  CHECK_PLAN((plan.threads & (plan.threads - 1)) == 0);
  CHECK_PLAN(lanes <= 32 || lanes == plan.threads);
  if (plan.is_short) {
    CHECK_PLAN(lanes <= 32 && plan.threads == kShortRowThreads && plan.blocks_of_row == 1);
    CHECK_PLAN(MayBeShort(shape.reduces, shape.itemsize));
    CHECK_PLAN(bytes % 16 != 0 && lanes < 2 * shape.n);
    CHECK_PLAN(plan.rows_of_block >= 1 && plan.rows_of_block * lanes <= kShortRowThreads);
    CHECK_PLAN(plan.rows_of_block * bytes + 32 <= 48 << 10);  // shared memory
    CHECK_PLAN(plan.blocks == CeilDiv(shape.rows, plan.rows_of_block));
    return;
  }
  if (lanes <= 32) {
    CHECK_PLAN(plan.blocks_of_row == 1 && lanes < 2 * words);
    CHECK_PLAN(plan.blocks == CeilDiv(shape.rows, plan.threads / lanes));
    CHECK_PLAN(lanes == 32 || words <= lanes * 2 * kRowWords);
    return;
  }
  CHECK_PLAN(plan.blocks == shape.rows * plan.blocks_of_row && lanes <= words);
  if (shape.reduces) {
    CHECK_PLAN(plan.blocks_of_row <= max_cluster);
    CHECK_PLAN(plan.blocks_of_row == 1 || plan.blocks <= processors);
  } else {
    // No block is without a chunk, and none has more than two.
    CHECK_PLAN((plan.blocks_of_row - 1) * lanes * kRowWords < words);
    CHECK_PLAN(plan.blocks_of_row * lanes * kRowWords * 2 >= words);
  }
}

#define CHECK_HELD(condition)                                                                      \
  CHECK(                                                                                           \
      condition,                                                                                   \
      "%lld rows of %lld elements, %d bytes, %d inputs, alike %d, aligned %d, registers %d, room " \
      "%lld, %d SMs: holder %d, %d words, %d lanes, %d threads, %d blocks of a row, %d rows of a " \
      "block, %lld blocks, %lld bytes",                                                            \
      (long long)shape.rows, (long long)shape.n, shape.itemsize, shape.inputs, (int)shape.alike,   \
      (int)shape.aligned, (int)shape.registers_only, (long long)shape.room, limits.processors,     \
      (int)plan.holder, plan.words, 1 << plan.log_lanes, plan.threads, plan.blocks_of_row,         \
      plan.rows_of_block, (long long)plan.blocks, (long long)plan.shared_bytes)

void CheckHeld(const HeldShape& shape, const HeldLimits& limits, int64_t (&uses)[5]) {
  const HeldPlan plan = PlanHeldRows(shape, limits);
  ++uses[static_cast<int>(plan.holder)];
  const int64_t bytes = shape.n * shape.itemsize, words = bytes / 16;
  const int64_t lanes = int64_t{1} << plan.log_lanes;
  if (plan.holder == RowHolder::kNone) {
    CHECK_HELD(!shape.alike || shape.registers_only);
    CHECK_HELD(!shape.alike || words > kMaxHeldThreads * kRowWords);
    return;
  }
  CHECK_HELD(plan.threads % 32 == 0 && (plan.threads & (plan.threads - 1)) == 0);
  CHECK_HELD(plan.shared_bytes <= limits.shared_bytes && plan.edges == !shape.aligned);
  CHECK_HELD(plan.blocks >= 1 && plan.blocks_of_row >= 1);
  if (plan.holder == RowHolder::kShort) {
    CHECK_HELD(!shape.registers_only && plan.threads == kShortHeldThreads && lanes <= 32);
    CHECK_HELD(lanes * kShortHeldElements >= shape.n && lanes < 2 * shape.n);
    const int64_t groups = plan.threads / lanes, rows = plan.rows_of_block;
    CHECK_HELD(rows >= groups && rows % groups == 0);
    // The words that the rows of a block may overlap.
    CHECK_HELD(plan.words_of_block * 16 >= rows * bytes + 16 - shape.itemsize);
    CHECK_HELD(plan.shared_bytes == int64_t{plan.words_of_block} * 16 * shape.inputs);
    CHECK_HELD(plan.shared_bytes <= 48 << 10);
    CHECK_HELD(plan.blocks * rows >= shape.rows && (plan.blocks - 1) * rows < shape.rows);
    return;
  }
  CHECK_HELD(shape.alike && (lanes <= 32 || lanes == plan.threads));
  if (plan.holder == RowHolder::kRegisters) {
    const int64_t rows = plan.threads / lanes;
    CHECK_HELD(plan.threads <= kMaxHeldThreads && lanes * plan.words >= words);
    CHECK_HELD(plan.words == kRowWords ||
               (!plan.edges && plan.words >= (shape.registers_only + 1)));
    CHECK_HELD(!plan.edges || lanes >= std::min<int64_t>(shape.n, 2 * (16 / shape.itemsize - 1)));
    CHECK_HELD(plan.blocks * rows >= shape.rows && (plan.blocks - 1) * rows < shape.rows);
    return;
  }
  CHECK_HELD(!shape.registers_only && lanes == plan.threads);
  CHECK_HELD(plan.blocks == shape.rows * plan.blocks_of_row);
  if (plan.holder == RowHolder::kShared) {
    CHECK_HELD(plan.threads <= kMaxSharedThreads && plan.blocks_of_row <= limits.max_cluster);
    CHECK_HELD(int64_t{plan.words_of_block} * plan.blocks_of_row >= words);
    CHECK_HELD(plan.shared_bytes == int64_t{plan.words_of_block} * 16 * shape.inputs);
    return;
  }
  CHECK_HELD(plan.holder == RowHolder::kStreamed && plan.threads == kStreamedThreads);
  if (plan.one_launch) {
    CHECK_HELD(plan.blocks_of_row <= limits.max_cluster);
    return;
  }
  CHECK_HELD(plan.blocks_of_row <= shape.room);
  // Each block has a chunk.
  CHECK_HELD((plan.blocks_of_row - 1) * int64_t{kStreamedThreads} * kRowWords < words);
}

#define CHECK_SUMS(condition)                                                     \
  CHECK(condition, "%lld results of %lld terms: width 2^%d, share 2^%d, wide %d", \
        (long long)results, (long long)terms, plan.log_width, plan.log_share, widens)

void CheckSums(int64_t results, int64_t terms, bool widens) {
  SumsPlan plan = PlanSums(results, terms);
  if (widens) Widen(&plan, kMaxLogSumsThreads);
  const int64_t width = int64_t{1} << plan.log_width, share = int64_t{1} << plan.log_share;
  const int64_t threads = width * share;
  CHECK_SUMS(plan.results == results && plan.terms == terms);
  CHECK_SUMS(threads >= 64 && threads <= kMaxSumsThreads && threads == 1 << plan.log_threads());
  CHECK_SUMS(plan.blocks() * width >= results && (plan.blocks() - 1) * width < results);
  CHECK_SUMS(share == 1 || width <= 32);
  // The kernel's shared memory, where it is used.
  CHECK_SUMS(share == 1 || threads / 32 * (width + 1) <= kMaxSumsThreads / 32 * 9);
  if (widens) return;
  CHECK_SUMS(share == 1 || share < terms);  // each thread has a term
  CHECK_SUMS(threads <= 256 || results * share <= 1 << 20);
}

}  // namespace
}  // namespace jax_fastops

int main() {
  using namespace jax_fastops;
  Random random(1);
  for (int i = 0; i < kShapes; ++i) {
    RowsShape shape;
    shape.itemsize = 2 << random.Below(3);
    shape.rows = random.Size(random.Coin() ? 256 : int64_t{1} << 31);
    shape.n = random.Size(int64_t{1} << 30);
    shape.reduces = random.Coin();
    CheckPlan(shape, static_cast<int>(random.Size(200)), 1 << random.Below(4));
  }
  int64_t uses[5] = {};
  for (int i = 0; i < kShapes; ++i) {
    HeldShape shape;
    shape.itemsize = 2 << random.Below(2);
    shape.rows = random.Size(random.Coin() ? 256 : int64_t{1} << 31);
    shape.n = random.Size(int64_t{1} << 31);
    shape.n = std::min(shape.n, kMaxHeldRow);
    shape.inputs = 1 + random.Coin();
    shape.alike = random.Below(4) > 0;
    shape.aligned = shape.alike && shape.n * shape.itemsize % 16 == 0 && random.Coin();
    shape.registers_only = random.Below(4) == 0;
    shape.room = random.Coin() ? 0 : random.Size(100000);
    const HeldLimits devices[] = {{132, 230400, 16}, {108, 164864, 1}, {46, 99328, 1}};
    CheckHeld(shape, devices[random.Below(3)], uses);
  }
  for (int64_t count : uses) CHECK(count > 0, "no shape is held in one of the ways");
  for (int i = 0; i < kShapes; ++i) {
    CheckSums(random.Size(int64_t{1} << 40), random.Size(0x7fffffff), random.Coin());
  }
}

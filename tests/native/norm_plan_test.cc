// Plans of layer norm and RMS norm: every shape gets a kernel that covers it, within the limits of
// the device.
#include "norm/plan.h"

#include <algorithm>
#include <cstdint>

#include "norm/shape.h"
#include "property.h"

using namespace jax_fastops;

namespace {

constexpr int64_t kMaxElements = int64_t{1} << 36;
constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;

void CheckForward(Random& random) {
  const int itemsize = 2 << random.Below(3);
  const int64_t n = random.Size(int64_t{1} << 24);
  const int64_t rows = random.Size(kMaxElements / n);
  const int64_t unit = 16 / itemsize, compute = std::max(itemsize, 4);
  const bool aligned = n % unit == 0 && random.Coin();
  const int alignment = aligned ? 16 : n * itemsize % 4 == 0 && random.Coin() ? 4 : 1;
  const int parameters = static_cast<int>(random.Below(4)), most = 1 << random.Below(5);
  const bool dropout = random.Coin();
  const NormForwardPlan plan =
      PlanNormForward(rows, n, itemsize, alignment, parameters, most, dropout);
#define FORWARD(condition)                                                            \
  CHECK(condition, "forward of %lld rows of %lld, %d bytes, aligned %d, clusters %d", \
        (long long)rows, (long long)n, itemsize, aligned, most)
  FORWARD(plan.blocks > 0 && plan.blocks <= kMaxGrid);
  FORWARD(!plan.drops || (dropout && kNormForwardForms[plan.form].drops && aligned));
  FORWARD(plan.drops ==
          (dropout && aligned && itemsize < 8 && n >= kNormDropoutLeast && n <= kNormDropoutMost));
  FORWARD(plan.blocks % plan.cluster == 0 && plan.cluster <= most);
  FORWARD(plan.threads % 32 == 0 && plan.threads <= 1024);
  // Units that a row touches, wherever it starts.
  const int64_t units = (n + (aligned ? 0 : unit - 1) + unit - 1) / unit;
  switch (plan.kernel) {
    case NormForwardKernel::kRow: {
      const NormForwardForm& form = kNormForwardForms[plan.form];
      const bool shifted = plan.access == NormAccess::kShifted;
      FORWARD(itemsize < 8 && (plan.drops || NormHasForm(plan.form, plan.access, itemsize)));
      FORWARD(aligned == (plan.access == NormAccess::kUnits));
      FORWARD(plan.access != NormAccess::kPairs || alignment == 4);
      FORWARD((shifted ? units * unit : n) * compute <= form.threads * form.held);
      FORWARD(plan.blocks * (form.block / form.threads) >= rows && plan.threads == form.block);
      break;
    }
    case NormForwardKernel::kLong:
      FORWARD(itemsize < 8 && aligned && plan.cluster > 1 && plan.block_columns % unit == 0);
      FORWARD(plan.block_columns * compute <= kNormLongThreads * kNormLongHeld);
      FORWARD(plan.block_columns * plan.cluster >= n);
      FORWARD(plan.block_columns * (plan.cluster - 1) < n);
      FORWARD(plan.shared <= 3 * kNormLongThreads * kNormLongHeld);
      break;
    case NormForwardKernel::kChunks:
      FORWARD(n > kNormWorkspace && 2 * plan.chunks <= (n + 1023) / 1024);
      FORWARD(plan.blocks == rows * plan.chunks);
      FORWARD(units * unit * compute <= plan.chunks * kNormChunkThreads * kNormChunkHeld);
      break;
    case NormForwardKernel::kGeneral:
      FORWARD(itemsize == 8);
      FORWARD(units * unit * compute <= plan.chunks * kNormGeneralThreads * kNormChunkHeld);
      break;
  }
}

void CheckBackward(Random& random) {
  NormBackwardCall call;
  call.itemsize = 2 << random.Below(3);
  call.n = random.Size(int64_t{1} << 24);
  call.rows = random.Size(kMaxElements / call.n);
  call.batch = random.Size(std::max<int64_t>(1, kMaxElements / call.n / call.rows));
  call.sums = random.Size(std::min<int64_t>(call.rows, 1000));
  call.aligned = call.n * call.itemsize % 16 == 0 && random.Coin();
  call.sums_wanted = random.Coin();
  call.dropout = random.Coin();
  call.arrays = 2 + static_cast<int>(random.Below(3));
  HeldLimits device;
  device.processors = static_cast<int>(random.Size(200));
  device.shared_bytes = static_cast<int>((48 + random.Below(180)) << 10);
  device.max_cluster = random.Coin() ? kNormBackwardCluster : 1;
  const NormBackwardPlan plan = PlanNormBackward(call, device);
#define BACKWARD(condition)                                                                     \
  CHECK(condition, "backward of %lld x %lld rows of %lld, %d bytes, aligned %d, %d arrays, %d", \
        (long long)call.batch, (long long)call.rows, (long long)call.n, call.itemsize,          \
        call.aligned, call.arrays, device.shared_bytes)
  const bool drops = call.aligned && call.itemsize < 8 && call.n >= kNormDropoutLeast &&
                     call.n <= kNormDropoutMost && call.arrays <= 3 &&
                     device.shared_bytes >= 220 << 10;
  BACKWARD(!call.dropout || !drops || plan.form >= 0);
  if (call.dropout && plan.form < 0) return;
  BACKWARD(plan.blocks > 0 && plan.blocks <= kMaxGrid && plan.blocks % plan.cluster == 0);
  // Every row is in one partial sum.
  if (call.sums_wanted) {
    BACKWARD(plan.rows == call.rows && plan.sums == call.sums);
    BACKWARD(plan.partials == call.batch * call.sums);
  } else {
    BACKWARD(plan.rows == call.batch * call.rows);
    BACKWARD(plan.partials == plan.sums && plan.sums > 0 && plan.sums <= plan.rows);
  }
  if (plan.form < 0) {
    BACKWARD(plan.tiles * kNormLongTile >= call.n);
    // Two accumulators fit into the dx of a tile.
    BACKWARD(call.n / plan.tiles * call.itemsize >= 2 * std::max(call.itemsize, 4));
    return;
  }
  const NormBackwardForm form = NormBackwardFormOf(call.itemsize, call.aligned, plan.form);
  BACKWARD(!call.dropout || form.drops);
  const int64_t columns = plan.block_columns, last = call.n - (plan.cluster - 1) * columns;
  BACKWARD(columns <= int64_t{form.threads} * form.columns && last <= columns);
  BACKWARD(last > 0 && last >= int64_t{form.threads} * form.least);
  BACKWARD(plan.cluster == 1 || (device.max_cluster > 1 && form.clusters));
  BACKWARD(plan.cluster <= kNormBackwardCluster);
  BACKWARD(!call.aligned || call.itemsize == 8 || columns * call.itemsize % 16 == 0);
  BACKWARD(plan.stages >= 2 && plan.stages <= kNormMaxStages);
  BACKWARD(plan.slot_bytes >= NormTile(form, call.itemsize) * columns * call.itemsize + 15);
  BACKWARD(plan.slot_bytes % 16 == 0 && plan.stat_bytes % 16 == 0);
  BACKWARD(plan.stage_bytes == call.arrays * plan.slot_bytes + 2 * plan.stat_bytes);
  BACKWARD(plan.shared == int64_t{NormWorkers(form.threads)} * plan.stages * plan.stage_bytes);
  const int fixed = NormWorkers(form.threads) > 1 ? kNormWorkersStatic : kNormBlockStatic;
  BACKWARD(plan.shared + fixed <= device.shared_bytes);
}

}  // namespace

int main() {
  Random random(1);
  for (int i = 0; i < kShapes; ++i) {
    CheckForward(random);
    CheckBackward(random);
  }
}

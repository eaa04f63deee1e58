#include "norm/plan.h"

#include <algorithm>

#include "core/integer.h"

namespace jax_fastops {
namespace {

int64_t ComputeBytes(int itemsize) { return std::max<int64_t>(itemsize, sizeof(float)); }

}  // namespace

// -------------------------------------------------------------------------------------------------
// Forward

namespace {

NormForwardPlan RowPlan(int64_t rows, int i, NormAccess access, bool drops) {
  const NormForwardForm& form = kNormForwardForms[i];
  NormForwardPlan plan;
  plan.kernel = NormForwardKernel::kRow;
  plan.access = access;
  plan.form = i;
  plan.threads = form.block;
  plan.blocks = CeilDiv(rows, form.block / form.threads);
  plan.drops = drops;
  return plan;
}

}  // namespace

NormForwardPlan PlanNormForward(int64_t rows, int64_t n, int itemsize, int alignment,
                                int parameters, int max_cluster, bool dropout) {
  const bool aligned = alignment == 16;
  const int64_t compute = ComputeBytes(itemsize), unit = 16 / itemsize;
  NormForwardPlan plan;
  if (itemsize == 8) {
    plan.kernel = NormForwardKernel::kGeneral;
    plan.threads = kNormGeneralThreads;
    plan.blocks = std::min(rows, kNormMaxBlocks);
    plan.chunks = CeilDiv(n + unit - 1, kNormGeneralThreads * 128 / compute);
    return plan;
  }

  const bool drops = dropout && aligned && n >= kNormDropoutLeast;
  for (int i = 0; drops && i < kNormForwardFormCount; ++i) {
    const NormForwardForm& form = kNormForwardForms[i];
    if (!form.drops || n > form.threads * form.held / compute) continue;
    return RowPlan(rows, i, NormAccess::kUnits, true);
  }

  // The kernel for long rows reads the parameters once per cluster, not once per row. With 16-bit
  // types, the parameters have as many bytes as a row, or more, so this pays above 8192 columns. In
  // float32 it starts where a block is too small for a row.
  const int64_t long_columns = kNormLongThreads * kNormLongHeld / compute;
  const int64_t least_long = itemsize == 2 ? 8192 : kNormWorkspace;
  int cluster = 2;
  while (cluster <= max_cluster && n > cluster * long_columns) cluster *= 2;
  if (aligned && n > least_long && cluster <= max_cluster) {
    plan.kernel = NormForwardKernel::kLong;
    plan.threads = kNormLongThreads;
    plan.cluster = cluster;
    plan.blocks = std::min(rows, kNormMaxBlocks / cluster) * cluster;
    plan.block_columns = RoundUp(CeilDiv(n, cluster), unit);
    plan.access = NormAccess::kUnits;
    plan.shared = int64_t{parameters} * kNormLongThreads * kNormLongHeld;
    return plan;
  }

  const NormAccess narrow =
      itemsize == 2 && alignment >= 4 ? NormAccess::kPairs : NormAccess::kElements;
  for (int i = 0; i < kNormForwardFormCount; ++i) {
    for (const NormAccess access : {aligned ? NormAccess::kUnits : narrow, NormAccess::kShifted}) {
      if (!NormHasForm(i, access, itemsize)) continue;
      if (aligned && access == NormAccess::kShifted) continue;
      // A row at any address may begin in the middle of its first unit.
      const int64_t columns = access == NormAccess::kShifted ? n + unit - 1 : n;
      const NormForwardForm& form = kNormForwardForms[i];
      if (columns > form.threads * form.held / compute) continue;
      return RowPlan(rows, i, access, false);
    }
  }

  plan.kernel = NormForwardKernel::kChunks;
  plan.threads = kNormChunkThreads;
  plan.chunks = CeilDiv(n + unit - 1, kNormChunkThreads * kNormChunkHeld / compute);
  plan.blocks = rows * plan.chunks;
  return plan;
}

// -------------------------------------------------------------------------------------------------
// Backward

namespace {

// The shared memory for the rings of a block, unless kMinStages stages need more. In larger rings
// tiles only wait longer, and more of them are left to process after the last load.
constexpr int64_t kRing = 64 << 10;
constexpr int64_t kMinStages = 2;

// Sets the plan's ring. Returns false if the form cannot be used: its blocks have too few columns
// for a row or too many, or two stages do not fit.
bool PlanRing(const NormBackwardCall& call, const NormBackwardForm& form, int64_t shared,
              NormBackwardPlan* plan) {
  const int64_t unit = call.aligned && call.itemsize < 8 ? 16 / call.itemsize : 1;
  const int64_t columns = RoundUp(CeilDiv(call.n, plan->cluster), unit);
  if (columns > int64_t{form.threads} * form.columns) return false;
  // The last block of a cluster has the fewest columns.
  if (call.n - (plan->cluster - 1) * columns < int64_t{form.threads} * form.least) return false;
  const int64_t workers = NormWorkers(form.threads), tile = NormTile(form, call.itemsize);
  // 16 more bytes per slot, so that the data fits at any offset from a 16-byte boundary.
  const int64_t slot = RoundUp(tile * columns * call.itemsize, 16) + 16;
  const int64_t stat = RoundUp(tile * ComputeBytes(call.itemsize), 16) + 16;
  const int64_t stage = call.arrays * slot + 2 * stat;
  const int64_t stages = std::min<int64_t>(
      {kNormMaxStages,
       (shared - (workers > 1 ? kNormWorkersStatic : kNormBlockStatic)) / (workers * stage),
       std::max<int64_t>(kMinStages, kRing / (workers * stage))});
  if (stages < kMinStages) return false;
  static_cast<NormRing&>(*plan) = {static_cast<int>(columns), static_cast<int>(stages),
                                   static_cast<int>(slot), static_cast<int>(stat),
                                   static_cast<int>(stage)};
  plan->shared = workers * stages * stage;
  return true;
}

// If no sums are wanted, the number of partial sums does not limit the parallelism. Redefines a
// partial sum as `rows` rows.
void FreeSums(const NormBackwardCall& call, int64_t rows, NormBackwardPlan* plan) {
  if (call.sums_wanted) return;
  plan->rows = call.all_rows();
  plan->partials = plan->sums = CeilDiv(plan->rows, rows);
}

}  // namespace

NormBackwardPlan PlanNormBackward(const NormBackwardCall& call, const HeldLimits& device) {
  NormBackwardPlan plan;
  plan.rows = call.rows;
  plan.sums = call.sums;
  plan.partials = call.batch * call.sums;
  const int64_t all_rows = call.all_rows();
  const int count = call.itemsize == 8 ? 1
                    : call.aligned     ? kNormAlignedFormCount
                                       : kNormElementFormCount;
  for (int i = 0; i < count; ++i) {
    const NormBackwardForm form = NormBackwardFormOf(call.itemsize, call.aligned, i);
    if (call.dropout && !form.drops) continue;
    const int most = form.clusters ? std::min(device.max_cluster, kNormBackwardCluster) : 1;
    for (plan.cluster = 1; plan.cluster <= most; plan.cluster *= 2) {
      if (!PlanRing(call, form, device.shared_bytes, &plan)) continue;
      plan.form = i;
      const int64_t groups = std::max(1, 4 * device.processors / plan.cluster);
      const int64_t tiles = NormWorkers(form.threads) * NormTile(form, call.itemsize);
      FreeSums(call, std::max(CeilDiv(all_rows, groups), tiles), &plan);
      // Blocks are persistent, one per SM. Not every SM can be in a cluster, so clusters are not
      // persistent: there is one for each partial sum.
      plan.blocks = plan.cluster == 1 ? std::min<int64_t>(plan.partials, device.processors)
                                      : std::min<int64_t>(plan.partials, 1 << 20) * plan.cluster;
      return plan;
    }
  }
  plan.cluster = 1;
  if (call.dropout) return plan;
  plan.tiles = CeilDiv(call.n, kNormLongTile);
  FreeSums(call, 8, &plan);
  plan.blocks = std::min(plan.partials * plan.tiles, kNormMaxBlocks);
  return plan;
}

}  // namespace jax_fastops

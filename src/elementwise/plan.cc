#include "elementwise/plan.h"

#include <algorithm>
#include <numeric>

#include "core/integer.h"

namespace jax_fastops {
namespace {

constexpr int kMaxLanes = kBackwardThreads;

// The outer dimensions along which an array has a stride, as bits.
uint32_t KeptBy(const BroadcastShape& shape, int array) {
  uint32_t kept = 0;
  for (int d = 0; d + 1 < shape.rank; ++d) kept |= (shape.stride[array][d] != 0 ? 1u : 0u) << d;
  return kept;
}

class Planner {
 public:
  Planner(const BroadcastShape& shape, const GradientShape* gradients, int count,
          const BackwardLimits& limits)
      : shape_(shape), gradients_(gradients), count_(count), limits_(limits), n_(shape.inner()) {
    int64_t step = 1;
    for (int d = shape.rank - 1; d >= 0; step *= shape.size[d--]) dense_[d] = step;
    all_ = shape.rank > 1 ? (1u << (shape.rank - 1)) - 1 : 0;
  }

  BackwardPlan Plan() {
    for (int g = 0; g < count_; ++g) FindKind(g);
    uint32_t a = 0;
    if (!ChooseColumns(&a)) return {};
    if (plan_.columns != 0) return Try(a);
    // Without sums of columns, sums of rows may end with each index of the dimensions that they
    // keep, if a block has enough to do for each of them. That needs few partial sums, or none.
    uint32_t kept = 0;
    for (int g = 0; g < count_ && kept == 0; ++g) {
      if (plan_.sum[g].kind == SumKind::kRows) kept = kept_[g];
    }
    if (kept == 0) return Try(0);
    Split(kept);
    CutRows();
    const bool enough = plan_.length_b * plan_.segments >= 2 * kBackwardRows * plan_.groups();
    const BackwardPlan first = Try(enough ? kept : 0);
    return first.valid ? first : Try(enough ? 0 : kept);
  }

 private:
  void FindKind(int g) {
    const GradientShape& gradient = gradients_[g];
    kept_[g] = KeptBy(shape_, gradient.array);
    SumPlan& sum = plan_.sum[g];
    if (!gradient.wanted) return;
    sum.kind = shape_.IsFull(gradient.array)             ? SumKind::kFull
               : shape_.InnerStride(gradient.array) != 0 ? SumKind::kColumns
                                                         : SumKind::kRows;
  }

  // Finds the sums of columns, and the dimensions of A.
  bool ChooseColumns(uint32_t* a) {
    int columns = 0;
    for (int g = 0; g < count_; ++g) {
      if (plan_.sum[g].kind != SumKind::kColumns) continue;
      ++columns;
      plan_.columns |= 1 << g;
      if (kept_[g] == 0 || kept_[g] == *a) continue;
      if (*a == 0) {
        *a = kept_[g];
      } else {
        if ((kept_[g] & *a) != 0 || (kept_[g] | *a) != all_ || !limits_.crossed) return false;
        plan_.crossed = true;
      }
    }
    if (columns > limits_.columns || (plan_.crossed && columns != 2)) return false;
    // Rows that are not whole units: an operand that is invariant in the loop over B is kept in
    // registers, even if its gradient is not wanted. Otherwise it would be read by single elements.
    if (plan_.crossed || n_ % limits_.unit == 0 || !limits_.crossed) return true;
    for (int g = 0; g < count_ && columns < limits_.columns; ++g) {
      const int operand = gradients_[g].operand;
      if (gradients_[g].wanted || operand < 0 || shape_.IsFull(operand)) continue;
      if (shape_.InnerStride(operand) == 0) continue;
      const uint32_t kept = KeptBy(shape_, operand);
      if (columns == 0) *a = kept;
      if ((kept & ~*a) != 0) continue;
      ++columns;
      plan_.columns |= 1 << g;
    }
    return true;
  }

  // Sorts the outer dimensions into A and B.
  void Split(uint32_t a) {
    plan_.rank = plan_.rank_a = 0;
    plan_.length_a = plan_.length_b = 1;
    for (const bool in_a : {true, false}) {
      for (int d = 0; d + 1 < shape_.rank; ++d) {
        if (((a >> d & 1) != 0) != in_a) continue;
        plan_.dims[plan_.rank++] = d;
        (in_a ? plan_.length_a : plan_.length_b) *= shape_.size[d];
      }
      if (in_a) plan_.rank_a = plan_.rank;
    }
  }

  // Whether the units of all rows of a class, for one index of A or for all of them, begin at the
  // same columns. Sets the number of classes.
  bool FindClasses(bool for_all_of_a) {
    const int64_t unit = limits_.unit;
    plan_.classes = 1;
    if (plan_.crossed) return false;
    for (int i = 0; for_all_of_a && i < plan_.rank_a; ++i) {
      if (dense_[plan_.dims[i]] % unit != 0) return false;
    }
    if (plan_.rank == plan_.rank_a) return true;
    for (int i = plan_.rank_a; i + 1 < plan_.rank; ++i) {
      const int d = plan_.dims[i], next = plan_.dims[i + 1];
      if (dense_[d] != dense_[next] * shape_.size[next]) return false;
    }
    const int64_t period = unit / std::gcd(dense_[plan_.dims[plan_.rank - 1]], unit);
    plan_.classes = std::min(period, plan_.length_b);
    return true;
  }

  // Cuts a row into lanes, strips and segments.
  void CutRows() {
    const int64_t unit = limits_.unit;
    int64_t gap = unit;  // rows begin at multiples of it
    for (int d = 0; d + 1 < shape_.rank; ++d) gap = std::gcd(gap, dense_[d]);
    const int64_t words = CeilDiv(n_ + unit - gap, unit);
    const int64_t warps = CeilDiv(words, 32);
    plan_.strips = plan_.segments = 1;
    plan_.lanes = kBackwardRows;  // at least
    if (words <= 32) {
      while (plan_.lanes < words) plan_.lanes *= 2;
    } else if (plan_.crossed) {
      plan_.lanes = 32;
      plan_.strips = warps;
    } else {
      int64_t& pieces = plan_.columns != 0 ? plan_.strips : plan_.segments;
      pieces = CeilDiv(warps, kMaxLanes / 32);
      plan_.lanes = static_cast<int>(CeilDiv(warps, pieces)) * 32;
    }
    plan_.threads = kMaxLanes / plan_.lanes * plan_.lanes;
    plan_.valid = false;
  }

  // The plan with this set A.
  BackwardPlan Try(uint32_t a) {
    Split(a);
    bool ends_with_block = false, ends_with_a = false;
    columns_end_with_block_ = false;
    for (int g = 0; g < count_; ++g) {
      SumPlan& sum = plan_.sum[g];
      const bool columns = (plan_.columns >> g & 1) != 0;
      if (sum.kind == SumKind::kLoop) sum.kind = SumKind::kRows;  // of an earlier try
      if (sum.kind == SumKind::kRows && (kept_[g] == 0 || (kept_[g] == a && !plan_.crossed))) {
        sum.kind = SumKind::kLoop;
      }
      sum.keeps_a = sum.kind == SumKind::kRows || (a != 0 && kept_[g] == a);
      sum.keeps_b = sum.kind == SumKind::kRows;
      if (plan_.crossed && sum.kind == SumKind::kColumns) sum.keeps_b = !sum.keeps_a;
      if (sum.kind != SumKind::kColumns && sum.kind != SumKind::kLoop) continue;
      const bool with_block = !sum.keeps_a && !sum.keeps_b;
      ends_with_block = ends_with_block || with_block;
      ends_with_a = ends_with_a || sum.keeps_a;
      columns_end_with_block_ = columns_end_with_block_ || (columns && with_block && a != 0);
    }
    plan_.classes = 1;
    const bool ragged = n_ % limits_.unit != 0;
    if (ragged && plan_.columns != 0 && !FindClasses(columns_end_with_block_)) return {};
    CutRows();
    plan_.valid = plan_.crossed ? Cross() : Spread(ends_with_block, ends_with_a);
    return plan_.valid ? plan_ : BackwardPlan{};
  }

  // Blocks of a crossed pass.
  bool Cross() {
    const int64_t groups = plan_.groups();
    if (plan_.length_b < 4) return false;
    const int64_t most = std::min<int64_t>(limits_.slots, kBackwardTable / groups);
    plan_.boxes_b = CeilDiv(plan_.length_b, groups * most);
    plan_.slots = static_cast<int>(CeilDiv(plan_.length_b, groups * plan_.boxes_b));
    const int64_t trips = CeilDiv(plan_.length_a, kBackwardRows);
    const int64_t resident = int64_t{limits_.processors} * limits_.blocks;
    plan_.boxes_a = std::clamp<int64_t>(resident / (plan_.strips * plan_.boxes_b), 1, trips);
    for (;; plan_.boxes_a = (plan_.boxes_a + 1) / 2) {
      if (Fits()) return true;
      if (plan_.boxes_a == 1) return false;
    }
  }

  // Blocks of any other pass.
  bool Spread(bool ends_with_block, bool ends_with_a) {
    const int64_t groups = plan_.groups(), rows = kBackwardRows;
    const int64_t count = CeilDiv(plan_.length_b, plan_.classes) * plan_.segments;
    plan_.over_a = plan_.rank_a > 0 && groups > 1 && plan_.lanes <= 32 &&
                   !columns_end_with_block_ && count < 2 * groups * rows;
    const int64_t trips_a = plan_.over_a ? CeilDiv(plan_.length_a, groups) : plan_.length_a;
    const int64_t trips_b = CeilDiv(count, plan_.over_a ? rows : groups * rows);
    if (!ends_with_block && !ends_with_a) {
      plan_.boxes_a = trips_a;
      plan_.boxes_b = plan_.columns != 0 ? CeilDiv(trips_b, 4) : trips_b;
      while (plan_.blocks() >= int64_t{1} << 30) {
        int64_t& more = plan_.boxes_a > plan_.boxes_b ? plan_.boxes_a : plan_.boxes_b;
        if (more == 1) return false;
        more = CeilDiv(more, 2);
      }
      return Fits();
    }
    const int64_t resident = int64_t{limits_.processors} * limits_.blocks;
    const int64_t share = std::max<int64_t>(1, resident / (plan_.strips * plan_.classes));
    plan_.boxes_a = std::min(trips_a, ends_with_block ? share : 4 * share);
    plan_.boxes_b = std::clamp<int64_t>(share / plan_.boxes_a, 1, trips_b);
    for (;;) {
      // No block without work.
      plan_.boxes_a = CeilDiv(trips_a, CeilDiv(trips_a, plan_.boxes_a));
      plan_.boxes_b = CeilDiv(trips_b, CeilDiv(trips_b, plan_.boxes_b));
      if (plan_.blocks() < int64_t{1} << 31 && Fits()) return true;
      int64_t& fewer = plan_.boxes_b > 1 ? plan_.boxes_b : plan_.boxes_a;
      if (fewer == 1) return false;
      fewer /= 2;
    }
  }

  // Places the sums. False if the partial sums do not fit into the workspace.
  bool Fits() {
    plan_.workspace = 0;
    for (int g = 0; g < count_; ++g) {
      SumPlan& sum = plan_.sum[g];
      const bool columns = sum.kind == SumKind::kColumns;
      if (!columns && sum.kind != SumKind::kLoop && sum.kind != SumKind::kRows) continue;
      if (sum.kind == SumKind::kRows) {
        sum.parts = plan_.strips * plan_.segments * std::max(plan_.lanes / 32, 1);
      } else {
        sum.parts = columns ? 1 : plan_.strips;
        if (!sum.keeps_b) sum.parts *= plan_.boxes_b * plan_.classes;
        if (!sum.keeps_a) sum.parts *= plan_.boxes_a;
      }
      sum.complete = sum.parts == 1;
      sum.plane = columns ? n_ : 1;
      for (int i = plan_.rank - 1; i >= 0; --i) {
        const int d = plan_.dims[i];
        const bool indexed = i < plan_.rank_a ? sum.keeps_a : sum.keeps_b;
        sum.stride[i] = indexed ? sum.plane : 0;
        if (!indexed) continue;
        sum.plane *= shape_.size[d];
        sum.complete = sum.complete && (kept_[g] >> d & 1) != 0;
      }
      if (sum.complete) {
        sum.plane = 0;
        for (int i = 0; i < plan_.rank; ++i) {
          sum.stride[i] = shape_.stride[gradients_[g].array][plan_.dims[i]];
        }
        continue;
      }
      sum.offset = plan_.workspace;
      if (sum.parts > limits_.workspace / sum.plane) return false;
      plan_.workspace += sum.parts * sum.plane;
      if (plan_.workspace > limits_.workspace) return false;
    }
    return true;
  }

  const BroadcastShape& shape_;
  const GradientShape* gradients_;
  const int count_;
  const BackwardLimits& limits_;
  const int64_t n_;
  int64_t dense_[kMaxBroadcastRank];  // strides of the result
  uint32_t all_ = 0;                  // the outer dimensions
  uint32_t kept_[kMaxSums];
  bool columns_end_with_block_ = false;  // and there is an A
  BackwardPlan plan_;
};

}  // namespace

BackwardPlan PlanBackward(const BroadcastShape& shape, const GradientShape* gradients, int count,
                          const BackwardLimits& limits) {
  return Planner(shape, gradients, count, limits).Plan();
}

FinishPlan PlanFinish(const BroadcastShape& shape, const BackwardPlan& plan, const SumPlan& sum,
                      int array) {
  FinishPlan finish;
  const auto keep = [&finish](int64_t size, int64_t stride, int64_t out) {
    finish.elements *= size;
    const int last = finish.kept - 1;
    if (last >= 0 && finish.kept_stride[last] == stride * size &&
        finish.out_stride[last] == out * size) {
      finish.kept_size[last] *= size;
      finish.kept_stride[last] = stride;
      finish.out_stride[last] = out;
      return;
    }
    finish.kept_size[finish.kept] = size;
    finish.kept_stride[finish.kept] = stride;
    finish.out_stride[finish.kept++] = out;
  };
  const auto add = [&finish](int64_t size, int64_t stride) {
    finish.terms *= size;
    const int last = finish.added - 1;
    if (last >= 0 && finish.added_stride[last] == stride * size) {
      finish.added_size[last] *= size;
      finish.added_stride[last] = stride;
      return;
    }
    finish.added_size[finish.added] = size;
    finish.added_stride[finish.added++] = stride;
  };
  if (sum.parts > 1) add(sum.parts, sum.plane);
  for (int i = 0; i < plan.rank; ++i) {
    if (sum.stride[i] == 0) continue;
    const int d = plan.dims[i];
    const int64_t out = shape.stride[array][d];
    if (out != 0) {
      keep(shape.size[d], sum.stride[i], out);
    } else {
      add(shape.size[d], sum.stride[i]);
    }
  }
  if (sum.kind == SumKind::kColumns) keep(shape.inner(), 1, 1);
  return finish;
}

bool WithRows(const BroadcastShape& shape, BroadcastShape* with_rows) {
  *with_rows = shape;
  bool steps = false;
  for (int a = 0; a < shape.arrays; ++a) steps = steps || shape.InnerStride(a) > 1;
  if (!steps) return true;
  if (shape.rank == kMaxBroadcastRank) return false;
  with_rows->size[with_rows->rank++] = 1;
  for (int a = 0; a < shape.arrays; ++a) {
    with_rows->stride[a][shape.rank] = shape.IsFull(a) ? 1 : 0;
  }
  return true;
}

}  // namespace jax_fastops

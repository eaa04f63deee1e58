#include "elementwise/plan.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/integer.h"

namespace jax_fastops::cuda {
namespace {

// 1, 2, 4, ... up to `most`, and `length` if it is not larger.
std::vector<int> Sizes(int64_t length, int64_t most) {
  std::vector<int> sizes;
  for (int64_t size = 1; size < length && size <= most; size *= 2) {
    sizes.push_back(static_cast<int>(size));
  }
  if (length <= most) sizes.push_back(static_cast<int>(length));
  return sizes;
}

// The cost of a plan, in elements that could be moved in the same time. The constants are rough.
// kStart stands for a block's start and its table of offsets, and kFlush for the barriers of a sum
// over the block.
double Cost(const BoxPlan& plan, int64_t n, int sums, const BoxLimits& limits) {
  constexpr double kStart = 6144, kFlush = 3072;
  const int groups = kBoxThreads / plan.lanes / plan.ranges;
  const double a = plan.groups_over_a ? CeilDiv(plan.box_a, groups) : plan.box_a;
  const double b = plan.groups_over_a ? plan.box_b : CeilDiv(plan.box_b, groups);
  double box = a * b * plan.range * kBoxThreads * limits.unit * limits.units + kStart;
  double partial = 0;
  for (int s = 0; s < sums; ++s) {
    const SumPlan& sum = plan.sum[s];
    if (!sum.keeps_b) box += kFlush * (sum.keeps_a && !plan.groups_over_a ? a : 1);
    if (!sum.complete) partial += 2.0 * static_cast<double>(sum.parts());
  }
  // Short pieces of rows waste DRAM pages.
  const double piece = static_cast<double>(
      std::min<int64_t>(n, int64_t{plan.ranges} * plan.lanes * limits.unit * limits.units));
  box *= 1 + 0.25 * std::max(0.0, 2048.0 / (piece * limits.element_bytes) - 1) / 3;
  const double shared = kTableBytes + (8 << 10) + plan.slot_elements * limits.accumulator_bytes;
  const double resident = limits.processors * std::min(2.0, std::max(1.0, 200e3 / shared));
  const double blocks = static_cast<double>(plan.blocks());
  const double rounds = blocks / resident;
  const double whole = static_cast<double>(static_cast<int64_t>(rounds + 0.999999));
  return std::min(whole, rounds + 0.5) * box * resident + partial;
}

}  // namespace

BoxPlan PlanBoxes(const BroadcastShape& shape, const int* arrays, int sums,
                  const BoxLimits& limits) {
  BoxPlan plan;
  const int outer = std::max(shape.rank - 1, 0);
  const int64_t n = shape.inner();
  bool columns = false;
  for (int s = 0; s < sums; ++s) {
    plan.sum[s].keeps_inner = shape.InnerStride(arrays[s]) != 0;
    columns = columns || plan.sum[s].keeps_inner;
  }
  // The kind of a dimension is the set of gradients that keep it. At most two kinds can share a
  // pass.
  int kind[kMaxBroadcastRank], kinds[2], count = 0;
  for (int d = 0; d < outer; ++d) {
    kind[d] = 0;
    for (int s = 0; s < sums; ++s) kind[d] |= (shape.stride[arrays[s]][d] != 0) << s;
    if (std::find(kinds, kinds + count, kind[d]) != kinds + count) continue;
    if (count == 2) return plan;
    kinds[count++] = kind[d];
  }

  const int64_t lane_elements = int64_t{limits.unit} * limits.units;
  while (plan.lanes > 1 && plan.lanes / 2 * lane_elements >= n) plan.lanes /= 2;
  const int64_t chunk = plan.lanes * lane_elements;
  const int64_t chunks = CeilDiv(n, chunk);
  const int groups = kBoxThreads / plan.lanes;
  const int64_t table = kTableBytes / (8 * limits.table_columns);

  BoxPlan best = plan;
  double least = 0;
  for (int first = 0; first < std::max(count, 1); ++first) {
    // With only one kind of dimensions, A is empty.
    BoxPlan p = plan;
    const int kind_b = count == 0 ? 0 : kinds[first];
    for (int d = 0; d < outer; ++d) {
      const bool in_b = kind[d] == kind_b;
      (in_b ? p.dims_b[p.rank_b++] : p.dims_a[p.rank_a++]) = d;
      (in_b ? p.length_b : p.length_a) *= shape.size[d];
    }
    int registers = 0;
    bool slots = false;
    for (int s = 0; s < sums; ++s) {
      SumPlan& sum = p.sum[s];
      sum.keeps_a = p.rank_a == 0 || (kinds[1 - first] >> s & 1);
      sum.keeps_b = p.rank_b == 0 || (kind_b >> s & 1);
      if (sum.keeps_a && sum.keeps_b && sum.keeps_inner) return plan;  // not a sum
      slots = slots || sum.in_slots();
      registers += sum.keeps_inner && !sum.in_slots();
    }
    if (registers > kMaxColumnSums) continue;
    for (const int ranges : Sizes(groups, groups)) {
      if (groups % ranges != 0) continue;
      for (const int range : Sizes(chunks, columns ? 1 : limits.most_range)) {
        if (ranges > 1 && int64_t{ranges} * range >= 2 * chunks) continue;
        for (const int box_b : Sizes(p.length_b, table - 1)) {
          for (const int box_a : Sizes(p.length_a, std::min<int64_t>(table - box_b, 256))) {
            p.ranges = ranges;
            p.range = range;
            p.boxes_inner = CeilDiv(chunks, int64_t{range} * ranges);
            p.box_a = box_a;
            p.box_b = box_b;
            p.boxes_a = CeilDiv(p.length_a, box_a);
            p.boxes_b = CeilDiv(p.length_b, box_b);
            if (p.blocks() >= (int64_t{1} << 31)) continue;
            for (const bool over_a : {false, true}) {
              if (over_a && (slots || box_a < 2)) continue;
              p.groups_over_a = over_a;
              p.slot_elements = 0;
              int64_t partial = 0;
              for (int s = 0; s < sums; ++s) {
                SumPlan& sum = p.sum[s];
                const bool by_group = sum.keeps_b || (over_a && sum.keeps_a);
                sum.parts_a = sum.keeps_a ? p.length_a : p.boxes_a;
                sum.parts_b = sum.keeps_b ? p.length_b : p.boxes_b;
                sum.parts_inner = sum.keeps_inner ? n : p.boxes_inner * (by_group ? ranges : 1);
                sum.complete = (sum.keeps_a || p.boxes_a == 1) && (sum.keeps_b || p.boxes_b == 1) &&
                               (sum.keeps_inner || sum.parts_inner == 1);
                if (!sum.complete) partial += sum.parts();
                if (sum.in_slots()) {
                  p.slot_elements +=
                      ranges * box_b * (sum.keeps_inner ? static_cast<int>(chunk) : 4);
                }
              }
              if (partial > limits.workspace ||
                  int64_t{p.slot_elements} * limits.accumulator_bytes > limits.slot_bytes)
                continue;
              const double cost = Cost(p, n, sums, limits);
              if (best.valid && cost >= least) continue;
              best = p;
              best.valid = true;
              least = cost;
            }
          }
        }
      }
    }
  }
  return best;
}

BoxPlan CachedBoxes(const BroadcastShape& shape, const int* arrays, int sums,
                    const BoxLimits& limits) {
  static std::mutex mutex;
  static std::unordered_map<std::string, BoxPlan> plans;
  std::string key;
  const auto add = [&key](const int64_t* data, int count) {
    key.append(reinterpret_cast<const char*>(data), sizeof(int64_t) * count);
  };
  add(shape.size, shape.rank);
  for (int s = 0; s < sums; ++s) add(shape.stride[arrays[s]], shape.rank);
  const int64_t rest[] = {shape.rank,           sums,
                          limits.unit,          limits.units,
                          limits.most_range,    limits.table_columns,
                          limits.element_bytes, limits.accumulator_bytes,
                          limits.slot_bytes,    limits.workspace,
                          limits.processors};
  add(rest, sizeof(rest) / sizeof(rest[0]));
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = plans.find(key);
  if (found != plans.end()) return found->second;
  // A program has few shapes. The limit protects against one that makes new shapes forever.
  if (plans.size() >= 1024) plans.clear();
  return plans[key] = PlanBoxes(shape, arrays, sums, limits);
}

}  // namespace jax_fastops::cuda

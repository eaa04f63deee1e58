// Property test of the plan of an element-wise backward with sums. It does on the host what the
// kernel does with indices (core/cuda/elements_sums.cuh): every element is taken once, every sum is
// written by one block, and the second kernel finds the partial sums.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "core/broadcast.h"
#include "core/integer.h"
#include "core/plan_elements.h"
#include "property.h"

using namespace jax_fastops;
using namespace jax_fastops::cuda;

namespace {

std::string Text(const BroadcastShape& shape) {
  std::string text;
  for (int d = 0; d < shape.rank; ++d) {
    text += (d == 0 ? "(" : ", ") + std::to_string(shape.size[d]);
    for (int a = 0; a < shape.arrays; ++a) text += shape.stride[a][d] == 0 ? '-' : '+';
  }
  return text + ")";
}

// A result, and gradients that are summed along random dimensions, at least one each.
BroadcastShape RandomShape(Random& random, int gradients, int log_most) {
  std::vector<int64_t> sizes(random.Below(5) + 1);
  int64_t most = int64_t{1} << (random.Below(log_most) + 1);
  for (int64_t& size : sizes) {
    size = random.Size(most);
    most = std::max<int64_t>(most / size, 1);
  }
  sizes[random.Below(sizes.size())] += 1;
  std::vector<ArrayStrides> strides(gradients);
  for (ArrayStrides& array : strides) {
    std::vector<int64_t> own = sizes;
    while (own == sizes) {
      for (int64_t& size : own) {
        if (random.Coin()) size = 1;
      }
    }
    BroadcastStrides(sizes, own, &array);
  }
  BroadcastShape shape;
  CHECK(Collapse(sizes, strides.data(), gradients, &shape), "rank %zu", sizes.size());
  return shape;
}

int64_t ValueOf(int64_t element, int gradient) {
  return (element * 2654435761 + gradient * 40503) >> 7 & 15;
}

int64_t OffsetIn(const DimSet& set, int array, int64_t index) {
  int64_t offset = 0;
  for (int d = set.rank - 1; d >= 0; --d) {
    offset += index % set.size[d] * set.stride[array][d];
    index /= set.size[d];
  }
  return offset;
}

// Sums by place, and the block or warp that has written each.
struct Sums {
  std::map<int64_t, int64_t> value, writer;

  void Put(int64_t at, int64_t its_writer, int64_t term, const char* name) {
    const auto found = writer.emplace(at, its_writer);
    CHECK(found.first->second == its_writer, "%s: place %lld", name, (long long)at);
    value[at] += term;
  }
};

// What the kernel does with the elements of the result.
void Emulate(const RowsSplit& split, const PassPlan& plan, const SumLayout* layouts, int count,
             int unit, int in_flight, std::vector<int>* taken, Sums* sums, const char* name) {
  const int64_t rows = split.rows.length;
  const int lanes = plan.lanes, side_by_side = plan.threads / lanes;
  CHECK(plan.threads % 32 == 0 && plan.threads % lanes == 0 && plan.threads <= kSumsThreads, "%s",
        name);
  for (int64_t block = 0; block < plan.blocks(); ++block) {
    const int64_t its_class = block % plan.classes, strip = block / plan.classes % plan.strips;
    const int64_t rest = block / plan.classes / plan.strips;
    const int64_t box = rest % plan.boxes, plane = rest / plan.boxes;
    const int64_t base = OffsetIn(split.planes, 0, plane);
    const int64_t row_stride = split.rows.rank > 0 ? split.rows.stride[0][split.rows.rank - 1] : 0;
    const int64_t shift = (base + its_class * row_stride) % unit;
    const int64_t rows_of_class = (rows - its_class - 1) / plan.period + 1;
    const int64_t part = (plane * plan.boxes + box) * plan.classes + its_class;
    for (int64_t trip = box; trip == box || trip * side_by_side * in_flight < rows_of_class;
         trip += plan.boxes) {
      for (int thread = 0; thread < plan.threads; ++thread) {
        const int64_t word_in_row = strip * lanes + thread % lanes;
        const int64_t first_column = word_in_row * unit - shift;
        for (int r = 0; r < in_flight; ++r) {
          const int64_t index = trip * side_by_side * in_flight + thread / lanes + r * side_by_side;
          const int64_t row = its_class + index * plan.period;
          const int64_t at = base + OffsetIn(split.rows, 0, row) - shift;
          CHECK(index >= rows_of_class || at % unit == 0, "%s", name);
          for (int i = 0; i < unit; ++i) {
            const int64_t column = first_column + i, element = (at / unit + word_in_row) * unit + i;
            const int64_t end = row == rows - 1 ? split.last_n : split.n;
            const bool lives = index < rows_of_class && column >= 0 && column < end;
            if (lives) ++taken->at(element);
            for (int s = 0; s < count; ++s) {
              const SumLayout& sum = layouts[s];
              const int64_t term = lives ? ValueOf(element, sum.array) : 0;
              const int64_t place = OffsetIn(split.planes, 1 + sum.array, plane);
              if (sum.its_class == RowClass::kRow) {
                if (column < 0 || column >= split.n) continue;
                sums[s].Put((sum.direct ? place : part * split.n) + column, block, term, name);
              } else if (!sum.per_row) {
                sums[s].Put(sum.direct ? place : block, block, term, name);
              } else if (index < rows_of_class) {
                const int64_t its_part = strip * lanes / 32 + thread % lanes / 32;
                sums[s].Put(sum.direct ? place + OffsetIn(split.rows, 1 + sum.array, row)
                                       : (its_part * plan.planes + plane) * rows + row,
                            block * 8 + (lanes < 32 ? 0 : thread / 32), term, name);
              }
            }
          }
        }
      }
    }
  }
}

// What the second kernel does.
Sums Finish(const FinishSum& sum, const Sums& partial, const char* name) {
  Sums done;
  for (int64_t result = 0; result < sum.kept[0] * sum.kept[1] * sum.kept[2]; ++result) {
    const int64_t column = result % sum.kept[2], row = result / sum.kept[2] % sum.kept[1];
    const int64_t plane = result / sum.kept[2] / sum.kept[1];
    int64_t at = column;
    const int64_t index[2] = {plane, row};
    for (int i = 0; i < 2; ++i) {
      int64_t rest = index[i];
      for (int d = sum.rank[i] - 1; d >= 0; --d) {
        at += rest % sum.size[i][d] * sum.stride[i][d];
        rest /= sum.size[i][d];
      }
    }
    for (int64_t term = 0; term < sum.terms; ++term) {
      const auto found = partial.value.find(plane * sum.step[0] + row * sum.step[1] +
                                            column * sum.step[2] + term * sum.term_step);
      CHECK(found != partial.value.end(), "%s: no partial sum", name);
      done.Put(at, result, found->second, name);
    }
  }
  return done;
}

// One backward, in as many passes as it takes.
void Check(Random& random, const BroadcastShape& shape, int gradients, bool emulate) {
  const std::string text = Text(shape);
  const char* const name = text.c_str();
  const int unit = 1 << 2 * random.Below(2) << random.Below(2);  // 1, 2, 4, 8
  const int in_flight = random.Coin() ? 4 : 6;
  const int processors = static_cast<int>(random.Below(160)) + 1;
  int arrays[kMaxGradients], left = 0;
  for (int g = 0; g < gradients; ++g) {
    if (!shape.IsFull(g)) arrays[left++] = g;
  }
  bool only_one = false;
  while (left > 0) {
    uint32_t chosen;
    const uint32_t planes = ChoosePlanes(shape, arrays, only_one ? 1 : left, &chosen);
    CHECK(chosen != 0 && (!only_one || chosen == 1), "%s", name);
    SumLayout layouts[kMaxGradients];
    int count = 0, kept = 0;
    for (int i = 0; i < left; ++i) {
      if (chosen >> i & 1) {
        layouts[count++].array = arrays[i];
      } else {
        arrays[kept++] = arrays[i];
      }
    }
    PassLimits limits = {.unit = unit,
                         .rows_in_flight = in_flight,
                         .blocks_of_processor = 2,
                         .processors = processors,
                         .workspace = CeilDiv(shape.elements(), 8)};
    RowsSplit split = SplitRows(shape, planes, kSumsThreads * limits.unit);
    PassPlan plan = PlanPass(split, layouts, count, limits);
    if (!plan.valid) {
      limits.unit = 1;
      split = SplitRows(shape, planes, kSumsThreads);
      plan = PlanPass(split, layouts, count, limits);
    }
    const bool too_many = split.rows.length >= int64_t{1} << 31 || split.planes.length >= int64_t{1}
                                                                                              << 31;
    if (!plan.valid) {
      CHECK(!only_one || too_many, "%s: only_one", name);
      if (only_one) return;
      for (int s = count - 1; s >= 0; --s) arrays[kept++] = layouts[s].array;
      left = kept;
      only_one = true;
      continue;
    }
    only_one = false;
    left = kept;
    int64_t used = 0;
    for (int s = 0; s < count; ++s) used += layouts[s].Partial(split);
    CHECK(used <= limits.workspace, "%s", name);
    if (!emulate) continue;
    std::vector<int> taken(shape.elements() + 16);
    Sums sums[kMaxGradients];
    Emulate(split, plan, layouts, count, limits.unit, in_flight, &taken, sums, name);
    for (int64_t e = 0; e < shape.elements(); ++e) CHECK(taken[e] == 1, "%s: %d", name, taken[e]);
    for (int s = 0; s < count; ++s) {
      const int array = layouts[s].array;
      std::map<int64_t, int64_t> expected;
      for (int64_t e = 0; e < shape.elements(); ++e) {
        int64_t at = 0, rest = e;
        for (int d = shape.rank - 1; d >= 0; --d) {
          at += rest % shape.size[d] * shape.stride[array][d];
          rest /= shape.size[d];
        }
        expected[at] += ValueOf(e, array);
      }
      if (!layouts[s].direct) sums[s] = Finish(FinishOf(split, layouts[s]), sums[s], name);
      CHECK(sums[s].value == expected, "%s: gradient %d, unit %d", name, array, limits.unit);
    }
  }
}

}  // namespace

int main() {
  Random random(1);
  for (int i = 0; i < kShapes; ++i) {
    const int gradients = 1 + static_cast<int>(random.Below(kMaxGradients));
    const bool emulate = i % 20 == 0;
    const BroadcastShape shape = RandomShape(random, gradients, emulate ? 12 : 36);
    Check(random, shape, gradients, emulate);
  }
}

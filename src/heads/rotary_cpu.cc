// The passes of rotary.h on the CPU. The work is divided into runs of rows, and into heads that
// together have long contiguous pieces of a row. Without sums, a run is a single row.
#include "heads/rotary.h"

#include <algorithm>
#include <cstring>

#include "core/cpu/dtype.h"
#include "core/cpu/pointers.h"
#include "core/integer.h"
#include "heads/rotary_simd.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(Kernels, rotary_kernels)

constexpr int64_t kHeadsBytes = 2 << 10;

// The bytes of an element, and of one of the accumulator type.
struct Sizes {
  int64_t element, wide;

  explicit Sizes(DType dtype) : element(ItemSize(dtype)), wide(AccumulatorSize(dtype)) {}
};

// Head `index` (of all) of token `row`. `run` is the run of rows whose sums it adds to.
RotaryHead HeadOf(const RotaryShape& shape, const Sizes& sizes, const RotaryArrays& arrays,
                  int64_t row, int64_t index, int64_t run) {
  const int part = index < shape.query_heads                     ? 0
                   : index < shape.query_heads + shape.key_heads ? 1
                                                                 : 2;
  const int64_t own = index - (part > 0 ? shape.query_heads : 0) - (part > 1 ? shape.key_heads : 0);
  const int64_t batch = row / shape.sequence, heads = shape.part_heads(part);
  const int64_t split = shape.heads_first
                            ? (batch * heads + own) * shape.sequence + row % shape.sequence
                            : row * heads + own;
  const int64_t size = shape.head_size, feature = index * size;
  const int64_t in_x = (row * shape.features() + feature) * sizes.element;
  const bool biased = arrays.bias_sums != nullptr;
  const int per_sum = RotaryHeadsPerSum(biased);
  const int64_t sum = own / per_sum + (part == 0 ? 0 : CeilDiv(shape.query_heads, per_sum));
  RotaryHead head{};
  head.size = size;
  head.pairs = shape.pairs;
  head.interleaved = shape.interleaved;
  head.eps = shape.eps;
  head.x = Offset(arrays.x, in_x);
  head.dx = Offset(arrays.dx, in_x);
  head.y = Offset(arrays.y[part], split * size * sizes.element);
  head.wide_bias = arrays.wide_bias;
  head.bias = Offset(arrays.bias, feature * (arrays.wide_bias ? sizes.wide : sizes.element));
  head.bias_sums = Offset(arrays.bias_sums, (run * shape.features() + feature) * sizes.wide);
  if (part == 2) return head;
  head.scale = static_cast<const char*>(arrays.scale[part]);
  head.wide_scale = arrays.wide_scale[part];
  head.scale_sums =
      Offset(arrays.scale_sums, (run * shape.scale_sums(biased) + sum * size) * sizes.wide);
  if (shape.pairs == 0) return head;
  const int64_t angle = (shape.angles.Offset(batch) + row % shape.sequence) * 2 * shape.pairs;
  head.cos = Offset(arrays.turns, angle * sizes.wide);
  head.sin = Offset(arrays.turns, (angle + shape.pairs) * sizes.wide);
  return head;
}

void Run(const RotaryShape& shape, DType dtype, int64_t groups, int64_t subgroups,
         const RotaryArrays& arrays, void (*kernel)(const RotaryHead&), Executor& executor) {
  const Sizes sizes(dtype);
  const int64_t group_rows = shape.rows() / groups, run_rows = CeilDiv(group_rows, subgroups);
  const int64_t head_bytes = shape.head_size * sizes.element, all = shape.heads();
  // Heads that share a sum stay together.
  const bool shared = arrays.scale_sums != nullptr && arrays.bias_sums == nullptr;
  const int64_t longest = shared ? all : kHeadsBytes / head_bytes;
  const int64_t some = std::min(all, std::max<int64_t>(1, longest));
  const int64_t pieces = CeilDiv(all, some), items = groups * subgroups * pieces;
  const double bytes = (arrays.x && arrays.dx ? 3.0 : 2.0) *
                       static_cast<double>(shape.rows() * shape.features() * sizes.element);
  ParallelFor(executor, items, 1, bytes / static_cast<double>(items),
              [&](int64_t begin, int64_t end) {
                for (int64_t item = begin; item < end; ++item) {
                  const int64_t run = item / pieces, group = run / subgroups;
                  const int64_t first = std::min(run % subgroups * run_rows, group_rows);
                  const int64_t last = std::min(first + run_rows, group_rows);
                  const int64_t from = item % pieces * some, to = std::min(from + some, all);
                  for (int64_t row = first; row < last; ++row) {
                    for (int64_t index = from; index < to; ++index) {
                      kernel(HeadOf(shape, sizes, arrays, group * group_rows + row, index, run));
                    }
                  }
                }
              });
}

}  // namespace

void RotaryHeads(const RotaryShape& shape, DType dtype, const RotaryArrays& arrays,
                 Executor& executor) {
  if (shape.rows() * shape.features() == 0) return;
  Run(shape, dtype, 1, shape.rows(), arrays, Kernels(dtype).forward, executor);
}

void RotaryHeadsBackward(const RotaryShape& shape, DType dtype, const HeadsSums& sums,
                         const RotaryArrays& arrays, Executor& executor) {
  const int64_t groups = shape.batch * sums.groups, runs = groups * sums.subgroups;
  const int64_t rows = shape.rows(), wide = Sizes(dtype).wide;
  const auto clear = [&](void* p, int64_t features) {
    if (p != nullptr) std::memset(p, 0, static_cast<size_t>(runs * features * wide));
  };
  clear(arrays.bias_sums, shape.features());
  clear(arrays.scale_sums, shape.scale_sums(arrays.bias_sums != nullptr));
  if (rows * shape.features() == 0) return;
  const bool summing = arrays.bias_sums != nullptr || arrays.scale_sums != nullptr;
  Run(shape, dtype, summing ? groups : 1, summing ? sums.subgroups : rows, arrays,
      Kernels(dtype).backward, executor);
}

}  // namespace jax_fastops::cpu

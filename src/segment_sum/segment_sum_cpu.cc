// Sums of rows by segment on the CPU, from ids in any order. A task has the sums of some segments
// and some columns. It reads all ids, and adds the rows of its segments in their order, so no ids
// are sorted, and no two tasks add to the same sum. Columns are divided first: a segment with half
// of the rows is then as fast as any other.
#include <algorithm>
#include <cstring>

#include "core/cpu/buffer.h"
#include "core/cpu/dtype.h"
#include "core/cpu/parallel.h"
#include "segment_sum/segment_sum.h"
#include "segment_sum/segment_sum_simd.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(Kernels, segment_sum_kernels)

// What a task adds up, if it is rounded afterwards, stays in the L2 cache or near it.
constexpr int64_t kSumsBytes = 2 << 20;
// The shortest part of a row for a task: some cache lines.
constexpr int64_t kPartBytes = 256;

struct Range {
  int64_t begin, end;

  int64_t size() const { return end - begin; }
};

Range PartOf(int64_t total, int64_t size, int64_t index) {
  return {index * size, std::min(total, (index + 1) * size)};
}

}  // namespace

void SegmentSum(const SegmentSumCall& call, Executor& executor) {
  const SegmentSumKernels& kernels = Kernels(call.dtype);
  const int64_t bytes = ItemSize(call.dtype), wide_bytes = AccumulatorSize(call.dtype);
  const bool rounds = !call.wide && bytes != wide_bytes;
  const int64_t y_bytes = call.wide ? wide_bytes : bytes;
  const int64_t threads = executor.threads();
  if (call.batch * call.segments * call.columns == 0) return;

  const int64_t most = std::max<int64_t>(1, call.columns * bytes / kPartBytes);
  const int64_t columns = RoundUp(CeilDiv(call.columns, std::min(threads, most)), 32);
  const int64_t column_parts = CeilDiv(call.columns, columns);
  int64_t segments = CeilDiv(call.segments, CeilDiv(threads, column_parts));
  if (rounds)
    segments = std::min(segments, std::max<int64_t>(1, kSumsBytes / wide_bytes / columns));
  const int64_t segment_parts = CeilDiv(call.segments, segments);
  const int64_t tasks = call.batch * segment_parts * column_parts;
  const int64_t moved = call.batch * (call.rows + call.segments) * call.columns * bytes;

  const auto run = [&](int64_t task) {
    const Range own = PartOf(call.columns, columns, task % column_parts);
    const Range of = PartOf(call.segments, segments, task / column_parts % segment_parts);
    const int64_t batch = task / column_parts / segment_parts;
    const char* const x =
        static_cast<const char*>(call.x) + (batch * call.rows * call.columns + own.begin) * bytes;
    char* const y = static_cast<char*>(call.y) +
                    ((batch * call.segments + of.begin) * call.columns + own.begin) * y_bytes;
    const Buffer<char> buffer(rounds ? of.size() * own.size() * wide_bytes : 0);
    char* const sums = rounds ? buffer.begin() : y;
    const int64_t step = rounds ? own.size() * wide_bytes : call.columns * y_bytes;
    for (int64_t s = 0; s < of.size(); ++s) {
      std::memset(sums + s * step, 0, static_cast<size_t>(own.size() * wide_bytes));
    }
    kernels.add({.x = x,
                 .rows = call.rows,
                 .x_step = call.columns * bytes,
                 .n = own.size(),
                 .ids = static_cast<const int32_t*>(call.ids) + FirstId(call, batch),
                 .id_step = call.step,
                 .sums = sums,
                 .sums_step = step,
                 .first = of.begin,
                 .segments = of.size()});
    if (!rounds) return;
    for (int64_t s = 0; s < of.size(); ++s) {
      kernels.round(sums + s * step, own.size(), y + s * call.columns * y_bytes);
    }
  };
  ParallelFor(executor, tasks, 1, static_cast<double>(moved) / static_cast<double>(tasks),
              [&](int64_t begin, int64_t end) {
                for (int64_t task = begin; task < end; ++task) run(task);
              });
}

}  // namespace jax_fastops::cpu

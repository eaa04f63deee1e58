// Splitting and merging of attention heads on the CPU.
//
// The elements of one head in one row are contiguous in both layouts, so the kernels move runs of
// head_size elements. The work is divided into boxes of some rows of the sequence and some heads of
// one part. A box has long contiguous runs in both layouts, and stays in the caches. Boxes are
// independent, and threads take runs of boxes. There are enough boxes for a small batch too,
// because the features are divided as well.
#include "heads/heads.h"

#include <algorithm>
#include <cstring>

#include "core/cpu/dtype.h"
#include "core/cpu/pointers.h"
#include "core/integer.h"
#include "heads/heads_simd.h"
#include "transpose/transpose.h"
#include "transpose/transpose_simd.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(Kernels, heads_kernels)
FASTOPS_DEFINE_TABLE(Movers, transpose_kernels)

// The maximum size of a box, in rows and in bytes per row.
constexpr int64_t kBoxRows = 32;
constexpr int64_t kBoxRowBytes = 2 << 10;

// Part `part`, rows [row, row + rows) of a run of the sequence of one batch, heads [head, head +
// heads), and elements [from, from + size) of each head.
struct Box {
  int64_t batch, run, row, rows, part, head, heads, from, size;
};

// All boxes of a shape, in the order of the merged layout. A run is a set of rows that are summed
// together, and a box lies within one run. Without sums there is one run, the sequence.
struct Boxes {
  HeadsShape shape;
  int64_t runs, run_rows;  // per batch
  int64_t box_rows;        // of a box; all rows of a run, if `whole_runs`
  int64_t box_heads, box_size;
  int64_t row_boxes, head_boxes, size_boxes;

  Boxes(const HeadsShape& s, int64_t itemsize, int64_t runs, int64_t run_rows, bool whole_runs)
      : shape(s), runs(runs), run_rows(run_rows) {
    const int64_t head_bytes = s.head_size * itemsize;
    box_size = head_bytes > 2 * kBoxRowBytes ? kBoxRowBytes / itemsize : s.head_size;
    box_heads = std::min(s.heads, std::max<int64_t>(1, kBoxRowBytes / head_bytes));
    box_rows = whole_runs ? run_rows : std::min(run_rows, kBoxRows);
    row_boxes = CeilDiv(run_rows, box_rows);
    head_boxes = CeilDiv(s.heads, box_heads);
    size_boxes = CeilDiv(s.head_size, box_size);
  }

  int64_t count() const {
    return shape.batch * runs * row_boxes * shape.parts * head_boxes * size_boxes;
  }

  Box At(int64_t index) const {
    Box box;
    box.from = index % size_boxes * box_size;
    index /= size_boxes;
    box.head = index % head_boxes * box_heads;
    index /= head_boxes;
    box.part = index % shape.parts;
    index /= shape.parts;
    box.row = index % row_boxes * box_rows;
    index /= row_boxes;
    box.run = index % runs;
    box.batch = index / runs;
    box.size = std::min(box_size, shape.head_size - box.from);
    box.heads = std::min(box_heads, shape.heads - box.head);
    box.rows = std::min(box_rows, run_rows - box.row);
    return box;
  }

  // The offset of a box's first element: in the features, in x, and in its part of y.
  int64_t Feature(const Box& box) const {
    return (box.part * shape.heads + box.head) * shape.head_size + box.from;
  }
  int64_t Merged(const Box& box, int64_t row) const {
    return (box.batch * shape.sequence + row) * shape.features() + Feature(box);
  }
  int64_t Split(const Box& box, int64_t row) const {
    return ((box.batch * shape.heads + box.head) * shape.sequence + row) * shape.head_size +
           box.from;
  }
};

// How far apart rows and heads are in the two layouts, in bytes.
struct Steps {
  int64_t merged_row, merged_head, split_row, split_head;

  Steps(const HeadsShape& shape, int64_t itemsize)
      : merged_row(shape.features() * itemsize),
        merged_head(shape.head_size * itemsize),
        split_row(merged_head),
        split_head(shape.sequence * merged_head) {}
};

template <typename Body>
void OverBoxes(const Boxes& boxes, int64_t itemsize, Executor& executor, const Body& body) {
  const int64_t count = boxes.count();
  const double bytes = 2 * static_cast<double>(boxes.shape.size() * itemsize);
  ParallelFor(executor, count, 1, bytes / static_cast<double>(count),
              [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) body(boxes.At(i));
              });
}

// Splits or merges without arithmetic.
void Move(const HeadsShape& shape, int64_t itemsize, bool splits, const void* const* from,
          void* const* to, Executor& executor) {
  if (shape.size() == 0) return;
  if (shape.parts == 1) {
    const int64_t dims[] = {shape.batch, splits ? shape.sequence : shape.heads,
                            splits ? shape.heads : shape.sequence, shape.head_size};
    const int axes[] = {0, 2, 1, 3};
    return Transpose(from[0], to[0], dims, axes, 4, itemsize, executor);
  }
  const Boxes boxes(shape, itemsize, 1, shape.sequence, false);
  const Steps step(shape, itemsize);
  OverBoxes(boxes, itemsize, executor, [&](const Box& box) {
    const int64_t merged = boxes.Merged(box, box.row) * itemsize;
    const int64_t split = boxes.Split(box, box.row) * itemsize;
    LoopNest nest;
    if (splits) {
      nest.Add(box.heads, step.merged_head, step.split_head);
      nest.Add(box.rows, step.merged_row, step.split_row);
      Movers().rows(nest, Offset(from[0], merged), Offset(to[box.part], split),
                    box.size * itemsize);
    } else {
      nest.Add(box.rows, step.split_row, step.merged_row);
      nest.Add(box.heads, step.split_head, step.merged_head);
      Movers().rows(nest, Offset(from[box.part], split), Offset(to[0], merged),
                    box.size * itemsize);
    }
  });
}

}  // namespace

void SplitHeads(const HeadsShape& shape, int64_t itemsize, const void* x, void* const* y,
                Executor& executor) {
  Move(shape, itemsize, true, &x, y, executor);
}

void MergeHeads(const HeadsShape& shape, int64_t itemsize, const void* const* y, void* x,
                Executor& executor) {
  Move(shape, itemsize, false, y, &x, executor);
}

void SplitHeadsAddBias(const HeadsShape& shape, DType dtype, bool wide_bias, const void* x,
                       const void* bias, void* const* y, Executor& executor) {
  if (shape.size() == 0) return;
  const int64_t itemsize = ItemSize(dtype);
  const int64_t bias_size = wide_bias ? AccumulatorSize(dtype) : itemsize;
  auto* const kernel = Kernels(dtype).add_bias;
  const Boxes boxes(shape, itemsize, 1, shape.sequence, false);
  const Steps step(shape, itemsize);
  OverBoxes(boxes, itemsize, executor, [&](const Box& box) {
    const char* from = Offset(x, boxes.Merged(box, box.row) * itemsize);
    const char* b = Offset(bias, boxes.Feature(box) * bias_size);
    char* to = Offset(y[box.part], boxes.Split(box, box.row) * itemsize);
    for (int64_t h = 0; h < box.heads; ++h) {
      kernel(from + h * step.merged_head, step.merged_row, b + h * shape.head_size * bias_size,
             bias_size > itemsize, to + h * step.split_head, step.split_row, box.rows, box.size);
    }
  });
}

void MergeHeadsWithSums(const HeadsShape& shape, DType dtype, const void* const* y, void* x,
                        const HeadsSums& layout, void* sums_data, Executor& executor) {
  const int64_t itemsize = ItemSize(dtype);
  const int64_t sum_size = AccumulatorSize(dtype);
  char* sums = static_cast<char*>(sums_data);
  const int64_t runs = layout.groups * layout.subgroups;
  const int64_t sums_bytes = shape.batch * runs * shape.features() * sum_size;
  if (shape.size() == 0 || runs == 0) {
    if (sums_bytes > 0) std::memset(sums, 0, static_cast<size_t>(sums_bytes));
    return;
  }
  const int64_t group_rows = shape.sequence / layout.groups;
  const int64_t run_rows = CeilDiv(group_rows, layout.subgroups);
  const Boxes boxes(shape, itemsize, runs, run_rows, true);
  const Steps step(shape, itemsize);
  auto* const kernel = Kernels(dtype).add_rows;
  OverBoxes(boxes, itemsize, executor, [&](const Box& box) {
    const int64_t in_group = box.run % layout.subgroups * run_rows;
    const int64_t first = box.run / layout.subgroups * group_rows + std::min(in_group, group_rows);
    const int64_t rows = std::min(run_rows, group_rows - std::min(in_group, group_rows));
    const int64_t box_features = (box.heads - 1) * shape.head_size + box.size;
    char* sum =
        sums + ((box.batch * runs + box.run) * shape.features() + boxes.Feature(box)) * sum_size;
    if (rows == 0) std::memset(sum, 0, static_cast<size_t>(box_features * sum_size));
    // Sums over kBoxRows rows, which are then added up, so that the rounding error does not grow
    // with the length of the run.
    for (int64_t r = 0; r < rows; r += kBoxRows) {
      const int64_t some = std::min(kBoxRows, rows - r);
      const char* from = Offset(y[box.part], boxes.Split(box, first + r) * itemsize);
      char* to = Offset(x, boxes.Merged(box, first + r) * itemsize);
      for (int64_t h = 0; h < box.heads; ++h) {
        kernel(from + h * step.split_head, step.split_row, to + h * step.merged_head,
               step.merged_row, some, box.size, sum + h * shape.head_size * sum_size, r == 0);
      }
    }
  });
}

}  // namespace jax_fastops::cpu

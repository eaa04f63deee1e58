// Splitting and merging of attention heads on the CPU.
//
// The elements of one head in one row are contiguous in both layouts, so the kernels move runs of
// head_size elements. The work is divided into boxes of some rows of the sequence and some heads of
// one part. A box has long contiguous runs in both layouts, and stays in the caches. Boxes are
// independent, and threads take runs of boxes. There are enough boxes for a small batch too,
// because the features are divided as well.
//
// With arithmetic (a bias, or its gradient), heads of at least a register's width are processed
// directly. Smaller heads would leave most of a register empty. For these, the arithmetic is done
// in the merged layout, where all features of a row are contiguous, and in the caches: on the way
// to a buffer that is then split, or on a box that has just been merged.
#include "heads/heads.h"

#include <cstring>

#include "heads/heads_simd.h"
#include "transpose/transpose.h"
#include "transpose/transpose_simd.h"

namespace jax_fastops::cpu {
namespace {

const HeadsKernels& Kernels() {
  static const HeadsKernels& kernels = FASTOPS_KERNELS(heads_kernels);
  return kernels;
}

const TransposeKernels& Movers() {
  static const TransposeKernels& kernels = FASTOPS_KERNELS(transpose_kernels);
  return kernels;
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a - 1) / b + 1; }
int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }

// The maximum size of a box, in rows and in bytes per row. Heads of less than 64 bytes have the
// smaller one.
constexpr int64_t kBoxRows = 32;
constexpr int64_t kBoxRowBytes = 2 << 10;
constexpr int64_t kSmallBoxRowBytes = 512;

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
    const int64_t row_bytes = head_bytes < 64 ? kSmallBoxRowBytes : kBoxRowBytes;
    box_heads = Min(s.heads, Max(1, row_bytes / head_bytes));
    box_rows = whole_runs ? run_rows : Min(run_rows, kBoxRows);
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
    box.size = Min(box_size, shape.head_size - box.from);
    box.heads = Min(box_heads, shape.heads - box.head);
    box.rows = Min(box_rows, run_rows - box.row);
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

// The log2 of `bytes`, if pieces of `bytes` bytes can be units of a transposition; else -1.
int UnitLog(int64_t bytes) {
  for (int i = 0; i < 5; ++i) {
    if (bytes == int64_t{1} << i) return i;
  }
  return -1;
}

// Moves rows x heads pieces of `bytes` bytes. The arguments `..._row` and `..._head` are the
// strides in the two arrays. If the pieces are units, and heads in the merged layout and rows in
// the split layout are contiguous, this is a matrix transposition.
void MoveToSplit(const char* in, int64_t in_row, int64_t in_head, char* out, int64_t out_row,
                 int64_t out_head, int64_t rows, int64_t heads, int64_t bytes) {
  LoopNest nest;
  const int unit_log = UnitLog(bytes);
  if (unit_log >= 0 && in_head == bytes && out_row == bytes) {
    int64_t row_offset[kBoxRows], head_offset[kSmallBoxRowBytes];
    for (int64_t i = 0; i < rows; ++i) row_offset[i] = i * in_row;
    for (int64_t i = 0; i < heads; ++i) head_offset[i] = i * out_head;
    Movers().matrix[unit_log](nest, in, row_offset, out, head_offset, rows, heads, false);
    return;
  }
  nest.Add(heads, in_head, out_head);
  nest.Add(rows, in_row, out_row);
  Movers().rows(nest, in, out, bytes);
}

void MoveToMerged(const char* in, int64_t in_row, int64_t in_head, char* out, int64_t out_row,
                  int64_t out_head, int64_t rows, int64_t heads, int64_t bytes) {
  LoopNest nest;
  const int unit_log = UnitLog(bytes);
  if (unit_log >= 0 && in_row == bytes && out_head == bytes) {
    int64_t row_offset[kBoxRows], head_offset[kSmallBoxRowBytes];
    for (int64_t i = 0; i < rows; ++i) row_offset[i] = i * out_row;
    for (int64_t i = 0; i < heads; ++i) head_offset[i] = i * in_head;
    Movers().matrix[unit_log](nest, in, head_offset, out, row_offset, heads, rows, false);
    return;
  }
  nest.Add(rows, in_row, out_row);
  nest.Add(heads, in_head, out_head);
  Movers().rows(nest, in, out, bytes);
}

template <typename Body>
void OverBoxes(const Boxes& boxes, int64_t itemsize, Executor& executor, const Body& body) {
  const int64_t count = boxes.count();
  const double bytes = 2 * static_cast<double>(boxes.shape.size() * itemsize);
  ParallelFor(executor, count, 1, bytes / static_cast<double>(count),
              [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) body(boxes.At(i));
              });
}

}  // namespace

void SplitHeads(const HeadsShape& shape, int64_t itemsize, const void* x, void* const* y,
                Executor& executor) {
  if (shape.size() == 0) return;
  if (shape.parts == 1) {
    const int64_t dims[] = {shape.batch, shape.sequence, shape.heads, shape.head_size};
    const int axes[] = {0, 2, 1, 3};
    return Transpose(x, y[0], dims, axes, 4, itemsize, executor);
  }
  const Boxes boxes(shape, itemsize, 1, shape.sequence, false);
  const int64_t head = shape.head_size * itemsize;
  OverBoxes(boxes, itemsize, executor, [&](const Box& box) {
    MoveToSplit(static_cast<const char*>(x) + boxes.Merged(box, box.row) * itemsize,
                shape.features() * itemsize, head,
                static_cast<char*>(y[box.part]) + boxes.Split(box, box.row) * itemsize, head,
                shape.sequence * head, box.rows, box.heads, box.size * itemsize);
  });
}

void MergeHeads(const HeadsShape& shape, int64_t itemsize, const void* const* y, void* x,
                Executor& executor) {
  if (shape.size() == 0) return;
  if (shape.parts == 1) {
    const int64_t dims[] = {shape.batch, shape.heads, shape.sequence, shape.head_size};
    const int axes[] = {0, 2, 1, 3};
    return Transpose(y[0], x, dims, axes, 4, itemsize, executor);
  }
  const Boxes boxes(shape, itemsize, 1, shape.sequence, false);
  const int64_t head = shape.head_size * itemsize;
  OverBoxes(boxes, itemsize, executor, [&](const Box& box) {
    MoveToMerged(static_cast<const char*>(y[box.part]) + boxes.Split(box, box.row) * itemsize, head,
                 shape.sequence * head,
                 static_cast<char*>(x) + boxes.Merged(box, box.row) * itemsize,
                 shape.features() * itemsize, head, box.rows, box.heads, box.size * itemsize);
  });
}

void SplitHeadsAddBias(const HeadsShape& shape, DType dtype, bool wide_bias, const void* x,
                       const void* bias, void* const* y, Executor& executor) {
  if (shape.size() == 0) return;
  const int type = static_cast<int>(dtype);
  const int64_t itemsize = static_cast<int64_t>(DTypeSize(dtype));
  const int64_t bias_size = wide_bias && itemsize == 2 ? 4 : itemsize;
  auto* add = bias_size == itemsize ? Kernels().add_bias[type] : Kernels().add_wide_bias[type];
  const Boxes boxes(shape, itemsize, 1, shape.sequence, false);
  const int64_t head = shape.head_size * itemsize;
  const int64_t x_row = shape.features() * itemsize;
  const bool direct = shape.head_size >= Kernels().fast[type];
  OverBoxes(boxes, itemsize, executor, [&](const Box& box) {
    const char* from = static_cast<const char*>(x) + boxes.Merged(box, box.row) * itemsize;
    const char* b = static_cast<const char*>(bias) + boxes.Feature(box) * bias_size;
    char* to = static_cast<char*>(y[box.part]) + boxes.Split(box, box.row) * itemsize;
    if (direct) {
      for (int64_t h = 0; h < box.heads; ++h) {
        add(from + h * head, x_row, b + h * shape.head_size * bias_size,
            to + h * shape.sequence * head, head, box.rows, box.size);
      }
      return;
    }
    char buffer[kBoxRows * kSmallBoxRowBytes];
    const int64_t buffer_row = box.heads * head;
    add(from, x_row, b, buffer, buffer_row, box.rows, box.heads * shape.head_size);
    MoveToSplit(buffer, buffer_row, head, to, head, shape.sequence * head, box.rows, box.heads,
                head);
  });
}

void MergeHeadsWithSums(const HeadsShape& shape, DType dtype, const void* const* y, void* x,
                        const HeadsSums& layout, void* sums_data, Executor& executor) {
  const int type = static_cast<int>(dtype);
  const int64_t itemsize = static_cast<int64_t>(DTypeSize(dtype));
  const int64_t sum_size = dtype == DType::kF64 ? 8 : 4;
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
  const int64_t head = shape.head_size * itemsize;
  const int64_t x_row = shape.features() * itemsize;
  auto* add = Kernels().add_rows[type];
  const bool direct = shape.head_size >= Kernels().fast[type];
  OverBoxes(boxes, itemsize, executor, [&](const Box& box) {
    const int64_t in_group = box.run % layout.subgroups * run_rows;
    const int64_t first = box.run / layout.subgroups * group_rows + Min(in_group, group_rows);
    const int64_t rows = Min(run_rows, group_rows - Min(in_group, group_rows));
    const int64_t box_features = (box.heads - 1) * shape.head_size + box.size;
    char* sum =
        sums + ((box.batch * runs + box.run) * shape.features() + boxes.Feature(box)) * sum_size;
    if (rows == 0) std::memset(sum, 0, static_cast<size_t>(box_features * sum_size));
    // Sums over kBoxRows rows, which are then added up, so that the rounding error does not grow
    // with the length of the run.
    for (int64_t r = 0; r < rows; r += kBoxRows) {
      const int64_t some = Min(kBoxRows, rows - r);
      const char* from =
          static_cast<const char*>(y[box.part]) + boxes.Split(box, first + r) * itemsize;
      char* to = static_cast<char*>(x) + boxes.Merged(box, first + r) * itemsize;
      if (direct) {
        for (int64_t h = 0; h < box.heads; ++h) {
          add(from + h * shape.sequence * head, head, to + h * head, x_row, some, box.size,
              sum + h * shape.head_size * sum_size, r == 0);
        }
      } else {
        MoveToMerged(from, head, shape.sequence * head, to, x_row, head, some, box.heads, head);
        add(to, x_row, nullptr, 0, some, box_features, sum, r == 0);
      }
    }
  });
}

}  // namespace jax_fastops::cpu

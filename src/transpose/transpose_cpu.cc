// Transposition on the CPU: divides an array into blocks that use whole cache lines, for any
// permutation.
//
// A block is a matrix whose rows are contiguous in the input and whose columns are contiguous in
// the output. Each side is long enough to cover several cache lines, and consists of as many
// dimensions as that takes. A table per side has the offsets of its indices in the other array. So
// a transposition (3, 2, 1, 0) of dimensions of 49, or of eight dimensions of 2, works like that of
// a large matrix, and cache lines are not cut at the ends of dimensions. Dimensions that would
// belong to both sides, as in (0, 2, 1) of small matrices, are loops around the matrix instead.
//
// If the minor dimension stays minor, rows are copied in the order of the output. Blocks along the
// input as well were faster only for rows of less than a cache line.
//
// The input and output of a block fit into the L2 cache. Threads take runs of blocks in the order
// of the output.
#include "transpose/transpose.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "core/cpu/stream.h"
#include "core/integer.h"
#include "transpose/permutation.h"
#include "transpose/transpose_simd.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_TABLE(Kernels, transpose_kernels)

// The dimensions of one side of a block. They are adjacent in the input or in the output, and the
// block takes all of each except the last, of which it takes a part.
struct Side {
  int rank = 0;
  int dim[kMaxPermutationRank];
  int64_t inner = 1;            // the product of all except the last
  std::vector<int64_t> offset;  // of each index, in the other array
};

// The output size, in bytes, from which stores bypass the caches early. stream.h gives the size for
// other cases. Columns that are whole pages apart compete for the same few cache sets, and a buffer
// may be written in whole lines (`dense`). Rows that stay rows are never streamed.
constexpr int64_t kEarlyStreamBytes = int64_t{8} << 20;

struct Plan {
  Permutation p;
  int unit_log = 0;
  // For each dimension: the part of it that a block takes, and the resulting number of blocks.
  int64_t block[kMaxPermutationRank];
  int64_t grid[kMaxPermutationRank];
  int64_t blocks = 1;
  Side rows, columns;    // not used if rows stay rows
  bool aligned = false;  // blocks consist of whole cache lines of the output, if y begins with one
  bool dense = false;    // short columns that are adjacent in the output
  bool early = false;    // uses kEarlyStreamBytes
};

// The minimum length of a block's side, and the size of a block, in bytes.
constexpr int64_t kSide = 512;
constexpr int64_t kBlock = 16 << 10;
// Rows that stay rows are divided only if they are longer than this.
constexpr int64_t kLongRow = 32 << 10;
constexpr int64_t kLine = 64;

// Returns the part of a dimension that a block takes, if each index has `inner` units: all of it if
// it is not much larger than needed. Otherwise at least `wanted` units, or a little more if that
// fills cache lines better.
int64_t Take(int64_t size, int64_t inner, int64_t wanted, int64_t line) {
  const int64_t least = CeilDiv(wanted, inner);
  if (size <= least + least / 2) return size;
  int64_t best = least;
  double best_waste = 2;
  for (int64_t b = least; b <= size && b < least + std::max(least / 2, line); ++b) {
    const int64_t units = b * inner;
    const double waste =
        static_cast<double>(CeilDiv(units, line) * line) / static_cast<double>(units);
    if (waste < best_waste - 0.02) {
      best = b;
      best_waste = waste;
    }
    if (units % line == 0) break;
  }
  return best;
}

// Lets a side of a block grow to `wanted` units, along its last dimension.
void Resize(Side* side, Plan* plan, int64_t wanted) {
  const int d = side->dim[side->rank - 1];
  plan->block[d] = Take(plan->p.size[d], side->inner, wanted, kLine / plan->p.unit);
}

int64_t Units(const Side& side, const Plan& plan) {
  return side.inner * plan.block[side.dim[side.rank - 1]];
}

void Append(Side* side, Plan* plan, int dim, int64_t wanted) {
  if (side->rank > 0) side->inner *= plan->p.size[side->dim[side->rank - 1]];
  side->dim[side->rank++] = dim;
  Resize(side, plan, wanted);
}

void FillOffsets(Side* side, const Plan& plan, const int64_t* strides) {
  int64_t size = 1;
  side->offset.resize(static_cast<size_t>(Units(*side, plan)));
  side->offset[0] = 0;
  for (int k = 0; k < side->rank; ++k) {
    const int d = side->dim[k];
    for (int64_t i = size; i < size * plan.block[d]; ++i) {
      side->offset[i] = side->offset[i - size] + strides[d] * plan.p.unit;
    }
    size *= plan.block[d];
  }
}

int DimensionOfStride(const Permutation& p, int64_t in_stride) {
  for (int d = 0; d < p.rank; ++d) {
    if (p.in_stride[d] == in_stride) return d;
  }
  return -1;
}

void PlanMatrix(Plan* plan) {
  const Permutation& p = plan->p;
  const int64_t wanted = kSide / p.unit;
  Side& rows = plan->rows;
  Side& columns = plan->columns;
  bool used[kMaxPermutationRank] = {};
  const int minor = DimensionOfStride(p, 1);  // of the input
  used[p.rank - 1] = used[minor] = true;
  Append(&rows, plan, p.rank - 1, wanted);
  Append(&columns, plan, minor, wanted);
  // The shorter side grows first: a dimension that both sides could take goes to the one that needs
  // it.
  for (;;) {
    const auto next = [&](const Side& side, bool output) {
      if (Units(side, *plan) >= wanted) return -1;
      const int last = side.dim[side.rank - 1];
      if (plan->block[last] < p.size[last]) return -1;
      const int d = output ? last - 1 : DimensionOfStride(p, p.in_stride[last] * p.size[last]);
      return d < 0 || used[d] ? -1 : d;
    };
    const int row = next(rows, true), column = next(columns, false);
    if (row < 0 && column < 0) break;
    const bool to_rows = column < 0 || (row >= 0 && Units(rows, *plan) <= Units(columns, *plan));
    used[to_rows ? row : column] = true;
    Append(to_rows ? &rows : &columns, plan, to_rows ? row : column, wanted);
  }
  // The overhead per block would dominate if blocks were small.
  int64_t units = Units(rows, *plan) * Units(columns, *plan);
  const int64_t least = kBlock / p.unit;
  if (units < least) {
    Resize(&rows, plan, CeilDiv(least, Units(columns, *plan)));
    Resize(&columns, plan, CeilDiv(least, Units(rows, *plan)));
    units = Units(rows, *plan) * Units(columns, *plan);
  }
  for (int d = p.rank - 1; d >= 0 && units < least; --d) {
    if (used[d]) continue;
    plan->block[d] = Take(p.size[d], units, least, 1);
    units *= plan->block[d];
  }
  FillOffsets(&rows, *plan, p.in_stride);
  FillOffsets(&columns, *plan, p.out_stride);
  plan->aligned = Units(rows, *plan) * p.unit % kLine == 0;
  for (int d = 0; d < rows.dim[rows.rank - 1]; ++d) {
    plan->aligned = plan->aligned && p.out_stride[d] * p.unit % kLine == 0;
  }
  const int64_t column = Units(rows, *plan) * p.unit;
  plan->dense = column <= 16 && Units(columns, *plan) * p.unit > 16;
  for (size_t c = 1; c < columns.offset.size(); ++c) {
    plan->dense = plan->dense && columns.offset[c] == columns.offset[c - 1] + column;
  }
  plan->early = plan->dense || p.out_stride[columns.dim[0]] * p.unit % 4096 == 0;
}

void PlanRows(Plan* plan) {
  const Permutation& p = plan->p;
  const int last = p.rank - 1;
  int64_t units = 1;
  const auto take = [&](int d, int64_t wanted, int64_t line) {
    const int64_t b = Take(p.size[d], 1, wanted, line);
    if (b <= plan->block[d]) return;
    units = units / plan->block[d] * b;
    plan->block[d] = b;
  };
  take(last, kLongRow / p.unit, kLine / p.unit);
  // Rows share cache lines in the input, so the block extends along the input too.
  if (p.size[last] * p.unit < kLine) {
    int64_t length = p.size[last];
    for (int d = last; length * p.unit < kSide && plan->block[d] == p.size[d];) {
      d = DimensionOfStride(p, p.in_stride[d] * p.size[d]);
      if (d < 0) break;
      take(d, CeilDiv(kSide / p.unit, length), 1);
      length *= plan->block[d];
    }
  }
  for (int d = last; d >= 0 && units * p.unit < kBlock; --d) {
    take(d, CeilDiv(kBlock / p.unit, units / plan->block[d]), 1);
  }
}

// Whether the iterations of the nest write adjacent pieces of `bytes` bytes, in order.
bool IsDense(const LoopNest& nest, int64_t bytes) {
  for (int d = nest.rank - 1; d >= 0; --d) {
    if (nest.out_step[d] != bytes) return false;
    bytes *= nest.size[d];
  }
  return true;
}

Plan MakePlan(const TransposeShape& shape) {
  Plan plan;
  plan.p = Normalize(shape);
  const Permutation& p = plan.p;
  if (p.IsCopy()) return plan;
  plan.unit_log = std::countr_zero(static_cast<uint64_t>(p.unit));
  for (int d = 0; d < p.rank; ++d) plan.block[d] = 1;
  if (p.KeepsMinor()) {
    PlanRows(&plan);
  } else {
    PlanMatrix(&plan);
  }
  for (int d = 0; d < p.rank; ++d) {
    plan.grid[d] = CeilDiv(p.size[d], plan.block[d]);
    plan.blocks *= plan.grid[d];
  }
  return plan;
}

void RunBlocks(const Plan& plan, const char* x, char* y, int64_t begin, int64_t end, bool stream) {
  const Permutation& p = plan.p;
  const int last = p.rank - 1;
  const bool keeps_minor = p.KeepsMinor();
  int64_t index[kMaxPermutationRank];
  int64_t rest = begin;
  for (int d = last; d >= 0; --d) {
    index[d] = rest % plan.grid[d];
    rest /= plan.grid[d];
  }
  // The dimensions that are not part of the matrix or the row.
  bool loops[kMaxPermutationRank];
  std::fill_n(loops, p.rank, true);
  if (keeps_minor) {
    loops[last] = false;
  } else {
    for (int k = 0; k < plan.rows.rank; ++k) loops[plan.rows.dim[k]] = false;
    for (int k = 0; k < plan.columns.rank; ++k) loops[plan.columns.dim[k]] = false;
  }
  for (int64_t b = begin; b < end; ++b) {
    LoopNest nest;
    int64_t in = 0, out = 0;
    const auto size = [&](int d) {
      return std::min(plan.block[d], p.size[d] - index[d] * plan.block[d]);
    };
    for (int d = 0; d < p.rank; ++d) {
      in += index[d] * plan.block[d] * p.in_stride[d];
      out += index[d] * plan.block[d] * p.out_stride[d];
      if (loops[d] && plan.block[d] > 1) {
        nest.Add(size(d), p.in_stride[d] * p.unit, p.out_stride[d] * p.unit);
      }
    }
    const char* from = x + in * p.unit;
    char* to = y + out * p.unit;
    if (keeps_minor) {
      Kernels().rows(nest, from, to, size(last) * p.unit);
    } else {
      const auto units = [&](const Side& side) {
        return side.inner * size(side.dim[side.rank - 1]);
      };
      const int64_t rows = units(plan.rows), columns = units(plan.columns);
      if (plan.dense && IsDense(nest, rows * columns * p.unit)) {
        Kernels().dense[plan.unit_log](nest, from, plan.rows.offset.data(), to, rows, columns,
                                       stream);
      } else {
        Kernels().matrix[plan.unit_log](nest, from, plan.rows.offset.data(), to,
                                        plan.columns.offset.data(), rows, columns,
                                        stream && plan.aligned);
      }
    }
    for (int d = last; d >= 0; --d) {
      if (++index[d] < plan.grid[d]) break;
      index[d] = 0;
    }
  }
}

}  // namespace

void Transpose(const void* x_data, void* y_data, const int64_t* dims, const int* axes, int rank,
               int64_t itemsize, Executor& executor) {
  for (int i = 0; i < rank; ++i) {
    if (dims[i] == 0) return;
  }
  const char* x = static_cast<const char*>(x_data);
  char* y = static_cast<char*>(y_data);
  // Unaligned loads and stores cost the same, so the unit is as wide as the shape allows.
  const Plan plan = MakePlan({{dims, dims + rank}, {axes, axes + rank}, itemsize, 16});
  const Permutation& p = plan.p;
  const int64_t bytes = p.count * p.unit;
  if (p.IsCopy()) {
    ParallelFor(executor, bytes, 4096, 2, [&](int64_t begin, int64_t end) {
      std::memcpy(y + begin, x + begin, static_cast<size_t>(end - begin));
    });
    return;
  }
  const bool stream = (plan.aligned || plan.dense) && reinterpret_cast<uintptr_t>(y) % kLine == 0 &&
                      ShouldStream(bytes, plan.early ? kEarlyStreamBytes : kStreamBytes);
  ParallelFor(executor, plan.blocks, 1,
              2 * static_cast<double>(bytes) / static_cast<double>(plan.blocks),
              [&](int64_t begin, int64_t end) { RunBlocks(plan, x, y, begin, end, stream); });
}

}  // namespace jax_fastops::cpu

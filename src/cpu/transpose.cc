// A transposition is cut into blocks that use what they load: along the input and along the output
// a block is so long that whole cache lines, several in a row, are read and written, whatever the
// permutation. Usually that is a rectangle of the two minor dimensions, the input's and the
// output's; where these are short, the dimensions around them belong to the block too, and become
// loops around the kernel's rectangle ((3, 2, 1, 0) of dimensions of 49 would otherwise end a cache
// line with every row). A block fits into the caches with its input and its output. Threads take
// runs of blocks in the order of the output.
#include "cpu/transpose.h"

#include <cstring>
#include <memory>

#include "cpu/transpose_simd.h"
#include "permutation.h"

namespace jax_fastops::cpu {
namespace {

const TransposeKernels& Kernels() {
  static const TransposeKernels& kernels = FASTOPS_KERNELS(transpose_kernels);
  return kernels;
}

struct Plan {
  Permutation p;
  // Of each dimension: how much of it a block takes, and how many blocks that makes.
  int64_t block[kMaxPermutationRank];
  int64_t grid[kMaxPermutationRank];
  int64_t blocks = 1;
  int minor = 0;  // the output dimension along which the input is contiguous
};

// How long a block is along the input and the output, and how much it takes at least, in bytes.
constexpr int64_t kRun = 256;
constexpr int64_t kBlock = 16 << 10;
// Rows that stay rows are cut only where they are longer.
constexpr int64_t kLongRow = 32 << 10;

int64_t CeilDiv(int64_t a, int64_t b) { return (a - 1) / b + 1; }

// As much of a dimension as is wanted, and all of it where little would be left over; in multiples
// of `line`, so that blocks begin at whole cache lines if the array does.
int64_t Take(int64_t size, int64_t wanted, int64_t line) {
  const int64_t rounded = CeilDiv(wanted, line) * line;
  return size <= rounded + rounded / 2 ? size : rounded;
}

Plan MakePlan(const TransposeShape& shape) {
  Plan plan;
  plan.p = Normalize(shape);
  const Permutation& p = plan.p;
  if (p.IsCopy()) return plan;
  const int last = p.rank - 1;
  plan.minor = p.InputMinor();
  for (int d = 0; d < p.rank; ++d) plan.block[d] = 1;

  const int64_t line = 64 / p.unit;
  int64_t elements = 1;
  const auto take = [&](int d, int64_t wanted, int64_t multiple) {
    const int64_t b = Take(p.size[d], wanted, multiple);
    if (b <= plan.block[d]) return;
    elements = elements / plan.block[d] * b;
    plan.block[d] = b;
  };
  if (p.KeepsMinor()) take(last, kLongRow / p.unit, line);
  // Along the output, then along the input: the dimensions in the order of their strides.
  for (int64_t run = 1, d = last; d >= 0 && run * p.unit < kRun; --d) {
    take(static_cast<int>(d), CeilDiv(kRun / p.unit, run), d == last ? line : 1);
    run *= plan.block[d];
    if (plan.block[d] < p.size[d]) break;
  }
  for (int64_t run = 1; run * p.unit < kRun;) {
    int d = 0;
    while (d < p.rank && p.in_stride[d] != run) ++d;
    if (d == p.rank) break;
    take(d, CeilDiv(kRun / p.unit, run), run == 1 ? line : 1);
    run *= plan.block[d];
    if (plan.block[d] < p.size[d]) break;
  }
  // Blocks of few bytes would be all overhead.
  for (int d = last; d >= 0 && elements * p.unit < kBlock; --d) {
    const int64_t others = elements / plan.block[d];
    take(d, CeilDiv(kBlock / p.unit, others), d == last || d == plan.minor ? line : 1);
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
  const bool rows = p.KeepsMinor();
  int unit_log = 0;
  while ((int64_t{1} << unit_log) < p.unit) ++unit_log;

  int64_t index[kMaxPermutationRank];
  int64_t rest = begin;
  for (int d = last; d >= 0; --d) {
    index[d] = rest % plan.grid[d];
    rest /= plan.grid[d];
  }
  for (int64_t b = begin; b < end; ++b) {
    LoopNest nest;
    int64_t in = 0, out = 0, row_size = 0, column_size = 0;
    for (int d = 0; d < p.rank; ++d) {
      const int64_t from = index[d] * plan.block[d];
      const int64_t left = p.size[d] - from;
      const int64_t size = left < plan.block[d] ? left : plan.block[d];
      in += from * p.in_stride[d];
      out += from * p.out_stride[d];
      if (d == last) {
        row_size = size;
      } else if (d == plan.minor) {
        column_size = size;
      } else if (size > 1) {
        nest.Add(size, p.in_stride[d] * p.unit, p.out_stride[d] * p.unit);
      }
    }
    const char* from = x + in * p.unit;
    char* to = y + out * p.unit;
    if (rows) {
      Kernels().rows(nest, from, to, row_size * p.unit);
    } else {
      Kernels().matrix[unit_log](nest, from, p.in_stride[last] * p.unit, to,
                                 p.out_stride[plan.minor] * p.unit, row_size, column_size, stream);
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
  static PlanCache<Plan> cache;
  // Loads and stores of any alignment cost the same: the unit is as wide as the shape allows.
  const std::shared_ptr<const Plan> plan =
      cache.Get({{dims, dims + rank}, {axes, axes + rank}, itemsize, 16}, MakePlan);
  const Permutation& p = plan->p;
  const int64_t bytes = p.count * p.unit;
  if (p.IsCopy()) {
    ParallelFor(executor, bytes, 4096, 2, [&](int64_t begin, int64_t end) {
      std::memcpy(y + begin, x + begin, static_cast<size_t>(end - begin));
    });
    return;
  }
  const bool stream = false;
  ParallelFor(executor, plan->blocks, 1,
              2 * static_cast<double>(bytes) / static_cast<double>(plan->blocks),
              [&](int64_t begin, int64_t end) { RunBlocks(*plan, x, y, begin, end, stream); });
}

}  // namespace jax_fastops::cpu

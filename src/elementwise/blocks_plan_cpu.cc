// Plans the blocks of the element-wise engine, the tables for dense copies of broadcast operands,
// and the loops.
#include "elementwise/blocks_plan.h"

#include <algorithm>

#include "core/cpu/dtype.h"
#include "core/cpu/stream.h"

namespace jax_fastops::cpu::blocks {
namespace {

FASTOPS_DEFINE_TABLE(Kernels, block_helpers)

// The maximum number of elements in a block without parts on the stack. Rows of up to half of kTile
// are combined into blocks of several rows.
constexpr int64_t kLongTile = 8192;
// The number of sums, in doubles, that fit the L2 cache in addition to other data.
constexpr int64_t kFewSums = 32 << 10;
// The minimum size of outputs that use streaming stores. It is lower than kStreamBytes (stream.h)
// because the operands use the caches too, so less of the result would stay there.
constexpr int64_t kLeastStreamed = int64_t{12} << 20;

void SetPattern(const Plan& plan, Slot* s) {
  int64_t dense = 1;      // elements of the dimensions inside of the first one with stride 0
  bool repeated = false;  // a dimension of stride 0 was found
  s->pattern = Pattern::kRows;
  for (int d = plan.rank - 1; d >= plan.cut; --d) {
    if (plan.size[d] == 1) continue;
    if (s->stride[d] != (repeated ? 0 : dense)) {
      if (repeated || s->stride[d] != 0) return;
      repeated = true;
    } else if (!repeated) {
      dense *= plan.size[d];
    }
  }
  if (!repeated) {
    s->pattern = Pattern::kDense;
  } else if (s->storage == Storage::kBits) {
    return;
  } else if (dense == 1) {
    s->pattern = Pattern::kSplat;
  } else if (dense >= kLeastPeriod && (dense & (dense - 1)) == 0) {
    s->pattern = Pattern::kPeriod;
    s->period = dense;
  }
}

// The number of elements of a gradient in `count` indices of the cut dimension.
int64_t LengthOf(const Plan& plan, const Slot& s, int64_t count) {
  int64_t length = s.stride[plan.cut] == 0 ? 1 : count;
  for (int d = plan.cut + 1; d < plan.rank; ++d) {
    if (s.stride[d] != 0) length *= plan.size[d];
  }
  return length;
}

void AddSlot(const BroadcastShape& shape, const BlockOperand& operand, Plan* plan) {
  Slot& s = plan->slot[plan->slots++];
  const int array = operand.array;
  s.data = static_cast<char*>(operand.data);
  s.storage = operand.storage;
  s.bytes = s.storage == Storage::kBits   ? 0
            : s.storage == Storage::kWide ? static_cast<int>(AccumulatorSize(plan->dtype))
                                          : static_cast<int>(ItemSize(plan->dtype));
  s.offsets = nullptr;
  s.byte_rows = false;
  s.permutation = {};
  int64_t dense = 1;
  for (int d = plan->rank - 1; d >= 0; --d) {
    // With rank 0 there is one element, and nothing is broadcast.
    s.stride[d] = array == kResult || shape.rank == 0 ? dense : shape.stride[array][d];
    dense *= plan->size[d];
  }
}

// A loop over a dimension, with `indices` indices per iteration.
struct Loop {
  int dimension;
  int64_t extent, indices;
};

// Sets the loops. Leaves out those with one iteration.
void SetLoops(Plan* plan, std::span<const Loop> order) {
  plan->loops = 0;
  plan->chunk_loop = -1;
  plan->blocks = 1;
  for (const Loop& loop : order) {
    if (loop.extent == 1) continue;
    const int l = plan->loops++;
    plan->extent[l] = loop.extent;
    plan->blocks *= loop.extent;
    if (loop.dimension == plan->cut) plan->chunk_loop = l;
    for (int i_slot = 0; i_slot < plan->slots; ++i_slot) {
      Slot& s = plan->slot[i_slot];
      s.step[l] = s.stride[loop.dimension] * loop.indices;
    }
  }
  for (int i = 0; i < plan->sums; ++i) {
    Sum& sum = plan->sum[i];
    const Slot& s = plan->slot[sum.slot];
    sum.length = LengthOf(*plan, s, plan->chunk);
    sum.last_length = LengthOf(*plan, s, plan->last_chunk);
    sum.first = 0;
    while (sum.first < plan->loops && s.step[sum.first] != 0) ++sum.first;
    sum.slice_blocks = 1;
    sum.size = sum.length;
    for (int l = plan->loops - 1; l >= 0; --l) {
      sum.step[l] = 0;
      if (l < sum.first) continue;
      sum.slice_blocks *= plan->extent[l];
      if (s.step[l] == 0) continue;
      sum.step[l] = sum.size;
      sum.size *= plan->extent[l];
    }
  }
}

int64_t SizeOfSums(const Plan& plan) {
  int64_t size = 0;
  for (int i = 0; i < plan.sums; ++i) size += plan.sum[i].size;
  return size;
}

// The number of values of a block that are immediately added to sums in double, if the loop over
// this dimension is innermost.
int64_t CostOfInnermost(const Plan& plan, int dimension) {
  int64_t cost = 0;
  for (int i = 0; i < plan.sums; ++i) {
    const Slot& s = plan.slot[plan.sum[i].slot];
    if (s.stride[dimension] != 0) cost += WidthOf(s, plan.chunk * plan.inside);
  }
  return cost;
}

// Chooses the order of the loops. There is a loop over each dimension outside of the cut dimension,
// and one over the chunks of the cut dimension. The default is the result's order, which suits
// memory best. If that needs many sums, the dimensions over which the fewest gradients are summed
// come first. Otherwise, a few iterations of the second innermost loop may move inside of the
// innermost loop, if then more consecutive blocks add to the same sums.
void ChooseLoops(Plan* plan) {
  Loop order[kMaxLoops], other[kMaxLoops];
  int summed[kMaxLoops] = {}, loops = 0;
  for (int d = 0; d <= plan->cut; ++d) {
    const int64_t extent = d == plan->cut ? plan->chunks : plan->size[d];
    if (extent == 1) continue;
    for (int i = 0; i < plan->sums; ++i) {
      summed[d] += plan->slot[plan->sum[i].slot].stride[d] == 0 ? 1 : 0;
    }
    order[loops] = other[loops] = {d, extent, d == plan->cut ? plan->chunk : 1};
    ++loops;
  }
  SetLoops(plan, {order, order + loops});
  const int64_t size = SizeOfSums(*plan);
  if (size > kFewSums) {
    std::stable_sort(other, other + loops, [&](const Loop& a, const Loop& b) {
      return summed[a.dimension] < summed[b.dimension];
    });
    SetLoops(plan, {other, other + loops});
    if (SizeOfSums(*plan) > size / 2) SetLoops(plan, {order, order + loops});
    return;
  }
  if (loops < 2 || loops == kMaxLoops) return;
  const Loop inner = order[loops - 1], outer = order[loops - 2];
  if (outer.extent % kMostDepth != 0 ||
      CostOfInnermost(*plan, outer.dimension) >= CostOfInnermost(*plan, inner.dimension)) {
    return;
  }
  std::copy(order, order + loops, other);
  other[loops - 2].extent /= kMostDepth;
  other[loops - 2].indices *= kMostDepth;
  other[loops] = {outer.dimension, kMostDepth, outer.indices};
  SetLoops(plan, {other, other + loops + 1});
  if (SizeOfSums(*plan) > kFewSums) SetLoops(plan, {order, order + loops});
}

void ChooseBlocks(Plan* plan) {
  const int last = plan->rank - 1;
  plan->cut = last;
  plan->inside = 1;
  bool on_stack = plan->sums > 0;
  for (int i = 0; i < plan->slots; ++i) {
    const Slot& s = plan->slot[i];
    const bool dense = s.storage == Storage::kBits ? s.stride[last] == 1 : s.stride[last] <= 1;
    on_stack |= !dense && plan->size[last] > 1;
  }
  int64_t most = on_stack ? kTile : kLongTile;
  if (plan->size[last] <= kTile / 2) {
    while (plan->cut > 0 && plan->inside * plan->size[plan->cut] <= kTile / 2) {
      plan->inside *= plan->size[plan->cut--];
    }
    if (plan->cut < last) most = kTile;
  }
  const int64_t size = plan->size[plan->cut];
  plan->chunk = std::min(size, std::max<int64_t>(1, most / plan->inside));
  plan->chunks = (size - 1) / plan->chunk + 1;
  plan->chunk = (size - 1) / plan->chunks + 1;  // of about equal length
  // A multiple of 64 elements, so that chunks of all arrays, including bits, begin at whole cache
  // lines if possible.
  if (plan->cut == last && plan->chunks > 1) plan->chunk = (plan->chunk + 63) / 64 * 64;
  plan->chunks = (size - 1) / plan->chunk + 1;
  plan->last_chunk = size - (plan->chunks - 1) * plan->chunk;
  for (int i = 0; i < plan->slots; ++i) SetPattern(*plan, &plan->slot[i]);
}

// The offsets of a block's rows.
void FillOffsets(const Plan& plan, const Slot& s, int64_t* offsets) {
  if (plan.cut == plan.rank - 1) {
    offsets[0] = 0;
    return;
  }
  int64_t index[kMaxBroadcastRank] = {}, offset = 0;
  const int64_t rows = plan.chunk * plan.inside / plan.size[plan.rank - 1];
  for (int64_t r = 0; r < rows; ++r) {
    offsets[r] = offset;
    for (int d = plan.rank - 2; d >= plan.cut; --d) {
      offset += s.stride[d];
      if (++index[d] < plan.size[d]) break;
      offset -= index[d] * s.stride[d];
      index[d] = 0;
    }
  }
}

// Rows of at least this length are copied one by one.
constexpr int64_t kLongRow = 64;

// Sets no permutation if the elements of the operand are too far apart.
void FillPermutation(const Plan& plan, Slot* s, Tables* tables) {
  const int64_t inner = plan.size[plan.rank - 1], n = plan.chunk * plan.inside;
  const int lanes = Kernels().lanes[s->SizeIndex()];
  if (lanes == 0 || inner >= kLongRow) return;
  int64_t all[kTile];
  int64_t i = 0;
  for (int64_t r = 0; i < n; ++r) {
    for (int64_t k = 0; k < inner; ++k, ++i) {
      all[i] = tables->offsets[r] + k * s->stride[plan.rank - 1];
    }
  }
  for (int64_t v = 0; v * lanes < n; ++v) {
    const int64_t begin = v * lanes, end = std::min(n, begin + lanes);
    const int64_t base = *std::min_element(all + begin, all + end);
    const int64_t count = *std::max_element(all + begin, all + end) - base + 1;
    if (count > lanes || base > UINT16_MAX) return;
    tables->bases[v] = static_cast<uint16_t>(base);
    tables->counts[v] = static_cast<uint8_t>(count);
    for (i = begin; i < end; ++i) tables->indices[i] = static_cast<uint8_t>(all[i] - base);
    for (; i < begin + lanes; ++i) tables->indices[i] = 0;
  }
  s->permutation = {tables->bases, tables->counts, tables->indices};
}

// Whether a block's rows are one byte each and contiguous. Then eight rows are `inner` dense bytes.
bool HasByteRows(const BlockRows& rows) {
  bool result = rows.inner < 8 && rows.step == 1;
  for (int64_t r = 0; result && r < rows.rows; ++r) result = rows.offsets[r] == 8 * r;
  return result;
}

bool IsSummed(const Plan& plan, const Slot& s) {
  for (int d = 0; d < plan.rank; ++d) {
    if (s.stride[d] == 0 && plan.size[d] > 1) return true;
  }
  return false;
}

void ChoosePieces(Plan* plan, int64_t elements, int threads) {
  double bytes = 0;  // total memory traffic
  for (int i = 0; i < plan->slots; ++i) {
    const Slot& s = plan->slot[i];
    if (s.data != nullptr && (s.pattern != Pattern::kSplat || plan->cut < plan->rank - 1)) {
      bytes += static_cast<double>(s.bytes) * static_cast<double>(elements);
    }
  }
  const int64_t sums = SizeOfSums(*plan);
  // Every piece clears its slices and adds them up at the end, so large sums get fewer pieces.
  int64_t pieces = int64_t{threads} * (sums > kFewSums / 8 ? 2 : sums > 0 ? 4 : 8);
  if (bytes < static_cast<double>(pieces) * static_cast<double>(kParallelBytes)) {
    pieces = static_cast<int64_t>(bytes / static_cast<double>(kParallelBytes));
  }
  if (sums > 0) {  // at most as much memory as the result
    const int64_t size = static_cast<int64_t>(DTypeSize(plan->dtype));
    pieces = std::min(pieces, elements * size / (sums * 8) + 1);
  }
  if (threads <= 1) pieces = 1;
  pieces = std::max<int64_t>(1, std::min(pieces, plan->blocks));
  plan->piece_blocks = (plan->blocks - 1) / pieces + 1;
  plan->sums_per_piece = 2 * sums;
}

}  // namespace

void SetPlan(const BroadcastShape& shape, DType dtype, std::span<const BlockOperand> in,
             std::span<const BlockOperand> out, BlockKernel* kernel, int threads, Plan* plan) {
  const int inputs = static_cast<int>(in.size()), outputs = static_cast<int>(out.size());
  const int64_t elements = shape.elements();
  plan->rank = std::max(1, shape.rank);
  plan->size[0] = 1;
  for (int d = 0; d < shape.rank; ++d) plan->size[d] = shape.size[d];
  plan->dtype = dtype;
  plan->accumulator = dtype == DType::kF64 ? 1 : 0;
  plan->kernel = kernel;
  plan->inputs = inputs;
  plan->slots = plan->sums = 0;
  for (const BlockOperand& operand : in) AddSlot(shape, operand, plan);
  for (int i = 0; i < outputs; ++i) {
    const int at = plan->slots;
    AddSlot(shape, out[i], plan);
    const Slot& s = plan->slot[at];
    plan->stream[i] = s.bytes > 0 && ShouldStream(elements * s.bytes, kLeastStreamed);
    plan->sum_of[i] = -1;
    if (s.data != nullptr && s.bytes > 0 && IsSummed(*plan, s)) {
      plan->sum_of[i] = plan->sums;
      plan->sum[plan->sums++].slot = at;
    }
  }
  ChooseBlocks(plan);
  for (int i = 0; i < plan->slots; ++i) {
    Slot& s = plan->slot[i];
    if (s.pattern != Pattern::kRows || s.data == nullptr) continue;
    FillOffsets(*plan, s, plan->tables[i].offsets);
    s.offsets = plan->tables[i].offsets;
    if (s.storage == Storage::kBits) {
      s.byte_rows = HasByteRows(plan->Rows(s, plan->chunk * plan->inside));
    }
    if (i < inputs && s.bytes > 0) FillPermutation(*plan, &s, &plan->tables[i]);
  }
  ChooseLoops(plan);
  // No streaming stores if only some blocks begin at a cache line.
  for (int i = 0; i < outputs; ++i) {
    const Slot& s = plan->slot[inputs + i];
    for (int l = 0; l < plan->loops; ++l) plan->stream[i] &= s.step[l] * s.bytes % 64 == 0;
  }
  ChoosePieces(plan, elements, threads);
}

}  // namespace jax_fastops::cpu::blocks

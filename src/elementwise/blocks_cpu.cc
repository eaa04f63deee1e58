// The element-wise engine: plans the blocks, makes dense copies of broadcast operands, and sums
// gradients.
//
// A block is a run of indices of one dimension (the cut dimension), with all dimensions inside of
// it. So a block is contiguous in the result, and lies in a short range of each operand. Kernels
// see only dense blocks. If an operand is broadcast within a block, a dense copy is made on the
// stack, with a table of offsets that is computed once per call. So short dimensions, in any
// number, cost a few instructions per element, and long dimensions cost nothing. If a block's
// output is a gradient that must be summed, it stays on the stack too. The values of a few blocks
// are added up there, and are then added to sums in double.
//
// A stride of an input other than 0 may be larger than in a dense array, for example if the array
// has several copies along a dimension and only one is read. The elements between neighbors are
// skipped. Outputs have no such gaps.
//
// The blocks are ordered as in nested loops, and threads take pieces of this order. The sums of a
// gradient are complete when the outermost loop over which it is summed ends. Until then they are
// accumulated in a small *slice*, which is then written. A piece may begin or end within a slice.
// Its part of such a slice is stored separately, and these parts are added up at the end, in the
// order of the pieces. So the order of all additions depends only on the shape and the number of
// threads.
//
// Long because planning, iteration and sums share one description of the loops.
#include "elementwise/blocks_cpu.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "core/cpu/dtype.h"
#include "core/cpu/stream.h"
#include "core/integer.h"

namespace jax_fastops::cpu {
namespace {

// The maximum number of elements in a block, if parts of it are on the stack, and otherwise. Rows
// of up to half of kTile are combined into blocks of several rows.
constexpr int64_t kTile = 1024, kLongTile = 8192;
constexpr int kTileBytes = static_cast<int>(kTile) * 8;
constexpr int kMaxLoops = kMaxBroadcastRank + 1, kMaxSlots = kMaxInputs + kMaxOutputs;
// Up to this many values are added in their own type, before they are added to sums in double. This
// replaces four conversions and two additions by one vector addition, and its error is no larger
// than that of the values themselves. If a block is summed to one value, kPartialSums partial sums
// are kept.
constexpr int64_t kMostDepth = 8, kPartialSums = 128;
// The number of sums, in doubles, that fit the L2 cache in addition to other data.
constexpr int64_t kFewSums = 32 << 10;

FASTOPS_DEFINE_TABLE(Kernels, block_helpers)

// The minimum size of outputs that use streaming stores. It is lower than kStreamBytes (stream.h)
// because the operands use the caches too, so less of the result would stay there.
constexpr int64_t kLeastStreamed = int64_t{12} << 20;

// The layout of an array within a block: contiguous; one value; a repeated run of values; any rows.
enum class Pattern : uint8_t { kDense, kSplat, kPeriod, kRows };

// An array, input or output.
struct Slot {
  char* data;
  Storage storage;
  int bytes;  // per element; 0 for bits
  Pattern pattern;
  int64_t period;  // kPeriod: the number of elements that are repeated
  int64_t stride[kMaxBroadcastRank];
  int64_t step[kMaxLoops];
  const int64_t* offsets;
  bool byte_rows;                // bits: rows of one byte each, contiguous
  BlockPermutation permutation;  // if bases is not null

  char* At(int64_t offset) const {
    return data + (storage == Storage::kBits ? offset / 8 : offset * bytes);
  }
};

// An output that is summed.
struct Sum {
  int slot;
  int first;             // outermost loop that is summed over; number of loops if none
  int64_t slice_blocks;  // number of blocks that are summed into a slice
  int64_t size;          // number of sums in a slice
  int64_t step[kMaxLoops];
  int64_t length, last_length;  // of the gradient in a block, and in a block of the last chunk
};

struct Plan {
  int64_t size[kMaxBroadcastRank];
  int rank;

  int cut;                    // the cut dimension: a block has a run of its indices
  int64_t chunk, last_chunk;  // lengths of these runs
  int64_t chunks;
  int64_t inside;  // elements per index of the cut dimension
  int loops;
  int64_t extent[kMaxLoops];
  int chunk_loop;  // the loop over the chunks; -1 if there is only one chunk
  int64_t blocks;

  int inputs, slots;
  Slot slot[kMaxSlots];
  int sums;
  Sum sum[kMaxOutputs];
  int sum_of[kMaxOutputs];   // -1 if the output is not summed
  bool stream[kMaxOutputs];  // use streaming stores

  DType dtype;
  int accumulator;  // 0 float, 1 double
  BlockKernel* kernel;

  int64_t piece_blocks;
  int64_t sums_per_piece;  // for all slices, twice each
  double* workspace;

  BlockRows Rows(const Slot& s, int64_t n) const {
    const int64_t inner = cut == rank - 1 ? n : size[rank - 1];
    return {s.offsets, n / inner, inner, s.stride[rank - 1]};
  }
};

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

// The range of an operand in `count` indices of the cut dimension, in elements. It may be larger
// than the number of elements, because strides may have gaps.
int64_t ReachOf(const Plan& plan, const Slot& s, int64_t count) {
  int64_t last = (count - 1) * s.stride[plan.cut];
  for (int d = plan.cut + 1; d < plan.rank; ++d) last += (plan.size[d] - 1) * s.stride[d];
  return last + 1;
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
void SetLoops(Plan* plan, const Loop* order, int loops) {
  plan->loops = 0;
  plan->chunk_loop = -1;
  plan->blocks = 1;
  for (int i = 0; i < loops; ++i) {
    const Loop& loop = order[i];
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

// The number of values that are kept of a block of n, for a gradient that is summed.
int64_t WidthOf(const Slot& s, int64_t n) {
  const int64_t width = s.pattern == Pattern::kSplat    ? kPartialSums
                        : s.pattern == Pattern::kPeriod ? s.period
                                                        : n;
  return std::min(n, width);
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
  SetLoops(plan, order, loops);
  const int64_t size = SizeOfSums(*plan);
  if (size > kFewSums) {
    std::stable_sort(other, other + loops, [&](const Loop& a, const Loop& b) {
      return summed[a.dimension] < summed[b.dimension];
    });
    SetLoops(plan, other, loops);
    if (SizeOfSums(*plan) > size / 2) SetLoops(plan, order, loops);
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
  SetLoops(plan, other, loops + 1);
  if (SizeOfSums(*plan) > kFewSums) SetLoops(plan, order, loops);
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
  for (int i = 0; i < plan->slots; ++i) {
    SetPattern(*plan, &plan->slot[i]);
  }
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

// Memory for the tables of an operand.
struct Tables {
  int64_t offsets[kTile];
  uint16_t bases[kTile];
  uint8_t counts[kTile], indices[kTile];
};

// Rows of at least this length are copied one by one.
constexpr int64_t kLongRow = 64;

int SizeIndex(int bytes) { return bytes / 4; }  // of 2, 4, 8

// Sets no permutation if the elements of the operand are too far apart.
void FillPermutation(const Plan& plan, Slot* s, Tables* tables) {
  const int64_t inner = plan.size[plan.rank - 1], n = plan.chunk * plan.inside;
  const int lanes = Kernels().lanes[SizeIndex(s->bytes)];
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

// ---- Bits that are not dense --------------------------------------------------------------------
//
// Every row begins at a byte, or every bit has its own byte.

// Whether a block's rows are one byte each and contiguous. Then eight rows are `inner` dense bytes.
bool HasByteRows(const BlockRows& rows) {
  bool result = rows.inner < 8 && rows.step == 1;
  for (int64_t r = 0; result && r < rows.rows; ++r) result = rows.offsets[r] == 8 * r;
  return result;
}

void GatherBits(const uint8_t* from, const BlockRows& rows, bool byte_rows, uint8_t* dense) {
  std::memset(dense, 0, kTile / 8 + 1);
  int64_t at = 0, r = 0;
  if (byte_rows) {
    for (; r + 8 <= rows.rows; r += 8, at += 8 * rows.inner) {
      uint64_t bits = 0;
      for (int k = 0; k < 8; ++k) bits |= static_cast<uint64_t>(from[r + k]) << k * rows.inner;
      std::memcpy(dense + at / 8, &bits, static_cast<size_t>(rows.inner));
    }
  }
  for (; r < rows.rows; ++r) {
    const uint8_t* row = from + rows.offsets[r] / 8;
    if (rows.step != 1) {
      for (int64_t i = 0; i < rows.inner; ++i, ++at) {
        const int64_t bit = i * rows.step;
        dense[at / 8] |= static_cast<uint8_t>((row[bit / 8] >> bit % 8 & 1) << at % 8);
      }
      continue;
    }
    for (int64_t i = 0; i < rows.inner; i += 8) {  // unused bits of a row are 0
      const unsigned eight = static_cast<unsigned>(row[i / 8]) << at % 8;
      dense[at / 8] |= static_cast<uint8_t>(eight);
      dense[at / 8 + 1] |= static_cast<uint8_t>(eight >> 8);
      at += std::min<int64_t>(8, rows.inner - i);
    }
  }
}

void ScatterBits(const uint8_t* dense, const BlockRows& rows, bool byte_rows, uint8_t* to) {
  int64_t at = 0, r = 0;
  if (byte_rows) {
    const uint64_t used = (uint64_t{1} << rows.inner) - 1;
    for (; r + 8 <= rows.rows; r += 8, at += 8 * rows.inner) {
      uint64_t bits = 0;
      std::memcpy(&bits, dense + at / 8, static_cast<size_t>(rows.inner));
      for (int k = 0; k < 8; ++k) to[r + k] = static_cast<uint8_t>(bits >> k * rows.inner & used);
    }
  }
  for (; r < rows.rows; ++r) {
    uint8_t* row = to + rows.offsets[r] / 8;
    if (rows.step != 1) {
      std::memset(row, 0, static_cast<size_t>((rows.inner - 1) * rows.step / 8 + 1));
      for (int64_t i = 0; i < rows.inner; ++i, ++at) {
        const int64_t bit = i * rows.step;
        row[bit / 8] |= static_cast<uint8_t>((dense[at / 8] >> at % 8 & 1) << bit % 8);
      }
      continue;
    }
    for (int64_t i = 0; i < rows.inner; i += 8) {
      const int64_t count = std::min<int64_t>(8, rows.inner - i);
      const unsigned two = dense[at / 8] | static_cast<unsigned>(dense[at / 8 + 1]) << 8;
      row[i / 8] = static_cast<uint8_t>(two >> at % 8 & ((1u << count) - 1));
      at += count;
    }
  }
}

// ---- Pieces -------------------------------------------------------------------------------------

// Writes a slice. Its first block has the chunk number `chunk` and begins at element `offset` of
// the gradient.
void WriteSlice(const Plan& plan, const Sum& sum, const double* sums, int64_t offset,
                int64_t chunk) {
  const Slot& s = plan.slot[sum.slot];
  const DType type = s.bytes == ItemSize(plan.dtype) ? plan.dtype : DType::kF32;
  auto* write = Kernels().write[static_cast<int>(type)];
  int64_t index[kMaxLoops] = {};
  for (;;) {
    const bool last =
        (plan.chunk_loop >= sum.first && sum.step[plan.chunk_loop] != 0 ? index[plan.chunk_loop]
                                                                        : chunk) == plan.chunks - 1;
    write(sums, last ? sum.last_length : sum.length, s.At(offset));
    int l = plan.loops - 1;
    for (; l >= sum.first; --l) {
      if (sum.step[l] == 0) continue;
      offset += s.step[l];
      sums += sum.step[l];
      if (++index[l] < plan.extent[l]) break;
      offset -= index[l] * s.step[l];
      sums -= index[l] * sum.step[l];
      index[l] = 0;
    }
    if (l < sum.first) return;
  }
}

// The state of a gradient's sums in one piece.
struct SumState {
  double* slice;          // the current slice
  double* begun;          // the first slice, if an earlier piece has its beginning; else null
  int64_t blocks_left;    // until the end of the slice
  int64_t offset, chunk;  // of the first block of the slice
  double* held_to;        // the sums to which the held values will be added; null if none are held
  int64_t held_n;         // elements per block of the held values
  int64_t held_depth;     // how many values have been added together
};

struct Scratch {
  alignas(64) char in[kMaxInputs][kTileBytes];
  alignas(64) char out[kMaxOutputs][kTileBytes];
};

class Piece {
 public:
  Piece(const Plan& plan, int64_t piece) : plan_(plan), kernels_(Kernels()) {
    begin_ = piece * plan.piece_blocks;
    end_ = std::min(plan.blocks, begin_ + plan.piece_blocks);
    int64_t rest = begin_;
    for (int l = plan.loops - 1; l >= 0; --l) {
      index_[l] = rest % plan.extent[l];
      rest /= plan.extent[l];
    }
    for (int i = 0; i < plan.slots; ++i) {
      offset_[i] = 0;
      last_[i] = nullptr;
      for (int l = 0; l < plan.loops; ++l) offset_[i] += index_[l] * plan.slot[i].step[l];
    }
    double* workspace = plan.workspace + piece * plan.sums_per_piece;
    for (int i = 0; i < plan.sums; ++i) {
      const Sum& sum = plan.sum[i];
      SumState& state = state_[i];
      sum_offset_[i] = 0;
      for (int l = 0; l < plan.loops; ++l) sum_offset_[i] += index_[l] * sum.step[l];
      const int64_t done = begin_ % sum.slice_blocks;
      state.begun = done == 0 ? nullptr : workspace;
      state.slice = done == 0 ? workspace + sum.size : workspace;
      state.blocks_left = sum.slice_blocks - done;
      state.held_to = nullptr;
      workspace += 2 * sum.size;
      Begin(i);
    }
  }

  void Run() {
    for (int64_t block = begin_;;) {
      const bool last = plan_.chunk_loop < 0 || index_[plan_.chunk_loop] == plan_.chunks - 1;
      Block(plan_.inside * (last ? plan_.last_chunk : plan_.chunk));
      bool complete[kMaxOutputs] = {};
      for (int i = 0; i < plan_.sums; ++i) {
        complete[i] = --state_[i].blocks_left == 0;
        if (complete[i]) End(i);
      }
      if (++block == end_) break;
      Advance();
      for (int i = 0; i < plan_.sums; ++i) {
        if (!complete[i]) continue;
        state_[i].blocks_left = plan_.sum[i].slice_blocks;
        Begin(i);
      }
    }
    for (int i = 0; i < plan_.sums; ++i) Flush(i);
    if (streamed_) kernels_.fence();
  }

 private:
  void Advance() {
    for (int l = plan_.loops - 1; l >= 0; --l) {
      const bool wraps = ++index_[l] == plan_.extent[l];
      const int64_t turns = wraps ? 1 - plan_.extent[l] : 1;
      for (int i = 0; i < plan_.slots; ++i) offset_[i] += turns * plan_.slot[i].step[l];
      for (int i = 0; i < plan_.sums; ++i) sum_offset_[i] += turns * plan_.sum[i].step[l];
      if (!wraps) return;
      index_[l] = 0;
    }
  }

  // Begins a slice at this block.
  void Begin(int i) {
    SumState& state = state_[i];
    std::memset(state.slice, 0, static_cast<size_t>(plan_.sum[i].size) * sizeof(double));
    state.offset = offset_[plan_.sum[i].slot];
    state.chunk = plan_.chunk_loop < 0 ? 0 : index_[plan_.chunk_loop];
  }

  // Ends a slice after this block.
  void End(int i) {
    SumState& state = state_[i];
    Flush(i);
    if (state.slice == state.begun) {
      state.slice += plan_.sum[i].size;
    } else {
      WriteSlice(plan_, plan_.sum[i], state.slice, state.offset, state.chunk);
    }
  }

  // Sets where the kernel writes a block's values of a gradient. If consecutive blocks have the
  // same sums, the values are added to those of the previous blocks.
  void Hold(int i, int64_t n, BlockArray* array) {
    SumState& state = state_[i];
    double* const to = state.slice + sum_offset_[i];
    const int64_t width = WidthOf(plan_.slot[plan_.sum[i].slot], n),
                  depth = (n + width - 1) / width;
    bool add = to == state.held_to && n == state.held_n && state.held_depth + depth <= kMostDepth;
    if (!add) {
      Flush(i);
      state.held_to = to;
      state.held_n = n;
      state.held_depth = 0;
    }
    state.held_depth += depth;
    if (width < n) {
      if (!add) std::memset(array->data, 0, static_cast<size_t>(width << 2 << plan_.accumulator));
      array->mask = width - 1;
      add = true;
    }
    array->add = add;
  }

  void Flush(int i) {
    SumState& state = state_[i];
    double* const to = state.held_to;
    if (to == nullptr) return;
    state.held_to = nullptr;
    const int type = plan_.accumulator, at = plan_.sum[i].slot;
    const Slot& s = plan_.slot[at];
    const char* const values = scratch_.out[at - plan_.inputs];
    if (s.pattern == Pattern::kSplat) {
      *to += kernels_.sum[type](values, WidthOf(s, state.held_n));
    } else if (s.pattern == Pattern::kRows) {
      kernels_.add_rows[type](values, plan_.Rows(s, state.held_n), to);
    } else {
      kernels_.add[type](values, WidthOf(s, state.held_n), to);
    }
  }

  void Block(int64_t n) {
    BlockArray in[kMaxInputs], out[kMaxOutputs];
    for (int i = 0; i < plan_.inputs; ++i) in[i] = Input(i, n);
    const int outputs = std::min(plan_.slots - plan_.inputs, kMaxOutputs);
    for (int i = 0; i < outputs; ++i) out[i] = Output(i, n);
    plan_.kernel(n, in, out);
    for (int i = 0; i < outputs; ++i) {
      const int at = plan_.inputs + i;
      const Slot& s = plan_.slot[at];
      if (s.data != nullptr && plan_.sum_of[i] < 0 && s.pattern == Pattern::kRows) {
        ScatterBits(reinterpret_cast<uint8_t*>(scratch_.out[i]), plan_.Rows(s, n), s.byte_rows,
                    reinterpret_cast<uint8_t*>(s.At(offset_[at])));
      }
    }
  }

  BlockArray Input(int i, int64_t n) {
    const Slot& s = plan_.slot[i];
    BlockArray array;
    array.wide = s.storage == Storage::kWide;
    if (s.data == nullptr) return array;
    char* const from = s.At(offset_[i]);
    if (s.pattern == Pattern::kDense) {
      array.data = from;
      return array;
    }
    if (s.pattern == Pattern::kPeriod) {
      array.data = from;
      array.mask = s.period - 1;
      return array;
    }
    array.data = scratch_.in[i];
    if (s.pattern == Pattern::kSplat) {
      array.mask = 0;
      if (from != last_[i]) kernels_.splat[SizeIndex(s.bytes)](from, array.data);
      last_[i] = from;
    } else if (s.storage == Storage::kBits) {
      GatherBits(reinterpret_cast<uint8_t*>(from), plan_.Rows(s, n), s.byte_rows,
                 reinterpret_cast<uint8_t*>(array.data));
    } else {
      // The last block of a chunk loop is shorter. A copy made for it is too short for the next
      // block.
      if (from != last_[i] || n > last_n_[i]) {
        const int size = SizeIndex(s.bytes);
        if (s.permutation.bases != nullptr) {
          const int64_t length = ReachOf(plan_, s, n / plan_.inside);
          kernels_.permute[size](from, length, s.permutation, n, array.data);
        } else {
          kernels_.expand[size](from, plan_.Rows(s, n), array.data);
        }
      }
      last_n_[i] = from != last_[i] ? n : std::max(n, last_n_[i]);
      last_[i] = from;
    }
    return array;
  }

  BlockArray Output(int i, int64_t n) {
    const int at = plan_.inputs + i;
    const Slot& s = plan_.slot[at];
    BlockArray array;
    if (s.data == nullptr) return array;
    if (plan_.sum_of[i] >= 0 || s.pattern == Pattern::kRows) {
      array.data = scratch_.out[i];
      array.wide = true;
      if (plan_.sum_of[i] >= 0) Hold(plan_.sum_of[i], n, &array);
      return array;
    }
    array.data = s.At(offset_[at]);
    array.wide = s.storage == Storage::kWide;
    array.stream = plan_.stream[i] && IsWholeLines(array.data);
    streamed_ |= array.stream;
    return array;
  }

  const Plan& plan_;
  const BlockHelpers& kernels_;
  int64_t begin_, end_;
  int64_t index_[kMaxLoops];
  int64_t offset_[kMaxSlots], sum_offset_[kMaxOutputs];
  const char* last_[kMaxSlots];
  int64_t last_n_[kMaxSlots] = {};
  SumState state_[kMaxOutputs];
  bool streamed_ = false;
  Scratch scratch_;
};

// Adds up the parts of a slice from several pieces, in the order of the pieces, and writes it.
void FinishSums(const Plan& plan) {
  int64_t before = 0;  // sums of a piece that belong to previous gradients
  for (int i = 0; i < plan.sums; ++i) {
    const Sum& sum = plan.sum[i];
    const Slot& s = plan.slot[sum.slot];
    double* open = nullptr;
    int64_t piece = 0;
    for (int64_t begin = 0; begin < plan.blocks; begin += plan.piece_blocks, ++piece) {
      const int64_t end = std::min(plan.blocks, begin + plan.piece_blocks);
      double* const begun = plan.workspace + piece * plan.sums_per_piece + before;
      const int64_t slice = begin - begin % sum.slice_blocks;  // the first block of the slice
      if (slice != begin) {
        for (int64_t k = 0; k < sum.size; ++k) open[k] += begun[k];
        if (end - slice >= sum.slice_blocks) {
          int64_t offset = 0, chunk = 0, rest = slice;
          for (int l = plan.loops - 1; l >= 0; --l) {
            const int64_t index = rest % plan.extent[l];
            offset += index * s.step[l];
            if (l == plan.chunk_loop) chunk = index;
            rest /= plan.extent[l];
          }
          WriteSlice(plan, sum, open, offset, chunk);
        }
      }
      const int64_t last = end - end % sum.slice_blocks;
      if (last != end && last >= begin) open = begun + sum.size;
    }
    before += 2 * sum.size;
  }
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

void RunBlocks(const BroadcastShape& shape, DType dtype, std::span<const BlockOperand> in,
               std::span<const BlockOperand> out, BlockKernel* kernel, Executor& executor) {
  const int inputs = static_cast<int>(in.size()), outputs = static_cast<int>(out.size());
  const int64_t elements = shape.elements();
  if (elements == 0) return;
  Plan plan;
  plan.rank = std::max(1, shape.rank);
  plan.size[0] = 1;
  for (int d = 0; d < shape.rank; ++d) plan.size[d] = shape.size[d];
  plan.dtype = dtype;
  plan.accumulator = dtype == DType::kF64 ? 1 : 0;
  plan.kernel = kernel;
  plan.inputs = inputs;
  plan.slots = plan.sums = 0;
  for (const BlockOperand& operand : in) AddSlot(shape, operand, &plan);
  for (int i = 0; i < outputs; ++i) {
    const int at = plan.slots;
    AddSlot(shape, out[i], &plan);
    const Slot& s = plan.slot[at];
    plan.stream[i] = s.bytes > 0 && ShouldStream(elements * s.bytes, kLeastStreamed);
    plan.sum_of[i] = -1;
    if (s.data != nullptr && s.bytes > 0 && IsSummed(plan, s)) {
      plan.sum_of[i] = plan.sums;
      plan.sum[plan.sums++].slot = at;
    }
  }
  ChooseBlocks(&plan);
  Tables tables[kMaxSlots];
  for (int i = 0; i < plan.slots; ++i) {
    Slot& s = plan.slot[i];
    if (s.pattern != Pattern::kRows || s.data == nullptr) continue;
    FillOffsets(plan, s, tables[i].offsets);
    s.offsets = tables[i].offsets;
    if (s.storage == Storage::kBits) {
      s.byte_rows = HasByteRows(plan.Rows(s, plan.chunk * plan.inside));
    }
    if (i < inputs && s.bytes > 0) FillPermutation(plan, &s, &tables[i]);
  }
  ChooseLoops(&plan);
  // No streaming stores if only some blocks begin at a cache line.
  for (int i = 0; i < outputs; ++i) {
    const Slot& s = plan.slot[inputs + i];
    for (int l = 0; l < plan.loops; ++l) plan.stream[i] &= s.step[l] * s.bytes % 64 == 0;
  }
  ChoosePieces(&plan, elements, executor.threads());
  const int64_t pieces = (plan.blocks - 1) / plan.piece_blocks + 1;
  // Uninitialized: a piece clears the part that it uses.
  const std::unique_ptr<double[]> workspace(
      new double[static_cast<size_t>(pieces * plan.sums_per_piece)]);
  plan.workspace = workspace.get();
  const auto run = +[](void* context, int64_t index) {
    Piece piece(*static_cast<const Plan*>(context), index);
    piece.Run();
  };
  if (pieces == 1) {
    run(&plan, 0);
  } else {
    executor.Run(pieces, run, &plan);
    FinishSums(plan);
  }
}

}  // namespace jax_fastops::cpu

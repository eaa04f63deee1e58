// The element-wise engine: runs the blocks of a plan (blocks_plan.h), makes dense copies of
// broadcast operands, and sums gradients.
//
// Kernels see only dense blocks. If an operand is broadcast within a block, a dense copy is made on
// the stack, with a table of offsets that is computed once per call. So short dimensions, in any
// number, cost a few instructions per element, and long dimensions cost nothing. If a block's
// output is a gradient that must be summed, it stays on the stack too. The values of a few blocks
// are added up there, and are then added to sums in double.
//
// The blocks are ordered as in nested loops, and threads take pieces of this order. The sums of a
// gradient are complete when the outermost loop over which it is summed ends. Until then they are
// accumulated in a small *slice*, which is then written. A piece may begin or end within a slice.
// Its part of such a slice is stored separately, and these parts are added up at the end, in the
// order of the pieces. So the order of all additions depends only on the shape and the number of
// threads.
#include "elementwise/blocks_cpu.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "core/cpu/dtype.h"
#include "core/cpu/stream.h"
#include "elementwise/blocks_plan.h"

namespace jax_fastops::cpu {
namespace blocks {
namespace {

FASTOPS_DEFINE_TABLE(Kernels, block_helpers)

// ---- Bits that are not dense --------------------------------------------------------------------
//
// Every row begins at a byte, or every bit has its own byte.

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
      state.held_to = nullptr;
      workspace += 2 * sum.size;
      Begin(i);
      state.blocks_left -= done;
    }
  }

  void Run() {
    for (int64_t block = begin_;;) {
      const bool last = plan_.chunk_loop < 0 || index_[plan_.chunk_loop] == plan_.chunks - 1;
      Block(plan_.inside * (last ? plan_.last_chunk : plan_.chunk));
      for (int i = 0; i < plan_.sums; ++i) {
        if (--state_[i].blocks_left == 0) End(i);
      }
      if (++block == end_) break;
      Advance();
      for (int i = 0; i < plan_.sums; ++i) {
        if (state_[i].blocks_left == 0) Begin(i);
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
    state.blocks_left = plan_.sum[i].slice_blocks;
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
    const char* const values = out_[at - plan_.inputs];
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
        ScatterBits(reinterpret_cast<uint8_t*>(out_[i]), plan_.Rows(s, n), s.byte_rows,
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
    if (s.pattern == Pattern::kDense || s.pattern == Pattern::kPeriod) {
      array.data = from;
      if (s.pattern == Pattern::kPeriod) array.mask = s.period - 1;
      return array;
    }
    array.data = in_[i];
    if (s.pattern == Pattern::kSplat) {
      array.mask = 0;
      if (from != last_[i]) kernels_.splat[s.SizeIndex()](from, array.data);
      last_[i] = from;
    } else if (s.storage == Storage::kBits) {
      GatherBits(reinterpret_cast<uint8_t*>(from), plan_.Rows(s, n), s.byte_rows,
                 reinterpret_cast<uint8_t*>(array.data));
    } else {
      // The last block of a chunk loop is shorter. A copy made for it is too short for the next
      // block.
      if (from != last_[i] || n > last_n_[i]) {
        const int size = s.SizeIndex();
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
      array.data = out_[i];
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
  alignas(64) char in_[kMaxInputs][kTile * 8];
  alignas(64) char out_[kMaxOutputs][kTile * 8];
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

}  // namespace
}  // namespace blocks

void RunBlocks(const BroadcastShape& shape, DType dtype, std::span<const BlockOperand> in,
               std::span<const BlockOperand> out, BlockKernel* kernel, Executor& executor) {
  using namespace blocks;
  if (shape.elements() == 0) return;
  Plan plan;
  SetPlan(shape, dtype, in, out, kernel, executor.threads(), &plan);
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

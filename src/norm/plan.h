// Launch plans of the CUDA kernels of layer norm and RMS norm: which kernel runs, on how many
// blocks, with how much shared memory. The tables of forms also define the kernels: the .cu files
// instantiate one for each form, or one for each form and element type.
#pragma once

#include <cstdint>
#include <iterator>

#include "core/plan_rows.h"
#include "norm/shape.h"

namespace jax_fastops {

// Kernels whose blocks process several items have no more blocks than this.
inline constexpr int64_t kNormMaxBlocks = int64_t{1} << 30;

// -------------------------------------------------------------------------------------------------
// Forward

// How a thread accesses rows.
enum class NormAccess {
  kUnits,     // 16 bytes at a time; every row and parameter starts at a multiple of 16 bytes
  kPairs,     // two 16-bit elements at a time; rows start at multiples of 4 bytes
  kElements,  // element by element
  kShifted,   // 16 bytes at a time, at multiples of 16 bytes; rows start anywhere
};
inline constexpr int kNormAccesses = 4;

// How NormRowKernel distributes rows. A block has `block` threads, `threads` of them hold a row,
// and each holds up to `held` bytes of it in the compute type (float32; float64 for float64).
struct NormForwardForm {
  int threads;
  int block;
  int held;
  // The accesses for which there is a kernel.
  bool units;
  bool narrow;  // pairs and elements
  bool shifted;
  bool drops = false;  // a second kernel for units, with dropout
};

// From the shortest rows to the longest. Rows that are not aligned have narrow accesses if they are
// short, and shifted ones if they are long: a shift costs instructions for the parameters, but
// moves 16 bytes at a time. The last form for shifted rows must hold kNormWorkspace columns and one
// unit more, because rows up to that length have no workspace for chunks.
inline constexpr NormForwardForm kNormForwardForms[] = {
    {4, 128, 64, true, true, false},         {16, 128, 64, true, true, false},
    {32, 128, 64, false, true, false},       {32, 128, 96, true, false, false},
    {32, 128, 128, true, true, false, true}, {64, 64, 128, true, false, true},
    {96, 96, 96, false, false, true},        {128, 128, 128, true, false, true},
    {256, 256, 128, true, false, true},      {512, 512, 128, true, false, false},
    {1024, 1024, 128, false, false, true},
};
inline constexpr int kNormForwardFormCount = std::size(kNormForwardForms);

// Whether there is a kernel of this form. Elements have at least 2 bytes, and there are no pairs of
// larger ones.
constexpr bool NormHasForm(int form, NormAccess access, int itemsize) {
  const NormForwardForm& f = kNormForwardForms[form];
  switch (access) {
    case NormAccess::kUnits:
      return f.units;
    case NormAccess::kPairs:
      return f.narrow && itemsize == 2;
    case NormAccess::kElements:
      return f.narrow;
    default:
      return f.shifted;
  }
}

// NormLongKernel: persistent clusters of blocks hold a row.
inline constexpr int kNormLongThreads = 512;
inline constexpr int kNormLongHeld = 64;  // bytes of a row that a thread holds, in the compute type
inline constexpr int kNormLongCluster = 16;  // most blocks
// ChunkMoments and MergeChunks: a block processes a chunk of a row.
inline constexpr int kNormChunkThreads = 256;
inline constexpr int kNormChunkHeld = 128;
// NormGeneralKernel: a block processes a row, chunk by chunk.
inline constexpr int kNormGeneralThreads = 128;

enum class NormForwardKernel { kRow, kLong, kChunks, kGeneral };

struct NormForwardPlan {
  NormForwardKernel kernel = NormForwardKernel::kGeneral;
  NormAccess access = NormAccess::kShifted;
  int form = 0;               // kRow: index in kNormForwardForms
  int threads = 1;            // of a block
  int cluster = 1;            // blocks in a cluster
  int64_t blocks = 0;         // kLong: the launcher starts only those that are resident at once
  int64_t block_columns = 0;  // kLong: columns of a row in each block of a cluster
  int64_t chunks = 0;         // kChunks: per row
  int64_t shared = 0;         // bytes of dynamic shared memory, for parameters
  bool drops = false;         // kRow: the kernel with dropout; otherwise the sum comes before it
};

// A plan for `rows` rows of `n` elements of `itemsize` bytes; `rows` and `n` are at least 1.
// `alignment` is 16 if all rows and parameters start at multiples of 16 bytes, 4 if rows start at
// multiples of 4 bytes and parameters of 8, and otherwise 1. `parameters`: how many of input bias,
// scale and bias exist. Clusters have at most `max_cluster` blocks. `dropout`: there is dropout.
NormForwardPlan PlanNormForward(int64_t rows, int64_t n, int itemsize, int alignment,
                                int parameters, int max_cluster, bool dropout);

// -------------------------------------------------------------------------------------------------
// Backward

// How NormRowsKernel distributes rows. `threads` threads of a block hold a row, each of them up to
// `columns` columns. The first `least` of these exist in every row that the form is used for, so
// they need no bounds checks. `clusters`: the blocks of a cluster may share a row.
struct NormBackwardForm {
  int threads;
  int columns;
  int least;
  bool clusters;
  bool drops = false;  // has kernels with dropout
};

inline constexpr int kNormBackwardThreads = 256;  // of a block
inline constexpr int kNormBackwardCluster = 8;    // most blocks
inline constexpr int kNormMaxStages = 8;
// Bounds of the static shared memory of a kernel whose blocks have several workers, or one.
inline constexpr int kNormWorkersStatic = 20 << 10;
inline constexpr int kNormBlockStatic = 4 << 10;

// The forms for aligned rows, whose threads access 16 bytes at a time, and for other rows, whose
// threads access single elements. From the shortest rows to the longest.
inline constexpr NormBackwardForm kNormAlignedForms[] = {
    {8, 8, 0, false},          {32, 8, 0, false},         {32, 16, 8, false, true},
    {32, 24, 16, false, true}, {32, 32, 24, false, true}, {64, 32, 16, false},
    {256, 16, 0, false},       {256, 32, 8, true},
};
inline constexpr NormBackwardForm kNormElementForms[] = {
    {32, 8, 0, false},   {32, 24, 8, false},  {32, 32, 24, false},
    {64, 32, 16, false}, {256, 16, 8, false}, {256, 32, 15, true},
};
// float64 has one form, for rows at any address.
inline constexpr NormBackwardForm kNormDoubleForm = {256, 16, 0, false};
inline constexpr int kNormAlignedFormCount = std::size(kNormAlignedForms);
inline constexpr int kNormElementFormCount = std::size(kNormElementForms);

// The form of this index in the table for such rows.
constexpr NormBackwardForm NormBackwardFormOf(int itemsize, bool aligned, int form) {
  if (itemsize == 8) return kNormDoubleForm;
  return aligned ? kNormAlignedForms[form] : kNormElementForms[form];
}

// A worker is the group of threads that holds a row. A warp may hold several short rows.
constexpr int NormWorkers(int threads) {
  return threads >= kNormBackwardThreads ? 1 : kNormBackwardThreads / (threads < 32 ? 32 : threads);
}
// The rows that a thread holds at once: 64 bytes of an array, but at least one row.
constexpr int NormRepeat(const NormBackwardForm& form, int itemsize) {
  return form.columns * itemsize < 64 ? 64 / (form.columns * itemsize) : 1;
}
// The rows of a stage of the ring (backward.cu).
constexpr int NormTile(const NormBackwardForm& form, int itemsize) {
  return NormRepeat(form, itemsize) * (form.threads < 32 ? 32 / form.threads : 1);
}

struct NormBackwardCall : NormShape {
  int itemsize = 4;
  bool aligned = false;  // every row starts at a multiple of 16 bytes
  bool dropout = false;
  bool sums_wanted = true;
  int arrays = 2;  // dy, s, dsum and dy2: how many of them exist
};

// The ring. A stage has a slot for each array, and the statistics.
struct NormRing {
  int block_columns = 0;  // columns of a row in each block of a cluster
  int stages = 0;
  int slot_bytes = 0;   // for the elements of one array in a tile
  int stat_bytes = 0;   // for the means of a tile; as many for its rstds
  int stage_bytes = 0;  // of a whole stage
};

struct NormBackwardPlan : NormRing {
  int form = -1;  // index in the table for aligned or for other rows, 0 in float64;
                  // -1: the kernels for long rows
  int cluster = 1;
  int64_t blocks = 0;
  int64_t tiles = 0;  // of a row, for the kernels for long rows
  // The rows of each batch entry and its partial sums. They differ from those of the call if no
  // sums are wanted: all batch entries are one then.
  int64_t rows = 0;
  int64_t sums = 0;
  int64_t partials = 0;  // of all batch entries
  int64_t shared = 0;    // bytes of dynamic shared memory
};

// A plan for a call that is not empty. With dropout, form -1 says that no form with dropout takes
// the call.
NormBackwardPlan PlanNormBackward(const NormBackwardCall& call, const HeldLimits& device);

// The columns of a tile of a long row.
inline constexpr int kNormLongTile = 16 * kNormBackwardThreads;

}  // namespace jax_fastops

// What the backends plan a transposition from: the permutation of a dense row-major array, reduced
// to the dimensions that matter.
//
// - Dimensions of size 1 are dropped.
// - Dimensions that are adjacent in the input and, in the same order, in the output are merged:
//   (0, 1, 2, 3) -> (2, 3, 0, 1) is a transposition of a matrix.
// - The moved unit is a power of two from 1 to 16 bytes. If the minor dimension stays minor, it is
//   the largest unit that divides a row and matches the alignment of the pointers. A row of a
//   single unit is then dropped as a dimension: pairs of float32 move like complex64. If the minor
//   dimension moves, the unit is an element.
//
// An identity has at most one dimension left: it is a copy.
//
// Source: OneFlow, "How to implement a permute / transpose operator".
#pragma once

#include <cstdint>
#include <vector>

namespace jax_fastops {

// Every remaining dimension has at least two units, and no array has 2^48 units.
inline constexpr int kMaxPermutationRank = 48;

struct Permutation {
  int64_t unit = 1;   // bytes
  int64_t count = 1;  // total number of units
  int rank = 0;
  // The dimensions in the order of the output, major to minor, and their strides in the input and
  // in the output, in units.
  int64_t size[kMaxPermutationRank];
  int64_t in_stride[kMaxPermutationRank];
  int64_t out_stride[kMaxPermutationRank];

  bool IsCopy() const { return rank == 0 || (rank == 1 && in_stride[0] == 1); }
  // Whether rows of size[rank - 1] units are contiguous in input and output.
  bool KeepsMinor() const { return rank == 0 || in_stride[rank - 1] == 1; }
};

// The array that is permuted: output dimension i is input dimension axes[i].
struct TransposeShape {
  std::vector<int64_t> dims;  // of the input
  std::vector<int> axes;      // a permutation of 0 .. dims.size() - 1
  int64_t itemsize = 1;       // bytes per element: a power of two up to 16
  // The alignment of both pointers: a power of two up to 16. It may be less than an element.
  int64_t alignment = 16;
};

// No dimension may have size 0.
Permutation Normalize(const TransposeShape& shape);

}  // namespace jax_fastops

// What is known when a kernel of elements_sums_kernel.cuh is compiled, and what is known when it is
// launched.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/broadcast.h"
#include "core/cuda/divide.cuh"
#include "core/cuda/gradient_sums.h"
#include "core/fast_divide.h"
#include "core/plan_elements.h"

namespace jax_fastops::cuda {

// The classes of operands, two bits each. kStrided counts as kFull.
template <typename... Classes>
constexpr int RowClasses(Classes... classes) {
  int all = 0, shift = 0;
  ((all |= static_cast<int>(classes) << shift, shift += 2), ...);
  return all;
}
constexpr RowClass ClassIn(int set, int k) { return static_cast<RowClass>(set >> (2 * k) & 3); }
constexpr int CountClass(int set, int count, RowClass its_class) {
  int found = 0;
  for (int k = 0; k < count; ++k) found += ClassIn(set, k) == its_class;
  return found;
}
// All classes are looked up at run time.
inline constexpr int kAnyClasses = -1;

template <typename F, typename T, int kSet>
struct SumsTraits {
  static constexpr bool kAny = kSet == kAnyClasses;
  static constexpr int kBytes = kAny ? sizeof(T) : 16;
  static constexpr int kSize = kBytes / sizeof(T);
  static constexpr int kVectors =
      kAny ? F::kGradients : CountClass(kSet, F::kGradients, RowClass::kRow);
  static constexpr int kValues =
      kAny ? F::kGradients : CountClass(kSet, F::kGradients, RowClass::kColumn);
  // The 16-byte words that a lane loads per row.
  static constexpr int kStreams = F::kBits ? 1 : 1 + F::kGradients - kVectors - kValues;
  // Rows in flight, and blocks per SM, as registers allow without spilling. 48 to 96 KB per SM are
  // then in flight.
  static constexpr int kRows = kAny ? 4 : kStreams > 3 ? 2 : kStreams == 1 && kValues == 0 ? 6 : 4;
  static constexpr int kBlocks =
      kAny || kStreams > 2 || kValues > 1 || (sizeof(T) == 2 && kVectors + kValues > 1) ? 2 : 3;
  using Offset = std::conditional_t<kAny, int64_t, uint32_t>;  // of an element
  using Column = std::conditional_t<kAny, int64_t, int>;
};

struct SumParams {
  void* out;  // null: not requested. Else the gradient, or the partial sums
  RowClass its_class;
  bool wide;     // the accumulator type: partial sums, or a wide gradient
  bool per_row;  // a sum for each row
  bool direct;   // the gradient
};

// A dimension, and its strides in the result, the operands and the gradients.
template <int kArrays>
struct SumDim {
  FastDivisor length;
  int64_t stride[kArrays];
};

// What every thread reads comes first, next to the first dimension: a small kernel waits for each
// line of constants.
template <typename F>
struct SumsParams {
  static constexpr int kArrays = 1 + F::kOperands + F::kGradients;
  const void* dy;
  Operand operand[F::kOperands];
  SumParams sum[F::kGradients];
  uint32_t plane_count, row_count;
  int64_t n, last_n;
  int64_t row_stride;  // of the result, if there are several classes
  int64_t tail_word;   // the index of the word that sticks out of the arrays; -1: none
  uint32_t tail;       // its elements
  uint32_t period, classes, strips, boxes;
  int lanes;
  bool needed[F::kOperands];  // for the requested gradients
  RowClass operand_class[F::kOperands];
  F f;
  // Major to minor: those of the rows, at least one, then those of the planes.
  uint8_t row_rank, plane_rank;
  SumDim<kArrays> dim[kMaxBroadcastRank + 1];

  // The offsets of an index of the dimensions [first, first + rank) in kCount arrays, from array
  // `from` on.
  template <int kCount, typename Offset>
  __device__ __forceinline__ void Offsets(int first, int rank, int from, uint32_t index,
                                          Offset (&offset)[kCount]) const {
#pragma unroll
    for (int a = 0; a < kCount; ++a) offset[a] = 0;
#pragma unroll 1
    for (int d = first + rank - 1; d > first; --d) {
      const uint32_t major = Divide(index, dim[d].length);
      const uint32_t digit = index - major * dim[d].length.divisor;
#pragma unroll
      for (int a = 0; a < kCount; ++a) {
        offset[a] += digit * static_cast<Offset>(dim[d].stride[from + a]);
      }
      index = major;
    }
#pragma unroll
    for (int a = 0; a < kCount; ++a) {
      offset[a] += index * static_cast<Offset>(dim[first].stride[from + a]);
    }
  }
  template <int kCount, typename Offset>
  __device__ __forceinline__ void RowOffsets(uint32_t row, Offset (&offset)[kCount],
                                             int from = 0) const {
    Offsets(0, row_rank, from, row, offset);
  }
  template <int kCount, typename Offset>
  __device__ __forceinline__ void PlaneOffsets(uint32_t plane, Offset (&offset)[kCount],
                                               int from = 0) const {
#pragma unroll
    for (int a = 0; a < kCount; ++a) offset[a] = 0;
    if (plane_rank > 0) Offsets(row_rank, plane_rank, from, plane, offset);
  }
};

}  // namespace jax_fastops::cuda

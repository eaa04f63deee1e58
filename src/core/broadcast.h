// The sizes of an element-wise op's result and the strides of its arrays, computed once per call
// and shared by the backends. An array that is broadcast along a dimension has stride 0 there and
// is never expanded.
//
// Dimensions of size 1 are dropped, and adjacent dimensions are merged if all arrays allow it:
// (16, 3, 1024, 1024) with an operand (16, 1, 1, 1) becomes two dimensions.
//
// Source: CMU 10-414, strides of 0; Paddle, lerp, without its limit of six dimensions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace jax_fastops {

inline constexpr int kMaxBroadcastRank = 16;
inline constexpr int kMaxBroadcastArrays = 8;
inline constexpr int kMaxGradients = 3;  // that a backward sums

struct BroadcastShape {
  int rank = 0;
  int arrays = 0;
  // Major to minor. The result itself, and every array of its shape, is dense and row-major.
  int64_t size[kMaxBroadcastRank];
  // In elements; for a bitmask, in bits.
  int64_t stride[kMaxBroadcastArrays][kMaxBroadcastRank];

  int64_t elements() const;
  // The length of the innermost dimension; 1 if there is none.
  int64_t inner() const { return rank == 0 ? 1 : size[rank - 1]; }
  // Whether an array has the result's shape.
  bool IsFull(int array) const;
  // Whether it has a single element.
  bool IsScalar(int array) const;
  // The stride along the innermost dimension: 0 or 1. It is larger if the innermost dimension of
  // the array was dropped (a mask with one bit per byte; copies along a dimension of 1).
  int64_t InnerStride(int array) const { return rank == 0 ? 0 : stride[array][rank - 1]; }
  // Drops the most major dimension.
  void DropMajor();
};

// The strides of an array before dimensions are dropped and merged.
inline constexpr int kMaxArrayRank = 80;
struct ArrayStrides {
  int64_t at[kMaxArrayRank];
};

void RowMajorStrides(std::span<const int64_t> array, ArrayStrides* strides);

// The row-major strides of a dense array that broadcasts to `result`: 0 along dimensions in which
// it does not have the result's size.
void BroadcastStrides(std::span<const int64_t> result, std::span<const int64_t> array,
                      ArrayStrides* strides);

// Drops and merges dimensions. False if more than kMaxBroadcastRank dimensions are left, or if
// there are more than kMaxBroadcastArrays arrays. An empty result has one dimension of size 0.
bool Collapse(std::span<const int64_t> result, const ArrayStrides* strides, int arrays,
              BroadcastShape* shape);

// The shape with rows in which every array has adjacent elements, or one element. If that does not
// hold (a mask with one bit per byte; copies of an operand along a dimension of size 1), rows of
// one element are appended. False if there is no room for another dimension.
bool WithRows(const BroadcastShape& shape, BroadcastShape* with_rows);

// An operand of an op over broadcast operands.
struct Operand {
  const void* data = nullptr;
  bool wide = false;  // has the accumulator type, not the element type
};

// The gradient of an operand: summed over the dimensions along which its stride is 0.
struct Gradient {
  void* data = nullptr;  // null: not requested
  bool wide = false;     // has the accumulator type, not the element type
};

// Memory for partial sums, in elements of the accumulator type. None is needed if every requested
// gradient has the shape of the result. With more memory, more blocks can work on one sum.
struct SumWorkspace {
  void* data = nullptr;
  int64_t size = 0;
};

}  // namespace jax_fastops

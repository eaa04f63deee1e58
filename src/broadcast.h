// How the arrays of an element-wise op lie under its result, worked out once per call and shared by
// the backends: sizes, and for each array how far apart neighbours are along each dimension. An
// array that is broadcast along a dimension has stride 0 there and is never expanded.
//
// Dimensions that do not matter are dropped (size 1), and neighbours are merged where all arrays
// allow it, so that (16, 3, 1024, 1024) with an operand (16, 1, 1, 1) has two dimensions left.
//
// Source: CMU 10-414, strides of 0; Paddle, lerp, without its limit of six dimensions.
#ifndef JAX_FASTOPS_BROADCAST_H_
#define JAX_FASTOPS_BROADCAST_H_

#include <cstdint>
#include <vector>

namespace jax_fastops {

inline constexpr int kMaxBroadcastRank = 16;
inline constexpr int kMaxBroadcastArrays = 8;

struct BroadcastShape {
  int rank = 0;
  int arrays = 0;
  // Major to minor. The result itself, and every array of its shape, is dense and row-major.
  int64_t size[kMaxBroadcastRank];
  // In elements (in bits, of a bitmask).
  int64_t stride[kMaxBroadcastArrays][kMaxBroadcastRank];

  int64_t elements() const;
  // The length of the innermost dimension; 1 without any.
  int64_t inner() const { return rank == 0 ? 1 : size[rank - 1]; }
  // Whether an array has the result's shape.
  bool IsFull(int array) const;
  // Whether it has one element for everything.
  bool IsScalar(int array) const;
  // The distance between neighbours along the innermost dimension: 0 or 1, or more where what they
  // are neighbours along was dropped (a mask's bytes of one bit; copies along a dimension of 1).
  int64_t InnerStride(int array) const { return rank == 0 ? 0 : stride[array][rank - 1]; }
};

// The dense row-major strides of an array that lies under `result`: 0 along dimensions in which it
// does not have the result's size (index 0 stands for all there).
std::vector<int64_t> BroadcastStrides(const std::vector<int64_t>& result,
                                      const std::vector<int64_t>& array);

// Drops and merges dimensions. False if more than kMaxBroadcastRank dimensions are left, or if
// there are more than kMaxBroadcastArrays arrays. An empty result has one dimension of size 0.
bool Collapse(const std::vector<int64_t>& result,
              const std::vector<std::vector<int64_t>>& array_strides, BroadcastShape* shape);

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_BROADCAST_H_

// What a softmax runs over, shared by the backends.
#ifndef JAX_FASTOPS_SOFTMAX_SHAPE_H_
#define JAX_FASTOPS_SOFTMAX_SHAPE_H_

#include <cstdint>

namespace jax_fastops {

// A row-major array [outer, n, inner]. Each line [:, n, :] is one row: it is normalised by itself.
struct SoftmaxShape {
  int64_t outer = 1;
  int64_t n = 1;
  int64_t inner = 1;

  int64_t rows() const { return outer * inner; }
};

inline constexpr int kMaxMaskRank = 16;

// Where the elements of a mask are that belong to a row-major index: sizes, major to minor, and how
// far apart, in the mask, an index and the next one are. The stride of a dimension along which the
// mask is broadcast is 0. Neighbours that can be are merged, sizes of 1 are left out: an index that
// does not matter, or of rank 0, is no dimension at all.
struct MaskIndex {
  int rank = 0;
  int64_t size[kMaxMaskRank] = {};
  int64_t stride[kMaxMaskRank] = {};
};

// A boolean array, a byte (0 or 1) per element, in its own shape. The element of x[o, i, j] is
// data[outer(o) + i * stride + inner(j)].
struct SoftmaxMask {
  const uint8_t* data = nullptr;  // null: no mask
  MaskIndex outer;
  int64_t stride = 0;  // 0 or more; 1 where the mask is as long as a row and inner is 1
  MaskIndex inner;
};

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_SOFTMAX_SHAPE_H_

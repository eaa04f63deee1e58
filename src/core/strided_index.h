// From a row-major index to an offset in an array that is broadcast along some dimensions.
#pragma once

#include <stdint.h>

namespace jax_fastops {

// Sizes, major to minor, and strides in the array: 0 along a dimension in which it is broadcast.
// Adjacent dimensions are merged if possible, and sizes of 1 are left out, so an index that does
// not matter has no dimension.
template <int kMaxRank>
struct StridedIndex {
  int rank = 0;
  int64_t size[kMaxRank] = {};
  int64_t stride[kMaxRank] = {};

  // Adds dimensions, major to minor. False if too many of them are left.
  bool Add(const int64_t* sizes, const int64_t* strides, int dimensions) {
    for (int i = 0; i < dimensions; ++i) {
      if (sizes[i] == 1) continue;
      const int last = rank - 1;
      if (last >= 0 && stride[last] == strides[i] * sizes[i]) {  // or both 0
        size[last] *= sizes[i];
        stride[last] = strides[i];
      } else if (rank < kMaxRank) {
        size[rank] = sizes[i];
        stride[rank++] = strides[i];
      } else {
        return false;
      }
    }
    if (rank == 1 && stride[0] == 0) rank = 0;
    return true;
  }

  int64_t Offset(int64_t index) const {
    int64_t offset = 0;
    for (int d = rank - 1; d >= 0; --d) {
      offset += index % size[d] * stride[d];
      index /= size[d];
    }
    return offset;
  }
};

}  // namespace jax_fastops

// Dimensions and strides of arrays that are broadcast, and offsets from row-major indices.
#pragma once

#include <stdint.h>

namespace jax_fastops {

// Appends a dimension of several arrays to `*rank` ones, major to minor, or merges it into the last
// one if all strides allow it. False if there is no room.
template <int kMaxRank>
bool AppendDim(int64_t size, const int64_t* strides, int arrays, int* rank, int64_t* sizes,
               int64_t (*all_strides)[kMaxRank]) {
  bool merges = *rank > 0;
  for (int a = 0; merges && a < arrays; ++a) {  // contiguous, or both strides are 0
    merges = all_strides[a][*rank - 1] == strides[a] * size;
  }
  if (!merges && *rank == kMaxRank) return false;
  const int at = merges ? *rank - 1 : (*rank)++;
  sizes[at] = merges ? sizes[at] * size : size;
  for (int a = 0; a < arrays; ++a) all_strides[a][at] = strides[a];
  return true;
}

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
      if (!AppendDim(sizes[i], strides + i, 1, &rank, size, &stride)) return false;
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

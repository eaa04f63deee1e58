// Offsets in a broadcast array from indices of elements.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/cuda/divide.cuh"
#include "core/fast_divide.h"

namespace jax_fastops::cuda {

// Strides of up to kMostRank dimensions, major to minor, with divisors that the host has prepared.
template <int kMostRank>
struct Offsets {
  int rank = 0;
  bool narrow = true;  // fewer than 2^31 indices
  FastDivisor divisor[kMostRank];
  FastDivisor64 wide_divisor[kMostRank];
  int64_t stride[kMostRank];

  Offsets() = default;
  // Sizes may be 0 if the array is empty.
  Offsets(int rank, const int64_t* sizes, const int64_t* strides) : rank(rank) {
    int64_t count = 1;
    for (int i = 0; i < rank; ++i) count *= sizes[i];
    narrow = count < int64_t{1} << 31;
    for (int i = 0; i < rank; ++i) {
      const uint64_t size = static_cast<uint64_t>(std::max<int64_t>(1, sizes[i]));
      stride[i] = strides[i];
      if (narrow) {
        divisor[i] = FastDivisor(static_cast<uint32_t>(size));
      } else {
        wide_divisor[i] = FastDivisor64(size);
      }
    }
  }

  __device__ __forceinline__ int64_t Offset(int64_t index) const {
    int64_t offset[1] = {index};
    ToOffsets(offset);
    return offset[0];
  }

  // Replaces several indices by their offsets. A dimension's constants are loaded once, and the
  // chains of multiplications overlap.
  template <int kCount>
  __device__ __forceinline__ void ToOffsets(int64_t (&indices)[kCount]) const {
    int64_t offsets[kCount] = {};
    if (narrow) {
      Reduce<uint32_t>(divisor, indices, offsets);
    } else {
      Reduce<uint64_t>(wide_divisor, indices, offsets);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      indices[k] = rank == 0 ? 0 : offsets[k] + indices[k] * stride[0];
    }
  }

 private:
  // Leaves the indices along the most major dimension.
  template <typename Index, typename Divisor, int kCount>
  __device__ __forceinline__ void Reduce(const Divisor (&divisors)[kMostRank],
                                         int64_t (&indices)[kCount],
                                         int64_t (&offsets)[kCount]) const {
    Index left[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) left[k] = static_cast<Index>(indices[k]);
#pragma unroll 1
    for (int i = rank - 1; i > 0; --i) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const Index major = Divide(left[k], divisors[i]);
        offsets[k] += (left[k] - major * divisors[i].divisor) * stride[i];
        left[k] = major;
      }
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) indices[k] = left[k];
  }
};

}  // namespace jax_fastops::cuda

// How warps read and write one bit per element: the mask of ReLU and of ops that end in a ReLU.
//
// Layout. `x` is rows x n. The mask has ceil(n / 8) bytes per row. Bit j of byte b of a row belongs
// to element 8 * b + j of that row; bits past the end of the row are 0. If n is a multiple of 8,
// the whole mask is flat: bit e % 8 of byte e / 8 belongs to element e of the array. Otherwise the
// mask is "ragged": every row begins with a new byte, although the rows of elements are still
// contiguous.
//
// Problem. With 16-byte accesses a lane gets B = 16 / sizeof(T) adjacent elements, hence B bits,
// and its next load is 32 * B elements further. Storing B bits after each load would take one
// 1-byte store per load (B < 8 does not even fill a byte). Instead a warp makes L = 32 / B loads,
// which cover 1024 elements. Each lane then has 32 bits, where field k comes from load k. Together
// the lanes have the 32 words of the mask, but the fields are in the wrong lanes. Within a group of
// L lanes they form an L x L matrix of B-bit fields. log2(L) shuffles transpose it, and the warp
// then stores its part of the mask as 128 contiguous bytes. Reading reverses these steps.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/cuda/group.cuh"

namespace jax_fastops::cuda {

// Elements covered by the 32 mask words of a warp.
constexpr int kMaskTile = 32 * kWarpSize;

// Transposes fields of kField bits within groups of 32 / kField lanes: field f of lane q of a group
// becomes field q of lane f. The function is its own inverse. In each step, lanes at distance s
// swap the half of their fields that belongs to the other lane.
template <int kField>
__device__ __forceinline__ uint32_t TransposeFields(uint32_t word) {
  static_assert(kField == 2 || kField == 4 || kField == 8);
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int s = 32 / kField / 2; s >= 1; s /= 2) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, word, s);
    const bool upper = lane & s;
    const int shift = kField * s;
    if (shift == 16) {
      // Whole bytes move, so one byte permutation is enough.
      word = __byte_perm(word, other, upper ? 0x3276 : 0x5410);
    } else if (shift == 8) {
      word = __byte_perm(word, other, upper ? 0x3715 : 0x6240);
    } else {
      const uint32_t low = shift == 4 ? 0x0f0f0f0fu : 0x33333333u;
      const uint32_t keep = upper ? ~low : low;
      // A rotation works in both directions: the bits that wrap around land in positions that
      // `keep` covers.
      word = (word & keep) | (__funnelshift_l(other, other, upper ? 32 - shift : shift) & ~keep);
    }
  }
  return word;
}

// After TransposeFields, lane `lane` holds word WordOfLane(lane), which is the bits of elements 32
// * w ... 32 * w + 31 of the warp's 1024. LaneOfWord is the inverse.
template <int kField>
__device__ __forceinline__ int WordOfLane(int lane) {
  constexpr int kGroup = 32 / kField;
  return lane % kGroup * kField + lane / kGroup;
}
template <int kField>
__device__ __forceinline__ int LaneOfWord(int word) {
  constexpr int kGroup = 32 / kField;
  return word % kField * kGroup + word / kField;
}

// Whether the bit of element 32 * row + lane of 1024 is set. Lane w has in `word` the bits of the
// 32 elements from 32 * w on. All lanes of the warp call it.
__device__ __forceinline__ bool BitOfRow(uint32_t word, int row) {
  return __shfl_sync(kFullWarp, word, row) >> threadIdx.x % kWarpSize & 1;
}

// Sets bits in shared memory: all threads of the block call it, and each of them calls draw(set);
// set(at, bits) sets at most 8 bits from `at` on. They may be in two words, so a word must follow
// that of the last `at`.
template <int kThreads, int kWords, typename Draw>
__device__ __forceinline__ void SetBits(uint32_t (&words)[kWords], const Draw& draw) {
  for (uint32_t i = threadIdx.x; i < kWords; i += kThreads) words[i] = 0;
  __syncthreads();
  draw([&](uint32_t at, uint32_t bits) {
    atomicOr(&words[at / 32], bits << at % 32);
    if (at % 32 > 24) atomicOr(&words[at / 32 + 1], bits >> (32 - at % 32));
  });
  __syncthreads();
}

// The shape of a ragged mask, with the reciprocals that find a byte's row without a division.
//
// A warp handles at most 1024 elements at once, hence at most 1024 mask bytes. Rows and bytes are
// counted relative to the warp's first ones. Row lengths above 1024 may be replaced by 1024: the
// quotient is 0 either way. For u < 1024 and d <= 1024, in 32 bits:
//   floor(u / d) = (u * ceil(2^20 / d)) >> 20
struct MaskLayout {
  uint64_t columns;
  uint64_t row_bytes;
  uint32_t padding;  // unused bits at the end of each row, 0 ... 7
  uint32_t row_bytes_small, row_bytes_reciprocal;
  uint32_t columns_small, columns_reciprocal;

  static constexpr uint32_t kLimit = 1024;
  static constexpr int kShift = 20;
};

inline MaskLayout MakeMaskLayout(int64_t columns) {
  MaskLayout layout;
  layout.columns = columns;
  layout.row_bytes = layout.columns / 8 + (layout.columns % 8 != 0);
  layout.padding = static_cast<uint32_t>(layout.row_bytes * 8 - layout.columns);
  const auto reciprocal = [](uint32_t d) { return ((1u << MaskLayout::kShift) + d - 1) / d; };
  const auto small = [](uint64_t d) {
    return static_cast<uint32_t>(std::min<uint64_t>(d, MaskLayout::kLimit));
  };
  layout.row_bytes_small = small(layout.row_bytes);
  layout.row_bytes_reciprocal = reciprocal(layout.row_bytes_small);
  layout.columns_small = small(layout.columns);
  layout.columns_reciprocal = reciprocal(layout.columns_small);
  return layout;
}

namespace internal {

// The only real division, once per warp; in 32 bits unless the array is too large.
__device__ __forceinline__ uint64_t RowOf(const MaskLayout& layout, uint64_t element) {
  if (((element | layout.columns) >> 32) == 0) {
    return static_cast<uint32_t>(element) / static_cast<uint32_t>(layout.columns);
  }
  return element / layout.columns;
}

}  // namespace internal

// Writes the mask bytes whose first element is among the warp's `count` <= 1024 elements starting
// at `begin`. Lane w has the bits of elements 32 * w ... 32 * w + 31 in `word`, and those of the
// next 32 elements in `next`. `next` is needed because a byte of a ragged mask may span two words;
// the last byte may need up to 7 bits of the next warp's elements. All lanes must call it.
__device__ __forceinline__ void StoreMaskBytes(const MaskLayout& layout, uint8_t* mask,
                                               int64_t begin, int count, uint32_t word,
                                               uint32_t next) {
  const uint64_t row = internal::RowOf(layout, begin);
  const uint64_t column = begin - row * layout.columns;
  // Skip to the first byte that begins at or after `column`. An earlier warp writes the byte that
  // begins before it.
  const uint64_t first_byte = (column + 7) / 8;
  mask += row * layout.row_bytes + first_byte;

  const int padding = layout.padding;
  const int row_bytes = layout.row_bytes_small;
  // From here on, rows and bytes are counted from the start of the next row: this row is row -1 and
  // its bytes have negative indices. Elements are counted from `begin`. Byte v in row q begins at
  // element
  //   next_row + 8 * v - q * padding
  const int left = static_cast<int>(min(layout.row_bytes - first_byte, uint64_t{1} << 20));
  const int next_row = 8 * left - padding + static_cast<int>(first_byte * 8 - column);
  for (int t = threadIdx.x % kWarpSize;; t += kWarpSize) {
    const int v = t - left;
    const int q =
        v < 0 ? -1 : static_cast<int>((v * layout.row_bytes_reciprocal) >> MaskLayout::kShift);
    const int start = next_row + 8 * v - q * padding;
    const bool live = start < count;
    if (!__any_sync(kFullWarp, live)) break;
    const uint32_t low = __shfl_sync(kFullWarp, word, start >> 5);
    const uint32_t high = __shfl_sync(kFullWarp, next, start >> 5);
    const bool last = v - q * row_bytes == row_bytes - 1;
    const uint32_t used = 0xffu >> (last ? padding : 0);
    if (live) mask[t] = static_cast<uint8_t>(__funnelshift_r(low, high, start) & used);
  }
}

// The inverse of StoreMaskBytes: returns the bits of the 32 elements from begin + 32 * lane. Only
// elements below begin + count exist. `mask_bytes` is the size of the whole mask.
__device__ __forceinline__ uint32_t LoadMaskWord(const MaskLayout& layout, const uint8_t* mask,
                                                 int64_t mask_bytes, int64_t begin, int count) {
  const int offset = threadIdx.x % kWarpSize * 32;
  const uint64_t row = internal::RowOf(layout, begin);
  const uint64_t column = begin - row * layout.columns;

  // Locate the lane's first element: its byte, its bit in that byte, and how many elements remain
  // in its row.
  const int columns = layout.columns_small;
  const int left = static_cast<int>(min(layout.columns - column, uint64_t{1} << 20));
  int64_t byte;
  int bit, remaining;
  if (offset < left) {
    const int position = static_cast<int>(column % 8) + offset;
    byte = row * layout.row_bytes + column / 8 + position / 8;
    bit = position % 8;
    remaining = left - offset;
  } else {
    const int u = offset - left;
    const int q = static_cast<int>((u * layout.columns_reciprocal) >> MaskLayout::kShift);
    const int position = u - q * columns;
    byte = (row + 1 + q) * layout.row_bytes + position / 8;
    bit = position % 8;
    remaining = columns - position;
  }

  // The bytes needed are contiguous, even across rows. Unless rows are short, six bytes hold the
  // bits of 32 elements. Load these six at once, so that the warp waits for memory only once.
  constexpr int kAhead = 6;
  uint8_t ahead[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    ahead[j] = offset < count && byte + j < mask_bytes ? mask[byte + j] : 0;
  }

  const int end = min(32, count - offset);
  uint32_t word = 0;
  int position = 0;
  const auto consume = [&](uint32_t bits) {
    const int take = min(8 - bit, remaining);
    word |= ((bits >> bit) & ((1u << take) - 1)) << position;
    position += take;
    remaining -= take;
    if (remaining == 0) remaining = columns;
    bit = 0;
  };
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    if (position < end) consume(ahead[j]);
  }
  for (byte += kAhead; position < end; ++byte) consume(mask[byte]);
  return word;
}

// The fields of 1024 elements from `begin` on, as TransposeFields gives them for a flat mask.
template <int kField>
__device__ __forceinline__ uint32_t LoadMaskFields(const MaskLayout& layout, const uint8_t* mask,
                                                   int64_t mask_bytes, int64_t begin) {
  const uint32_t word = LoadMaskWord(layout, mask, mask_bytes, begin, kMaskTile);
  return TransposeFields<kField>(
      __shfl_sync(kFullWarp, word, WordOfLane<kField>(threadIdx.x % kWarpSize)));
}

}  // namespace jax_fastops::cuda

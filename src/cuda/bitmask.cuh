// One bit per element, as warps write and read it: the mask of ReLU and of ops that end in one.
//
// The layout. `x` is rows x n; the mask has ceil(n / 8) bytes per row, and bit j of byte b of a row
// is the bit of the row's element 8 * b + j. Bits beyond the row's end are 0. Where n is a multiple
// of 8 the whole mask is flat: bit e % 8 of byte e / 8 belongs to element e of the array. Otherwise
// every row begins a new byte ("ragged"), though the elements themselves still lie back to back.
//
// The problem. With 16-byte accesses a lane gets B = 16 / sizeof(T) neighbouring elements, hence B
// bits, and its next load is 32 * B elements further on. Storing those B bits alone would take one
// 1-byte (for B < 8 not even that) store per load. Instead a warp makes L = 32 / B loads, which
// cover 1024 elements: each lane then has 32 bits, field k of them from load k, and all lanes
// together have the 32 words of the mask, only with the wrong bits in the wrong lanes. Within a
// group of L lanes that is an L x L matrix of B-bit fields to transpose, log2(L) shuffles; and the
// warp's part of the mask goes out as one store of 128 contiguous bytes. Reading goes the same way
// back.
#ifndef JAX_FASTOPS_CUDA_BITMASK_CUH_
#define JAX_FASTOPS_CUDA_BITMASK_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace jax_fastops::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// The warp's index in its block. The shuffle tells the compiler that it is the same in all lanes:
// branches on it then leave the warp converged, and shuffles after them need no code for the case
// that it is not.
__device__ __forceinline__ int WarpIndex() {
  return __shfl_sync(kFullWarp, threadIdx.x / kWarpSize, 0);
}

// Elements whose bits are the 32 words of a warp.
constexpr int kMaskTile = 32 * kWarpSize;

// Transposes fields of kField bits between groups of 32 / kField lanes: field f of lane q of a
// group becomes field q of lane f. It is its own inverse. In each step lanes at distance s swap
// those halves of their fields that the other must have.
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
      // Whole bytes move: one byte permutation.
      word = __byte_perm(word, other, upper ? 0x3276 : 0x5410);
    } else if (shift == 8) {
      word = __byte_perm(word, other, upper ? 0x3715 : 0x6240);
    } else {
      const uint32_t low = shift == 4 ? 0x0f0f0f0fu : 0x33333333u;
      const uint32_t keep = upper ? ~low : low;
      // A rotation does for either direction: what it wraps around lands in bits that are kept.
      word = (word & keep) | (__funnelshift_l(other, other, upper ? 32 - shift : shift) & ~keep);
    }
  }
  return word;
}

// After TransposeFields, `lane` holds the bits of elements 32 * w ... 32 * w + 31 of the warp's
// 1024, with this w; and the lane that holds word w.
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

// The shape of a ragged mask, with the reciprocals that find a byte's row without a division.
//
// A warp looks at no more than 1024 elements, hence 1024 bytes at once, so rows and bytes are
// counted from the warp's first ones, and row lengths above the limit may be taken for the limit:
// the quotient is 0 either way. For u < 1024 and d <= 1024, in 32 bits:
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

// The one true division: once per warp, in 32 bits unless the array is too large for that.
__device__ __forceinline__ uint64_t RowOf(const MaskLayout& layout, uint64_t element) {
  if (((element | layout.columns) >> 32) == 0) {
    return static_cast<uint32_t>(element) / static_cast<uint32_t>(layout.columns);
  }
  return element / layout.columns;
}

}  // namespace internal

// Writes the mask bytes whose first element is one of the warp's `count` <= 1024 elements from
// `begin` on. Lane w has the bits of elements 32 * w ... in `word`, and those of the 32 elements
// after them in `next`: a byte of a ragged mask lies across words, and the last one may need up to
// 7 bits of the warp's successor. All lanes must call it.
__device__ __forceinline__ void StoreMaskBytes(const MaskLayout& layout, uint8_t* mask,
                                               int64_t begin, int count, uint32_t word,
                                               uint32_t next) {
  const uint64_t row = internal::RowOf(layout, begin);
  const uint64_t column = begin - row * layout.columns;
  // The first byte to write is the first that begins here; the row's last byte may have begun
  // before.
  const uint64_t first_byte = (column + 7) / 8;
  mask += row * layout.row_bytes + first_byte;

  const int padding = layout.padding;
  const int row_bytes = layout.row_bytes_small;
  // From here on rows and bytes are counted from the next row and its first byte, so that this row
  // is row -1 and its bytes are negative, and elements are counted from `begin`: byte v, in row q,
  // begins at element
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

// The reverse: the bits of the 32 elements from begin + 32 * lane on, of which only those below
// begin + count exist. `mask_bytes` is the size of the whole mask.
__device__ __forceinline__ uint32_t LoadMaskWord(const MaskLayout& layout, const uint8_t* mask,
                                                 int64_t mask_bytes, int64_t begin, int count) {
  const int offset = threadIdx.x % kWarpSize * 32;
  const uint64_t row = internal::RowOf(layout, begin);
  const uint64_t column = begin - row * layout.columns;

  // Find the lane's first element: its byte, its bit there, and how far its row goes on.
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

  // The bytes wanted are contiguous, whatever rows they belong to. Six of them hold 32 elements
  // unless rows are short: load those at once, so that the warp waits for memory once.
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

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CUDA_BITMASK_CUH_

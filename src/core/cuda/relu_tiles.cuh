// z = max(x + addend, 0) with a mask of one bit per element, for relu, add_relu and bias_act. The
// families differ in where the addends come from:
//
//   struct Addends {
//     using One = ...;                 // of one element
//     using Sum = ...;                 // the type of x + addend
//     using Values = ...;              // of 16 bytes of x
//     static constexpr int kStep = ...;  // units whose addends are loaded together: 1 to 8
//     __device__ One Load(int64_t element) const;
//     static __device__ Sum Add(T x, One addend);
//     // The addends of kStep units that begin with element `first`, `stride` elements apart.
//     __device__ void Load(int64_t first, int64_t stride, Values (&units)[kStep]) const;
//     // Replaces the elements by the result. Bit i of the value is set if element i of the sum is
//     // greater than zero.
//     static __device__ uint32_t ReluInPlace(Unit<T>& x, Values& addends);
//   };
//
// - A warp takes a tile of 1024 contiguous elements (2048 for 16-bit types). It loads 16 bytes per
//   lane and issues eight loads together, that is, 4 KB per warp. Saturating the memory of an H100
//   takes about 3.35 TB/s times 0.8 us = 20 KB in flight per SM; 24 to 48 warps are resident.
// - The mask of 1024 elements is 32 words, one per lane, which move in one 128-byte access.
//   bitmask.cuh explains how the bits get from the lanes that compute them to the lanes that store
//   them.
// - If the row length is not a multiple of 8, each row begins with a new mask byte, but the
//   elements are still contiguous. The code for the elements is the same; only the bits are written
//   byte by byte ("ragged").
// - Pointers that are not aligned to 16 bytes (XLA passes slices of buffers) and the elements after
//   the last whole tile are processed in chunks of 256 elements per warp. In a chunk each load
//   takes one element per lane, again eight loads are issued together, and the mask bits come from
//   ballots. float64 has chunks only.
//
// One launch does everything: the first warps take the tiles, the next ones the rest. No warp waits
// for another. Whether there is a mask, and whether it is ragged, is known at run time: the bits
// take few instructions, and no more registers than the elements before them.
#pragma once

#include <cstdint>

#include "core/cuda/bitmask.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/relu_of.cuh"
#include "core/cuda/vec.cuh"
#include "core/integer.h"

namespace jax_fastops::cuda {

struct ReluMask {
  uint8_t* data;  // null: none
  MaskLayout layout;
  bool ragged;  // with tiles

  // A flat mask is one row. `flat_words`: it is also aligned to words.
  ReluMask(uint8_t* mask, int64_t columns, bool flat_words)
      : data(mask), layout(MakeMaskLayout(columns)), ragged(mask != nullptr && !flat_words) {}
};

constexpr int kReluThreads = 256;

// Loads that are issued together, per lane and operand. Loads and stores use the default caching:
// the next kernel reads the result, so it should stay in L2. x is read once, but marking it for
// early eviction (ld.cs) measured 2 to 4% slower.
constexpr int kReluTogether = 8;

// The words of the mask that a lane has of a tile, and the elements of a tile.
template <typename T>
constexpr int kReluWords = sizeof(T) == 2 ? 2 : 1;
template <typename T>
constexpr int kReluTile = kMaskTile * kReluWords<T>;

// The elements that a warp takes without 16-byte accesses: one per lane and load.
constexpr int kReluChunk = kReluTogether * kWarpSize;

// `x` and `z` are the whole arrays, of `size` elements.
template <typename T, typename Addends>
__device__ __forceinline__ void ReluForwardChunk(const ReluMask& mask, const Addends& addends,
                                                 const T* x, T* z, int64_t size, int64_t begin) {
  const int lane = threadIdx.x % kWarpSize;
  x += begin + lane;
  z += begin + lane;
  // Number of elements from this lane's first element to the end of the array (capped, to fit into
  // an int).
  const int rest = static_cast<int>(min(size - begin, int64_t{2 * kReluChunk})) - lane;

  // Row k of the chunk is `values[k]` of all lanes. Row 8 holds the first 7 elements after the
  // chunk, whose bits the last byte of a ragged mask may contain.
  constexpr int kRows = kReluTogether + 1;
  const int next_lanes = mask.data != nullptr ? 7 : 0;
  T values[kRows];
  typename Addends::One others[kRows];
  bool live[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    live[k] = k * kWarpSize < rest && (k < kReluTogether || lane < next_lanes);
    values[k] = live[k] ? x[k * kWarpSize] : FromCompute<T>(0);
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    others[k] = typename Addends::One{};
    if (live[k]) others[k] = addends.Load(begin + lane + k * kWarpSize);
  }

  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const typename Addends::Sum sum = Addends::Add(values[k], others[k]);
    const uint32_t bits = __ballot_sync(kFullWarp, ToCompute(sum) > 0);
    if (lane == k) word = bits;
    if (k < kReluTogether && live[k]) z[k * kWarpSize] = ReluTo<T>(sum);
  }
  if (mask.data != nullptr) {
    const uint32_t next = __shfl_down_sync(kFullWarp, word, 1);
    const int count = static_cast<int>(min(size - begin, int64_t{kReluChunk}));
    StoreMaskBytes(mask.layout, mask.data, begin, count, word, next);
  }
}

// Writes the bits of a tile. Lane l has in word i, field k, those of the elements that it loaded in
// load k of word i. `beyond` are the bits of the elements after the tile.
template <typename T>
__device__ __forceinline__ void StoreReluMask(const ReluMask& mask, int64_t begin,
                                              uint32_t (&words)[kReluWords<T>], uint32_t beyond) {
  constexpr int kField = Unit<T>::kSize;
  const int lane = threadIdx.x % kWarpSize;
  if (!mask.ragged) {
    uint32_t* to = reinterpret_cast<uint32_t*>(mask.data + begin / 8);
#pragma unroll
    for (int i = 0; i < kReluWords<T>; ++i) {
      to[i * kWarpSize + WordOfLane<kField>(lane)] = TransposeFields<kField>(words[i]);
    }
    return;
  }
  // Move word w to lane w, so that the next word is in the next lane.
#pragma unroll
  for (int i = 0; i < kReluWords<T>; ++i) {
    words[i] = __shfl_sync(kFullWarp, TransposeFields<kField>(words[i]), LaneOfWord<kField>(lane));
  }
#pragma unroll
  for (int i = 0; i < kReluWords<T>; ++i) {
    uint32_t after = beyond;
    if (i + 1 < kReluWords<T>) after = __shfl_sync(kFullWarp, words[(i + 1) % kReluWords<T>], 0);
    uint32_t next = __shfl_down_sync(kFullWarp, words[i], 1);
    if (lane == kWarpSize - 1) next = after;
    StoreMaskBytes(mask.layout, mask.data, begin + i * kMaskTile, kMaskTile, words[i], next);
  }
}

template <typename T, typename Addends>
__device__ __forceinline__ void ReluForwardTile(const ReluMask& mask, const Addends& addends,
                                                const T* x, T* z, int64_t size, int64_t begin) {
  constexpr int kField = Unit<T>::kSize;
  constexpr int kLoads = 32 / kField;  // per mask word
  constexpr int kStride = kField * kWarpSize;
  constexpr int kStep = Addends::kStep;
  static_assert(kReluWords<T> * kLoads == kReluTogether);
  const int lane = threadIdx.x % kWarpSize;
  const int64_t first = begin + lane * kField;

  // The 7 elements after the tile, whose bits the last byte of a ragged mask may contain. They are
  // used only after the tile's loads have been issued.
  T beyond = FromCompute<T>(0);
  typename Addends::One beyond_other{};
  if (mask.ragged) {
    const int64_t i = begin + kReluTile<T> + lane;
    if (lane < 7 && i < size) {
      beyond = x[i];
      beyond_other = addends.Load(i);
    }
  }

  Unit<T> values[kReluTogether];
#pragma unroll
  for (int k = 0; k < kReluTogether; ++k) values[k] = LoadWord(x + first + k * kStride);
  uint32_t words[kReluWords<T>] = {};
#pragma unroll
  for (int step = 0; step < kReluTogether; step += kStep) {
    typename Addends::Values units[kStep];
    addends.Load(first + step * kStride, kStride, units);
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const int k = step + i;
      const uint32_t bits = Addends::ReluInPlace(values[k], units[i]);
      words[k / kLoads] |= bits << k % kLoads * kField;
      StoreWord(z + first + k * kStride, values[k]);
    }
  }
  if (mask.data == nullptr) return;
  const bool positive = ToCompute(Addends::Add(beyond, beyond_other)) > 0;
  StoreReluMask<T>(mask, begin, words, __ballot_sync(kFullWarp, positive));
}

__device__ __forceinline__ int64_t ReluWarp() {
  return int64_t{blockIdx.x} * (kReluThreads / kWarpSize) + WarpIndex();
}

// The first warps take one whole tile each, the following ones one chunk each of the remaining
// elements.
template <int kTile, typename TileFn, typename ChunkFn>
__device__ __forceinline__ void ForEachReluTile(int64_t size, const TileFn& tile_fn,
                                                const ChunkFn& chunk_fn) {
  const int64_t tiles = size / kTile, warp = ReluWarp();
  if (warp < tiles) {
    tile_fn(warp * kTile);
  } else {
    const int64_t begin = tiles * kTile + (warp - tiles) * kReluChunk;
    if (begin < size) chunk_fn(begin);
  }
}

// A grid with tiles of `tile` elements; 0: only chunks.
inline LaunchConfig ReluGrid(int64_t size, int64_t tile) {
  const int64_t tiles = tile == 0 ? 0 : size / tile;
  const int64_t warps = tiles + CeilDiv(size - tiles * tile, kReluChunk);
  return Grid(CeilDiv(warps, kReluThreads / kWarpSize), kReluThreads);
}

}  // namespace jax_fastops::cuda

// y = max(x, 0) and z = max(x + y, 0), with a mask of one bit per element as the residual, and the
// backward pass that reads this mask.
//
// All of these are memory-bound. The forward reads and writes every element once and writes one bit
// more (2% of the traffic in float32, 3% in bfloat16). The backward reads that bit instead of the
// element. The kernels are therefore designed around their memory accesses:
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
// for another. Whether the forward writes a mask, and whether that is ragged, is known at run time:
// the bits take few instructions, and no more registers than the elements before them.
#include "relu/relu.h"

#include <type_traits>

#include "core/alignment.h"
#include "core/cuda/bitmask.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/packed.cuh"
#include "core/cuda/relu_of.cuh"
#include "core/integer.h"

namespace jax_fastops::cuda {

struct ReluFamily;

namespace {

// -------------------------------------------------------------------------------------------------
// Kernels

struct ReluParams {
  const void* a;  // x, or dy
  const void* b;  // the second summand
  void* out;      // y, z or dx
  uint8_t* mask;  // written by the forward, unless null; read by the backward
  int64_t size;   // elements
  int64_t mask_bytes;
  MaskLayout layout;
  bool ragged;  // the mask is; with tiles
};

constexpr int kThreads = 256;

// Loads that are issued together, per lane and operand. Loads and stores use the default caching:
// the next kernel reads y and dx, so these should stay in L2. x and dy are read once, but marking
// them for early eviction (ld.cs) measured 2 to 4% slower.
constexpr int kTogether = 8;

// The words of the mask that a lane has of a tile, and the elements of a tile.
template <typename T>
constexpr int kWordsOf = sizeof(T) == 2 ? 2 : 1;
template <typename T>
constexpr int kTileOf = kMaskTile * kWordsOf<T>;

// The elements that a warp takes without 16-byte accesses: one per lane and load.
constexpr int kChunk = kTogether * kWarpSize;

// Clears the elements whose bit is not set. This is a selection, not a product, because an element
// may be infinite or NaN.
template <typename U>
__device__ __forceinline__ Packed128<U> Select(uint32_t bits, Packed128<U> x) {
  if constexpr (sizeof(U) == 2) {
    Packed128<uint32_t> pairs = Reinterpret<uint32_t>(x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(bits & 1u << 2 * i)) pairs[i] &= 0xffff0000u;
      if (!(bits & 2u << 2 * i)) pairs[i] &= 0x0000ffffu;
    }
    return Reinterpret<U>(pairs);
  } else {
#pragma unroll
    for (int i = 0; i < x.kSize; ++i) x[i] = bits & 1u << i ? x[i] : U{0};
    return x;
  }
}

template <typename T, bool kAdd>
__device__ __forceinline__ void ForwardChunk(const ReluParams& p, int64_t begin) {
  const int lane = threadIdx.x % kWarpSize;
  const T* x = static_cast<const T*>(p.a) + begin + lane;
  const T* y = static_cast<const T*>(p.b) + begin + lane;
  T* z = static_cast<T*>(p.out) + begin + lane;
  // Number of elements from this lane's first element to the end of the array (capped, to fit into
  // an int).
  const int rest = static_cast<int>(min(p.size - begin, int64_t{2 * kChunk})) - lane;

  // Row k of the chunk is `values[k]` of all lanes. Row 8 holds the first 7 elements after the
  // chunk, whose bits the last byte of a ragged mask may contain.
  constexpr int kRows = kTogether + 1;
  const int next_lanes = p.mask != nullptr ? 7 : 0;
  T values[kRows], addends[kRows];
  bool live[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    live[k] = k * kWarpSize < rest && (k < kTogether || lane < next_lanes);
    values[k] = live[k] ? x[k * kWarpSize] : FromCompute<T>(0);
    if constexpr (kAdd) addends[k] = live[k] ? y[k * kWarpSize] : FromCompute<T>(0);
  }

  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if constexpr (kAdd) values[k] = SumOf(values[k], addends[k]);
    const uint32_t bits = __ballot_sync(kFullWarp, ToCompute(values[k]) > 0);
    if (lane == k) word = bits;
    if (k < kTogether && live[k]) z[k * kWarpSize] = ReluOf(values[k]);
  }
  if (p.mask != nullptr) {
    const uint32_t next = __shfl_down_sync(kFullWarp, word, 1);
    const int count = static_cast<int>(min(p.size - begin, int64_t{kChunk}));
    StoreMaskBytes(p.layout, p.mask, begin, count, word, next);
  }
}

// Writes the bits of a tile. Lane l has in word i, field k, those of the elements that it loaded in
// load k of word i. `beyond` is the element of this lane after the tile.
template <typename T>
__device__ __forceinline__ void StoreMask(const ReluParams& p, int64_t begin,
                                          uint32_t (&words)[kWordsOf<T>], T beyond) {
  constexpr int kField = Packed128<T>::kSize;
  const int lane = threadIdx.x % kWarpSize;
  if (!p.ragged) {
    uint32_t* mask = reinterpret_cast<uint32_t*>(p.mask + begin / 8);
#pragma unroll
    for (int i = 0; i < kWordsOf<T>; ++i) {
      mask[i * kWarpSize + WordOfLane<kField>(lane)] = TransposeFields<kField>(words[i]);
    }
    return;
  }
  // Move word w to lane w, so that the next word is in the next lane.
#pragma unroll
  for (int i = 0; i < kWordsOf<T>; ++i) {
    words[i] = __shfl_sync(kFullWarp, TransposeFields<kField>(words[i]), LaneOfWord<kField>(lane));
  }
  const uint32_t last = __ballot_sync(kFullWarp, ToCompute(beyond) > 0);
#pragma unroll
  for (int i = 0; i < kWordsOf<T>; ++i) {
    uint32_t after = last;
    if (i + 1 < kWordsOf<T>) after = __shfl_sync(kFullWarp, words[(i + 1) % kWordsOf<T>], 0);
    uint32_t next = __shfl_down_sync(kFullWarp, words[i], 1);
    if (lane == kWarpSize - 1) next = after;
    StoreMaskBytes(p.layout, p.mask, begin + i * kMaskTile, kMaskTile, words[i], next);
  }
}

template <typename T, bool kAdd>
__device__ __forceinline__ void ForwardTile(const ReluParams& p, int64_t begin) {
  constexpr int kField = Packed128<T>::kSize;
  constexpr int kLoads = 32 / kField;  // per mask word
  constexpr int kStride = kField * kWarpSize;
  static_assert(kWordsOf<T> * kLoads == kTogether);

  const int lane = threadIdx.x % kWarpSize;
  const T* x = static_cast<const T*>(p.a) + begin + lane * kField;
  const T* y = static_cast<const T*>(p.b) + begin + lane * kField;
  T* z = static_cast<T*>(p.out) + begin + lane * kField;

  // The 7 elements after the tile, whose bits the last byte of a ragged mask may contain.
  T beyond = FromCompute<T>(0), beyond_addend = FromCompute<T>(0);
  if (p.ragged) {
    const int64_t i = begin + kTileOf<T> + lane;
    if (lane < 7 && i < p.size) {
      beyond = static_cast<const T*>(p.a)[i];
      if constexpr (kAdd) beyond_addend = static_cast<const T*>(p.b)[i];
    }
  }

  Packed128<T> values[kTogether], addends[kTogether];
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    values[k] = LoadPacked(x + k * kStride);
    if constexpr (kAdd) addends[k] = LoadPacked(y + k * kStride);
  }
  uint32_t words[kWordsOf<T>] = {};
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    if constexpr (kAdd) values[k] = SumOf(values[k], addends[k]);
    const uint32_t bits = ReluInPlace(values[k]);
    words[k / kLoads] |= bits << k % kLoads * kField;
    StorePacked(z + k * kStride, values[k]);
  }
  if (p.mask == nullptr) return;
  if constexpr (kAdd) beyond = SumOf(beyond, beyond_addend);
  StoreMask(p, begin, words, beyond);
}

// The backward only moves bits: U is the unsigned integer type of the element's size.
template <typename U>
__device__ __forceinline__ void BackwardChunk(const ReluParams& p, int64_t begin) {
  const int lane = threadIdx.x % kWarpSize;
  const U* dy = static_cast<const U*>(p.a) + begin + lane;
  U* dx = static_cast<U*>(p.out) + begin + lane;
  const int count = static_cast<int>(min(p.size - begin, int64_t{kChunk}));
  const int rest = count - lane;

  U values[kTogether];
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    values[k] = k * kWarpSize < rest ? dy[k * kWarpSize] : U{0};
  }
  const uint32_t word = LoadMaskWord(p.layout, p.mask, p.mask_bytes, begin, count);
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const uint32_t bits = __shfl_sync(kFullWarp, word, k);
    const U value = (bits >> lane) & 1 ? values[k] : U{0};
    if (k * kWarpSize < rest) dx[k * kWarpSize] = value;
  }
}

template <typename U, bool kRagged>
__device__ __forceinline__ void BackwardTile(const ReluParams& p, int64_t begin) {
  constexpr int kField = Packed128<U>::kSize;
  constexpr int kLoads = 32 / kField;
  constexpr int kStride = kField * kWarpSize;
  static_assert(kWordsOf<U> * kLoads == kTogether);

  const int lane = threadIdx.x % kWarpSize;
  const U* dy = static_cast<const U*>(p.a) + begin + lane * kField;
  U* dx = static_cast<U*>(p.out) + begin + lane * kField;

  // Issue the loads of the mask first, because everything else depends on them.
  uint32_t words[kWordsOf<U>];
  if constexpr (!kRagged) {
    const uint32_t* mask = reinterpret_cast<const uint32_t*>(p.mask + begin / 8);
#pragma unroll
    for (int i = 0; i < kWordsOf<U>; ++i) {
      words[i] = mask[i * kWarpSize + WordOfLane<kField>(lane)];
    }
  }
  Packed128<U> values[kTogether];
#pragma unroll
  for (int k = 0; k < kTogether; ++k) values[k] = LoadPacked(dy + k * kStride);
#pragma unroll
  for (int i = 0; i < kWordsOf<U>; ++i) {
    if constexpr (kRagged) {
      words[i] = __shfl_sync(
          kFullWarp, LoadMaskWord(p.layout, p.mask, p.mask_bytes, begin + i * kMaskTile, kMaskTile),
          WordOfLane<kField>(lane));
    }
    words[i] = TransposeFields<kField>(words[i]);
  }
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const uint32_t bits = words[k / kLoads] >> k % kLoads * kField;
    StorePacked(dx + k * kStride, Select(bits, values[k]));
  }
}

__device__ __forceinline__ int64_t GlobalWarp() {
  return int64_t{blockIdx.x} * (kThreads / kWarpSize) + WarpIndex();
}

// The first warps take one whole tile each, the following ones one chunk each of the remaining
// elements.
template <int kTile, typename TileFn, typename ChunkFn>
__device__ __forceinline__ void ForEachTile(int64_t size, const TileFn& tile_fn,
                                            const ChunkFn& chunk_fn) {
  const int64_t tiles = size / kTile, warp = GlobalWarp();
  if (warp < tiles) {
    tile_fn(warp * kTile);
  } else {
    const int64_t begin = tiles * kTile + (warp - tiles) * kChunk;
    if (begin < size) chunk_fn(begin);
  }
}

template <typename T, bool kAdd>
__global__ void __launch_bounds__(kThreads) ForwardKernel(const ReluParams p) {
  ForEachTile<kTileOf<T>>(
      p.size, [&](int64_t begin) { ForwardTile<T, kAdd>(p, begin); },
      [&](int64_t begin) { ForwardChunk<T, kAdd>(p, begin); });
}

template <typename T, bool kAdd>
__global__ void __launch_bounds__(kThreads) ForwardChunksKernel(const ReluParams p) {
  const int64_t begin = GlobalWarp() * kChunk;
  if (begin < p.size) ForwardChunk<T, kAdd>(p, begin);
}

template <typename U, bool kRagged>
__global__ void __launch_bounds__(kThreads) BackwardKernel(const ReluParams p) {
  ForEachTile<kTileOf<U>>(
      p.size, [&](int64_t begin) { BackwardTile<U, kRagged>(p, begin); },
      [&](int64_t begin) { BackwardChunk<U>(p, begin); });
}

template <typename U>
__global__ void __launch_bounds__(kThreads) BackwardChunksKernel(const ReluParams p) {
  const int64_t begin = GlobalWarp() * kChunk;
  if (begin < p.size) BackwardChunk<U>(p, begin);
}

// -------------------------------------------------------------------------------------------------
// Launches

using Kernel = void (*)(ReluParams);

template <typename T, bool kAdd>
Kernel ForwardOf(bool tiles) {
  if constexpr (sizeof(T) < 8) {
    if (tiles) return KernelOf<ReluFamily, ForwardKernel<T, kAdd>>();
  }
  return KernelOf<ReluFamily, ForwardChunksKernel<T, kAdd>>();
}

template <typename T>
Kernel BackwardOf(bool tiles, bool ragged) {
  using U = std::conditional_t<sizeof(T) == 2, uint16_t,
                               std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  if constexpr (sizeof(T) < 8) {
    if (tiles && ragged) return KernelOf<ReluFamily, BackwardKernel<U, true>>();
    if (tiles) return KernelOf<ReluFamily, BackwardKernel<U, false>>();
  }
  return KernelOf<ReluFamily, BackwardChunksKernel<U>>();
}

enum class Operation { kRelu, kAddRelu, kBackward };

cudaError_t Run(Operation operation, DType dtype, const void* a, const void* b, void* out,
                uint8_t* mask, int64_t rows, int64_t columns, cudaStream_t stream) {
  const int64_t size = rows * columns;
  if (size == 0) return cudaSuccess;
  // Rows that fill whole mask bytes have a flat mask, so treat them as a single row.
  const bool flat = mask == nullptr || columns % 8 == 0;
  if (flat) {
    rows = 1;
    columns = size;
  }
  ReluParams params = {a, b, out, mask, size, 0, MakeMaskLayout(columns), false};
  params.mask_bytes = rows * static_cast<int64_t>(params.layout.row_bytes);
  params.ragged = !flat || CommonAlignment({mask}) < 4;
  const bool aligned = CommonAlignment({a, b, out}) == 16;

  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    const int64_t tile = aligned && sizeof(T) < 8 ? kTileOf<T> : 0;
    const int64_t tiles = tile == 0 ? 0 : size / tile;
    const int64_t warps = tiles + CeilDiv(size - tiles * tile, kChunk);
    const int64_t blocks = CeilDiv(warps, kThreads / kWarpSize);
    if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
    const Kernel kernel = operation == Operation::kRelu ? ForwardOf<T, false>(tile > 0)
                          : operation == Operation::kAddRelu
                              ? ForwardOf<T, true>(tile > 0)
                              : BackwardOf<T>(tile > 0, params.ragged);
    const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(blocks)),
                                 .block = dim3(kThreads)};
    return Launch(kernel, config, stream, params);
  });
}

}  // namespace

cudaError_t Relu(DType dtype, const void* x, void* y, uint8_t* mask, int64_t rows, int64_t columns,
                 cudaStream_t stream) {
  return Run(Operation::kRelu, dtype, x, nullptr, y, mask, rows, columns, stream);
}

cudaError_t ReluBackward(DType dtype, const uint8_t* mask, const void* dy, void* dx, int64_t rows,
                         int64_t columns, cudaStream_t stream) {
  // ReluParams has one mask pointer for both directions. The backward kernels only read the mask.
  return Run(Operation::kBackward, dtype, dy, nullptr, dx, const_cast<uint8_t*>(mask), rows,
             columns, stream);
}

cudaError_t AddRelu(DType dtype, const void* x, const void* y, void* z, uint8_t* mask, int64_t rows,
                    int64_t columns, cudaStream_t stream) {
  return Run(Operation::kAddRelu, dtype, x, y, z, mask, rows, columns, stream);
}

cudaError_t LoadReluKernels() { return LoadKernels<ReluFamily>(); }

}  // namespace jax_fastops::cuda

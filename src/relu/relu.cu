// y = max(x, 0) and z = max(x + y, 0), with a mask of one bit per element as the residual, and the
// backward pass that reads this mask.
//
// All of these are memory-bound. The forward reads and writes every element once and writes one bit
// more (2% of the traffic in float32, 3% in bfloat16). The backward reads that bit instead of the
// element. The kernels are therefore designed around their memory accesses:
//
// - A warp takes a tile of 1024 contiguous elements (2048 for 16-bit types). It loads 16 bytes per
//   lane and issues four to eight loads together, that is, 2 to 4 KB per warp. Saturating the
//   memory of an H100 takes about 3.35 TB/s times 0.8 us = 20 KB in flight per SM; 30 to 48 warps
//   are resident.
// - The mask of 1024 elements is 32 words, one per lane, which move in one 128-byte access.
//   bitmask.cuh explains how the bits get from the lanes that compute them to the lanes that store
//   them.
// - If the row length is not a multiple of 8, each row begins with a new mask byte, but the
//   elements are still contiguous. The code for the elements is the same; only the bits are written
//   byte by byte ("ragged").
// - Pointers that are not aligned to 16 bytes (XLA passes slices of buffers) and the elements after
//   the last whole tile are processed in chunks of 256 elements per warp. In a chunk each load
//   takes one element per lane, again eight loads are issued together, and the mask bits come from
//   ballots.
//
// One launch does everything: the first warps take the tiles, the next ones the rest. No warp waits
// for another.
#include "relu/relu.h"

#include "core/cuda/bitmask.cuh"
#include "core/cuda/load_kernels.h"
#include "core/cuda/packed.cuh"
#include "core/cuda/relu_of.cuh"

namespace jax_fastops::cuda {
namespace {

// -------------------------------------------------------------------------------------------------
// Kernels

struct ReluParams {
  const void* a;  // x, or dy
  const void* b;  // the second summand
  void* out;      // y, z or dx
  uint8_t* mask;  // written by the forward, read by the backward
  int64_t size;   // elements
  int64_t mask_bytes;
  MaskLayout layout;
};

enum class Mask { kNone, kFlat, kRagged };

// Tuning parameters. DefaultTuning has the values that the kernels use.
template <int kThreads_, int kWords_, int kInFlight_, CacheHint kLoad_, CacheHint kStore_>
struct Tuning {
  static constexpr int kThreads = kThreads_;  // per block
  static constexpr int kWords = kWords_;  // mask words per lane, one per 1024 elements of a tile
  static constexpr int kInFlight = kInFlight_;  // loads issued together, per lane and operand
  static constexpr CacheHint kLoad = kLoad_;
  static constexpr CacheHint kStore = kStore_;
};

// Loads and stores use the default caching. The next kernel reads y and dx, so these should stay in
// L2. x and dy are read once, but marking them for early eviction (ld.cs) measured 2 to 4% slower.
// float64 has four loads in flight, because with eight the forward would spill registers.
template <typename T>
using DefaultTuning = Tuning<256, sizeof(T) == 2 ? 2 : 1, sizeof(T) == 8 ? 4 : 8,
                             CacheHint::kDefault, CacheHint::kDefault>;

// A warp that cannot use 16-byte accesses processes a chunk: one element per lane and load.
constexpr int kChunkLoads = 8;
constexpr int kChunk = kChunkLoads * kWarpSize;

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

template <typename T, bool kAdd, Mask kMask>
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
  constexpr int kRows = kMask == Mask::kNone ? kChunkLoads : kChunkLoads + 1;
  T values[kRows], addends[kRows];
  bool live[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    live[k] = k * kWarpSize < rest && (k < kChunkLoads || lane < 7);
    values[k] = live[k] ? x[k * kWarpSize] : FromCompute<T>(0);
    if constexpr (kAdd) addends[k] = live[k] ? y[k * kWarpSize] : FromCompute<T>(0);
  }

  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if constexpr (kAdd) values[k] = SumOf(values[k], addends[k]);
    if constexpr (kMask != Mask::kNone) {
      const uint32_t bits = __ballot_sync(kFullWarp, ToCompute(values[k]) > 0);
      if (lane == k) word = bits;
    }
    if (k < kChunkLoads && live[k]) z[k * kWarpSize] = ReluOf(values[k]);
  }
  if constexpr (kMask != Mask::kNone) {
    const uint32_t next = __shfl_down_sync(kFullWarp, word, 1);
    const int count = static_cast<int>(min(p.size - begin, int64_t{kChunk}));
    StoreMaskBytes(p.layout, p.mask, begin, count, word, next);
  }
}

template <typename T, bool kAdd, Mask kMask, typename Tune>
__device__ __forceinline__ void ForwardTile(const ReluParams& p, int64_t begin) {
  constexpr int kField = Packed128<T>::kSize;
  constexpr int kLoads = 32 / kField;  // per mask word
  constexpr int kStride = kField * kWarpSize;
  constexpr int kBatch = Tune::kInFlight;
  static_assert(Tune::kWords * kLoads % kBatch == 0);

  const int lane = threadIdx.x % kWarpSize;
  const T* x = static_cast<const T*>(p.a) + begin + lane * kField;
  const T* y = static_cast<const T*>(p.b) + begin + lane * kField;
  T* z = static_cast<T*>(p.out) + begin + lane * kField;

  // The 7 elements after the tile, whose bits the last byte of a ragged mask may contain.
  T beyond = FromCompute<T>(0), beyond_addend = FromCompute<T>(0);
  if constexpr (kMask == Mask::kRagged) {
    const int64_t i = begin + kMaskTile * Tune::kWords + lane;
    if (lane < 7 && i < p.size) {
      beyond = static_cast<const T*>(p.a)[i];
      if constexpr (kAdd) beyond_addend = static_cast<const T*>(p.b)[i];
    }
  }

  uint32_t words[Tune::kWords] = {};
#pragma unroll
  for (int first = 0; first < Tune::kWords * kLoads; first += kBatch) {
    Packed128<T> values[kBatch];
    Packed128<T> addends[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      values[k] = LoadPacked<Tune::kLoad>(x + (first + k) * kStride);
      if constexpr (kAdd) addends[k] = LoadPacked<Tune::kLoad>(y + (first + k) * kStride);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if constexpr (kAdd) values[k] = SumOf(values[k], addends[k]);
      const uint32_t bits = ReluInPlace(values[k]);
      words[(first + k) / kLoads] |= bits << (first + k) % kLoads * kField;
      StorePacked<Tune::kStore>(z + (first + k) * kStride, values[k]);
    }
  }

  if constexpr (kMask == Mask::kFlat) {
    uint32_t* mask = reinterpret_cast<uint32_t*>(p.mask + begin / 8);
#pragma unroll
    for (int i = 0; i < Tune::kWords; ++i) {
      mask[i * kWarpSize + WordOfLane<kField>(lane)] = TransposeFields<kField>(words[i]);
    }
  } else if constexpr (kMask == Mask::kRagged) {
    // Move word w to lane w, so that the next word is in the next lane.
#pragma unroll
    for (int i = 0; i < Tune::kWords; ++i) {
      words[i] =
          __shfl_sync(kFullWarp, TransposeFields<kField>(words[i]), LaneOfWord<kField>(lane));
    }
    if constexpr (kAdd) beyond = SumOf(beyond, beyond_addend);
    const uint32_t last = __ballot_sync(kFullWarp, ToCompute(beyond) > 0);
#pragma unroll
    for (int i = 0; i < Tune::kWords; ++i) {
      uint32_t after = last;
      if (i + 1 < Tune::kWords) after = __shfl_sync(kFullWarp, words[(i + 1) % Tune::kWords], 0);
      uint32_t next = __shfl_down_sync(kFullWarp, words[i], 1);
      if (lane == kWarpSize - 1) next = after;
      StoreMaskBytes(p.layout, p.mask, begin + i * kMaskTile, kMaskTile, words[i], next);
    }
  }
}

// The backward only moves bits: U is the unsigned integer type of the element's size.
template <typename U>
__device__ __forceinline__ void BackwardChunk(const ReluParams& p, int64_t begin) {
  const int lane = threadIdx.x % kWarpSize;
  const U* dy = static_cast<const U*>(p.a) + begin + lane;
  U* dx = static_cast<U*>(p.out) + begin + lane;
  const int count = static_cast<int>(min(p.size - begin, int64_t{kChunk}));
  const int rest = count - lane;

  U values[kChunkLoads];
#pragma unroll
  for (int k = 0; k < kChunkLoads; ++k) {
    values[k] = k * kWarpSize < rest ? dy[k * kWarpSize] : U{0};
  }
  const uint32_t word = LoadMaskWord(p.layout, p.mask, p.mask_bytes, begin, count);
#pragma unroll
  for (int k = 0; k < kChunkLoads; ++k) {
    const uint32_t bits = __shfl_sync(kFullWarp, word, k);
    const U value = (bits >> lane) & 1 ? values[k] : U{0};
    if (k * kWarpSize < rest) dx[k * kWarpSize] = value;
  }
}

template <typename U, Mask kMask, typename Tune>
__device__ __forceinline__ void BackwardTile(const ReluParams& p, int64_t begin) {
  constexpr int kField = Packed128<U>::kSize;
  constexpr int kLoads = 32 / kField;
  constexpr int kStride = kField * kWarpSize;
  constexpr int kBatch = Tune::kInFlight;
  static_assert(Tune::kWords * kLoads % kBatch == 0);

  const int lane = threadIdx.x % kWarpSize;
  const U* dy = static_cast<const U*>(p.a) + begin + lane * kField;
  U* dx = static_cast<U*>(p.out) + begin + lane * kField;

  // Issue the loads of the mask first, because everything else depends on them.
  uint32_t words[Tune::kWords];
  if constexpr (kMask == Mask::kFlat) {
    const uint32_t* mask = reinterpret_cast<const uint32_t*>(p.mask + begin / 8);
#pragma unroll
    for (int i = 0; i < Tune::kWords; ++i) {
      words[i] = mask[i * kWarpSize + WordOfLane<kField>(lane)];
    }
  }
#pragma unroll
  for (int first = 0; first < Tune::kWords * kLoads; first += kBatch) {
    Packed128<U> values[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      values[k] = LoadPacked<Tune::kLoad>(dy + (first + k) * kStride);
    }
    if (first == 0) {
#pragma unroll
      for (int i = 0; i < Tune::kWords; ++i) {
        if constexpr (kMask == Mask::kRagged) {
          words[i] = __shfl_sync(
              kFullWarp,
              LoadMaskWord(p.layout, p.mask, p.mask_bytes, begin + i * kMaskTile, kMaskTile),
              WordOfLane<kField>(lane));
        }
        words[i] = TransposeFields<kField>(words[i]);
      }
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const uint32_t bits = words[(first + k) / kLoads] >> (first + k) % kLoads * kField;
      values[k] = Select(bits, values[k]);
      StorePacked<Tune::kStore>(dx + (first + k) * kStride, values[k]);
    }
  }
}

// The first warps take one whole tile each, the following ones one chunk each of the remaining
// elements.
template <typename Tune, typename TileFn, typename ChunkFn>
__device__ __forceinline__ void ForEachTile(int64_t size, const TileFn& tile_fn,
                                            const ChunkFn& chunk_fn) {
  constexpr int kTile = kMaskTile * Tune::kWords;
  constexpr int kWarps = Tune::kThreads / kWarpSize;
  const int64_t tiles = size / kTile;
  const int64_t warp = int64_t{blockIdx.x} * kWarps + WarpIndex();
  if (warp < tiles) {
    tile_fn(warp * kTile);
  } else {
    const int64_t begin = tiles * kTile + (warp - tiles) * kChunk;
    if (begin < size) chunk_fn(begin);
  }
}

template <typename T, bool kAdd, Mask kMask, typename Tune>
__global__ void __launch_bounds__(Tune::kThreads) ForwardKernel(const ReluParams p) {
  ForEachTile<Tune>(
      p.size, [&](int64_t begin) { ForwardTile<T, kAdd, kMask, Tune>(p, begin); },
      [&](int64_t begin) { ForwardChunk<T, kAdd, kMask>(p, begin); });
}

template <typename T, bool kAdd, Mask kMask>
__global__ void __launch_bounds__(256) ForwardChunksKernel(const ReluParams p) {
  const int64_t warp = int64_t{blockIdx.x} * (256 / kWarpSize) + WarpIndex();
  if (warp * kChunk < p.size) ForwardChunk<T, kAdd, kMask>(p, warp * kChunk);
}

template <typename U, Mask kMask, typename Tune>
__global__ void __launch_bounds__(Tune::kThreads) BackwardKernel(const ReluParams p) {
  ForEachTile<Tune>(
      p.size, [&](int64_t begin) { BackwardTile<U, kMask, Tune>(p, begin); },
      [&](int64_t begin) { BackwardChunk<U>(p, begin); });
}

template <typename U>
__global__ void __launch_bounds__(256) BackwardChunksKernel(const ReluParams p) {
  const int64_t warp = int64_t{blockIdx.x} * (256 / kWarpSize) + WarpIndex();
  if (warp * kChunk < p.size) BackwardChunk<U>(p, warp * kChunk);
}

// -------------------------------------------------------------------------------------------------
// Launches

using Kernel = void (*)(ReluParams);

struct KernelEntry {
  Kernel kernel;
  int threads;
  int tile;  // elements per warp before the rest is done in chunks; 0: all in chunks
};

// The kernels of one operation and element type.
struct KernelSet {
  KernelEntry flat;    // aligned pointers, flat mask or none
  KernelEntry ragged;  // aligned pointers, ragged mask; null where there is no mask
  KernelEntry chunks;  // any pointers
};

template <typename T, bool kAdd, Mask kMask>
KernelEntry ForwardEntry() {
  using Tune = DefaultTuning<T>;
  return {ForwardKernel<T, kAdd, kMask, Tune>, Tune::kThreads, kMaskTile * Tune::kWords};
}

template <typename T, bool kAdd, bool kMask>
KernelSet ForwardSet() {
  if constexpr (kMask) {
    return {ForwardEntry<T, kAdd, Mask::kFlat>(),
            ForwardEntry<T, kAdd, Mask::kRagged>(),
            {ForwardChunksKernel<T, kAdd, Mask::kRagged>, 256, 0}};
  } else {
    return {ForwardEntry<T, kAdd, Mask::kNone>(),
            {nullptr, 0, 0},
            {ForwardChunksKernel<T, kAdd, Mask::kNone>, 256, 0}};
  }
}

template <typename U>
KernelSet BackwardSet() {
  using Tune = DefaultTuning<U>;
  constexpr int kTile = kMaskTile * Tune::kWords;
  return {{BackwardKernel<U, Mask::kFlat, Tune>, Tune::kThreads, kTile},
          {BackwardKernel<U, Mask::kRagged, Tune>, Tune::kThreads, kTile},
          {BackwardChunksKernel<U>, 256, 0}};
}

enum Operation { kRelu, kReluForward, kAddRelu, kAddReluForward, kReluBackward, kNumOperations };

template <bool kAdd, bool kMask>
KernelSet ForwardSetOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ForwardSet<float, kAdd, kMask>();
    case DType::kBF16:
      return ForwardSet<__nv_bfloat16, kAdd, kMask>();
    case DType::kF16:
      return ForwardSet<__half, kAdd, kMask>();
    case DType::kF64:
      return ForwardSet<double, kAdd, kMask>();
  }
  return {};
}

KernelSet KernelsOf(Operation operation, DType dtype) {
  switch (operation) {
    case kRelu:
      return ForwardSetOf<false, false>(dtype);
    case kReluForward:
      return ForwardSetOf<false, true>(dtype);
    case kAddRelu:
      return ForwardSetOf<true, false>(dtype);
    case kAddReluForward:
      return ForwardSetOf<true, true>(dtype);
    default:
      switch (DTypeSize(dtype)) {
        case 2:
          return BackwardSet<uint16_t>();
        case 4:
          return BackwardSet<uint32_t>();
        default:
          return BackwardSet<uint64_t>();
      }
  }
}

cudaError_t Launch(const KernelEntry& entry, ReluParams params, cudaStream_t stream) {
  const int64_t tiles = entry.tile == 0 ? 0 : params.size / entry.tile;
  const int64_t rest = params.size - tiles * entry.tile;
  const int64_t warps = tiles + (rest + kChunk - 1) / kChunk;
  const int64_t warps_per_block = entry.threads / kWarpSize;
  const int64_t blocks = (warps + warps_per_block - 1) / warps_per_block;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  void* arguments[] = {&params};
  return cudaLaunchKernel(reinterpret_cast<const void*>(entry.kernel),
                          dim3(static_cast<unsigned>(blocks)), dim3(entry.threads), arguments, 0,
                          stream);
}

cudaError_t Run(Operation operation, DType dtype, const void* a, const void* b, void* out,
                uint8_t* mask, int64_t rows, int64_t columns, cudaStream_t stream) {
  const int64_t size = rows * columns;
  if (size == 0) return cudaSuccess;
  // Rows that fill whole mask bytes have a flat mask, so treat them as a single row.
  if (columns % 8 == 0) {
    rows = 1;
    columns = size;
  }

  ReluParams params;
  params.a = a;
  params.b = b;
  params.out = out;
  params.mask = mask;
  params.size = size;
  params.layout = MakeMaskLayout(columns);
  params.mask_bytes = rows * static_cast<int64_t>(params.layout.row_bytes);

  const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  const KernelSet kernels = KernelsOf(operation, dtype);
  if ((address(a) | address(b) | address(out)) % 16 != 0)
    return Launch(kernels.chunks, params, stream);
  const bool flat = mask == nullptr || (columns % 8 == 0 && address(mask) % 4 == 0);
  return Launch(flat ? kernels.flat : kernels.ragged, params, stream);
}

}  // namespace

cudaError_t Relu(DType dtype, const void* x, void* y, uint8_t* mask, int64_t rows, int64_t columns,
                 cudaStream_t stream) {
  if (mask == nullptr) return Run(kRelu, dtype, x, nullptr, y, nullptr, 1, rows * columns, stream);
  return Run(kReluForward, dtype, x, nullptr, y, mask, rows, columns, stream);
}

cudaError_t ReluBackward(DType dtype, const uint8_t* mask, const void* dy, void* dx, int64_t rows,
                         int64_t columns, cudaStream_t stream) {
  // ReluParams has one mask pointer for both directions. The backward kernels only read the mask.
  return Run(kReluBackward, dtype, dy, nullptr, dx, const_cast<uint8_t*>(mask), rows, columns,
             stream);
}

cudaError_t AddRelu(DType dtype, const void* x, const void* y, void* z, uint8_t* mask, int64_t rows,
                    int64_t columns, cudaStream_t stream) {
  if (mask == nullptr) return Run(kAddRelu, dtype, x, y, z, nullptr, 1, rows * columns, stream);
  return Run(kAddReluForward, dtype, x, y, z, mask, rows, columns, stream);
}

cudaError_t LoadReluKernels() {
  static KernelLoader loader;
  return loader.Load([](const auto& load) {
    for (int operation = 0; operation < kNumOperations; ++operation) {
      for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
        const KernelSet set =
            KernelsOf(static_cast<Operation>(operation), static_cast<DType>(dtype));
        for (const KernelEntry& entry : {set.flat, set.ragged, set.chunks})
          load(reinterpret_cast<const void*>(entry.kernel));
      }
    }
  });
}

}  // namespace jax_fastops::cuda

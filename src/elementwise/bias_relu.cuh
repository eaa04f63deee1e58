// y = max(x + bias, 0), with or without one bit per element for the backward pass.
//
// The kernels are bound by memory: they read x and write y once, and read the bias from the caches.
// So they are shaped like those of relu.cu, for any broadcast of the bias:
//
// - A warp takes 1024 contiguous elements (2048 of 16 bits) of the flat array, and loads 16 bytes
//   per lane, with four to eight loads in flight. The mask of 1024 elements moves as 32 words
//   (bitmask.cuh).
// - The offset in the bias of a 16-byte unit of x follows from the unit's index by one division by
//   the length of the innermost dimension. It is a multiplication, because the host knows the
//   divisor. A bias with more dimensions takes one division for each. The cost is per unit, not per
//   element.
// - If rows are whole units, the unit's bias is also a whole unit, loaded at once, or a single
//   element. Otherwise a bias of at most two dimensions is loaded element by element, because some
//   elements may belong to the next row: four to five instructions each, which elements of 32 bits
//   can afford. For elements of 16 bits it is read by aligned words and a shift (shifted.cuh), and
//   element by element only at the end of a row.
// - Rows that do not end on a whole mask byte ("ragged") each begin a new byte, but the elements
//   are contiguous: only the bits are distributed to bytes.
// - Chunks of 256 elements per warp, with one element per lane and load, and bits by ballots,
//   process all other cases: pointers that are not aligned to 16 bytes, other biases, rows shorter
//   than a unit, and the elements after the last whole tile.
//
// One launch does everything: the first warps take the tiles, and the next few take the rest.
#ifndef JAX_FASTOPS_ELEMENTWISE_BIAS_RELU_CUH_
#define JAX_FASTOPS_ELEMENTWISE_BIAS_RELU_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "core/alignment.h"
#include "core/cuda/bitmask.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/packed.cuh"
#include "core/cuda/relu_of.cuh"
#include "core/cuda/shifted.cuh"
#include "core/dtype.h"
#include "core/fast_divide.h"
#include "core/integer.h"
#include "elementwise/bias_act_of.h"
#include "elementwise/broadcast.h"
#include "elementwise/elementwise.h"

namespace jax_fastops::cuda {
namespace bias_relu {

// -------------------------------------------------------------------------------------------------
// The bias

// Computes the offset of an element's bias. The dimensions are those of the bias, merged. The
// innermost one is stored separately: it divides elements into rows and columns.
struct BiasIndex {
  bool narrow = true;  // fewer than 2^31 elements
  int outer_rank = 0;
  int64_t columns = 1;
  int64_t column_stride = 0;
  uint32_t words_end = 0;  // elements of the bias in whole words; 0: do not read by words
  int64_t outer_stride[kMaxBroadcastRank];
  FastDivisor column_divisor;
  FastDivisor outer_divisor[kMaxBroadcastRank];
  FastDivisor64 wide_column_divisor;
  FastDivisor64 wide_outer_divisor[kMaxBroadcastRank];

  // Splits the indices of elements, given in `rows`, into rows and columns.
  template <int kCount>
  __device__ __forceinline__ void Split(int64_t (&rows)[kCount], int64_t (&in_row)[kCount]) const {
    if (narrow) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t index = static_cast<uint32_t>(rows[k]);
        const uint32_t row = Divide(index, column_divisor);
        in_row[k] = index - row * column_divisor.divisor;
        rows[k] = row;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const int64_t row = Divide(static_cast<uint64_t>(rows[k]), wide_column_divisor);
        in_row[k] = rows[k] - row * columns;
        rows[k] = row;
      }
    }
  }

  // Replaces the indices of elements by the offsets of their biases.
  template <int kCount>
  __device__ __forceinline__ void ToOffsets(int64_t (&indices)[kCount]) const {
    int64_t offsets[kCount];
    Split(indices, offsets);
#pragma unroll
    for (int k = 0; k < kCount; ++k) offsets[k] *= column_stride;
#pragma unroll 1
    for (int i = outer_rank - 1; i > 0; --i) {
      if (narrow) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          const uint32_t index = static_cast<uint32_t>(indices[k]);
          const uint32_t major = Divide(index, outer_divisor[i]);
          offsets[k] += (index - major * outer_divisor[i].divisor) * outer_stride[i];
          indices[k] = major;
        }
      } else {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          const uint64_t index = indices[k];
          const uint64_t major = Divide(index, wide_outer_divisor[i]);
          offsets[k] += (index - major * wide_outer_divisor[i].divisor) * outer_stride[i];
          indices[k] = major;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) indices[k] = offsets[k] + indices[k] * outer_stride[0];
  }

  __device__ __forceinline__ int64_t Offset(int64_t index) const {
    int64_t offset[1] = {index};
    ToOffsets(offset);
    return offset[0];
  }
};

// The bias of 16 bytes of x, in its own type P.
template <typename T, typename P>
struct BiasUnit {
  static constexpr int kSize = Packed128<T>::kSize;
  static constexpr int kPieces = kSize * sizeof(P) / 16;  // 2 for float and 8 elements of 16 bits
  static constexpr int kPieceSize = kSize / kPieces;

  Packed128<P> pieces[kPieces];

  __device__ __forceinline__ P& operator[](int i) { return pieces[i / kPieceSize][i % kPieceSize]; }
};

// How the bias of a unit is loaded.
enum class Reach {
  kUnit,    // as an aligned unit, or as one element if the column stride is 0
  kGather,  // element by element: from one row, and perhaps from the next
};

// The biases of kCount units that are `step` elements apart.
template <Reach kReach, typename T, typename P, int kCount>
__device__ __forceinline__ void LoadBiases(const BiasIndex& index, const void* bias, int64_t first,
                                           int64_t step, BiasUnit<T, P> (&units)[kCount]) {
  constexpr int kSize = BiasUnit<T, P>::kSize;
  const P* p = static_cast<const P*>(bias);
  int64_t at[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) at[k] = first + k * step;
  if constexpr (kReach == Reach::kUnit) {
    index.ToOffsets(at);
    if (index.column_stride == 0) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const P one = __ldg(p + at[k]);
#pragma unroll
        for (int i = 0; i < kSize; ++i) units[k][i] = one;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
#pragma unroll
        for (int i = 0; i < units[k].kPieces; ++i) {
          units[k].pieces[i] = LoadPacked(p + at[k] + i * units[k].kPieceSize);
        }
      }
    }
  } else {
    int64_t column[kCount];
    index.Split(at, column);
    const int64_t stride = index.column_stride, outer_stride = index.outer_stride[0];
    if constexpr (sizeof(T) == 2) {
      if (index.words_end > 0) {
        Shifted<P, kSize> shifted[kCount];
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          const uint32_t row = static_cast<uint32_t>(at[k] * outer_stride);
          const uint32_t here = row + static_cast<uint32_t>(column[k]);
          const int left = static_cast<int>(index.columns - column[k]);
          if (left < kSize || here + (kSize - 1) >= index.words_end) {
            shifted[k].Gather(p, here, row + outer_stride, left);
          } else {
            shifted[k].Load(p, here);
          }
        }
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          P elements[kSize];
          shifted[k].Take(elements);
          memcpy(units[k].pieces, elements, sizeof(elements));
        }
        return;
      }
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int left = static_cast<int>(min(index.columns - column[k], int64_t{kSize}));
      const P* here = p + at[k] * outer_stride + column[k] * stride;
      const P* next = p + (at[k] + 1) * outer_stride - left * stride;
#pragma unroll
      for (int i = 0; i < kSize; ++i) units[k][i] = __ldg((i < left ? here : next) + i * stride);
    }
  }
}

// -------------------------------------------------------------------------------------------------
// Elements

// x + bias for the comparison with zero: rounded to the type of x, unless the bias is wider.
template <typename T, typename P>
__device__ __forceinline__ P Biased(T x, P bias) {
  if constexpr (std::is_same_v<T, P>) {
    return SumOf(x, bias);
  } else {
    return ToCompute(x) + bias;
  }
}

template <typename T, typename P>
__device__ __forceinline__ T Result(P biased) {
  if constexpr (std::is_same_v<T, P>) {
    return ReluOf(biased);
  } else {
    return FromCompute<T>(ReluOf(biased));
  }
}

// Replaces the elements by the result. Returns bits: bit i is set if the sum of element i is
// greater than zero.
template <typename T, typename P>
__device__ __forceinline__ uint32_t BiasReluInPlace(Packed128<T>& x, BiasUnit<T, P>& bias) {
  if constexpr (std::is_same_v<T, P>) {
    x = SumOf(x, bias.pieces[0]);
    return ReluInPlace(x);
  } else {
    using Pair = PairOf<T>;
    Packed128<Pair> pairs;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < x.kSize; i += 2) {
      const float low = Biased(x[i], bias[i]), high = Biased(x[i + 1], bias[i + 1]);
      if (low > 0) bits |= 1u << i;
      if (high > 0) bits |= 2u << i;
      if constexpr (std::is_same_v<T, __half>) {
        pairs[i / 2] = __floats2half2_rn(ReluOf(low), ReluOf(high));
      } else {
        pairs[i / 2] = __floats2bfloat162_rn(ReluOf(low), ReluOf(high));
      }
    }
    x = Reinterpret<T>(pairs);
    return bits;
  }
}

// -------------------------------------------------------------------------------------------------
// Kernels

struct Params {
  const void* x;
  const void* bias;
  void* out;
  uint8_t* mask;
  int64_t size;
  MaskLayout layout;
  BiasIndex index;
};

enum class Mask { kNone, kFlat, kRagged };

constexpr int kThreads = 256;
constexpr int kBlocks = 3;  // minimum per SM
constexpr int kChunkLoads = 8;
constexpr int kChunk = kChunkLoads * kWarpSize;

// The mask words of a lane; each word is for 1024 elements of a tile.
template <typename T>
constexpr int kWords = sizeof(T) == 2 ? 2 : 1;
template <typename T>
constexpr int kTile = kMaskTile * kWords<T>;

template <typename T, typename P, bool kMask>
__device__ __forceinline__ void Chunk(const Params& p, int64_t begin) {
  const int lane = threadIdx.x % kWarpSize;
  const T* x = static_cast<const T*>(p.x) + begin + lane;
  const P* bias = static_cast<const P*>(p.bias);
  T* y = static_cast<T*>(p.out) + begin + lane;
  const int rest = static_cast<int>(min(p.size - begin, int64_t{2 * kChunk})) - lane;

  // Row k of the chunk is element k of all lanes. Row 8 is the first 7 elements after the chunk,
  // which the last byte of a ragged mask may contain.
  constexpr int kRows = kMask ? kChunkLoads + 1 : kChunkLoads;
  T values[kRows];
  P biases[kRows];
  bool live[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    live[k] = k * kWarpSize < rest && (k < kChunkLoads || lane < 7);
    values[k] = live[k] ? x[k * kWarpSize] : FromCompute<T>(0);
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    biases[k] = FromCompute<P>(0);
    if (live[k]) biases[k] = __ldg(bias + p.index.Offset(begin + lane + k * kWarpSize));
  }

  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const P biased = Biased(values[k], biases[k]);
    if constexpr (kMask) {
      const uint32_t bits = __ballot_sync(kFullWarp, ToCompute(biased) > 0);
      if (lane == k) word = bits;
    }
    if (k < kChunkLoads && live[k]) y[k * kWarpSize] = Result<T>(biased);
  }
  if constexpr (kMask) {
    const uint32_t next = __shfl_down_sync(kFullWarp, word, 1);
    const int count = static_cast<int>(min(p.size - begin, int64_t{kChunk}));
    StoreMaskBytes(p.layout, p.mask, begin, count, word, next);
  }
}

template <typename T, typename P, Mask kMask, Reach kReach>
__device__ __forceinline__ void Tile(const Params& p, int64_t begin) {
  constexpr int kField = Packed128<T>::kSize;
  constexpr int kLoads = 32 / kField;  // per word
  constexpr int kStride = kField * kWarpSize;
  // All of a batch's loads of x are issued together. Those of the bias follow in smaller steps,
  // because they come from the caches, and take more registers each.
  constexpr int kBatch = sizeof(T) == 8 ? 4 : 8;
  constexpr bool kSame = sizeof(P) == sizeof(T);
  constexpr int kStep = kReach == Reach::kUnit ? (kSame ? 4 : 2)
                        : !kSame               ? 1
                        : sizeof(T) > 2        ? 4
                                               : 2;
  static_assert(kWords<T> * kLoads % kBatch == 0);

  const int lane = threadIdx.x % kWarpSize;
  const int64_t first = begin + lane * kField;
  const T* x = static_cast<const T*>(p.x) + first;
  T* y = static_cast<T*>(p.out) + first;

  // The 7 elements after the tile, which the last byte of a ragged mask may contain. They are used
  // only after the tile's loads have been issued.
  T beyond = FromCompute<T>(0);
  P beyond_bias = FromCompute<P>(0);
  if constexpr (kMask == Mask::kRagged) {
    const int64_t i = begin + kTile<T> + lane;
    if (lane < 7 && i < p.size) {
      beyond = static_cast<const T*>(p.x)[i];
      beyond_bias = __ldg(static_cast<const P*>(p.bias) + p.index.Offset(i));
    }
  }

  uint32_t words[kWords<T>] = {};
#pragma unroll
  for (int batch = 0; batch < kWords<T> * kLoads; batch += kBatch) {
    Packed128<T> values[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) values[k] = LoadPacked(x + (batch + k) * kStride);
#pragma unroll
    for (int step = 0; step < kBatch; step += kStep) {
      BiasUnit<T, P> biases[kStep];
      LoadBiases<kReach>(p.index, p.bias, first + (batch + step) * kStride, kStride, biases);
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        const int k = step + i, load = batch + k;
        const uint32_t bits = BiasReluInPlace(values[k], biases[i]);
        words[load / kLoads] |= bits << load % kLoads * kField;
        StorePacked(y + load * kStride, values[k]);
      }
    }
  }

  if constexpr (kMask == Mask::kFlat) {
    uint32_t* mask = reinterpret_cast<uint32_t*>(p.mask + begin / 8);
#pragma unroll
    for (int i = 0; i < kWords<T>; ++i) {
      mask[i * kWarpSize + WordOfLane<kField>(lane)] = TransposeFields<kField>(words[i]);
    }
  } else if constexpr (kMask == Mask::kRagged) {
    // Lane w gets word w, so the next word is in the next lane.
    uint32_t after = __ballot_sync(kFullWarp, ToCompute(Biased(beyond, beyond_bias)) > 0);
#pragma unroll
    for (int i = kWords<T> - 1; i >= 0; --i) {
      const uint32_t word =
          __shfl_sync(kFullWarp, TransposeFields<kField>(words[i]), LaneOfWord<kField>(lane));
      uint32_t next = __shfl_down_sync(kFullWarp, word, 1);
      if (lane == kWarpSize - 1) next = after;
      StoreMaskBytes(p.layout, p.mask, begin + i * kMaskTile, kMaskTile, word, next);
      after = __shfl_sync(kFullWarp, word, 0);
    }
  }
}

// Warps 0, 1, ... take the whole tiles. The following warps take the remaining elements in chunks.
template <typename T, typename P, Mask kMask, Reach kReach>
__global__ void __launch_bounds__(kThreads, kBlocks) TilesKernel(const __grid_constant__ Params p) {
  const int64_t tiles = p.size / kTile<T>;
  const int64_t warp = int64_t{blockIdx.x} * (kThreads / kWarpSize) + WarpIndex();
  if (warp < tiles) {
    Tile<T, P, kMask, kReach>(p, warp * kTile<T>);
  } else {
    const int64_t begin = tiles * kTile<T> + (warp - tiles) * kChunk;
    if (begin < p.size) Chunk<T, P, kMask != Mask::kNone>(p, begin);
  }
}

template <typename T, typename P, bool kMask>
__global__ void __launch_bounds__(kThreads) ChunksKernel(const __grid_constant__ Params p) {
  const int64_t warp = int64_t{blockIdx.x} * (kThreads / kWarpSize) + WarpIndex();
  if (warp * kChunk < p.size) Chunk<T, P, kMask>(p, warp * kChunk);
}

// -------------------------------------------------------------------------------------------------
// Launches

using Kernel = void (*)(Params);

struct KernelSet {
  Kernel chunks[2];      // without and with a mask
  Kernel units[3] = {};  // by the mask; null: not for float64
  Kernel gather[3] = {};
  int tile = 1;
};

template <typename T, typename P, Mask kMask, Reach kReach>
Kernel Tiles() {
  return KernelOf<BiasActKernels, TilesKernel<T, P, kMask, kReach>>();
}

template <typename T, typename P>
KernelSet MakeKernelSet() {
  KernelSet set = {.chunks = {KernelOf<BiasActKernels, ChunksKernel<T, P, false>>(),
                              KernelOf<BiasActKernels, ChunksKernel<T, P, true>>()}};
  if constexpr (sizeof(T) < 8) {
    constexpr Reach kUnit = Reach::kUnit, kGather = Reach::kGather;
    set.units[0] = Tiles<T, P, Mask::kNone, kUnit>();
    set.units[1] = Tiles<T, P, Mask::kFlat, kUnit>();
    set.units[2] = Tiles<T, P, Mask::kRagged, kUnit>();
    set.gather[0] = Tiles<T, P, Mask::kNone, kGather>();
    // Rows of a flat mask are whole bytes, so their bias is in units if it is aligned.
    set.gather[1] = set.gather[2] = Tiles<T, P, Mask::kRagged, kGather>();
    set.tile = kTile<T>;
  }
  return set;
}

inline KernelSet KernelsOf(DType dtype, bool wide) {
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    return wide ? MakeKernelSet<T, ComputeType<T>>() : MakeKernelSet<T, T>();
  });
}

// Returns false if there are too many dimensions, which cannot happen for those of `shape`.
inline bool MakeBiasIndex(const BroadcastShape& shape, int64_t size, const void* bias,
                          int64_t bias_itemsize, BiasIndex* index) {
  // Merges dimensions that are separate only because of the mask.
  BroadcastShape merged;
  if (!Collapse(std::vector<int64_t>(shape.size, shape.size + shape.rank),
                {std::vector<int64_t>(shape.stride[1], shape.stride[1] + shape.rank)}, &merged)) {
    return false;
  }
  const int64_t* stride = merged.stride[0];
  index->narrow = size < int64_t{1} << 31;
  index->columns = merged.inner();
  index->column_stride = merged.InnerStride(0);
  index->outer_rank = std::max(merged.rank - 1, 0);
  index->outer_stride[0] = 0;
  int64_t last = (index->columns - 1) * index->column_stride;
  for (int i = 0; i < index->outer_rank; ++i) last += (merged.size[i] - 1) * stride[i];
  if (index->narrow && index->column_stride == 1 && CommonAlignment({bias}) == 16) {
    const int64_t per_word = 16 / bias_itemsize;
    index->words_end = static_cast<uint32_t>((last + 1) / per_word * per_word);
  }
  const auto set = [index](int64_t length, FastDivisor* narrow, FastDivisor64* wide) {
    if (index->narrow) {
      *narrow = FastDivisor(static_cast<uint32_t>(length));
    } else {
      *wide = FastDivisor64(static_cast<uint64_t>(length));
    }
  };
  set(index->columns, &index->column_divisor, &index->wide_column_divisor);
  for (int i = 0; i < index->outer_rank; ++i) {
    index->outer_stride[i] = stride[i];
    set(merged.size[i], &index->outer_divisor[i], &index->wide_outer_divisor[i]);
  }
  return true;
}

// Whether the bias of every unit of x is an aligned unit or a single element.
inline bool BiasInUnits(const BiasIndex& index, const void* bias, int64_t unit, int64_t itemsize) {
  if (index.outer_rank > 0 && index.columns % unit != 0) return false;
  if (index.column_stride == 0) return true;
  if (index.column_stride != 1) return false;
  if (CommonAlignment({bias}) < std::min<int64_t>(unit * itemsize, 16)) return false;
  for (int i = 0; i < index.outer_rank; ++i) {
    if (index.outer_stride[i] % unit != 0) return false;
  }
  return true;
}

}  // namespace bias_relu

// out = max(x + bias, 0). Arrays of `shape`: x, which has the result's shape; bias; and, unless
// `mask` is null, the mask, whose strides count bits. Rows of the mask are whole bytes, and the
// bits after the end of a row are 0.
inline cudaError_t BiasReluForward(const BroadcastShape& shape, DType dtype,
                                   const Operand operands[2], void* out, uint8_t* mask,
                                   cudaStream_t stream) {
  using namespace bias_relu;
  const int64_t size = shape.elements();
  if (size == 0) return cudaSuccess;
  const int64_t itemsize = static_cast<int64_t>(DTypeSize(dtype));
  const bool wide = operands[1].wide && itemsize == 2;

  Params params;
  params.x = operands[0].data;
  params.bias = operands[1].data;
  params.out = out;
  params.mask = mask;
  params.size = size;
  const int64_t bias_itemsize = wide ? 4 : itemsize;
  if (!MakeBiasIndex(shape, size, params.bias, bias_itemsize, &params.index)) {
    return cudaErrorInvalidValue;
  }

  // If rows end on whole bytes, the array is one row for the mask. If the mask's inner stride is
  // not 1, its row dimension had size 1 and was dropped, so every element has its own byte.
  const bool one_row = mask == nullptr || shape.IsFull(2);
  const int64_t columns = one_row ? size : shape.InnerStride(2) == 1 ? shape.inner() : 1;
  params.layout = MakeMaskLayout(columns);

  const KernelSet kernels = KernelsOf(dtype, wide);
  const int64_t unit = 16 / itemsize;
  const bool units = BiasInUnits(params.index, params.bias, unit, bias_itemsize);
  const bool gather = params.index.outer_rank <= 1 && params.index.columns >= unit;
  Kernel kernel = kernels.chunks[mask != nullptr];
  int64_t tiles = 0;
  if (kernels.units[0] != nullptr && CommonAlignment({params.x, out}) == 16 && (units || gather)) {
    const bool flat = one_row && CommonAlignment({mask}) >= 4;
    const Mask kind = mask == nullptr ? Mask::kNone : flat ? Mask::kFlat : Mask::kRagged;
    kernel = (units ? kernels.units : kernels.gather)[static_cast<int>(kind)];
    tiles = size / kernels.tile;
  }
  const int64_t rest = size - tiles * kernels.tile;
  const int64_t warps = tiles + CeilDiv(rest, kChunk);
  const int64_t blocks = CeilDiv(warps, kThreads / kWarpSize);
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  return Launch(kernel, {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads)},
                stream, params);
}

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_BIAS_RELU_CUH_

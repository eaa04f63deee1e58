// y = max(x, 0) and y = max(x + bias, 0), with or without one bit per element for the backward
// pass, and the backward that selects a cotangent by these bits.
//
// The kernels are bound by memory: they read x and write y once (core/cuda/relu_tiles.cuh), and
// read a broadcast bias from the caches. The bits add 2% to the traffic in float32 and 3% in
// bfloat16. The backward reads them instead of x. The bias has any shape that broadcasts to that of
// x.
//
// - The offset in the bias of a 16-byte unit of x follows from the unit's index by one division by
//   the length of the innermost dimension. It is a multiplication, because the host knows the
//   divisor. A bias with more dimensions takes one division for each. The cost is per unit, not per
//   element.
// - If rows are whole units, the unit's bias is also a whole unit, loaded at once, or a single
//   element. Otherwise a bias of at most two dimensions is loaded element by element, because some
//   elements may belong to the next row: four to five instructions each, which elements of 32 bits
//   can afford. For elements of 16 bits it is read by aligned words and a shift (Shifted), and
//   element by element only at the end of a row.
// - All other cases are processed in chunks, without tiles: pointers that are not aligned to 16
//   bytes, other biases, rows shorter than a unit, and float64.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/alignment.h"
#include "core/broadcast.h"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/offsets.cuh"
#include "core/cuda/relu_tiles.cuh"
#include "core/cuda/vec.cuh"
#include "core/dtype.h"
#include "core/integer.h"

namespace jax_fastops::cuda {

struct BiasActKernels;  // the family of KernelOf

namespace bias_relu {

// -------------------------------------------------------------------------------------------------
// The bias

// Where the bias of an element is. The dimensions are those of the bias, merged; the innermost one
// divides elements into rows and columns.
struct BiasIndex : Offsets<kMaxBroadcastRank> {
  int64_t columns = 1;
  int64_t column_stride = 0;
  int64_t row_stride = 0;  // of at most two dimensions
  uint32_t words_end = 0;  // elements of the bias in whole words; 0: do not read by words

  // Splits the indices of elements, given in `rows`, into rows and columns.
  template <int kCount>
  __device__ __forceinline__ void Split(int64_t (&rows)[kCount], int64_t (&in_row)[kCount]) const {
    if (narrow) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t index = static_cast<uint32_t>(rows[k]);
        const uint32_t row = Divide(index, divisor[rank - 1]);
        in_row[k] = index - row * divisor[rank - 1].divisor;
        rows[k] = row;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const int64_t row = Divide(static_cast<uint64_t>(rows[k]), wide_divisor[rank - 1]);
        in_row[k] = rows[k] - row * columns;
        rows[k] = row;
      }
    }
  }
};

// The bias of 16 bytes of x, in its own type P.
template <typename T, typename P>
struct BiasUnit {
  static constexpr int kSize = Unit<T>::kSize;
  static constexpr int kPieces = kSize * sizeof(P) / 16;  // 2 for float and 8 elements of 16 bits
  static constexpr int kPieceSize = kSize / kPieces;

  Unit<P> pieces[kPieces];

  __device__ __forceinline__ P& operator[](int i) { return pieces[i / kPieceSize][i % kPieceSize]; }
};

// How the bias of a unit is loaded.
enum class BiasAccess {
  kNone,    // there is no bias
  kUnit,    // as an aligned unit, or as one element if the column stride is 0
  kGather,  // element by element: from one row, and perhaps from the next
};

// The biases of kCount units that are `step` elements apart.
template <BiasAccess kAccess, typename T, typename P, int kCount>
__device__ __forceinline__ void LoadBiases(const BiasIndex& index, const void* bias, int64_t first,
                                           int64_t step, BiasUnit<T, P> (&units)[kCount]) {
  constexpr int kSize = BiasUnit<T, P>::kSize;
  if constexpr (kAccess == BiasAccess::kNone) return;
  const P* p = static_cast<const P*>(bias);
  int64_t at[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) at[k] = first + k * step;
  if constexpr (kAccess == BiasAccess::kUnit) {
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
          units[k].pieces[i] = LoadWord(p + at[k] + i * units[k].kPieceSize);
        }
      }
    }
  } else {
    int64_t column[kCount];
    index.Split(at, column);
    const int64_t stride = index.column_stride, outer_stride = index.row_stride;
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

// Replaces the elements by the result. Returns bits: bit i is set if the sum of element i is
// greater than zero.
template <typename T, typename P>
__device__ __forceinline__ uint32_t BiasReluInPlace(Unit<T>& x, BiasUnit<T, P>& bias) {
  if constexpr (std::is_same_v<T, P>) {
    x = SumOf(x, bias.pieces[0]);
    return ReluInPlace(x);
  } else {
    using Pair = PairOf<T>;
    Unit<Pair> pairs;
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
  int64_t size;
  ReluMask mask;
  BiasIndex index;
};

// The addends of relu_tiles.cuh. The loads of the bias follow those of x in small steps, because
// they come from the caches, and take more registers each.
template <typename T, typename P, BiasAccess kAccess>
struct Biases {
  using One = P;
  using Sum = P;
  using Values = BiasUnit<T, P>;
  static constexpr bool kSame = sizeof(P) == sizeof(T);
  static constexpr int kStep = kAccess == BiasAccess::kNone   ? kReluTogether
                               : kAccess == BiasAccess::kUnit ? (kSame ? 4 : 2)
                               : !kSame                       ? 1
                               : sizeof(T) > 2                ? 4
                                                              : 2;

  const Params& p;

  // max(x + 0, 0) is max(x, 0), also for -0.0.
  __device__ __forceinline__ P Load(int64_t element) const {
    if constexpr (kAccess == BiasAccess::kNone) return FromCompute<P>(0);
    return __ldg(static_cast<const P*>(p.bias) + p.index.Offset(element));
  }
  static __device__ __forceinline__ P Add(T x, P bias) { return Biased(x, bias); }
  __device__ __forceinline__ void Load(int64_t first, int64_t stride,
                                       Values (&units)[kStep]) const {
    LoadBiases<kAccess>(p.index, p.bias, first, stride, units);
  }
  static __device__ __forceinline__ uint32_t ReluInPlace(Unit<T>& x, Values& bias) {
    if constexpr (kAccess == BiasAccess::kNone) return cuda::ReluInPlace(x);
    return BiasReluInPlace(x, bias);
  }
};

constexpr int kBlocks = 3;  // minimum per SM

template <typename T, typename P, BiasAccess kAccess>
__device__ __forceinline__ void Chunk(const Params& p, int64_t begin) {
  const Biases<T, P, kAccess> biases = {p};
  ReluForwardChunk(p.mask, biases, static_cast<const T*>(p.x), static_cast<T*>(p.out), p.size,
                   begin);
}

template <typename T, typename P, BiasAccess kAccess>
__global__ void __launch_bounds__(kReluThreads, kBlocks)
    TilesKernel(const __grid_constant__ Params p) {
  const Biases<T, P, kAccess> biases = {p};
  ForEachReluTile<kReluTile<T>>(
      p.size,
      [&](int64_t begin) {
        ReluForwardTile(p.mask, biases, static_cast<const T*>(p.x), static_cast<T*>(p.out), p.size,
                        begin);
      },
      [&](int64_t begin) { Chunk<T, P, kAccess>(p, begin); });
}

struct Chunks {
  static constexpr int kBlocks = 0;
  Params p;
  bool wide;

  template <typename T>
  __device__ __forceinline__ void Run() const {
    const int64_t begin = ReluWarp() * kReluChunk;
    if (begin >= p.size) return;
    if (p.bias == nullptr) {
      Chunk<T, T, BiasAccess::kNone>(p, begin);
    } else if (wide) {
      Chunk<T, ComputeType<T>, BiasAccess::kUnit>(p, begin);
    } else {
      Chunk<T, T, BiasAccess::kUnit>(p, begin);
    }
  }
};

// -------------------------------------------------------------------------------------------------
// Launches

using Kernel = void (*)(Params);

// The kernel with tiles for this access of the bias.
template <typename T, typename P>
Kernel KernelFor(BiasAccess access) {
  if (access == BiasAccess::kUnit) {
    return KernelOf<BiasActKernels, TilesKernel<T, P, BiasAccess::kUnit>>();
  }
  if (access == BiasAccess::kGather) {
    return KernelOf<BiasActKernels, TilesKernel<T, P, BiasAccess::kGather>>();
  }
  return KernelOf<BiasActKernels, TilesKernel<T, T, BiasAccess::kNone>>();
}

// Returns false if there are too many dimensions, which cannot happen for those of `shape`.
inline bool MakeBiasIndex(const BroadcastShape& shape, const void* bias, int64_t bias_itemsize,
                          BiasIndex* index) {
  // Merges dimensions that are separate only because of the mask.
  BroadcastShape merged;
  ArrayStrides strides;
  std::copy_n(shape.stride[1], shape.rank, strides.at);
  const size_t rank = static_cast<size_t>(shape.rank);
  if (!Collapse({shape.size, rank}, &strides, 1, &merged)) return false;
  if (merged.rank == 0) {
    merged.rank = 1;
    merged.size[0] = 1;
    merged.stride[0][0] = 0;
  }
  static_cast<Offsets<kMaxBroadcastRank>&>(*index) = {merged.rank, merged.size, merged.stride[0]};
  index->columns = merged.inner();
  index->column_stride = merged.InnerStride(0);
  index->row_stride = merged.rank > 1 ? merged.stride[0][0] : 0;
  int64_t last = 0;
  for (int i = 0; i < merged.rank; ++i) last += (merged.size[i] - 1) * merged.stride[0][i];
  if (index->narrow && index->column_stride == 1 && CommonAlignment({bias}) == 16) {
    const int64_t per_word = 16 / bias_itemsize;
    index->words_end = static_cast<uint32_t>((last + 1) / per_word * per_word);
  }
  return true;
}

// Whether the bias of every unit of x is an aligned unit or a single element.
inline bool BiasInUnits(const BiasIndex& index, const void* bias, int64_t unit, int64_t itemsize) {
  if (index.rank > 1 && index.columns % unit != 0) return false;
  if (index.column_stride == 0) return true;
  if (index.column_stride != 1) return false;
  if (CommonAlignment({bias}) < std::min<int64_t>(unit * itemsize, 16)) return false;
  for (int i = 0; i < index.rank - 1; ++i) {
    if (index.stride[i] % unit != 0) return false;
  }
  return true;
}

// The rows of a mask, array `array` of `shape`. If rows end on whole bytes, it is one row. If its
// inner stride is not 1, its row dimension had size 1 and was dropped: every element has a byte.
inline ReluMask MaskOf(const BroadcastShape& shape, int array, uint8_t* mask) {
  const bool one_row = mask == nullptr || shape.IsFull(array);
  const int64_t columns = one_row                         ? shape.elements()
                          : shape.InnerStride(array) == 1 ? shape.inner()
                                                          : 1;
  return ReluMask(mask, columns, one_row && CommonAlignment({mask}) >= 4);
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
  const int64_t itemsize = static_cast<int64_t>(DTypeSize(dtype)), unit = 16 / itemsize;
  const bool wide = operands[1].wide && itemsize == 2;
  const int64_t bias_itemsize = wide ? 4 : itemsize;
  Params params = {operands[0].data, operands[1].data, out, size, MaskOf(shape, 2, mask), {}};
  if (!MakeBiasIndex(shape, params.bias, bias_itemsize, &params.index)) {
    return cudaErrorInvalidValue;
  }
  const bool gather = params.index.rank <= 2 && params.index.columns >= unit;
  const bool units = BiasInUnits(params.index, params.bias, unit, bias_itemsize);
  const BiasAccess access = params.bias == nullptr ? BiasAccess::kNone
                            : units                ? BiasAccess::kUnit
                                                   : BiasAccess::kGather;
  const bool tiles = itemsize < 8 && CommonAlignment({params.x, out}) == 16 &&
                     (access != BiasAccess::kGather || gather);
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    if constexpr (sizeof(T) < 8) {
      const Kernel kernel = wide ? KernelFor<T, ComputeType<T>>(access) : KernelFor<T, T>(access);
      if (tiles) return Launch(kernel, ReluGrid(size, kReluTile<T>), stream, params);
    }
    return LaunchAnyType<BiasActKernels, kReluThreads>(dtype, ReluGrid(size, 0), stream,
                                                       Chunks{params, wide});
  });
}

}  // namespace jax_fastops::cuda

// What a block of elements_sums_kernel.cuh takes of the arrays, and how it writes its sums.
#ifndef JAX_FASTOPS_CORE_CUDA_ELEMENTS_SUMS_BLOCK_CUH_
#define JAX_FASTOPS_CORE_CUDA_ELEMENTS_SUMS_BLOCK_CUH_

#include <cstdint>

#include "core/cuda/elements_sums_params.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/vec.cuh"
#include "core/plan_elements.h"

namespace jax_fastops::cuda {

template <typename T, typename Offset>
__device__ __forceinline__ void PutSum(const SumParams& sum, Offset at, ComputeType<T> value) {
  if (sum.wide) {
    static_cast<ComputeType<T>*>(sum.out)[at] = value;
  } else {
    static_cast<T*>(sum.out)[at] = FromCompute<T>(value);
  }
}

// What a block and a lane take of the arrays.
template <typename F, typename T, int kSet>
struct SumsBlock : SumsTraits<F, T, kSet> {
  using Traits = SumsTraits<F, T, kSet>;
  using Traits::kAny, Traits::kOperands, Traits::kArrays, Traits::kSize, Traits::kRows;
  using typename Traits::C, typename Traits::Offset, typename Traits::Column;

  const SumsParams<F>& p;
  int side_by_side;  // rows
  int group;         // among them
  uint32_t row_class, strip_word, box, plane;
  Offset base[kArrays];  // of the plane, in the result and the operands
  uint32_t shift, word_in_row;
  Column first_column;
  Offset first_element;
  uint32_t elements_of_most, elements_of_last;  // of the word that belong to a row, one bit each
  uint32_t count;                               // rows of the class
  uint32_t per_trip;

  explicit __device__ __forceinline__ SumsBlock(const SumsParams<F>& p) : p(p) {
    side_by_side = blockDim.x / p.lanes;
    group = threadIdx.x / p.lanes;
    row_class = blockIdx.x % p.classes;
    const uint32_t strips_of = blockIdx.x / p.classes;
    const uint32_t strip = strips_of % p.strips, boxes_of = strips_of / p.strips;
    box = boxes_of % p.boxes;
    plane = boxes_of / p.boxes;
    p.PlaneOffsets(plane, base);
    shift = kAny ? 0
                 : static_cast<uint32_t>(base[0] + row_class * static_cast<Offset>(p.row_stride)) %
                       kSize;
    strip_word = strip * p.lanes;  // in the row
    word_in_row = strip_word + threadIdx.x % p.lanes;
    first_column = static_cast<Column>(word_in_row) * kSize - static_cast<Column>(shift);
    first_element = base[0] - shift + static_cast<Offset>(word_in_row) * kSize;
    elements_of_most = ElementsBefore(p.n);
    elements_of_last = Traits::kMayBeFlat ? ElementsBefore(p.last_n) : elements_of_most;
    count = (p.row_count - row_class - 1) / p.period + 1;
    per_trip = side_by_side * kRows;
  }

  // Those of a row that ends at column `end`.
  __device__ __forceinline__ uint32_t ElementsBefore(int64_t end) const {
    uint32_t elements = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const Column column = first_column + i;
      if (column >= 0 && column < static_cast<Column>(end)) elements |= 1u << i;
    }
    return elements;
  }

  __device__ __forceinline__ RowClass ClassOf(int operand) const {
    if constexpr (kAny) return p.operand_class[operand];
    return ClassIn(kSet, operand);
  }
  __device__ __forceinline__ RowClass ClassOfSum(int g) const {
    if constexpr (kAny) return p.sum[g].its_class;
    return ClassIn(kSet, g);
  }
  __device__ __forceinline__ bool IsWide(int operand) const {
    return F::kMayBeWide && sizeof(T) < sizeof(C) && p.operand[operand].wide;
  }

  // The columns of operands that are rows.
  __device__ __forceinline__ void LoadRows(C (&of_row)[kOperands][kSize]) const {
#pragma unroll
    for (int k = 0; k < kOperands; ++k) {
      if (ClassOf(k) != RowClass::kRow) continue;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        of_row[k][i] = C(0);
        if (F::kBits || !p.needed[k] || (elements_of_most >> i & 1) == 0) continue;
        const Offset at = base[1 + k] + static_cast<Offset>(first_column + i);
        of_row[k][i] = IsWide(k) ? static_cast<const C*>(p.operand[k].data)[at]
                                 : ToCompute(static_cast<const T*>(p.operand[k].data)[at]);
      }
    }
  }

  // Writes the sums along the rows in flight, of gradient g. `first` is the first of these rows.
  __device__ __forceinline__ void PutRowSums(int g, uint32_t first, C (&sums)[kRows]) const {
    const int lane = threadIdx.x % kWarpSize;
    const auto put_row = [&](int in_flight, C value) {
      const uint32_t index = first + in_flight * side_by_side;
      if (index >= count) return;
      const uint32_t row = row_class + index * p.period;
      Offset to;
      if (p.sum[g].direct) {
        Offset of_row[1], of_plane[1];
        p.RowOffsets(row, of_row, kArrays + g);
        p.PlaneOffsets(plane, of_plane, kArrays + g);
        to = of_row[0] + of_plane[0];
      } else {
        const uint32_t part = strip_word / 32 + threadIdx.x % p.lanes / 32;
        to = (Offset(part) * p.plane_count + plane) * p.row_count + row;
      }
      PutSum<T>(p.sum[g], to, value);
    };
    // Lanes keep half of their rows whenever the distance halves: 4 rows take 6 shuffles instead of
    // 20. `row` is the first row that this lane ends with.
    const auto halve = [&](int half, int width, int* row) {
      const bool upper = (lane & width) != 0;
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        if (i >= half) break;
        const C give = upper ? sums[i] : sums[i + half];
        const C keep = upper ? sums[i + half] : sums[i];
        sums[i] = keep + __shfl_xor_sync(kFullWarp, give, width);
      }
      *row += upper ? half : 0;
    };
    int row = 0, width = min(p.lanes, 32) / 2;
    if (width < kRows / 2) {  // 2 lanes: each ends with two rows
      halve(kRows / 2, width, &row);
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) put_row(row + i, sums[i]);
      return;
    }
#pragma unroll
    for (int half = kRows / 2; half > 0; half /= 2, width /= 2) halve(half, width, &row);
    bool writes = true;
    for (; width > 0; width /= 2) {
      sums[0] += __shfl_xor_sync(kFullWarp, sums[0], width);
      writes = writes && (lane & width) == 0;
    }
    if (writes) put_row(row, sums[0]);
  }

  // Writes the sums over the block's rows of each column of gradient g.
  __device__ __forceinline__ void PutColumnSums(int g, Offset of_plane, const C (&sums)[kSize],
                                                C* exchange) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      C value = sums[i];
      for (int step = p.lanes; step < 32; step *= 2) {
        value += __shfl_xor_sync(kFullWarp, value, step);
      }
      exchange[i * kSumsThreads + threadIdx.x] = value;
    }
    __syncthreads();
    // The first of a warp's parallel rows has the sum.
    const int step = max(p.lanes, 32);
    const Offset part = (Offset(plane) * p.boxes + box) * p.classes + row_class;
    for (int i = threadIdx.x; i < p.lanes * kSize; i += blockDim.x) {
      const int owner = i / kSize, element = i % kSize;
      C total = C(0);
      for (int at = owner; at < static_cast<int>(blockDim.x); at += step) {
        total += exchange[element * kSumsThreads + at];
      }
      const Column column =
          static_cast<Column>(strip_word) * kSize + i - static_cast<Column>(shift);
      if (column < 0 || column >= static_cast<Column>(p.n)) continue;
      PutSum<T>(p.sum[g],
                (p.sum[g].direct ? of_plane : part * static_cast<Offset>(p.n)) +
                    static_cast<Offset>(column),
                total);
    }
    __syncthreads();
  }

  // Writes the sum of gradient g over all of the block's elements.
  __device__ __forceinline__ void PutBlockSum(int g, Offset of_plane, C value, C* exchange) const {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
    if (threadIdx.x % kWarpSize == 0) exchange[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
      C total = C(0);
      for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) total += exchange[w];
      PutSum<T>(p.sum[g], p.sum[g].direct ? of_plane : Offset(blockIdx.x), total);
    }
    __syncthreads();
  }
};

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CORE_CUDA_ELEMENTS_SUMS_BLOCK_CUH_

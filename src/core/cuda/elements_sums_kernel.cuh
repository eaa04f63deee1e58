// The kernels of elements_sums.cuh: a pass over the arrays, which sums.
//
// A pass takes planes of rows (core/plan_elements.h). It is bound by memory, so every array is read
// once, and sums stay in registers as long as possible.
//
// The first elements of rows lie anywhere in a word of 16 bytes. Rows with the same position form a
// class, and a block takes only rows of one class, so its shift is constant. A lane owns an aligned
// word, with the same columns in every row. So
//
// - nothing is shifted: all loads and stores are aligned words;
// - the words that stick out of a row at its two ends belong to the same lanes in every row. Their
//   elements of the adjacent row go to columns that are never written, and are left out of sums
//   along the row. Gradients are stored element by element there;
// - the elements of a row operand, and the sums over rows, stay in registers.
//
// A row is processed by a power of two of lanes, or by some whole warps, with about 4 rows in
// flight. Long rows are cut into strips. Classes vary fastest in the grid, and rows interleave, so
// that all blocks read nearby memory at a time. Sums that a block cannot finish become partial sums
// for the second kernel (core/cuda/gradient_sums.cu). Without atomics, two runs are bitwise equal.
//
// SumsOfAnyClasses looks all classes up at run time and accesses single
// elements with 64-bit offsets: for addresses that are not aligned, rows shorter than a word,
// arrays of 2^31 elements, float64, and sets of classes without a kernel.
//
// Long because its parts share the registers of one loop. A version in functions, with fewer
// variants, was 1.3 to 2.8 times slower (docs/dev/log/elementwise.md).
#pragma once

#include <cstdint>

#include "core/cuda/elements_sums_params.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/vec.cuh"
#include "core/plan_elements.h"

namespace jax_fastops::cuda {

// Loads the elements of a word that sticks out of the array.
template <typename T>
__device__ __forceinline__ uint4 LoadTail(const T* p, int count) {
  uint4 bits = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (int i = count - 1; i >= 0; --i) {
    if constexpr (sizeof(T) == 4) {
      bits = make_uint4(reinterpret_cast<const uint32_t*>(p)[i], bits.x, bits.y, bits.z);
    } else {
      const uint32_t element = reinterpret_cast<const uint16_t*>(p)[i];
      bits = make_uint4(bits.x << 16 | element, bits.y << 16 | bits.x >> 16,
                        bits.z << 16 | bits.y >> 16, bits.w << 16 | bits.z >> 16);
    }
  }
  return bits;
}

template <typename T, typename Offset>
__device__ __forceinline__ void PutSum(const SumParams& sum, Offset at, ComputeType<T> value) {
  if (sum.wide) {
    static_cast<ComputeType<T>*>(sum.out)[at] = value;
  } else {
    static_cast<T*>(sum.out)[at] = FromCompute<T>(value);
  }
}

template <typename T, int kBytes, int kSize>
__device__ __forceinline__ void UnpackWord(const Word<kBytes>& bits,
                                           ComputeType<T> (&values)[kSize]) {
  Vec<T, kBytes> word;
  memcpy(word.words, &bits, kBytes);
  word.Unpack(values);
}

template <typename F, typename T, int kSet>
__device__ __forceinline__ void SumsLoop(const SumsParams<F>& p) {
  using C = ComputeType<T>;
  using Traits = SumsTraits<F, T, kSet>;
  using Offset = typename Traits::Offset;
  using Column = typename Traits::Column;
  using Bits = Word<Traits::kBytes>;
  constexpr bool kAny = Traits::kAny;
  constexpr int kOperands = F::kOperands, kGradients = F::kGradients, kArrays = 1 + kOperands;
  constexpr int kSize = Traits::kSize, kRows = Traits::kRows;
  constexpr int kVectors = Traits::kVectors, kValues = Traits::kValues;
  constexpr bool kMayBeFlat = kAny || kVectors == 0;
  constexpr uint32_t kWhole = (1u << kSize) - 1;
  constexpr unsigned kAll = 0xffffffffu;
  static_assert(F::kBits || kOperands == kGradients);
  static_assert(kValues == 0 || kRows == 4);  // the reduction of the row sums assumes 4 rows

  __shared__ C exchange[kVectors > 0 ? kSumsThreads * kSize : kSumsThreads / 32];

  const auto operand_class = [&](int k) {
    if constexpr (kAny) return p.operand_class[k];
    return ClassIn(kSet, k);
  };
  const auto sum_class = [&](int g) {
    if constexpr (kAny) return p.sum[g].its_class;
    return ClassIn(kSet, g);
  };
  const auto is_wide = [&](int k) {
    return F::kMayBeWide && sizeof(T) < sizeof(C) && p.operand[k].wide;
  };

  // ---- the block's plane and class, and this lane's columns
  const int side_by_side = blockDim.x / p.lanes;  // rows
  const int group = threadIdx.x / p.lanes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t row_class = blockIdx.x % p.classes, strips_of = blockIdx.x / p.classes;
  const uint32_t strip = strips_of % p.strips, boxes_of = strips_of / p.strips;
  const uint32_t box = boxes_of % p.boxes, plane = boxes_of / p.boxes;
  Offset base[kArrays];  // of the plane, in the result and the operands
  p.PlaneOffsets(plane, base);
  const uint32_t shift =
      kAny ? 0
           : static_cast<uint32_t>(base[0] + row_class * static_cast<Offset>(p.row_stride)) % kSize;
  const uint32_t strip_word = strip * p.lanes;  // in the row
  const uint32_t word_in_row = strip_word + threadIdx.x % p.lanes;
  const Column first_column = static_cast<Column>(word_in_row) * kSize - static_cast<Column>(shift);
  const Offset first_element = base[0] - shift + static_cast<Offset>(word_in_row) * kSize;
  // The elements of the word that belong to a row that ends at column `end`, one bit each.
  const auto elements_before = [&](int64_t end) {
    uint32_t elements = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const Column column = first_column + i;
      if (column >= 0 && column < static_cast<Column>(end)) elements |= 1u << i;
    }
    return elements;
  };
  const uint32_t elements_of_most = elements_before(p.n);
  const uint32_t elements_of_last = kMayBeFlat ? elements_before(p.last_n) : elements_of_most;
  const uint32_t count = (p.row_count - row_class - 1) / p.period + 1;  // rows of the class
  const uint32_t per_trip = side_by_side * kRows;

  C of_row[kOperands][kSize];
#pragma unroll
  for (int k = 0; k < kOperands; ++k) {
    if (operand_class(k) != RowClass::kRow) continue;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      of_row[k][i] = C(0);
      if (F::kBits || !p.needed[k] || (elements_of_most >> i & 1) == 0) continue;
      const Offset at = base[1 + k] + static_cast<Offset>(first_column + i);
      of_row[k][i] = is_wide(k) ? static_cast<const C*>(p.operand[k].data)[at]
                                : ToCompute(static_cast<const T*>(p.operand[k].data)[at]);
    }
  }
  // The two bytes of a mask's row that have the word's bits. If one of them is outside the row, its
  // bits are not used. Without a shift the word's bits are in one byte.
  uint32_t low_byte = 0, high_byte = 0;
  if constexpr (F::kBits && !kAny) {
    const int byte = first_column >> 3, last = static_cast<int>((p.n + 7) / 8) - 1;
    low_byte = min(max(byte, 0), last);
    high_byte = min(byte + 1, last);
  }

  C columns[kGradients][kSize], numbers[kGradients];
#pragma unroll
  for (int g = 0; g < kGradients; ++g) {
    numbers[g] = C(0);
#pragma unroll
    for (int i = 0; i < kSize; ++i) columns[g][i] = C(0);
  }

  // ---- the loop
  for (uint32_t trip = box; trip * per_trip < count; trip += p.boxes) {
    const uint32_t first = trip * per_trip + group;  // among the rows of the class
    Bits dy[kRows], full[kOperands][kRows];
    T value[kOperands][kRows];
    C wide_value[kOperands][kRows];
    uint32_t bits[kRows][2];
    uint32_t elements[kRows];
    Offset word[kRows];
    Offset bit[kRows];  // kAny: of a mask
    bool tail = false;
    // All loads are issued before any use.
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t index = first + r * side_by_side;
      const uint32_t row = row_class + index * p.period;
      elements[r] = kMayBeFlat && row == p.row_count - 1 ? elements_of_last : elements_of_most;
      if (index >= count) elements[r] = 0;
      if (elements[r] == 0) continue;
      Offset offset[kArrays];
      p.RowOffsets(row, offset);
      word[r] = (first_element + offset[0]) / kSize;
      if (!kAny && word[r] == static_cast<Offset>(p.tail_word)) {
        tail = true;
      } else {
        dy[r] = static_cast<const Bits*>(p.dy)[word[r]];
      }
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        const Offset at = base[1 + k] + offset[1 + k];
        if (F::kBits) {
          const uint8_t* const mask = static_cast<const uint8_t*>(p.operand[k].data);
          if (kAny) {
            bit[r] = at + static_cast<Offset>(first_column);
            bits[r][0] = mask[bit[r] >> 3];
          } else {
            bits[r][0] = mask[(at >> 3) + low_byte];
            bits[r][1] = shift != 0 ? mask[(at >> 3) + high_byte] : 0;
          }
        } else if (!p.needed[k]) {
          continue;
        } else if (!kAny && operand_class(k) == RowClass::kFull) {
          const bool own = F::kMayBeStrided && p.operand_class[k] == RowClass::kStrided;
          const Offset its_word = own ? at / kSize + word_in_row : word[r];
          if (its_word != static_cast<Offset>(p.tail_word)) {
            full[k][r] = static_cast<const Bits*>(p.operand[k].data)[its_word];
          }
        } else if (operand_class(k) != RowClass::kRow) {
          const Offset here = kAny && operand_class(k) != RowClass::kColumn
                                  ? at + static_cast<Offset>(first_column)
                                  : at;
          if (is_wide(k)) {
            wide_value[k][r] = static_cast<const C*>(p.operand[k].data)[here];
          } else {
            value[k][r] = static_cast<const T*>(p.operand[k].data)[here];
          }
        }
      }
    }
    if constexpr (!kAny) {
      if (tail) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (elements[r] == 0 || word[r] != static_cast<Offset>(p.tail_word)) continue;
          const uint32_t at = word[r] * kSize;
          dy[r] = LoadTail(static_cast<const T*>(p.dy) + at, p.tail);
#pragma unroll
          for (int k = 0; k < kOperands; ++k) {
            if (!F::kBits && operand_class(k) == RowClass::kFull && p.needed[k]) {
              full[k][r] = LoadTail(static_cast<const T*>(p.operand[k].data) + at, p.tail);
            }
          }
        }
      }
    }

    C row_sums[kGradients][kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int g = 0; g < kGradients; ++g) row_sums[g][r] = C(0);
      if (elements[r] == 0) continue;
      C of_dy[kSize], x[kOperands][kSize];
      UnpackWord<T, Traits::kBytes>(dy[r], of_dy);
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        if (F::kBits) {
          const uint32_t some = kAny ? bits[r][0] >> (bit[r] & 7)
                                     : (bits[r][0] | bits[r][1] << 8) >> (first_column & 7);
#pragma unroll
          for (int i = 0; i < kSize; ++i) x[k][i] = C(some >> i & 1u);
        } else if (!kAny && operand_class(k) == RowClass::kFull) {
          UnpackWord<T, Traits::kBytes>(full[k][r], x[k]);
        } else {
          const bool is_row = operand_class(k) == RowClass::kRow;
          const C the_one = is_row ? C(0) : is_wide(k) ? wide_value[k][r] : ToCompute(value[k][r]);
#pragma unroll
          for (int i = 0; i < kSize; ++i) x[k][i] = is_row ? of_row[k][i] : the_one;
        }
      }
      C values[kGradients][kSize];
      p.f.Choose([&](auto choice) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          C of_element[kOperands], g_of_element[kGradients];
#pragma unroll
          for (int k = 0; k < kOperands; ++k) of_element[k] = x[k][i];
          choice.template Gradients<T>(of_dy[i], of_element, g_of_element);
#pragma unroll
          for (int g = 0; g < kGradients; ++g) values[g][i] = g_of_element[g];
        }
      });
      const bool whole = elements[r] == kWhole;
#pragma unroll
      for (int g = 0; g < kGradients; ++g) {
        if (sum_class(g) == RowClass::kRow) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) columns[g][i] += values[g][i];
        } else if (sum_class(g) == RowClass::kColumn) {
          if (whole) {
#pragma unroll
            for (int i = 0; i < kSize; ++i) row_sums[g][r] += values[g][i];
          } else {
#pragma unroll
            for (int i = 0; i < kSize; ++i) {
              if (elements[r] >> i & 1) row_sums[g][r] += values[g][i];
            }
          }
        } else if (p.sum[g].out != nullptr) {
          if constexpr (kAny) {
            PutSum<T>(p.sum[g], word[r], values[g][0]);
          } else {
            Unit<T, 16> out;
#pragma unroll
            for (int i = 0; i < kSize; ++i) out.elements[i] = FromCompute<T>(values[g][i]);
            T* const to = static_cast<T*>(p.sum[g].out) + word[r] * kSize;
            if (whole) {
              out.Store(to);
            } else {
#pragma unroll
              for (int i = 0; i < kSize; ++i) {
                if (elements[r] >> i & 1) to[i] = out.elements[i];
              }
            }
          }
        }
      }
    }

    // All lanes of all warps get here: the number of trips is the block's.
    if constexpr (kValues > 0) {
#pragma unroll
      for (int g = 0; g < kGradients; ++g) {
        if (sum_class(g) != RowClass::kColumn || p.sum[g].out == nullptr) continue;
        if (!p.sum[g].per_row) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) numbers[g] += row_sums[g][r];
          continue;
        }
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
        // Lanes keep half of their rows whenever the distance halves: 4 rows take 6 shuffles
        // instead of 20. `row` is the first row that this lane ends with.
        const auto halve = [&](int half, int width, int* row) {
          const bool upper = (lane & width) != 0;
#pragma unroll
          for (int i = 0; i < kRows / 2; ++i) {
            if (i >= half) break;
            const C give = upper ? row_sums[g][i] : row_sums[g][i + half];
            const C keep = upper ? row_sums[g][i + half] : row_sums[g][i];
            row_sums[g][i] = keep + __shfl_xor_sync(kAll, give, width);
          }
          *row += upper ? half : 0;
        };
        int row = 0, width = min(p.lanes, 32) / 2;
        if (width < kRows / 2) {  // 2 lanes: each ends with two rows
          halve(kRows / 2, width, &row);
#pragma unroll
          for (int i = 0; i < kRows / 2; ++i) put_row(row + i, row_sums[g][i]);
          continue;
        }
#pragma unroll
        for (int half = kRows / 2; half > 0; half /= 2, width /= 2) halve(half, width, &row);
        bool writes = true;
        for (; width > 0; width /= 2) {
          row_sums[g][0] += __shfl_xor_sync(kAll, row_sums[g][0], width);
          writes = writes && (lane & width) == 0;
        }
        if (writes) put_row(row, row_sums[g][0]);
      }
    }
  }

  // ---- sums over all of the block's rows
#pragma unroll
  for (int g = 0; g < kGradients; ++g) {
    if (p.sum[g].out == nullptr) continue;
    Offset of_plane[1] = {0};
    if (p.sum[g].direct) p.PlaneOffsets(plane, of_plane, kArrays + g);
    if (kVectors > 0 && sum_class(g) == RowClass::kRow) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        C value = columns[g][i];
        for (int step = p.lanes; step < 32; step *= 2) value += __shfl_xor_sync(kAll, value, step);
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
                  (p.sum[g].direct ? of_plane[0] : part * static_cast<Offset>(p.n)) +
                      static_cast<Offset>(column),
                  total);
      }
      __syncthreads();
    } else if (kValues > 0 && sum_class(g) == RowClass::kColumn && !p.sum[g].per_row) {
      C value = numbers[g];
#pragma unroll
      for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAll, value, step);
      if (lane == 0) exchange[warp] = value;
      __syncthreads();
      if (threadIdx.x == 0) {
        C total = C(0);
        for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) total += exchange[w];
        PutSum<T>(p.sum[g], p.sum[g].direct ? of_plane[0] : Offset(blockIdx.x), total);
      }
      __syncthreads();
    }
  }
}

template <typename F, typename T, int kSet>
__global__ __launch_bounds__(kSumsThreads, (SumsTraits<F, T, kSet>::kBlocks)) void SumsKernel(
    const __grid_constant__ SumsParams<F> p) {
  SumsLoop<F, T, kSet>(p);
}

template <typename F>
struct SumsOfAnyClasses {
  static constexpr int kBlocks = 0;
  SumsParams<F> p;

  template <typename T>
  __device__ __forceinline__ void Run() const {
    SumsLoop<F, T, kAnyClasses>(p);
  }
};

}  // namespace jax_fastops::cuda

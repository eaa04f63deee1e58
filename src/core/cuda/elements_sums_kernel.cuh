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
// One kernel per functor and element type looks all classes up at run time and accesses single
// elements with 64-bit offsets: for addresses that are not aligned, rows shorter than a word,
// arrays of 2^31 elements, float64, and sets of classes without a kernel.
#ifndef JAX_FASTOPS_CORE_CUDA_ELEMENTS_SUMS_KERNEL_CUH_
#define JAX_FASTOPS_CORE_CUDA_ELEMENTS_SUMS_KERNEL_CUH_

#include <algorithm>
#include <cstdint>

#include "core/cuda/elements_sums_block.cuh"
#include "core/cuda/elements_sums_params.cuh"
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

template <typename T, int kBytes, int kSize>
__device__ __forceinline__ void UnpackWord(const Word<kBytes>& bits,
                                           ComputeType<T> (&values)[kSize]) {
  Vec<T, kBytes> word;
  memcpy(word.words, &bits, kBytes);
  word.Unpack(values);
}

// The rows that a lane has in flight.
template <typename F, typename T, int kSet>
struct SumsTrip : SumsTraits<F, T, kSet> {
  using Block = SumsBlock<F, T, kSet>;
  using Traits = SumsTraits<F, T, kSet>;
  using Traits::kAny, Traits::kOperands, Traits::kArrays, Traits::kSize, Traits::kRows;
  using typename Traits::C, typename Traits::Offset;
  using Bits = Word<Traits::kBytes>;

  Bits dy[kRows], full[kOperands][kRows];
  T value[kOperands][kRows];
  C wide_value[kOperands][kRows];
  uint32_t bits[kRows][2];
  uint32_t elements[kRows];
  Offset word[kRows];
  Offset bit[kRows];  // kAny: of a mask

  // All loads are issued before any use. `low_byte` and `high_byte` are those of a mask's row that
  // have the word's bits.
  __device__ __forceinline__ void Load(const Block& block, uint32_t first, uint32_t low_byte,
                                       uint32_t high_byte) {
    const SumsParams<F>& p = block.p;
    bool tail = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t index = first + r * block.side_by_side;
      const uint32_t row = block.row_class + index * p.period;
      elements[r] = Traits::kMayBeFlat && row == p.row_count - 1 ? block.elements_of_last
                                                                 : block.elements_of_most;
      if (index >= block.count) elements[r] = 0;
      if (elements[r] == 0) continue;
      Offset offset[kArrays];
      p.RowOffsets(row, offset);
      word[r] = (block.first_element + offset[0]) / kSize;
      if (!kAny && word[r] == static_cast<Offset>(p.tail_word)) {
        tail = true;
      } else {
        dy[r] = static_cast<const Bits*>(p.dy)[word[r]];
      }
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        const Offset at = block.base[1 + k] + offset[1 + k];
        if (F::kBits) {
          const uint8_t* const mask = static_cast<const uint8_t*>(p.operand[k].data);
          if (kAny) {
            bit[r] = at + static_cast<Offset>(block.first_column);
            bits[r][0] = mask[bit[r] >> 3];
          } else {
            bits[r][0] = mask[(at >> 3) + low_byte];
            bits[r][1] = block.shift != 0 ? mask[(at >> 3) + high_byte] : 0;
          }
        } else if (!p.needed[k]) {
          continue;
        } else if (!kAny && block.ClassOf(k) == RowClass::kFull) {
          const bool own = F::kMayBeStrided && p.operand_class[k] == RowClass::kStrided;
          const Offset its_word = own ? at / kSize + block.word_in_row : word[r];
          if (its_word != static_cast<Offset>(p.tail_word)) {
            full[k][r] = static_cast<const Bits*>(p.operand[k].data)[its_word];
          }
        } else if (block.ClassOf(k) != RowClass::kRow) {
          const Offset here = kAny && block.ClassOf(k) != RowClass::kColumn
                                  ? at + static_cast<Offset>(block.first_column)
                                  : at;
          if (block.IsWide(k)) {
            wide_value[k][r] = static_cast<const C*>(p.operand[k].data)[here];
          } else {
            value[k][r] = static_cast<const T*>(p.operand[k].data)[here];
          }
        }
      }
    }
    if constexpr (!kAny) {
      if (tail) LoadTails(block);
    }
  }

  // The operands' elements of a row.
  __device__ __forceinline__ void Unpack(const Block& block, int r,
                                         const C (&of_row)[kOperands][kSize],
                                         C (&x)[kOperands][kSize]) const {
#pragma unroll
    for (int k = 0; k < kOperands; ++k) {
      if (F::kBits) {
        const uint32_t some = kAny ? bits[r][0] >> (bit[r] & 7)
                                   : (bits[r][0] | bits[r][1] << 8) >> (block.first_column & 7);
#pragma unroll
        for (int i = 0; i < kSize; ++i) x[k][i] = C(some >> i & 1u);
      } else if (!kAny && block.ClassOf(k) == RowClass::kFull) {
        UnpackWord<T, Traits::kBytes>(full[k][r], x[k]);
      } else {
        const bool is_row = block.ClassOf(k) == RowClass::kRow;
        const C the_one = is_row            ? C(0)
                          : block.IsWide(k) ? wide_value[k][r]
                                            : ToCompute(value[k][r]);
#pragma unroll
        for (int i = 0; i < kSize; ++i) x[k][i] = is_row ? of_row[k][i] : the_one;
      }
    }
  }

 private:
  __device__ __forceinline__ void LoadTails(const Block& block) {
    const SumsParams<F>& p = block.p;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (elements[r] == 0 || word[r] != static_cast<Offset>(p.tail_word)) continue;
      const uint32_t at = word[r] * kSize;
      dy[r] = LoadTail(static_cast<const T*>(p.dy) + at, p.tail);
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        if (!F::kBits && block.ClassOf(k) == RowClass::kFull && p.needed[k]) {
          full[k][r] = LoadTail(static_cast<const T*>(p.operand[k].data) + at, p.tail);
        }
      }
    }
  }
};

// Stores a word of a gradient, or those of its elements that belong to the row.
template <typename T, int kSize>
__device__ __forceinline__ void StoreWord(T* to, const ComputeType<T> (&values)[kSize],
                                          uint32_t elements, bool whole) {
  Unit<T, 16> out;
#pragma unroll
  for (int i = 0; i < kSize; ++i) out.elements[i] = FromCompute<T>(values[i]);
  if (whole) {
    out.Store(to);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (elements >> i & 1) to[i] = out.elements[i];
    }
  }
}

template <typename F, typename T, int kSet>
__global__ __launch_bounds__(kSumsThreads, (SumsTraits<F, T, kSet>::kBlocks)) void SumsKernel(
    const __grid_constant__ SumsParams<F> p) {
  using Traits = SumsTraits<F, T, kSet>;
  using C = typename Traits::C;
  using Offset = typename Traits::Offset;
  constexpr bool kAny = Traits::kAny;
  constexpr int kOperands = F::kOperands, kGradients = F::kGradients, kArrays = 1 + kOperands;
  constexpr int kSize = Traits::kSize, kRows = Traits::kRows;
  constexpr int kVectors = Traits::kVectors, kValues = Traits::kValues;
  constexpr uint32_t kWhole = (1u << kSize) - 1;
  static_assert(F::kBits || kOperands == kGradients);
  static_assert(kValues == 0 || kRows == 4);  // PutRowSums assumes 4 rows

  __shared__ C exchange[kVectors > 0 ? kSumsThreads * kSize : kSumsThreads / 32];

  const SumsBlock<F, T, kSet> block(p);
  C of_row[kOperands][kSize];
  block.LoadRows(of_row);
  // The two bytes of a mask's row that have the word's bits. If one of them is outside the row, its
  // bits are not used. Without a shift the word's bits are in one byte.
  uint32_t low_byte = 0, high_byte = 0;
  if constexpr (F::kBits && !kAny) {
    const int byte = block.first_column >> 3, last = static_cast<int>((p.n + 7) / 8) - 1;
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

  for (uint32_t number = block.box; number * block.per_trip < block.count; number += p.boxes) {
    const uint32_t first = number * block.per_trip + block.group;  // among the rows of the class
    SumsTrip<F, T, kSet> trip;
    trip.Load(block, first, low_byte, high_byte);
    C row_sums[kGradients][kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int g = 0; g < kGradients; ++g) row_sums[g][r] = C(0);
      const uint32_t elements = trip.elements[r];
      if (elements == 0) continue;
      C of_dy[kSize], x[kOperands][kSize];
      UnpackWord<T, Traits::kBytes>(trip.dy[r], of_dy);
      trip.Unpack(block, r, of_row, x);
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
      const bool whole = elements == kWhole;
#pragma unroll
      for (int g = 0; g < kGradients; ++g) {
        if (block.ClassOfSum(g) == RowClass::kRow) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) columns[g][i] += values[g][i];
        } else if (block.ClassOfSum(g) == RowClass::kColumn) {
          if (whole) {
#pragma unroll
            for (int i = 0; i < kSize; ++i) row_sums[g][r] += values[g][i];
          } else {
#pragma unroll
            for (int i = 0; i < kSize; ++i) {
              if (elements >> i & 1) row_sums[g][r] += values[g][i];
            }
          }
        } else if (p.sum[g].out != nullptr) {
          if constexpr (kAny) {
            PutSum<T>(p.sum[g], trip.word[r], values[g][0]);
          } else {
            StoreWord(static_cast<T*>(p.sum[g].out) + trip.word[r] * kSize, values[g], elements,
                      whole);
          }
        }
      }
    }

    // All lanes of all warps get here: the number of trips is the block's.
    if constexpr (kValues > 0) {
#pragma unroll
      for (int g = 0; g < kGradients; ++g) {
        if (block.ClassOfSum(g) != RowClass::kColumn || p.sum[g].out == nullptr) continue;
        if (p.sum[g].per_row) {
          block.PutRowSums(g, first, row_sums[g]);
        } else {
#pragma unroll
          for (int r = 0; r < kRows; ++r) numbers[g] += row_sums[g][r];
        }
      }
    }
  }

#pragma unroll
  for (int g = 0; g < kGradients; ++g) {
    if (p.sum[g].out == nullptr) continue;
    Offset of_plane[1] = {0};
    if (p.sum[g].direct) p.PlaneOffsets(block.plane, of_plane, kArrays + g);
    if (kVectors > 0 && block.ClassOfSum(g) == RowClass::kRow) {
      block.PutColumnSums(g, of_plane[0], columns[g], exchange);
    } else if (kValues > 0 && block.ClassOfSum(g) == RowClass::kColumn && !p.sum[g].per_row) {
      block.PutBlockSum(g, of_plane[0], numbers[g], exchange);
    }
  }
}

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CORE_CUDA_ELEMENTS_SUMS_KERNEL_CUH_

// The backward of an element-wise op for rows that are short or not a multiple of 16 bytes: shape
// (R, n) with operands that are full (kPlain), a row (1, n) (kColumn), a column (R, 1) or one
// element (kRow). The general pass (elementwise/backward.cuh) would move ragged rows element by
// element, and use its kernel that looks everything up at run time.
//
// Row r begins r * n mod kSize elements after a boundary of 16 bytes. Rows with the same remainder
// form a class, and a block takes only rows of one class, so its shift is constant. A lane owns an
// aligned word of 16 bytes, with the same columns in every row. So
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
// for the second kernel, as in the general pass. Without atomics, two runs are bitwise equal.
//
// Long because its parts share the registers of one loop. A version in functions, with fewer
// variants, was 1.3 to 2.8 times slower (docs/dev/log/elementwise.md).
#ifndef JAX_FASTOPS_ELEMENTWISE_ROWS_CUH_
#define JAX_FASTOPS_ELEMENTWISE_ROWS_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "core/broadcast.h"
#include "core/cuda/launch.h"
#include "core/cuda/unit.cuh"
#include "core/integer.h"
#include "elementwise/elementwise.h"
#include "elementwise/finish.h"
#include "elementwise/operands.cuh"
#include "elementwise/plan.h"

namespace jax_fastops::cuda {

inline constexpr int kRowsThreads = 256;  // maximum per block

template <typename F, typename T, int kKinds>
struct RowsShape {
  static constexpr int kSize = 16 / sizeof(T);
  static constexpr int kVectors = CountKind(kKinds, F::kGradients, kColumn);
  static constexpr int kValues = CountKind(kKinds, F::kGradients, kRow);
  // The 16-byte words that a lane loads per row.
  static constexpr int kStreams = F::kBits ? 1 : 1 + F::kGradients - kVectors - kValues;
  // Rows in flight, and blocks per SM, as registers allow without spilling. 48 to 96 KB per SM are
  // then in flight.
  static constexpr int kRows = kStreams > 3 ? 2 : kStreams == 1 && kValues == 0 ? 6 : 4;
  static constexpr int kBlocks = kStreams > 2 || (sizeof(T) == 2 && kVectors + kValues > 1) ? 2 : 3;
};

struct RowsSum {
  void* out;        // null: not requested
  bool wide;        // accumulator type: partial sums, or a wide gradient
  bool over_all;    // the sum has one element
  uint32_t plane;   // distance between the partial sums of adjacent planes
  uint32_t stride;  // between rows
};

template <typename F>
struct RowsParams {
  const void* dy;
  Operand operand[F::kOperands];
  uint32_t operand_row[F::kOperands];  // stride of rows; for a bitmask, in bytes
  bool needed[F::kOperands];
  RowsSum sum[F::kGradients];
  uint32_t rows, n;
  uint32_t last_n;        // the last row is shorter if one array is cut into rows
  uint32_t period;        // words of rows r and r + period begin at the same columns
  uint32_t period_words;  // between these two rows
  uint32_t classes, strips, boxes;
  uint32_t tail, tail_word;  // elements of the word that sticks out of the arrays; its index
  int lanes;                 // per row, or per strip of a row: a power of two, or whole warps
  F f;
};

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

template <typename T>
__device__ __forceinline__ void PutRowsSum(const RowsSum& sum, uint32_t place,
                                           ComputeType<T> value) {
  if (sum.wide) {
    static_cast<ComputeType<T>*>(sum.out)[place] = value;
  } else {
    static_cast<T*>(sum.out)[place] = FromCompute<T>(value);
  }
}

template <typename F, typename T, int kKinds>
__global__
__launch_bounds__(kRowsThreads, (RowsShape<F, T, kKinds>::kBlocks)) void ElementwiseRowsKernel(
    const __grid_constant__ RowsParams<F> p) {
  using C = ComputeType<T>;
  using Shape = RowsShape<F, T, kKinds>;
  constexpr int kOperands = F::kOperands, kGradients = F::kGradients;
  constexpr int kSize = Shape::kSize, kRows = Shape::kRows;
  constexpr int kVectors = Shape::kVectors, kValues = Shape::kValues;
  constexpr bool kMayBeFlat = kVectors == 0 && !F::kBits;
  constexpr uint32_t kWhole = (1u << kSize) - 1;
  constexpr unsigned kAll = 0xffffffffu;
  static_assert(sizeof(C) == 4 && (F::kBits || kOperands == kGradients));
  static_assert(kValues == 0 || kRows == 4);  // the reduction of the row sums assumes 4 rows

  __shared__ C exchange[kVectors > 0 ? kRowsThreads * kSize : kRowsThreads / 32];

  // ---- the block's class, and this lane's columns
  const int side_by_side = blockDim.x / p.lanes;  // rows
  const int group = threadIdx.x / p.lanes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t row_class = blockIdx.x % p.classes, rest = blockIdx.x / p.classes;
  const uint32_t strip = rest % p.strips, box = rest / p.strips;
  const uint32_t shift = row_class * p.n % kSize;
  const uint32_t strip_word = strip * p.lanes;  // in the row
  const uint32_t word_in_row = strip_word + threadIdx.x % p.lanes;
  const int first_column = static_cast<int>(word_in_row * kSize) - static_cast<int>(shift);
  // The elements of the word that belong to a row that ends at column `end`, one bit each.
  const auto elements_before = [&](uint32_t end) {
    uint32_t elements = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int column = first_column + i;
      if (column >= 0 && column < static_cast<int>(end)) elements |= 1u << i;
    }
    return elements;
  };
  const uint32_t elements_of_most = elements_before(p.n);
  const uint32_t elements_of_last = kMayBeFlat ? elements_before(p.last_n) : elements_of_most;
  const uint32_t first_word = (row_class * p.n - shift) / kSize + word_in_row;
  const uint32_t count = (p.rows - row_class - 1) / p.period + 1;  // rows of the class
  const uint32_t per_trip = side_by_side * kRows;

  C of_vector[kOperands][kSize];
  if constexpr (!F::kBits) {
#pragma unroll
    for (int k = 0; k < kOperands; ++k) {
      if (KindOf(kKinds, k) != kColumn) continue;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        of_vector[k][i] = C(0);
        if (!p.needed[k] || (elements_of_most >> i & 1) == 0) continue;
        if (F::kMayBeWide && p.operand[k].wide) {
          of_vector[k][i] = static_cast<const C*>(p.operand[k].data)[first_column + i];
        } else {
          of_vector[k][i] = ToCompute(static_cast<const T*>(p.operand[k].data)[first_column + i]);
        }
      }
    }
  }
  // The two bytes of a mask's row that have the word's bits. If one of them is outside the row, its
  // bits are not used.
  uint32_t low_byte = 0, high_byte = 0;
  if constexpr (F::kBits) {
    const int byte = first_column >> 3, last = static_cast<int>((p.n + 7) / 8) - 1;
    low_byte = min(max(byte, 0), last);
    high_byte = min(byte + 1, last);
  }

  C columns[kVectors == 0 ? 1 : kVectors][kSize];
#pragma unroll
  for (int c = 0; c < kVectors; ++c) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) columns[c][i] = C(0);
  }
  C over_all[kGradients];
#pragma unroll
  for (int g = 0; g < kGradients; ++g) over_all[g] = C(0);

  // ---- the loop
  for (uint32_t trip = box; trip * per_trip < count; trip += p.boxes) {
    const uint32_t first = trip * per_trip + group;  // among the rows of the class
    uint4 dy[kRows], full[kOperands][kRows];
    T value[kOperands][kRows];
    C wide_value[kOperands][kRows];
    uint32_t bits[kRows][2];
    uint32_t elements[kRows];
    bool tail = false;
    // All loads are issued before any use.
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t index = first + r * side_by_side;
      const uint32_t row = row_class + index * p.period;
      const uint32_t word = first_word + index * p.period_words;
      elements[r] = kMayBeFlat && row == p.rows - 1 ? elements_of_last : elements_of_most;
      if (index >= count) elements[r] = 0;
      if (elements[r] == 0) continue;
      if (word == p.tail_word) {
        tail = true;
      } else {
        dy[r] = static_cast<const uint4*>(p.dy)[word];
      }
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        if (F::kBits) {
          const uint8_t* const mask =
              static_cast<const uint8_t*>(p.operand[k].data) + row * p.operand_row[k];
          bits[r][0] = mask[low_byte];
          bits[r][1] = mask[high_byte];
        } else if (KindOf(kKinds, k) == kPlain) {
          if (p.needed[k] && word != p.tail_word) {
            full[k][r] = static_cast<const uint4*>(p.operand[k].data)[word];
          }
        } else if (KindOf(kKinds, k) == kRow && p.needed[k]) {
          const uint32_t at = row * p.operand_row[k];
          if (F::kMayBeWide && sizeof(T) < sizeof(C) && p.operand[k].wide) {
            wide_value[k][r] = static_cast<const C*>(p.operand[k].data)[at];
          } else {
            value[k][r] = static_cast<const T*>(p.operand[k].data)[at];
          }
        }
      }
    }
    if (tail) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint32_t word = first_word + (first + r * side_by_side) * p.period_words;
        if (elements[r] == 0 || word != p.tail_word) continue;
        const uint32_t at = word * kSize;
        dy[r] = LoadTail(static_cast<const T*>(p.dy) + at, p.tail);
        if constexpr (!F::kBits) {
#pragma unroll
          for (int k = 0; k < kOperands; ++k) {
            if (KindOf(kKinds, k) == kPlain && p.needed[k]) {
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
      const uint32_t word = first_word + (first + r * side_by_side) * p.period_words;
      C of_dy[kSize], x[kOperands][kSize];
      ToCompute<T>(dy[r], of_dy);
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        const int kind = KindOf(kKinds, k);
        if (F::kBits) {
          const uint32_t two = (bits[r][0] | bits[r][1] << 8) >> (first_column & 7);
#pragma unroll
          for (int i = 0; i < kSize; ++i) x[k][i] = C(two >> i & 1u);
        } else if (kind == kPlain) {
          ToCompute<T>(full[k][r], x[k]);
        } else {
          const bool wide = F::kMayBeWide && sizeof(T) < sizeof(C) && p.operand[k].wide;
          const C the_one = kind == kColumn ? C(0)
                            : wide          ? wide_value[k][r]
                                            : ToCompute(value[k][r]);
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            x[k][i] = kind == kColumn ? of_vector[k][i] : the_one;
          }
        }
      }
      C values[kGradients][kSize];
      GradientsOf<F, T>(p.f, of_dy, x, values);
      const bool whole = elements[r] == kWhole;
      int next_vector = 0;
#pragma unroll
      for (int g = 0; g < kGradients; ++g) {
        const int kind = KindOf(kKinds, g);
        if (kind == kColumn) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) columns[next_vector][i] += values[g][i];
          ++next_vector;
        } else if (kind == kRow) {
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
          Unit<T, 16> out;
#pragma unroll
          for (int i = 0; i < kSize; ++i) out.elements[i] = FromCompute<T>(values[g][i]);
          T* const to = static_cast<T*>(p.sum[g].out) + word * kSize;
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

    // All lanes of all warps get here: the number of trips is the block's.
#pragma unroll
    for (int g = 0; g < kGradients; ++g) {
      if (KindOf(kKinds, g) != kRow || p.sum[g].out == nullptr) continue;
      if (p.sum[g].over_all) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) over_all[g] += row_sums[g][r];
        continue;
      }
      const auto put_row = [&](int in_flight, C value) {
        const uint32_t index = first + in_flight * side_by_side;
        if (index >= count) return;
        const uint32_t plane = strip_word / 32 + threadIdx.x % p.lanes / 32;
        const uint32_t row = row_class + index * p.period;
        PutRowsSum<T>(p.sum[g], plane * p.sum[g].plane + row * p.sum[g].stride, value);
      };
      // Lanes keep half of their rows whenever the distance halves: 4 rows take 6 shuffles instead
      // of 20. `row` is the first row that this lane ends with.
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

  // ---- sums over all of the block's rows
  int next_vector = 0;
#pragma unroll
  for (int g = 0; g < kGradients; ++g) {
    const int kind = KindOf(kKinds, g);
    if (kind == kColumn) {
      const int c = next_vector++;
      if (p.sum[g].out == nullptr) continue;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        C value = columns[c][i];
        for (int step = p.lanes; step < 32; step *= 2) value += __shfl_xor_sync(kAll, value, step);
        exchange[i * kRowsThreads + threadIdx.x] = value;
      }
      __syncthreads();
      // The first of a warp's parallel rows has the sum.
      const int step = max(p.lanes, 32);
      for (int i = threadIdx.x; i < p.lanes * kSize; i += blockDim.x) {
        const int owner = i / kSize, element = i % kSize;
        C total = C(0);
        for (int at = owner; at < static_cast<int>(blockDim.x); at += step) {
          total += exchange[element * kRowsThreads + at];
        }
        const int column = static_cast<int>(strip_word * kSize) + i - static_cast<int>(shift);
        if (column >= 0 && column < static_cast<int>(p.n)) {
          PutRowsSum<T>(p.sum[g], (box * p.classes + row_class) * p.sum[g].plane + column, total);
        }
      }
      __syncthreads();
    } else if (kind == kRow && p.sum[g].out != nullptr && p.sum[g].over_all) {
      C value = over_all[g];
#pragma unroll
      for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAll, value, step);
      if (lane == 0) exchange[warp] = value;
      __syncthreads();
      if (threadIdx.x == 0) {
        C total = C(0);
        for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) total += exchange[w];
        PutRowsSum<T>(p.sum[g], blockIdx.x * p.sum[g].plane, total);
      }
      __syncthreads();
    }
  }
}

// ---- launching ---------------------------------------------------------------------------------

// float64 has no such kernels.
template <typename F, typename T>
class RowsLauncher {
  using C = ComputeType<T>;

 public:
  // Launches these kernels if they take the shape, and after them the second kernel if there are
  // partial sums. Returns whether they take it.
  static bool Launch(const F& f, const BroadcastShape& shape, const void* dy,
                     const Operand* operands, const Gradient* gradients, SumWorkspace workspace,
                     cudaStream_t stream, cudaError_t* error) {
    const int64_t total = shape.elements();
    if (total >= int64_t{1} << 31) return false;
    const bool flat = shape.rank == 1;
    if (shape.rank != 2 && (!flat || F::kBits)) return false;
    const int64_t n = flat ? kFlatRow : shape.inner();
    const int64_t rows = flat ? CeilDiv(total, n) : shape.size[0];
    // For long aligned rows the general pass is as fast.
    const bool ragged = (flat ? total : n) % kSize != 0;
    if (n < kSize || (!ragged && (flat || n >= 256))) return false;

    // A row of a mask is aligned only to bytes.
    uintptr_t address = reinterpret_cast<uintptr_t>(dy);
    RowsParams<F> p{};
    p.f = f;
    bool wanted[F::kGradients];
    int kinds = 0;
    for (int g = 0; g < F::kGradients; ++g) {
      wanted[g] = gradients[g].data != nullptr;
      const int of_gradient = KindOfArray(shape, F::kOperands + g);
      int kind = wanted[g] ? of_gradient : F::kFirstIsFull && g > 0 ? kRow : kPlain;
      if (!F::kBits) {
        const int of_operand = KindOfArray(shape, g);
        if (wanted[g] && of_gradient != of_operand) return false;
        kind = of_operand;
        if (kind == kPlain) {
          if (operands[g].wide) return false;
          address |= reinterpret_cast<uintptr_t>(operands[g].data);
        }
      }
      if (kind < 0) return false;
      kinds |= kind << (2 * g);
      if (wanted[g] && kind == kPlain) {
        if (gradients[g].wide) return false;
        address |= reinterpret_cast<uintptr_t>(gradients[g].data);
      }
    }
    if (address % 16 != 0) return false;
    for (int k = 0; k < F::kOperands; ++k) {
      p.operand[k] = operands[k];
      const int64_t stride = flat ? 0 : shape.stride[k][0];
      if (F::kBits && (stride % 8 != 0 || shape.InnerStride(k) != 1)) return false;
      p.operand_row[k] = static_cast<uint32_t>(F::kBits ? stride / 8 : stride);
    }
    F::Needed(wanted, p.needed);

    void (*chosen)(RowsParams<F>) = nullptr;
    int rows_in_flight = 1, blocks_of_processor = 1;
    ForKinds(typename F::RowsKinds(), [&]<int kKinds>() {
      const auto kernel = KernelOf<typename F::Family, ElementwiseRowsKernel<F, T, kKinds>>();
      if (kKinds != kinds) return;
      using Shape = RowsShape<F, T, kKinds>;
      chosen = kernel;
      rows_in_flight = Shape::kRows;
      blocks_of_processor = Shape::kBlocks;
    });
    Device device;
    if (chosen == nullptr || CurrentDevice(&device) != cudaSuccess) return false;

    // ---- the distribution of the work
    const int64_t period = kSize / std::gcd<int64_t>(n, kSize);
    const int64_t classes = std::min(period, rows);
    // A row that begins or ends within a word has one more word.
    const int64_t gap = kSize / period;
    const int64_t words = CeilDiv(n + kSize - gap, kSize);
    int64_t lanes = 2, strips = 1;
    if (words <= 32) {
      while (lanes < words) lanes *= 2;
    } else {
      const int64_t warps = CeilDiv(words, 32);
      strips = CeilDiv(warps, kRowsThreads / 32);
      lanes = CeilDiv(warps, strips) * 32;
    }
    const int64_t side_by_side = kRowsThreads / lanes;
    const int64_t of_class = CeilDiv(rows, period);
    const int64_t trips = CeilDiv(of_class, side_by_side * rows_in_flight);
    const int64_t threads = lanes * side_by_side;
    const int64_t at_once = device.processors * (blocks_of_processor * kRowsThreads / threads);
    int64_t boxes = std::max<int64_t>(1, std::min(trips, at_once / (classes * strips)));
    boxes = CeilDiv(trips, CeilDiv(trips, boxes));  // no box without work
    const int64_t blocks = classes * strips * boxes;
    if (blocks >= int64_t{1} << 31) return false;
    const int64_t planes = lanes < 32 ? 1 : strips * lanes / 32;

    p.dy = dy;
    p.rows = static_cast<uint32_t>(rows);
    p.n = static_cast<uint32_t>(n);
    p.last_n = static_cast<uint32_t>(flat ? total - (rows - 1) * n : n);
    p.period = static_cast<uint32_t>(period);
    p.period_words = static_cast<uint32_t>(period * n / kSize);
    p.classes = static_cast<uint32_t>(classes);
    p.strips = static_cast<uint32_t>(strips);
    p.boxes = static_cast<uint32_t>(boxes);
    p.tail = static_cast<uint32_t>(total % kSize);
    p.tail_word = p.tail == 0 ? 0xffffffffu : static_cast<uint32_t>(total / kSize);
    p.lanes = static_cast<int>(lanes);

    // ---- partial sums [parts][kept]
    SumsToFinish unfinished;
    int64_t used = 0;
    for (int g = 0; g < F::kGradients; ++g) {
      RowsSum& sum = p.sum[g];
      sum.out = gradients[g].data;
      sum.wide = gradients[g].wide;
      const int kind = KindOf(kinds, g);
      if (!wanted[g] || kind == kPlain) continue;
      const int64_t stride = flat || kind == kColumn ? 0 : shape.stride[F::kOperands + g][0];
      sum.over_all = kind == kRow && stride == 0;
      sum.stride = static_cast<uint32_t>(stride);
      const int64_t kept = kind == kColumn ? n : sum.over_all ? 1 : rows;
      const int64_t parts = kind == kColumn ? classes * boxes : sum.over_all ? blocks : planes;
      if (parts == 1) continue;
      C* const at = static_cast<C*>(workspace.data) + used;
      used += parts * kept;
      if (used > workspace.size || parts * kept >= int64_t{1} << 31) return false;
      const bool vector = kind == kColumn;
      unfinished.AddPlanes(at, parts, {1, vector ? 1 : kept}, {0, stride}, vector ? kept : 1,
                           sum.out, sum.wide);
      sum.out = at;
      sum.wide = true;
      sum.plane = static_cast<uint32_t>(kept);
      sum.stride = 1;
    }

    const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(blocks)),
                                 .block = dim3(static_cast<unsigned>(threads))};
    *error = cuda::Launch(chosen, config, stream, p);
    if (*error == cudaSuccess) *error = unfinished.Launch(kDTypeOf<T>, stream);
    return true;
  }

 private:
  static constexpr int kSize = 16 / sizeof(T);
  static constexpr int kFlatRow = kRowsThreads * kSize;  // one array, cut into rows of this length

  // -1: another kind.
  static int KindOfArray(const BroadcastShape& shape, int array) {
    if (shape.IsFull(array)) return kPlain;
    const int64_t inner = shape.InnerStride(array);
    if (inner == 0) return kRow;
    return inner == 1 && shape.rank == 2 && shape.stride[array][0] == 0 ? kColumn : -1;
  }
};

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_ROWS_CUH_

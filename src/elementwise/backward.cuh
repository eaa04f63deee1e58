// The gradients of an element-wise op over broadcast operands, in one pass over the cotangent and
// the operands. Full gradients are written; gradients of broadcast operands are summed in the same
// pass. A new op is a functor:
//
//   struct F {
//     using Family = ...;  // of KernelOf
//     static constexpr int kOperands = ..., kGradients = ...;
//     // Whether an operand may have the accumulator type.
//     static constexpr bool kMayBeWide = ...;
//     // Whether operand 0 is a bitmask. Its values are 0 and 1.
//     static constexpr bool kBits = ...;
//     // Whether gradient 0 always has the result's shape.
//     static constexpr bool kFirstIsFull = ...;
//     // The kinds for which there is a kernel: for rows that are a multiple of 16 bytes, and for
//     // those of elementwise/rows.cuh.
//     using BackwardKinds = std::integer_sequence<int, ...>, RowsKinds = ...;
//     // Whether there is also a kernel for units of one element, if one gradient is a sum of
//     // columns.
//     static constexpr bool kShortUnits = ...;
//     // Calls visit(choice) with a value of the class that has Gradients: of this one, or of one
//     // that is chosen at run time.
//     template <typename Visit>
//     __device__ void Choose(const Visit& visit) const;
//     template <typename T>
//     static __device__ void Gradients(ComputeType<T> dy,
//                                      const ComputeType<T> (&x)[kOperands],
//                                      ComputeType<T> (&g)[kGradients]);
//     // Which operands the requested gradients need.
//     static void Needed(const bool* wanted, bool* needed);
//   };
//
// The pass is bound by memory, so every array is read once, and sums stay on the chip as long as
// possible. A block takes a box of the result (elementwise/plan.h): some indices of the outer
// dimensions, in two nested loops over A and B, and one or a few chunks of the innermost dimension.
// A group of lanes (a warp, unless rows are short) takes a chunk of a row at once, with 8 elements
// per lane. There are two kinds of sums:
//
//   columns  the sum keeps the innermost dimension. A lane adds up its own columns, row by row, in
//            registers. If there is a sum for every index of B, inside the loop over A, it is kept
//            in shared memory, in slots that only this lane accesses;
//   rows     the sum runs over the innermost dimension. A lane adds up its elements, and the lanes
//            of a group combine their sums at the end of a row, or at the end of the loop over
//            which the sum runs.
//
// The offsets of a box's rows in each array are computed once, into a table in shared memory, so
// the number of dimensions costs nothing in the loops. Sums that a box cannot finish become partial
// sums, which a second kernel adds up (elementwise/finish.cu). Without atomics, two runs are
// bitwise equal.
//
// Rows that are short or not a multiple of 16 bytes have separate kernels (elementwise/rows.cuh).
//
// Long because its parts share the registers of one loop. A version in functions, with fewer
// variants, was 1.3 to 2.8 times slower (docs/dev/log/elementwise.md).
#ifndef JAX_FASTOPS_ELEMENTWISE_BACKWARD_CUH_
#define JAX_FASTOPS_ELEMENTWISE_BACKWARD_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/broadcast.h"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "core/dtype.h"
#include "elementwise/finish.h"
#include "elementwise/operands.cuh"
#include "elementwise/plan.h"
#include "elementwise/rows.cuh"

namespace jax_fastops::cuda {

enum class Way : uint8_t {
  kUnwanted,
  kFull,         // has the result's shape: written, not summed
  kColumns,      // keeps the innermost dimension; summed in registers over B, and A unless kept
  kColumnSlots,  // keeps the innermost dimension and B; summed in slots over A
  kRows,         // summed over the innermost dimension and B, and over A unless kept
  kRowsOfB,      // summed over the innermost dimension only
  kRowSlots,     // summed in slots over the innermost dimension and A
};

struct SumParams {
  Way way;
  bool keeps_a, keeps_b, complete, wide;
  int column;  // complete: the table column with its offset
  int slots;   // the beginning of its slots
  int64_t parts_b, parts_inner;
  void* out;  // complete: the gradient; otherwise the partial sums
};

inline constexpr int kMaxTableColumns = 1 + kMaxElementwiseOperands + kMaxSums;

template <typename F>
struct BackwardParams {
  const void* dy;
  Operand operand[F::kOperands];
  Reach reach[F::kOperands];
  int operand_column[F::kOperands];  // of the table; column 0: arrays of the result's shape
  SumParams sum[F::kGradients];
  int column_source[kMaxColumnSums];  // kAnyKinds: the gradients of the register columns
  bool needed[F::kOperands];          // for the requested gradients
  bool any_rows;
  int64_t n;
  int64_t length_a, length_b, boxes_a, boxes_b, boxes_inner;
  int rank_a, rank_b, box_a, box_b, lanes, range, ranges, slot_elements, table_columns;
  bool groups_over_a;
  int64_t size_a[kMaxBroadcastRank], size_b[kMaxBroadcastRank];
  int64_t stride_a[kMaxTableColumns][kMaxBroadcastRank];
  int64_t stride_b[kMaxTableColumns][kMaxBroadcastRank];
  F f;
};

// The offsets of indices first, first + stride, ... of a set of dimensions.
template <typename Place>
__device__ __forceinline__ void FillTable(Place* table, int columns, int64_t first, int64_t stride,
                                          int count, int rank, const int64_t* sizes,
                                          const int64_t (*strides)[kMaxBroadcastRank]) {
  for (int i = threadIdx.x; i < count; i += kBoxThreads) {
    for (int c = 0; c < columns; ++c) {
      int64_t rest = first + i * stride, place = 0;
      for (int d = rank - 1; d >= 0; --d) {
        int64_t digit = rest;
        if (d > 0) {
          if (rest < (int64_t{1} << 32) && sizes[d] < (int64_t{1} << 32)) {
            const uint32_t quotient = static_cast<uint32_t>(rest) / static_cast<uint32_t>(sizes[d]);
            digit = static_cast<uint32_t>(rest) - quotient * static_cast<uint32_t>(sizes[d]);
            rest = quotient;
          } else {
            digit = rest % sizes[d];
            rest /= sizes[d];
          }
        }
        place += digit * strides[c][d];
      }
      table[i * columns + c] = static_cast<Place>(place);
    }
  }
}

// The units of a chunk per lane, and how many of them are in flight. More would cost registers and
// so occupancy (docs/dev/log/elementwise.md).
template <typename F, typename T, int kBytes, int kKinds>
struct BackwardShape {
  static constexpr int kSize = kBytes / sizeof(T);
  static constexpr int kElements = sizeof(T) == 8 ? 4 : 8;  // per chunk
  static constexpr int kUnits = kElements / kSize;
  // A bitmask and dy are little data, and registers hold twice as many 16-bit elements.
  static constexpr bool kMore =
      kKinds != kAnyKinds && (F::kBits || (sizeof(T) == 2 && !F::kMayBeWide &&
                                           CountKind(kKinds, F::kGradients, kColumn) < 2));
  static constexpr int kInFlight = kMore ? 4 : 2;
  static constexpr int kSteps = kUnits >= kInFlight ? 1 : kInFlight / kUnits;
};

// A lane's slots for one index of B, in pieces of 16 bytes. The pieces of adjacent lanes are
// contiguous.
template <typename C, int kElements>
__device__ __forceinline__ C* SlotPiece(C* slots, int b, int piece, int lanes, int lane) {
  constexpr int kPiece = 16 / sizeof(C);
  return slots + ((b * (kElements / kPiece) + piece) * lanes + lane) * kPiece;
}

template <typename F, typename T, int kBytes, int kKinds, bool kManyRows>
__global__ __launch_bounds__(kBoxThreads, 2) void ElementwiseBackwardKernel(
    const __grid_constant__ BackwardParams<F> p) {
  using C = ComputeType<T>;
  using Shape = BackwardShape<F, T, kBytes, kKinds>;
  using Elements = Unit<T, kBytes>;
  using Operands = Loaded<T, kBytes, F::kMayBeWide>;
  constexpr bool kAny = kKinds == kAnyKinds;
  // If the kinds are known at compile time, arrays have less than 2^31 elements and rows are long.
  using Place = std::conditional_t<kAny, int64_t, uint32_t>;
  constexpr int kSize = Shape::kSize, kUnits = Shape::kUnits, kElements = Shape::kElements;
  constexpr int kSteps = Shape::kSteps;
  constexpr int kWarps = kBoxThreads / 32;
  constexpr int kGradients = F::kGradients, kOperands = F::kOperands;
  constexpr int kColumns =
      kAny ? kMaxColumnSums : CountKind(kAny ? 0 : kKinds, kGradients, kColumn);
  constexpr int kPiece = 16 / sizeof(C) < kSize ? 16 / sizeof(C) : kSize;  // of a slot
  constexpr unsigned kAll = 0xffffffffu;

  extern __shared__ __align__(16) unsigned char memory[];
  C* const exchange = reinterpret_cast<C*>(memory);
  C* const slots = exchange + kBoxThreads * kElements;
  Place* const table_a = reinterpret_cast<Place*>(slots + p.slot_elements);
  Place* const table_b = table_a + p.box_a * p.table_columns;

  // ---- the box, and this group's part of it
  const int lanes = kAny ? p.lanes : 32;
  const int lane = threadIdx.x % lanes;
  const int groups = kBoxThreads / lanes / p.ranges;
  const int group = threadIdx.x / lanes % groups;
  const int in_range = threadIdx.x / lanes / groups;
  const int64_t box_inner = blockIdx.x % p.boxes_inner;
  const int64_t outer_box = blockIdx.x / p.boxes_inner;
  const int64_t index_b = outer_box % p.boxes_b, index_a = outer_box / p.boxes_b;
  // Boxes interleave, so that all blocks read nearby memory at a time.
  const int count_a = static_cast<int>((p.length_a - index_a + p.boxes_a - 1) / p.boxes_a);
  const int count_b = static_cast<int>((p.length_b - index_b + p.boxes_b - 1) / p.boxes_b);
  const int64_t range_index = box_inner * p.ranges + in_range;
  const int chunk = lanes * kElements;
  const Place n = static_cast<Place>(p.n);
  const Place first_column = static_cast<Place>(range_index * chunk + lane * kSize);
  const int64_t step_in_row = p.boxes_inner * p.ranges * chunk;

  FillTable(table_a, p.table_columns, index_a, p.boxes_a, count_a, p.rank_a, p.size_a, p.stride_a);
  FillTable(table_b, p.table_columns, index_b, p.boxes_b, count_b, p.rank_b, p.size_b, p.stride_b);
  for (int i = threadIdx.x; i < p.slot_elements; i += kBoxThreads) slots[i] = C(0);
  __syncthreads();

  C columns[kColumns == 0 ? 1 : kColumns][kElements];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) columns[c][e] = C(0);
  }
  C rows[kGradients];  // sums that continue beyond a row
#pragma unroll
  for (int g = 0; g < kGradients; ++g) rows[g] = C(0);
  // Whether a gradient may be summed along the rows, as far as the kinds tell.
  const auto may_be_row = [](int g) { return kAny || KindOf(kAny ? 0 : kKinds, g) == kRow; };
  const auto reach = [&](int k) {
    if constexpr (kAny || F::kBits) return p.reach[k];
    return KindOf(kAny ? 0 : kKinds, k) == kRow ? Reach::kOne : Reach::kNeighbours;
  };

  // ---- where sums go
  // `at_inner`: a column, or the part along the innermost dimension.
  const auto put = [&](const SumParams& sum, int a, int b, int64_t at_inner, C value) {
    if (sum.complete) {
      int64_t place = static_cast<int64_t>(table_a[a * p.table_columns + sum.column]) +
                      static_cast<int64_t>(table_b[b * p.table_columns + sum.column]);
      if (sum.way == Way::kColumns || sum.way == Way::kColumnSlots) place += at_inner;
      if (sum.wide) {
        static_cast<C*>(sum.out)[place] = value;
      } else {
        static_cast<T*>(sum.out)[place] = FromCompute<T>(value);
      }
    } else {
      const int64_t part_a = sum.keeps_a ? index_a + a * p.boxes_a : index_a;
      const int64_t part_b = sum.keeps_b ? index_b + b * p.boxes_b : index_b;
      static_cast<C*>(sum.out)[(part_a * sum.parts_b + part_b) * sum.parts_inner + at_inner] =
          value;
    }
  };
  const auto over_group = [&](C value) {
    for (int step = lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAll, value, step);
    return value;
  };
  // Sums of the whole block. All threads call it.
  const auto put_block_rows = [&](int g, int a) {
    C value = rows[g];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAll, value, step);
    if (threadIdx.x % 32 == 0) exchange[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
      C total = exchange[0];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) total += exchange[w];
      put(p.sum[g], a, 0, box_inner, total);
    }
    __syncthreads();
    rows[g] = C(0);
  };
  // The gradient to which register columns c belong.
  const auto source_of = [&](int c) {
    if constexpr (kAny) return p.column_source[c];
    int g = 0;
    for (int found = -1;; ++g) {
      found += KindOf(kAny ? 0 : kKinds, g) == kColumn;
      if (found == c) return g;
    }
  };
  const auto put_block_columns = [&](int c, const SumParams& sum, int a) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      C value = columns[c][e];
      for (int step = lanes; step < 32; step *= 2) value += __shfl_xor_sync(kAll, value, step);
      if (threadIdx.x % 32 < lanes) {
        exchange[(e * kWarps + threadIdx.x / 32) * lanes + threadIdx.x % 32] = value;
      }
      columns[c][e] = C(0);
    }
    __syncthreads();
    const int warps = kWarps / p.ranges;  // warps with the same columns
    for (int i = threadIdx.x; i < p.ranges * chunk; i += kBoxThreads) {
      const int owner = i % lanes, e = i / lanes % kElements, in_block = i / chunk;
      C total = C(0);
      for (int w = 0; w < warps; ++w) {
        total += exchange[(e * kWarps + in_block * warps + w) * lanes + owner];
      }
      const int64_t column = (box_inner * p.ranges + in_block) * chunk + owner * kSize +
                             e / kSize * (lanes * kSize) + e % kSize;
      if (column < p.n) put(sum, a, 0, column, total);
    }
    __syncthreads();
  };

  // ---- the loops
  const int trips_a = p.groups_over_a ? (count_a + groups - 1) / groups : count_a;
  const int trips_b = p.groups_over_a ? count_b : (count_b + groups - 1) / groups;
  const int step_b = p.groups_over_a ? 1 : groups;
  for (int trip_a = 0; trip_a < trips_a; ++trip_a) {
    const int a = p.groups_over_a ? trip_a * groups + group : trip_a;
    const bool live_a = a < count_a;
    const Place* const at_a = table_a + (live_a ? a : 0) * p.table_columns;
    const Place place_a = at_a[0];
    Place operand_place_a[kOperands];
#pragma unroll
    for (int k = 0; k < kOperands; ++k) operand_place_a[k] = at_a[p.operand_column[k]];
    for (int trip_b = 0; trip_b < trips_b; trip_b += kManyRows ? kSteps : 1) {
      C now[kManyRows ? kSteps : 1][kGradients];
#pragma unroll
      for (int r = 0; r < (kManyRows ? kSteps : 1); ++r) {
#pragma unroll
        for (int g = 0; g < kGradients; ++g) now[r][g] = C(0);
      }
      for (int in_row = 0; in_row < (kManyRows ? 1 : p.range); in_row += kSteps) {
        Word<kBytes> dy[kSteps][kUnits];
        Operands x[kSteps][kUnits][kOperands];
        // For a mask, keeps the byte of the unit's first element and its bit offset. Shifting it
        // now would wait for the load.
        uint32_t byte[kSteps][kUnits];
        Place bit[kSteps];
        Place place[kSteps], column[kSteps];
        int row_b[kSteps];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const int b = (p.groups_over_a ? 0 : group) + (trip_b + (kManyRows ? s : 0)) * step_b;
          const bool live = live_a && b < count_b && (kManyRows || in_row + s < p.range);
          row_b[s] = live ? b : 0;
          const Place* const at_b = table_b + row_b[s] * p.table_columns;
          // After the end of the row, where there is nothing to do.
          column[s] =
              live ? first_column + static_cast<Place>(kManyRows ? 0 : (in_row + s) * step_in_row)
                   : n;
          place[s] = place_a + at_b[0] + column[s];
#pragma unroll
          for (int k = 0; k < kOperands; ++k) {
            if (!p.needed[k]) continue;
            const Place own = operand_place_a[k] + at_b[p.operand_column[k]];
            const Place offset = reach(k) == Reach::kOne ? own : own + column[s];
            if (F::kBits && k == 0) bit[s] = offset;
#pragma unroll
            for (int u = 0; u < kUnits; ++u) {
              if (column[s] + u * lanes * kSize >= n) continue;
              const Place at =
                  reach(k) == Reach::kOne ? offset : offset + static_cast<Place>(u * lanes * kSize);
              if (F::kBits && k == 0) {
                byte[s][u] = static_cast<const uint8_t*>(p.operand[k].data)[at >> 3];
              } else {
                x[s][u][k].Load(p.operand[k].data, at, reach(k), p.operand[k].wide);
              }
            }
          }
#pragma unroll
          for (int u = 0; u < kUnits; ++u) {
            if (column[s] + u * lanes * kSize >= n) continue;
            dy[s][u] = *reinterpret_cast<const Word<kBytes>*>(
                static_cast<const T*>(p.dy) + place[s] + static_cast<Place>(u * lanes * kSize));
          }
        }
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int u = 0; u < kUnits; ++u) {
            if (column[s] + u * lanes * kSize >= n) continue;
            C operands[kOperands][kSize];
#pragma unroll
            for (int k = 0; k < kOperands; ++k) {
              if (F::kBits && k == 0) {
                const Place at = reach(k) == Reach::kOne
                                     ? bit[s]
                                     : bit[s] + static_cast<Place>(u * lanes * kSize);
                const uint32_t bits = byte[s][u] >> (at & 7);
#pragma unroll
                for (int i = 0; i < kSize; ++i) operands[k][i] = bits >> i & 1u ? C(1) : C(0);
              } else {
                x[s][u][k].Expand(operands[k], reach(k), p.operand[k].wide);
              }
            }
            C of_dy[kSize], values[kGradients][kSize];
#pragma unroll
            for (int i = 0; i < kSize; ++i) of_dy[i] = ToCompute(ElementOf<T>(dy[s][u], i));
            GradientsOf<F, T>(p.f, of_dy, operands, values);
            int next_column = 0;
#pragma unroll
            for (int g = 0; g < kGradients; ++g) {
              const int kind = KindOf(kAny ? 0 : kKinds, g);
              if (kAny || kind == kPlain) {
                if (kAny && p.sum[g].way == Way::kFull && p.sum[g].wide) {
                  C* const to = static_cast<C*>(p.sum[g].out) + place[s] +
                                static_cast<Place>(u * lanes * kSize);
#pragma unroll
                  for (int i = 0; i < kSize; ++i) to[i] = values[g][i];
                } else if (p.sum[g].way == Way::kFull) {
                  Elements out;
#pragma unroll
                  for (int i = 0; i < kSize; ++i) out.elements[i] = FromCompute<T>(values[g][i]);
                  out.Store(static_cast<T*>(p.sum[g].out) + place[s] +
                            static_cast<Place>(u * lanes * kSize));
                }
              }
              if (kAny || kind == kColumn) {
                if (p.sum[g].way == Way::kColumnSlots) {
#pragma unroll
                  for (int i = 0; i < kSize; i += kPiece) {
                    constexpr int kAll16 = 16 / sizeof(C);
                    C* const at = SlotPiece<C, kElements>(slots + p.sum[g].slots,
                                                          row_b[s] * p.ranges + in_range,
                                                          (u * kSize + i) / kAll16, lanes, lane) +
                                  (u * kSize + i) % kAll16;
                    Unit<C, kPiece * sizeof(C)> slot = Unit<C, kPiece * sizeof(C)>::Load(at);
#pragma unroll
                    for (int j = 0; j < kPiece; ++j) slot.elements[j] += values[g][i + j];
                    slot.Store(at);
                  }
                } else if (!kAny) {
#pragma unroll
                  for (int i = 0; i < kSize; ++i) {
                    columns[next_column][u * kSize + i] += values[g][i];
                  }
                }
                if (!kAny) ++next_column;
              }
              if (!kAny && kind == kRow) {
#pragma unroll
                for (int i = 0; i < kSize; ++i) now[kManyRows ? s : 0][g] += values[g][i];
              }
            }
            if constexpr (kAny) {
              if (p.any_rows) {
#pragma unroll
                for (int g = 0; g < kGradients; ++g) {
#pragma unroll
                  for (int i = 0; i < kSize; ++i) now[kManyRows ? s : 0][g] += values[g][i];
                }
              }
#pragma unroll
              for (int c = 0; c < kColumns; ++c) {
                const int source = p.column_source[c];
#pragma unroll
                for (int i = 0; i < kSize; ++i) {
                  C value = values[0][i];
#pragma unroll
                  for (int g = 1; g < kGradients; ++g) value = source == g ? values[g][i] : value;
                  columns[c][u * kSize + i] += value;
                }
              }
            }
          }
        }
      }
      if (!p.any_rows) continue;
#pragma unroll
      for (int r = 0; r < (kManyRows ? kSteps : 1); ++r) {
        const int b = (p.groups_over_a ? 0 : group) + (trip_b + r) * step_b;
        const bool live = live_a && b < count_b;
#pragma unroll
        for (int g = 0; g < kGradients; ++g) {
          if (!may_be_row(g)) continue;
          const SumParams& sum = p.sum[g];
          if (sum.way == Way::kRows) {
            rows[g] += now[r][g];
          } else if (sum.way == Way::kRowsOfB || sum.way == Way::kRowSlots) {
            const C value = over_group(now[r][g]);
            if (lane != 0 || !live) continue;
            if (sum.way == Way::kRowsOfB) {
              put(sum, a, b, range_index, value);
            } else {
              slots[sum.slots + b * p.ranges + in_range] += value;
            }
          }
        }
      }
    }
    // Sums that are kept for each index of A end here.
#pragma unroll
    for (int g = 0; g < kGradients; ++g) {
      if (!may_be_row(g) || p.sum[g].way != Way::kRows || !p.sum[g].keeps_a) continue;
      if (p.groups_over_a) {
        const C value = over_group(rows[g]);
        if (lane == 0 && live_a) put(p.sum[g], a, 0, range_index, value);
        rows[g] = C(0);
      } else {
        put_block_rows(g, a);
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const SumParams& sum = p.sum[source_of(c)];
      if (sum.way != Way::kColumns || !sum.keeps_a) continue;
      if (p.groups_over_a) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const int64_t column =
              static_cast<int64_t>(first_column) + e / kSize * (lanes * kSize) + e % kSize;
          if (live_a && column < p.n) put(sum, a, 0, column, columns[c][e]);
          columns[c][e] = C(0);
        }
      } else {
        put_block_columns(c, sum, a);
      }
    }
  }

  // Sums over the whole box.
#pragma unroll
  for (int g = 0; g < kGradients; ++g) {
    if (may_be_row(g) && p.sum[g].way == Way::kRows && !p.sum[g].keeps_a) put_block_rows(g, 0);
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const SumParams& sum = p.sum[source_of(c)];
    if (sum.way == Way::kColumns && !sum.keeps_a) put_block_columns(c, sum, 0);
  }
  // Slots, by the lanes that filled them.
  if (p.slot_elements == 0) return;
#pragma unroll
  for (int g = 0; g < kGradients; ++g) {
    const SumParams& sum = p.sum[g];
    if (sum.way == Way::kColumnSlots) {
      for (int b = group; b < count_b; b += groups) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          constexpr int kAll16 = 16 / sizeof(C);
          const int64_t column =
              static_cast<int64_t>(first_column) + e / kSize * (lanes * kSize) + e % kSize;
          if (column >= p.n) continue;
          put(sum, 0, b, column,
              SlotPiece<C, kElements>(slots + sum.slots, b * p.ranges + in_range, e / kAll16, lanes,
                                      lane)[e % kAll16]);
        }
      }
    } else if (sum.way == Way::kRowSlots && lane == 0) {
      for (int b = group; b < count_b; b += groups) {
        put(sum, 0, b, range_index, slots[sum.slots + b * p.ranges + in_range]);
      }
    }
  }
}

// ---- launching ---------------------------------------------------------------------------------

// 8 elements of 4 bytes, or 4 of 8, per thread.
inline constexpr int kExchangeBytes = 8 << 10;

template <typename F, typename T>
class BackwardLauncher {
  using C = ComputeType<T>;

 public:
  // Arrays of `shape`: the operands, then the gradients.
  static cudaError_t Launch(const F& f, const BroadcastShape& shape, const void* dy,
                            const Operand* operands, const Gradient* gradients,
                            SumWorkspace workspace, cudaStream_t stream) {
    if (shape.elements() == 0) return cudaSuccess;
    int summed[F::kGradients], sums = 0;
    bool any = false;
    for (int g = 0; g < F::kGradients; ++g) {
      if (gradients[g].data == nullptr) continue;
      any = true;
      if (!shape.IsFull(F::kOperands + g)) summed[sums++] = g;
    }
    if (!any) return cudaSuccess;
    cudaError_t error;
    if constexpr (sizeof(T) < 8) {
      if (RowsLauncher<F, T>::Launch(f, shape, dy, operands, gradients, workspace, stream,
                                     &error)) {
        return error;
      }
    }
    error = Pass(f, shape, dy, operands, gradients, summed, sums, true, workspace, stream);
    if (error != cudaErrorInvalidValue || sums < 2) return error;
    // The sums cannot share a pass. Each gets one, and the first also writes the full gradients.
    for (int s = 0; s < sums; ++s) {
      error = Pass(f, shape, dy, operands, gradients, summed + s, 1, s == 0, workspace, stream);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

 private:
  // Calls `use` with every kernel for units of this size, and its properties.
  template <int kBytes, typename Use>
  static void Each(const Use& use) {
    One<kBytes, kAnyKinds, true>(use);
    if constexpr (sizeof(T) < 8) {
      ForKinds(typename F::BackwardKinds(), [&]<int kKinds>() {
        constexpr int kColumns = CountKind(kKinds, F::kGradients, kColumn);
        if constexpr (kBytes == 16 || (F::kShortUnits && kColumns == 1)) {
          One<kBytes, kKinds, true>(use);
        }
        if constexpr (kBytes == 16 && kColumns == 0) One<kBytes, kKinds, false>(use);
      });
    }
  }

  template <int kBytes, int kKinds, bool kManyRows, typename Use>
  static void One(const Use& use) {
    use(KernelOf<typename F::Family, ElementwiseBackwardKernel<F, T, kBytes, kKinds, kManyRows>>(),
        kKinds, kManyRows);
  }

  static cudaError_t Pass(const F& f, const BroadcastShape& given, const void* dy,
                          const Operand* operands, const Gradient* gradients, const int* summed,
                          int sums, bool write_full, SumWorkspace workspace, cudaStream_t stream) {
    uintptr_t bits = reinterpret_cast<uintptr_t>(dy);
    for (int k = F::kBits ? 1 : 0; k < F::kOperands; ++k) {
      if (given.InnerStride(k) != 0) bits |= reinterpret_cast<uintptr_t>(operands[k].data);
    }
    for (int g = 0; g < F::kGradients; ++g) {
      if (given.IsFull(F::kOperands + g)) bits |= reinterpret_cast<uintptr_t>(gradients[g].data);
    }
    if constexpr (sizeof(T) < 8) {
      if (given.inner() % (16 / static_cast<int64_t>(sizeof(T))) == 0 && bits % 16 == 0) {
        return PassOf<16>(f, given, dy, operands, gradients, summed, sums, write_full, workspace,
                          stream);
      }
    }
    return PassOf<sizeof(T)>(f, given, dy, operands, gradients, summed, sums, write_full, workspace,
                             stream);
  }

  template <int kBytes>
  static cudaError_t PassOf(const F& f, const BroadcastShape& shape, const void* dy,
                            const Operand* operands, const Gradient* gradients, const int* summed,
                            int sums, bool write_full, SumWorkspace workspace,
                            cudaStream_t stream) {
    using Shape = BackwardShape<F, T, kBytes, kAnyKinds>;
    BackwardParams<F> p{};
    p.f = f;
    // The table's columns: 0 is the result's shape; the others are arrays with other offsets.
    int arrays_of_columns[kMaxTableColumns];
    int columns = 1;
    const auto column_of = [&](int array) {
      if (shape.IsFull(array)) return 0;
      arrays_of_columns[columns] = array;
      return columns++;
    };
    bool is_summed[F::kGradients] = {}, wanted[F::kGradients];
    for (int s = 0; s < sums; ++s) is_summed[summed[s]] = true;
    int kinds = 0;
    // In a partitioned program an operand may have copies along dimensions that its gradient keeps
    // or sums over. Their strides then differ. They also differ if an unsummed gradient is wide.
    bool alike = true;
    for (int g = 0; g < F::kGradients; ++g) {
      const int out = F::kOperands + g;
      const bool full = write_full && gradients[g].data != nullptr && shape.IsFull(out);
      const bool wide = gradients[g].wide && sizeof(T) < sizeof(C);
      wanted[g] = full || is_summed[g];
      const bool column = is_summed[g] && shape.InnerStride(out) != 0;
      const bool row = is_summed[g] && !column;
      // A gradient whose operand is not read by the backward has its own offsets.
      const int like = F::kOperands == F::kGradients ? g : out;
      const bool one = shape.InnerStride(like) == 0 && !shape.IsFull(like);
      alike = alike && (!wanted[g] || (one == row && !(full && wide)));
      kinds |= (column ? kColumn : one ? kRow : kPlain) << (2 * g);
      p.sum[g].way = full ? Way::kFull : Way::kUnwanted;
      p.sum[g].out = gradients[g].data;
      p.sum[g].wide = full && wide;
    }
    F::Needed(wanted, p.needed);
    const bool takes_special = alike && shape.elements() < (int64_t{1} << 31);
    void (*special[2])(BackwardParams<F>) = {};  // by many rows
    void (*chosen)(BackwardParams<F>) = nullptr;
    Each<kBytes>([&](auto kernel, int its_kinds, bool its_rows) {
      if (its_kinds == kAnyKinds) chosen = kernel;
      if (its_kinds == kinds) special[its_rows] = kernel;
    });

    p.dy = dy;
    for (int k = 0; k < F::kOperands; ++k) {
      p.operand[k] = operands[k];
      p.reach[k] = shape.InnerStride(k) != 0 || shape.IsFull(k) ? Reach::kNeighbours : Reach::kOne;
      p.operand_column[k] = column_of(k);
    }
    Device device;
    cudaError_t error = CurrentDevice(&device);
    if (error != cudaSuccess) return error;
    int arrays[kMaxSums];
    for (int s = 0; s < sums; ++s) arrays[s] = F::kOperands + summed[s];
    BoxLimits limits;
    limits.unit = Shape::kSize;
    limits.units = Shape::kUnits;
    // The general kernel has many rows.
    if (!takes_special || special[false] == nullptr) limits.most_range = 1;
    limits.table_columns = columns + sums;
    limits.element_bytes = sizeof(T);
    limits.accumulator_bytes = sizeof(C);
    limits.slot_bytes =
        std::min(kMostSlotBytes, device.shared_per_block - kTableBytes - kExchangeBytes);
    limits.workspace = workspace.size;
    limits.processors = device.processors;
    const BoxPlan plan = CachedBoxes(shape, arrays, sums, limits);
    if (!plan.valid) return cudaErrorInvalidValue;

    int slots = 0, register_columns = 0;
    p.column_source[0] = p.column_source[1] = 0;
    int64_t used = 0;
    SumsToFinish unfinished;
    for (int s = 0; s < sums; ++s) {
      const int g = summed[s];
      const SumPlan& from = plan.sum[s];
      SumParams& sum = p.sum[g];
      sum.keeps_a = from.keeps_a;
      sum.keeps_b = from.keeps_b;
      sum.complete = from.complete;
      sum.wide = gradients[g].wide;
      sum.parts_b = from.parts_b;
      sum.parts_inner = from.parts_inner;
      sum.slots = slots;
      if (from.keeps_inner) {
        sum.way = from.in_slots() ? Way::kColumnSlots : Way::kColumns;
        if (from.in_slots()) {
          slots += plan.box_b * plan.ranges * plan.lanes * Shape::kElements;
        } else {
          // PlanBoxes never plans more than kMaxColumnSums of these.
          p.column_source[register_columns++] = g;
        }
      } else {
        sum.way = from.in_slots() ? Way::kRowSlots : from.keeps_b ? Way::kRowsOfB : Way::kRows;
        if (from.in_slots()) slots += (plan.box_b * plan.ranges + 3) / 4 * 4;  // whole pieces
        p.any_rows = true;
      }
      if (from.complete) {
        sum.column = column_of(arrays[s]);
        sum.out = gradients[g].data;
        continue;
      }
      C* const parts = static_cast<C*>(workspace.data) + used;
      used += from.parts();
      sum.out = parts;
      FinishSum& last = unfinished.Add();
      last.parts = parts;
      last.out = gradients[g].data;
      last.wide = gradients[g].wide;
      const int64_t all[3] = {from.parts_a, from.parts_b, from.parts_inner};
      const bool keeps[3] = {from.keeps_a, from.keeps_b, from.keeps_inner};
      const int64_t steps[3] = {from.parts_b * from.parts_inner, from.parts_inner, 1};
      for (int i = 0; i < 3; ++i) {
        last.kept[i] = keeps[i] ? all[i] : 1;
        last.added[i] = keeps[i] ? 1 : all[i];
        last.step[i] = steps[i];
      }
      if (from.keeps_a)
        Copy(shape, plan.dims_a, plan.rank_a, arrays[s], &last.rank_a, last.size_a, last.stride_a);
      if (from.keeps_b)
        Copy(shape, plan.dims_b, plan.rank_b, arrays[s], &last.rank_b, last.size_b, last.stride_b);
    }

    p.n = shape.inner();
    p.length_a = plan.length_a;
    p.length_b = plan.length_b;
    p.boxes_a = plan.boxes_a;
    p.boxes_b = plan.boxes_b;
    p.boxes_inner = plan.boxes_inner;
    p.box_a = plan.box_a;
    p.box_b = plan.box_b;
    p.lanes = plan.lanes;
    p.range = plan.range;
    p.ranges = plan.ranges;
    p.groups_over_a = plan.groups_over_a;
    p.slot_elements = slots;
    p.table_columns = columns;
    int64_t step = 1;  // of the result's shape
    int64_t dense[kMaxBroadcastRank];
    for (int d = shape.rank - 1; d >= 0; --d) {
      dense[d] = step;
      step *= shape.size[d];
    }
    p.rank_a = plan.rank_a;
    p.rank_b = plan.rank_b;
    for (int set = 0; set < 2; ++set) {
      const int rank = set == 0 ? plan.rank_a : plan.rank_b;
      for (int i = 0; i < rank; ++i) {
        const int d = set == 0 ? plan.dims_a[i] : plan.dims_b[i];
        (set == 0 ? p.size_a : p.size_b)[i] = shape.size[d];
        for (int c = 0; c < columns; ++c) {
          (set == 0 ? p.stride_a : p.stride_b)[c][i] =
              c == 0 ? dense[d] : shape.stride[arrays_of_columns[c]][d];
        }
      }
    }

    if (takes_special && plan.lanes == 32 && special[plan.range == 1] != nullptr) {
      chosen = special[plan.range == 1];
    }
    const size_t shared = (plan.box_a + plan.box_b) * columns * sizeof(int64_t) + kExchangeBytes +
                          static_cast<size_t>(slots) * sizeof(C);
    const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(plan.blocks())),
                                 .block = dim3(kBoxThreads),
                                 .shared = shared};
    error = cuda::Launch(chosen, config, stream, p);
    return error == cudaSuccess ? unfinished.Launch(kDTypeOf<T>, stream) : error;
  }

  static void Copy(const BroadcastShape& shape, const int* dims, int rank, int array, int* own_rank,
                   int64_t* sizes, int64_t* strides) {
    *own_rank = rank;
    for (int i = 0; i < rank; ++i) {
      sizes[i] = shape.size[dims[i]];
      strides[i] = shape.stride[array][dims[i]];
    }
  }
};

template <typename F>
cudaError_t ElementwiseBackward(const F& f, const BroadcastShape& given, DType dtype,
                                const void* dy, const Operand* operands, const Gradient* gradients,
                                SumWorkspace workspace, cudaStream_t stream) {
  BroadcastShape shape;
  if (!WithRows(given, &shape)) return cudaErrorInvalidValue;
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    return BackwardLauncher<F, T>::Launch(f, shape, dy, operands, gradients, workspace, stream);
  });
}

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_BACKWARD_CUH_

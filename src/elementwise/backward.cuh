// The gradients of an element-wise op over broadcast operands, in one pass over the cotangent and
// the operands. Full gradients are written; gradients of broadcast operands are summed in the same
// pass. An op is a functor:
//
//   struct F {
//     using Family = ...;  // of kernels (core/cuda/launch.h)
//     static constexpr int kOperands = ..., kGradients = ...;
//     // Whether an operand other than the first may have the accumulator type.
//     static constexpr bool kMayBeWide = ...;
//     // Whether operand 0 is a bitmask. Its values are 0 and 1.
//     static constexpr bool kBits = ...;
//     // Whether gradient 0 always has the result's shape.
//     static constexpr bool kFirstIsFull = ...;
//     template <typename T>
//     static __device__ void Gradients(ComputeType<T> dy,
//                                      const ComputeType<T> (&x)[kOperands],
//                                      ComputeType<T> (&g)[kGradients]);
//     // Which operands the requested gradients need.
//     static void Needed(const bool* wanted, bool* needed);
//   };
//
// The pass is bound by memory, so every array is read once, and sums stay on the chip as long as
// possible. A lane owns a unit of 16 bytes with the same columns in every row, and its block loops
// over rows (elementwise/plan.h), with several rows in flight. Three functions make the loop:
//
//   Load        the units of the rows in flight, as raw bits;
//   Accumulate  computes a row's gradients, writes the full ones, and adds the others to sums: of
//               columns, in registers; of rows, one for each row in flight;
//   PutRows     writes or goes on adding up the sums of rows.
//
// An operand with a sum of columns does not change in the loop over B, and stays in registers. All
// others are loaded for each row; those that are broadcast come from the caches. In a crossed pass
// the rows in flight have different indices of A and the same index of B: the sums that keep A stay
// in registers, and those that keep B in slots of shared memory that only this thread accesses.
// Several rows are added before a slot is read and written.
//
// The offsets of rows in each array are computed once, into a table in shared memory, so the number
// of dimensions costs nothing in the loop.
//
// Rows that are not a multiple of 16 bytes: a row begins `shift` elements after a boundary of 16
// bytes, and lanes own the aligned words, so all loads and stores are aligned. The words that stick
// out of a row at its two ends are loaded whole. Their elements of the adjacent row go to columns
// that are never written, and are left out of sums of rows. Gradients are stored there by elements.
// If sums of columns need the same shift in all rows, a block takes only rows of one class, which
// have it (BackwardPlan::classes). What does not fit this, and arrays that are not aligned to 16
// bytes, take the general kernel, with units of one element. float64 has only that kernel.
//
// This file is long because all of a block's steps share its registers, as members of one class.
//
// Sums that a block cannot finish become partial sums, which a second kernel adds up
// (elementwise/finish.cu). Without atomics, two runs are bitwise equal.
#ifndef JAX_FASTOPS_ELEMENTWISE_BACKWARD_CUH_
#define JAX_FASTOPS_ELEMENTWISE_BACKWARD_CUH_

#include <cuda_runtime_api.h>

#include <bit>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/unit.cuh"
#include "core/dtype.h"
#include "elementwise/backward.h"
#include "elementwise/operands.cuh"
#include "elementwise/plan.h"

namespace jax_fastops::cuda {

// The general kernel: units of one element, and at most one sum of columns,
// BackwardParams::column.
inline constexpr int kGeneral = -1;

// How a kernel uses registers. `kColumns` is BackwardPlan::columns, or kGeneral.
template <typename F, typename T, int kColumns>
struct BackwardTraits {
  static constexpr bool kIsGeneral = kColumns == kGeneral;
  static constexpr int kBytes = kIsGeneral ? sizeof(T) : 16;  // of a unit
  static constexpr int kSums = kIsGeneral ? 1 : std::popcount(unsigned(kColumns));
  // The units that a lane loads for each row.
  static constexpr int kStreams = F::kBits ? 1 : 1 + F::kOperands - (kIsGeneral ? 0 : kSums);
  static constexpr bool kFewRows = kStreams > (F::kMayBeWide && sizeof(T) == 2 ? 2 : 3);
  static constexpr int kRows = !kIsGeneral && kFewRows ? kBackwardRows / 2 : kBackwardRows;
  static constexpr int kBlocks = 2;  // on a processor
};

// The offset of an index of some dimensions. Runs once for each row of a block.
__device__ __forceinline__ int64_t OffsetOf(int64_t index, int begin, int end, const int64_t* sizes,
                                            const int64_t* strides) {
  int64_t offset = 0;
#pragma unroll 1
  for (int d = end - 1; d > begin; --d) {
    const int64_t size = sizes[d];
    int64_t quotient;
    if (((index | size) >> 32) == 0) {
      quotient = static_cast<uint32_t>(index) / static_cast<uint32_t>(size);
    } else {
      quotient = index / size;
    }
    offset += (index - quotient * size) * strides[d];
    index = quotient;
  }
  return end > begin ? offset + index * strides[begin] : 0;
}

// The work of one block.
template <typename F, typename T, int kColumns, bool kCrossed>
class BackwardBlock {
  using C = ComputeType<T>;
  using Traits = BackwardTraits<F, T, kColumns>;
  using Operands = Loaded<T, Traits::kBytes, F::kMayBeWide>;
  using FirstOperand = Loaded<T, Traits::kBytes, false>;  // never has the accumulator type
  using Bits = Word<Traits::kBytes>;
  using UnitIndex = std::conditional_t<Traits::kIsGeneral, int64_t, uint32_t>;
  static constexpr bool kAny = Traits::kIsGeneral;
  static constexpr int kSize = Traits::kBytes / sizeof(T);
  static constexpr int kOperands = F::kOperands, kGradients = F::kGradients;
  static constexpr int kSums = Traits::kSums, kRows = Traits::kRows;
  static constexpr int kColumnRows = kCrossed ? kRows : 1;
  static constexpr uint32_t kWhole = (1u << kSize) - 1;
  static constexpr unsigned kAll = 0xffffffffu;
  // The table has a column for each of the arrays of BackwardParams, and one for the columns at
  // which segments begin.
  static constexpr int kSumTable = 1 + kMaxElementwiseOperands;
  static constexpr int kSegmentTable = BackwardParams::kArrays;
  static constexpr int kTableColumns = BackwardParams::kArrays + 1;

 public:
  static constexpr int kExchangeStride = kBackwardThreads + 4;  // avoids bank conflicts
  struct Shared {
    int64_t table[kTableColumns][kBackwardTable];                   // rows of B, or their segments
    int64_t table_a[kTableColumns][kRows];                          // crossed: the rows in flight
    int64_t base[1 + kOperands][kBackwardThreads / kBackwardRows];  // of A, for each group
    C exchange[kSize * kExchangeStride];
  };

  __device__ __forceinline__ BackwardBlock(const BackwardParams& params, Shared& shared, C* slots)
      : p(params), shared_(shared), slots_(slots) {
    group_ = threadIdx.x / p.lanes;
    groups_ = blockDim.x / p.lanes;
    lane_ = threadIdx.x % p.lanes;
    uint32_t rest = blockIdx.x;
    class_ = rest % p.classes;
    rest /= p.classes;
    strip_ = rest % p.strips;
    rest /= p.strips;
    box_b_ = rest % p.boxes_b;
    box_a_ = rest / p.boxes_b;
    first_column_ = (int64_t{strip_} * p.lanes + lane_) * kSize;
    rows_ = ((p.length_b - class_ - 1) / p.classes + 1) * p.segments;
#pragma unroll
    for (int g = 0; g < kGradients; ++g) loop_sums_[g] = C(0);
#pragma unroll
    for (int c = 0; c < kSums; ++c) {
#pragma unroll
      for (int r = 0; r < kColumnRows; ++r) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) columns_[c][r][i] = C(0);
      }
    }
  }

  __device__ __forceinline__ void Run() {
    if constexpr (kCrossed) {
      RunCrossed();
    } else {
      RunLoops();
    }
  }

 private:
  // ---- which sums are in registers
  static constexpr bool MayBeColumn(int g) { return kAny || (kColumns >> g & 1) != 0; }
  // The register columns of gradient g.
  static constexpr int ColumnOf(int g) {
    return kAny || !MayBeColumn(g) ? 0 : std::popcount(unsigned(kColumns) & ((1u << g) - 1));
  }
  __device__ __forceinline__ bool IsColumn(int g) const {
    return kAny ? p.column == g : MayBeColumn(g);
  }
  // Whether operand k stays in registers in the loop over B.
  static constexpr bool IsHeld(int k) { return !kAny && !kCrossed && !F::kBits && MayBeColumn(k); }
  // Crossed: the sum that keeps B.
  static constexpr bool KeepsB(int g) { return kCrossed && MayBeColumn(g) && ColumnOf(g) == 1; }

  // ---- places
  __device__ __forceinline__ int64_t OffsetA(int array, int64_t a) const {
    return OffsetOf(a, 0, p.rank_a, p.size, p.stride[array]);
  }
  __device__ __forceinline__ int64_t OffsetB(int array, int64_t b) const {
    return OffsetOf(b, p.rank_a, p.rank, p.size, p.stride[array]);
  }

  // Fills the table with the rows that the block takes in trips `first` to `first + trips`.
  __device__ __forceinline__ void FillTable(int64_t first, int trips, int per_trip) {
    const int64_t warps = p.lanes > 32 ? p.lanes / 32 : 1;
    for (int i = threadIdx.x; i < trips * per_trip; i += blockDim.x) {
      const int64_t index = (first + int64_t{i / per_trip} * p.boxes_b) * per_trip + i % per_trip;
      int64_t row = index, segment = 0;
      if (p.segments > 1) {
        row = ((index >> 32) == 0) ? static_cast<uint32_t>(index) / p.segments : index / p.segments;
        segment = index - row * p.segments;
      }
#pragma unroll 1
      for (int array = 0; array < BackwardParams::kArrays; ++array) {
        int64_t offset = OffsetB(array, class_ + row * p.classes);
        if (array >= kSumTable && p.any_rows)
          offset += segment * warps * p.sum[array - kSumTable].plane;
        shared_.table[array][i] = offset;
      }
      shared_.table[kSegmentTable][i] = segment * (p.lanes * kSize);
    }
  }

  __device__ __forceinline__ int ShiftOf(int64_t offset) const {
    return kAny ? 0 : static_cast<int>(offset) & (kSize - 1);
  }

  // The elements of a unit that are in the row, one bit each.
  __device__ __forceinline__ uint32_t ElementsAt(int64_t column) const {
    if (column >= 0 && column + kSize <= p.n) return kWhole;
    if (kAny || column >= p.n || column <= -kSize) return 0;
    const int first = column < 0 ? static_cast<int>(-column) : 0;
    const int end = static_cast<int>(min(p.n - column, int64_t{kSize}));
    return (1u << end) - (1u << first);
  }

  // The offset of this group's index of A.
  __device__ __forceinline__ int64_t Base(int array) const { return shared_.base[array][group_]; }

  // ---- the loops
  // The rows in flight: where they are, and what was loaded.
  struct Rows {
    UnitIndex place[kRows];    // of the unit, in arrays of the result's shape
    uint32_t elements[kRows];  // of the unit that are in the row; 0: nothing to do
    Bits dy[kRows];
    FirstOperand first[kRows];
    Operands x[kRows][kOperands];  // except operand 0
    uint32_t bits[kRows][2];       // two bytes of a mask
    int bit[kRows];                // the place of the unit's first element in them
    C sums[kGradients][kRows];
  };

  __device__ __forceinline__ void RunLoops() {
    const int own = p.over_a ? groups_ : 1;
    const int side = p.over_a ? 1 : groups_, group = p.over_a ? 0 : group_;
    const int per_trip = side * kRows;
    const int64_t trips = (rows_ + per_trip - 1) / per_trip;  // of all blocks
    const int table_trips = kBackwardTable / per_trip;
    // If all rows of the block fit into the table, it is filled once.
    const bool once = box_b_ + int64_t{table_trips} * p.boxes_b >= trips;
    for (int64_t first_a = box_a_ * own; first_a < p.length_a; first_a += p.boxes_a * own) {
      const int64_t a = first_a + (p.over_a ? group_ : 0);
      const bool live = a < p.length_a;
      // In shared memory, because registers are scarce.
      __syncthreads();
      if (lane_ <= kOperands) shared_.base[lane_][group_] = OffsetA(lane_, live ? a : 0);
      __syncthreads();
      LoadHeld(live);
      for (int64_t first = box_b_; first < trips; first += table_trips * p.boxes_b) {
        if (!once || first_a == box_a_ * own) {
          __syncthreads();
          FillTable(first, table_trips, per_trip);
          __syncthreads();
        }
        int at = group;
#pragma unroll 1
        for (int t = 0; t < table_trips; ++t, at += per_trip) {
          const int64_t trip = first + t * p.boxes_b;
          if (trip >= trips) break;
          const int left =
              live ? static_cast<int>(min(rows_ - trip * per_trip - group, int64_t{1} << 20)) : 0;
          Rows rows;
          Load(
              rows, [&](int r) { return r * side < left; },
              [&](int array, int r) { return Base(array) + shared_.table[array][at + r * side]; },
              [&](int r) { return shared_.table[kSegmentTable][at + r * side]; });
          C across[1] = {};
#pragma unroll
          for (int r = 0; r < kRows; ++r) Accumulate(rows, r, across);
          PutRows(
              rows, [&](int r) { return r * side < left; },
              [&](int array, int r) {
                return OffsetA(array, a) + shared_.table[array][at + r * side];
              });
        }
      }
      const bool last = first_a + p.boxes_a * own >= p.length_a;
#pragma unroll
      for (int g = 0; g < kGradients; ++g) {
        const BackwardSum& sum = p.sum[g];
        if (sum.keeps_b || !(sum.keeps_a || last)) continue;
        if (sum.kind == SumKind::kLoop) PutLoop(g, a, live);
        if (MayBeColumn(g) && sum.kind == SumKind::kColumns) {
          const int64_t box = sum.keeps_a ? box_b_ : box_a_ * p.boxes_b + box_b_;
          PutColumns(sum, g, columns_[ColumnOf(g)][0], a, live, box * p.classes + class_);
        }
      }
    }
  }

  __device__ __forceinline__ void RunCrossed() {
    const int64_t first_b = box_b_ * p.slots * groups_;
    for (int i = threadIdx.x; i < p.slots * groups_; i += blockDim.x) {
#pragma unroll 1
      for (int array = 0; array < BackwardParams::kArrays; ++array) {
        shared_.table[array][i] = first_b + i < p.length_b ? OffsetB(array, first_b + i) : 0;
      }
    }
    for (int j = 0; j < p.slots; ++j) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) Slot(j, i) = C(0);
    }
    for (int64_t tile = box_a_; tile * kRows < p.length_a; tile += p.boxes_a) {
      const int left_a = static_cast<int>(min(p.length_a - tile * kRows, int64_t{kRows}));
      for (int i = threadIdx.x; i < BackwardParams::kArrays * left_a; i += blockDim.x) {
        const int array = i / left_a, r = i % left_a;
        shared_.table_a[array][r] = OffsetA(array, tile * kRows + r);
      }
      __syncthreads();
#pragma unroll 1
      for (int j = 0; j < p.slots; ++j) {
        const int at = j * groups_ + group_;
        const int left = first_b + at < p.length_b ? left_a : 0;
        const auto live = [&](int r) { return r < left; };
        const auto offset = [&](int array, int r) {
          return shared_.table[array][at] + shared_.table_a[array][r];
        };
        Rows rows;
        Load(rows, live, offset, [](int) { return int64_t{0}; });
        C across[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) across[i] = Slot(j, i);
#pragma unroll
        for (int r = 0; r < kRows; ++r) Accumulate(rows, r, across);
#pragma unroll
        for (int i = 0; i < kSize; ++i) Slot(j, i) = across[i];
        PutRows(rows, live, offset);
      }
      constexpr int kFirst = kColumns > 0 ? std::countr_zero(unsigned(kColumns)) : 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        PutColumns(p.sum[kFirst], kFirst, columns_[0][r], tile * kRows + r, r < left_a, box_b_);
      }
    }
    PutSlots(first_b);
#pragma unroll
    for (int g = 0; g < kGradients; ++g) {
      if (!MayBeColumn(g) && p.sum[g].kind == SumKind::kLoop) PutLoop(g, 0, true);
    }
  }

  // ---- loading
  // Loads the operands that stay in registers while the block loops over B. An operand may have
  // copies along B; they are equal.
  __device__ __forceinline__ void LoadHeld(bool live) {
    if constexpr (kSums > 0 && !kAny) {
      shift_ = ShiftOf(Base(0) + OffsetB(0, class_));
      const int64_t column = first_column_ - shift_;
      const uint32_t elements = live ? ElementsAt(column) : 0;
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        if (!IsHeld(k)) continue;
        const BackwardOperand& operand = p.operand[k];
        Operands loaded{};
        if (operand.needed && elements != 0) {
          const int64_t at = Base(1 + k) + (operand.one ? 0 : column);
          if (operand.one || (operand.units && elements == kWhole)) {
            loaded.Load(operand.data, at, operand.one, operand.wide);
          } else {
            loaded.Gather(operand.data, at, elements, operand.wide);
          }
        }
        loaded.Expand(held_[ColumnOf(k)], operand.one, operand.wide);
      }
    }
  }

  // Issues all loads of the rows in flight. live(r) tells whether row r exists, offset(array, r)
  // where it begins, and segment(r) at which column its segment begins.
  template <typename Live, typename Offset, typename Segment>
  __device__ __forceinline__ void Load(Rows& rows, const Live& live, const Offset& offset,
                                       const Segment& segment) {
    const T* const dy = static_cast<const T*>(p.dy);
    uint32_t tails = 0;  // the rows with the arrays' last word, if it sticks out of them
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows.elements[r] = 0;
      if (!live(r)) continue;
      const int64_t begin = offset(0, r);
      const int64_t column = first_column_ + segment(r) - ShiftOf(begin);
      const int64_t place = begin + column;
      rows.place[r] = static_cast<UnitIndex>(place / kSize);
      rows.elements[r] = ElementsAt(column);
      if (rows.elements[r] == 0) continue;
      const bool inside = kAny || place + kSize <= p.elements;
      if (inside) {
        rows.dy[r] = *reinterpret_cast<const Bits*>(dy + place);
      } else {
        tails |= 1u << r;
      }
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        const BackwardOperand& operand = p.operand[k];
        if (IsHeld(k) || !operand.needed) continue;
        // The rows in flight have the same index of B.
        if (KeepsB(k) && r > 0) continue;
        if (F::kBits && k == 0) {
          LoadBits(rows, r, offset(1, r), column);
        } else if (!operand.full) {
          LoadOperand(rows, r, k, offset(1 + k, r) + (operand.one ? 0 : column));
        } else if (inside) {
          LoadOperand(rows, r, k, place);
        }
      }
    }
    if constexpr (!kAny) {
      if (tails != 0) LoadTails(rows, tails);
    }
  }

  __device__ __forceinline__ void LoadOperand(Rows& rows, int r, int k, int64_t at) const {
    const BackwardOperand& operand = p.operand[k];
    if (k == 0) {
      rows.first[r].Load(operand.data, at, operand.one, false);
    } else {
      rows.x[r][k].Load(operand.data, at, operand.one, operand.wide);
    }
  }

  __device__ __forceinline__ void LoadTails(Rows& rows, uint32_t tails) const {
    const uint32_t elements = (1u << (p.elements % kSize)) - 1;
    const int64_t place = p.elements / kSize * kSize;
    const uint4 dy = GatherUnit(static_cast<const T*>(p.dy) + place, elements);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (tails >> r & 1) rows.dy[r] = dy;
    }
#pragma unroll
    for (int k = F::kBits ? 1 : 0; k < kOperands; ++k) {
      const BackwardOperand& operand = p.operand[k];
      if (IsHeld(k) || !operand.needed || !operand.full) continue;
      Operands loaded{};
      loaded.Gather(operand.data, place, elements, operand.wide);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (!(tails >> r & 1)) continue;
        if (k == 0) {
          rows.first[r].bits = loaded.bits;
        } else {
          rows.x[r][k] = loaded;
        }
      }
    }
  }

  // Loads the one or two bytes that have the unit's bits. Shifting them now would wait for them.
  __device__ __forceinline__ void LoadBits(Rows& rows, int r, int64_t row, int64_t column) const {
    const uint8_t* const mask = static_cast<const uint8_t*>(p.operand[0].data) + (row >> 3);
    const int64_t low = max(column, int64_t{0}) >> 3;
    const int64_t high = (min(column + kSize, p.n) - 1) >> 3;
    rows.bits[r][0] = mask[low];
    rows.bits[r][1] = high != low ? mask[high] : 0;
    rows.bit[r] = static_cast<int>(column - low * 8);
  }

  // ---- computing
  // Adds up one of the rows in flight: the sums of columns, and in `across` the crossed one.
  template <int kAcross>
  __device__ __forceinline__ void Accumulate(Rows& rows, int r, C (&across)[kAcross]) {
#pragma unroll
    for (int g = 0; g < kGradients; ++g) rows.sums[g][r] = C(0);
    const uint32_t elements = rows.elements[r];
    if (elements == 0) return;
    C dy[kSize], x[kOperands][kSize], values[kGradients][kSize];
    ToCompute<T>(rows.dy[r], dy);
#pragma unroll
    for (int k = 0; k < kOperands; ++k) {
      if (F::kBits && k == 0) {
        const uint32_t two = rows.bits[r][0] | rows.bits[r][1] << 8;
        const int bit = rows.bit[r];
        const uint32_t bits = bit < 0 ? two << -bit : two >> bit;
#pragma unroll
        for (int i = 0; i < kSize; ++i) x[k][i] = C(bits >> i & 1u);
      } else if (IsHeld(k)) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) x[k][i] = held_[ColumnOf(k)][i];
      } else {
        const int from = KeepsB(k) ? 0 : r;
        if (k == 0) {
          rows.first[from].Expand(x[k], p.operand[k].one, false);
        } else {
          rows.x[from][k].Expand(x[k], p.operand[k].one, p.operand[k].wide);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      C of_element[kOperands], g[kGradients];
#pragma unroll
      for (int k = 0; k < kOperands; ++k) of_element[k] = x[k][i];
      F::template Gradients<T>(dy[i], of_element, g);
#pragma unroll
      for (int q = 0; q < kGradients; ++q) values[q][i] = g[q];
    }
#pragma unroll
    for (int g = 0; g < kGradients; ++g) {
      const BackwardSum& sum = p.sum[g];
      if (IsColumn(g)) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if (KeepsB(g)) {
            across[i % kAcross] += values[g][i];
          } else {
            columns_[ColumnOf(g)][kCrossed ? r : 0][i] += values[g][i];
          }
        }
      } else if (sum.kind == SumKind::kFull) {
        StoreFull(sum, int64_t{rows.place[r]} * kSize, elements, values[g]);
      } else if (sum.kind != SumKind::kNone) {
        if (elements != kWhole) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[g][i] = elements >> i & 1 ? values[g][i] : C(0);
        }
#pragma unroll
        for (int i = 0; i < kSize; ++i) rows.sums[g][r] += values[g][i];
      }
    }
  }

  __device__ __forceinline__ void StoreFull(const BackwardSum& sum, int64_t place,
                                            uint32_t elements, const C (&values)[kSize]) const {
    if (F::kMayBeWide && sum.wide) {
      C* const to = static_cast<C*>(sum.out) + place;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (elements >> i & 1) to[i] = values[i];
      }
      return;
    }
    Unit<T, kSize * sizeof(T)> out;
#pragma unroll
    for (int i = 0; i < kSize; ++i) out.elements[i] = FromCompute<T>(values[i]);
    T* const to = static_cast<T*>(sum.out) + place;
    if (elements == kWhole) {
      out.Store(to);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (elements >> i & 1) to[i] = out.elements[i];
      }
    }
  }

  // ---- where sums go
  static __device__ __forceinline__ void Write(const BackwardSum& sum, int64_t at, C value) {
    if (sum.wide) {
      static_cast<C*>(sum.out)[at] = value;
    } else {
      static_cast<T*>(sum.out)[at] = FromCompute<T>(value);
    }
  }

  // Sums of rows: added to those of the rows before, or written. A group has at least kRows lanes:
  // each of the first ones writes a row.
  template <typename Live, typename Offset>
  __device__ __forceinline__ void PutRows(Rows& rows, const Live& live, const Offset& offset) {
#pragma unroll
    for (int g = 0; g < kGradients; ++g) {
      if ((!kAny && MayBeColumn(g)) || p.sum[g].kind != SumKind::kLoop) continue;
#pragma unroll
      for (int r = 0; r < kRows; ++r) loop_sums_[g] += rows.sums[g][r];
    }
    if (!p.any_rows) return;
    const int own = lane_ % 32;
#pragma unroll
    for (int g = 0; g < kGradients; ++g) {
      const BackwardSum& sum = p.sum[g];
      if ((!kAny && MayBeColumn(g)) || sum.kind != SumKind::kRows) continue;
      for (int step = min(p.lanes, 32) / 2; step > 0; step /= 2) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          rows.sums[g][r] += __shfl_xor_sync(kAll, rows.sums[g][r], step);
        }
      }
      C value = rows.sums[g][0];
#pragma unroll
      for (int r = 1; r < kRows; ++r) value = own == r ? rows.sums[g][r] : value;
      if (own >= kRows || !live(own)) continue;
      const int64_t warps = p.lanes > 32 ? p.lanes / 32 : 1;
      const int64_t part = int64_t{strip_} * p.segments * warps + lane_ / 32;
      Write(sum, part * sum.plane + offset(kSumTable + g, own), value);
    }
  }

  // A sum of rows that ends with index `a`, or with the block.
  __device__ __forceinline__ void PutLoop(int g, int64_t a, bool live) {
    const BackwardSum& sum = p.sum[g];
    const int64_t box = sum.keeps_a ? box_b_ : box_a_ * p.boxes_b + box_b_;
    const int64_t part = (box * p.classes + class_) * p.strips + strip_;
    C value = loop_sums_[g];
    loop_sums_[g] = C(0);
    const bool by_group = p.over_a && sum.keeps_a;
    for (int step = (by_group ? p.lanes : 32) / 2; step > 0; step /= 2) {
      value += __shfl_xor_sync(kAll, value, step);
    }
    bool writes = by_group ? lane_ == 0 && live : threadIdx.x == 0;
    if (!by_group) {
      if (threadIdx.x % 32 == 0) shared_.exchange[threadIdx.x / 32] = value;
      __syncthreads();
      if (writes) {
        for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) value += shared_.exchange[w];
      }
      __syncthreads();
    }
    if (writes) Write(sum, part * sum.plane + (sum.keeps_a ? OffsetA(kSumTable + g, a) : 0), value);
  }

  // A sum of columns that ends with index `a`, or with the block. Clears `values`.
  __device__ __forceinline__ void PutColumns(const BackwardSum& sum, int g, C (&values)[kSize],
                                             int64_t a, bool live, int64_t part) {
    int64_t at = part * sum.plane;
    if (sum.keeps_a && live) at += OffsetA(kSumTable + g, a);
    if (p.over_a) {
      const int64_t column = first_column_ - shift_;
      const uint32_t elements = live ? ElementsAt(column) : 0;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (elements >> i & 1) Write(sum, at + column + i, values[i]);
        values[i] = C(0);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      C value = values[i];
      for (int step = p.lanes; step < 32; step *= 2) value += __shfl_xor_sync(kAll, value, step);
      shared_.exchange[i * kExchangeStride + threadIdx.x] = value;
      values[i] = C(0);
    }
    __syncthreads();
    // The first of a warp's parallel rows has the sum.
    const int step = max(p.lanes, 32);
    const int64_t strip_column = int64_t{strip_} * (p.lanes * kSize) - shift_;
    for (int i = threadIdx.x; i < p.lanes * kSize; i += blockDim.x) {
      const int owner = i / kSize, element = i % kSize;
      C total = C(0);
      for (int from = owner; from < static_cast<int>(blockDim.x); from += step) {
        total += shared_.exchange[element * kExchangeStride + from];
      }
      const int64_t column = strip_column + i;
      if (live && column >= 0 && column < p.n) Write(sum, at + column, total);
    }
    __syncthreads();
  }

  // ---- crossed: the slots of this thread
  // Pieces of 16 bytes of adjacent threads are contiguous.
  __device__ __forceinline__ C& Slot(int j, int i) const {
    constexpr int kPiece = 16 / sizeof(C), kPieces = kSize / kPiece;
    return slots_[((j * kPieces + i / kPiece) * blockDim.x + threadIdx.x) * kPiece + i % kPiece];
  }

  __device__ __forceinline__ void PutSlots(int64_t first_b) const {
    constexpr int kSecond = kColumns > 0 ? 31 - std::countl_zero(unsigned(kColumns)) : 0;
    const BackwardSum& sum = p.sum[kSecond];
    const uint32_t elements = ElementsAt(first_column_);
#pragma unroll 1
    for (int j = 0; j < p.slots; ++j) {
      const int row = j * groups_ + group_;
      if (first_b + row >= p.length_b) break;
      const int64_t at =
          box_a_ * sum.plane + shared_.table[kSumTable + kSecond][row] + first_column_;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (elements >> i & 1) Write(sum, at + i, Slot(j, i));
      }
    }
  }

  const BackwardParams& p;
  Shared& shared_;
  C* const slots_;
  int group_, groups_, lane_;  // of this thread
  uint32_t class_, strip_;
  int64_t box_a_, box_b_;
  int64_t rows_;          // of the block's class
  int64_t first_column_;  // of this lane, in a row that begins at a unit
  int shift_ = 0;         // of all rows of the class
  C held_[kSums == 0 ? 1 : kSums][kSize];
  C columns_[kSums == 0 ? 1 : kSums][kColumnRows][kSize];
  C loop_sums_[kGradients];  // of the rows so far
};

template <typename F, typename T, int kColumns, bool kCrossed>
__global__ __launch_bounds__(
    kBackwardThreads,
    (BackwardTraits<F, T,
                    kColumns>::kBlocks)) void ElementwiseBackwardKernel(const __grid_constant__
                                                                            BackwardParams p) {
  using Block = BackwardBlock<F, T, kColumns, kCrossed>;
  __shared__ typename Block::Shared shared;
  extern __shared__ __align__(16) unsigned char slots[];
  Block(p, shared, reinterpret_cast<ComputeType<T>*>(slots)).Run();
}

// ---- the kernels of an op ----------------------------------------------------------------------

template <typename F, typename T>
struct BackwardOf {
  // The sums of columns for which there is a kernel.
  static constexpr bool Occurs(int columns, bool crossed) {
    const int count = std::popcount(unsigned(columns));
    if (F::kFirstIsFull && (columns & 1) != 0) return false;
    return crossed ? count == 2 : count <= 2;
  }

  template <int... kColumns>
  static BackwardKernel ChooseOf(int columns, bool crossed,
                                 std::integer_sequence<int, kColumns...>) {
    BackwardKernel chosen = nullptr;
    const auto offer = [&]<int kThese, bool kCrossed>() {
      if constexpr (Occurs(kThese, kCrossed)) {
        const auto kernel =
            KernelOf<typename F::Family, ElementwiseBackwardKernel<F, T, kThese, kCrossed>>();
        if (columns == kThese && crossed == kCrossed) chosen = kernel;
      }
    };
    ((offer.template operator()<kColumns, false>(), offer.template operator()<kColumns, true>()),
     ...);
    return chosen;
  }

  // `columns` may be kGeneral.
  static BackwardKernel Choose(int columns, bool crossed) {
    const auto general =
        KernelOf<typename F::Family, ElementwiseBackwardKernel<F, T, kGeneral, false>>();
    if (columns == kGeneral) return general;
    if constexpr (sizeof(T) == 8) {
      return nullptr;
    } else {
      return ChooseOf(columns, crossed, std::make_integer_sequence<int, 1 << F::kGradients>());
    }
  }
};

// Arrays of `shape`: the operands, then the gradients.
template <typename F>
cudaError_t ElementwiseBackward(const BroadcastShape& shape, DType dtype, const void* dy,
                                const Operand* operands, const Gradient* gradients,
                                SumWorkspace workspace, cudaStream_t stream) {
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    constexpr int kFew = F::kGradients > 1 ? 2 : 1;
    const BackwardKernels kernels = {F::kOperands, F::kGradients,
                                     F::kBits,     BackwardTraits<F, T, kFew>::kBlocks,
                                     F::Needed,    BackwardOf<F, T>::Choose};
    return LaunchBackward(kernels, shape, dtype, dy, operands, gradients, workspace, stream);
  });
}

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_BACKWARD_CUH_

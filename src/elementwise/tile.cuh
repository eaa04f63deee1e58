// The backward of an element-wise op with one operand broadcast along A, another along B, and
// neither along the innermost dimension: "three planes", such as (P, 1, N), (1, Q, N) and (P, Q, 1)
// for a result (P, Q, N). The kernel would take any third operand, but is compiled for one like
// (P, Q, 1) only. The general pass (elementwise/backward.cuh) keeps a sum for every
// index of B in shared memory, and reads, adds and writes it for every element. In this kernel
//
// - a warp owns a tile of 8 indices of B by 128 columns, 32 elements per lane (half as many if the
//   third operand is full). The tile's operand and sums stay in registers while the warp loops over
//   A;
// - data that is read in the loop passes through a ring in shared memory, which every thread fills
//   for itself (cp.async). Bytes in flight cost no registers and no barrier;
// - the sum over B is made within a lane, then over the warps that share an index of A, for several
//   indices of A at a time, with one barrier for all of them;
// - the sums of a tile's rows are reduced together: lanes keep half of their rows whenever the
//   distance halves, so 8 rows of 32 bits take 9 shuffles instead of 40.
//
// A block has up to 16 warps: as many as cover B. If B is short, it has several groups of warps,
// which take the indices of A in turn and add up their sums at the end. Sums that it cannot finish
// become partial sums for the second kernel, as in the general pass. Without atomics, two runs are
// bitwise equal.
//
// Long because its parts share the registers of one loop. A version in functions, with fewer
// variants, was 1.3 to 2.8 times slower (docs/dev/log/elementwise.md).
#ifndef JAX_FASTOPS_ELEMENTWISE_TILE_CUH_
#define JAX_FASTOPS_ELEMENTWISE_TILE_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/cuda/launch.h"
#include "core/cuda/unit.cuh"
#include "core/integer.h"
#include "elementwise/broadcast.h"
#include "elementwise/elementwise.h"
#include "elementwise/finish.h"
#include "elementwise/operands.cuh"
#include "elementwise/plan.h"

namespace jax_fastops::cuda {

// The kind of an operand and its gradient, two bits each.
enum TileKind : int {
  kTileFull = 0,  // has the result's shape, like its gradient if requested
  kTileA = 1,     // broadcast along B
  kTileRow = 2,   // one element per row; its gradient, if requested, keeps A and B
  kTileB = 3,     // broadcast along A
};

constexpr int TileKindOf(int kinds, int operand) { return kinds >> (2 * operand) & 3; }

// The first operand of a kind, or -1.
constexpr int FindTileKind(int kinds, int operands, int kind) {
  for (int k = 0; k < operands; ++k) {
    if (TileKindOf(kinds, k) == kind) return k;
  }
  return -1;
}

constexpr int CountTileKind(int kinds, int operands, int kind) {
  int count = 0;
  for (int k = 0; k < operands; ++k) count += TileKindOf(kinds, k) == kind;
  return count;
}

inline constexpr int kTileWarps = 16;  // maximum per block
inline constexpr int kTileThreads = 32 * kTileWarps;

template <typename T, int kOperands, int kKinds>
struct TileShape {
  static constexpr int kFulls = CountTileKind(kKinds, kOperands, kTileFull);
  static constexpr int kSize = 16 / sizeof(T);                // per unit
  static constexpr int kColumns = 128;                        // per tile
  static constexpr int kRowLanes = kColumns / kSize;          // per row
  static constexpr int kSplit = 32 / kRowLanes;               // parallel rows in a warp
  static constexpr int kRows = 32 / kSize / (1 + kFulls);     // per lane
  static constexpr int kWarpRows = kRows * kSplit;            // indices of B
  static constexpr int kUnits = kRows * (1 + kFulls) + 1;     // in flight for an index of A
  static constexpr int kStages = sizeof(T) == 4 ? 2 : 4;      // indices of A in flight
  static constexpr int kBatch = sizeof(T) == 4 ? 4 : 2;       // indices of A between two barriers
  static constexpr int kFinishSize = sizeof(T) == 4 ? 2 : 1;  // columns per thread after it
  static constexpr int kRingBytes = kStages * kUnits * kTileThreads * 16;
  static constexpr int kExchange = kBatch * kTileWarps * kSplit * kColumns;  // elements
  static constexpr int kSharedBytes = kRingBytes + 2 * kExchange * 4;
  static_assert(kTileThreads * kRows * kSize * 4 <= kRingBytes);  // for the sums at the end
};

// The destination of a sum. `plane` is the distance between the partial sums of adjacent boxes.
struct TileSum {
  void* out;  // null: not requested
  bool wide;  // accumulator type: partial sums, or a wide gradient
  uint32_t plane, stride_a, stride_b;
};

template <typename F>
struct TileParams {
  const void* dy;
  uint32_t dy_a, dy_b;
  const void* operand[F::kOperands];
  uint32_t operand_a[F::kOperands], operand_b[F::kOperands];
  bool needed[F::kOperands];
  TileSum sum[F::kGradients];
  uint32_t n, length_a, length_b, chunks, boxes_a, boxes_b;
  int warps_b;  // that share an index of A
  int groups;   // that take the indices of A in turn
};

// Copies 16 bytes to shared memory; through L1 if other warps of the block read them, too.
template <bool kShared>
__device__ __forceinline__ void CopyAsync(uint32_t to, const void* from) {
  if constexpr (kShared) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from))
                 : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from))
                 : "memory");
  }
}

__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most this many of the last groups are in flight.
template <int kLeft>
__device__ __forceinline__ void AwaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// A barrier for the `threads` threads that call it with this index.
__device__ __forceinline__ void NamedBarrier(int index, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

// Computes kCount sums over kLanes adjacent lanes. A lane returns the sum of value number lane %
// kLanes / (kLanes / kCount).
template <int kCount, int kLanes, typename C>
__device__ __forceinline__ C SumTogether(C (&values)[kCount]) {
  int width = kLanes / 2;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2, width /= 2) {
    const bool upper = (threadIdx.x & width) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const C give = upper ? values[i] : values[i + half];
      const C keep = upper ? values[i + half] : values[i];
      values[i] = keep + __shfl_xor_sync(0xffffffffu, give, width);
    }
  }
#pragma unroll
  for (; width > 0; width /= 2) values[0] += __shfl_xor_sync(0xffffffffu, values[0], width);
  return values[0];
}

// kCount adjacent elements of a sum.
template <typename T, int kCount>
__device__ __forceinline__ void PutTileSum(const TileSum& sum, uint32_t place,
                                           const ComputeType<T> (&values)[kCount]) {
  using C = ComputeType<T>;
  if (sum.wide) {
    Unit<C, kCount * sizeof(C)> unit;
#pragma unroll
    for (int i = 0; i < kCount; ++i) unit.elements[i] = values[i];
    unit.Store(static_cast<C*>(sum.out) + place);
  } else {
    Unit<T, kCount * sizeof(T)> unit;
#pragma unroll
    for (int i = 0; i < kCount; ++i) unit.elements[i] = FromCompute<T>(values[i]);
    unit.Store(static_cast<T*>(sum.out) + place);
  }
}

template <typename F, typename T, int kKinds>
__global__ __launch_bounds__(kTileThreads, 1) void ElementwiseTileKernel(
    const __grid_constant__ TileParams<F> p) {
  using C = ComputeType<T>;
  constexpr int kOperands = F::kOperands, kGradients = F::kGradients;
  using Shape = TileShape<T, kOperands, kKinds>;
  constexpr int kSize = Shape::kSize, kRowLanes = Shape::kRowLanes, kSplit = Shape::kSplit;
  constexpr int kRows = Shape::kRows, kWarpRows = Shape::kWarpRows, kUnits = Shape::kUnits;
  constexpr int kStages = Shape::kStages, kBatch = Shape::kBatch;
  constexpr int kFulls = Shape::kFulls, kColumns = Shape::kColumns;
  constexpr int kPieces = kSize / 4;        // of 4 sums
  constexpr int kLanePart = kRowLanes * 4;  // columns of a row's pieces of one kind
  constexpr int kA = FindTileKind(kKinds, kOperands, kTileA);
  constexpr int kB = FindTileKind(kKinds, kOperands, kTileB);
  constexpr int kRow = FindTileKind(kKinds, kOperands, kTileRow);
  constexpr bool kHasRows = kRow >= 0;
  constexpr int kTogether = 32 / kWarpRows;  // indices of A whose rows' elements the lanes hold
  constexpr int kUnitStep = kTileThreads * 16;
  constexpr unsigned kAll = 0xffffffffu;
  static_assert(sizeof(C) == 4 && kOperands == kGradients);

  extern __shared__ __align__(16) unsigned char memory[];
  C* const exchange = reinterpret_cast<C*>(memory + Shape::kRingBytes);
  const unsigned char* const ring = memory + threadIdx.x * 16;
  const uint32_t ring_address = static_cast<uint32_t>(__cvta_generic_to_shared(ring));

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part = lane / kRowLanes, in_row = lane % kRowLanes;
  const int group = warp / p.warps_b, warp_b = warp % p.warps_b;
  const uint32_t chunk = blockIdx.x % p.chunks, box = blockIdx.x / p.chunks;
  const uint32_t box_b = box % p.boxes_b, box_a = box / p.boxes_b;
  const uint32_t column = chunk * kColumns + in_row * kSize;
  // Indices of A interleave, so that all blocks read nearby memory at a time.
  const uint32_t first_a = box_a + group * p.boxes_a, step_a = p.groups * p.boxes_a;
  const int trips =
      first_a < p.length_a ? static_cast<int>((p.length_a - first_a + step_a - 1) / step_a) : 0;
  const uint32_t warp_first_b = (box_b * p.warps_b + warp_b) * kWarpRows;
  const uint32_t first_b = warp_first_b + part * kRows;
  // A lane's rows that exist: none if its columns do not.
  const int live_rows = column < p.n ? static_cast<int>(p.length_b) - static_cast<int>(first_b) : 0;
  const bool whole = warp_first_b + kWarpRows <= p.length_b && (chunk + 1) * kColumns <= p.n;

  C of_b[kRows][kSize], sum_b[kRows][kSize];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    Unit<T, 16> unit{};
    if (p.needed[kB] && j < live_rows) {
      unit = Unit<T, 16>::Load(static_cast<const T*>(p.operand[kB]) +
                               (first_b + j) * p.operand_b[kB] + column);
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      of_b[j][i] = ToCompute(unit.elements[i]);
      sum_b[j][i] = C(0);
    }
  }

  // ---- the ring
  // A stage: the units of dy, of the full operands, and of the operand that is broadcast along B.
  const auto fill = [&](int trip, int stage) {
    const uint32_t a = first_a + trip * step_a;
    const uint32_t to = ring_address + stage * (kUnits * kUnitStep);
    const uint32_t place = a * p.dy_a + first_b * p.dy_b + column;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (!whole && j >= live_rows) continue;
      CopyAsync<false>(to + j * kUnitStep, static_cast<const T*>(p.dy) + (place + j * p.dy_b));
      int unit = kRows + j;
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        if (TileKindOf(kKinds, k) != kTileFull) continue;
        if (p.needed[k]) {
          CopyAsync<false>(to + unit * kUnitStep,
                           static_cast<const T*>(p.operand[k]) + (place + j * p.dy_b));
        }
        unit += kRows;
      }
    }
    if (p.needed[kA] && live_rows > 0) {
      CopyAsync<true>(to + (kUnits - 1) * kUnitStep,
                      static_cast<const T*>(p.operand[kA]) + (a * p.operand_a[kA] + column));
    }
  };
  const auto unit_of = [&](int stage, int unit) {
    return *reinterpret_cast<const uint4*>(ring + (stage * kUnits + unit) * kUnitStep);
  };

  // ---- the elements of row operands: lane l has row l / kTogether, index l % kTogether of a batch
  const uint32_t row_of_lane = warp_first_b + lane / kTogether;
  const auto load_rows = [&](int first_trip) {
    const int trip = first_trip + lane % kTogether;
    T value{};
    if constexpr (kHasRows) {
      if (p.needed[kRow] && trip < trips && row_of_lane < p.length_b) {
        value =
            static_cast<const T*>(p.operand[kRow])[(first_a + trip * step_a) * p.operand_a[kRow] +
                                                   row_of_lane * p.operand_b[kRow]];
      }
    }
    return value;
  };

#pragma unroll
  for (int s = 0; s < kStages; ++s) {
    if (s < trips) fill(s, s);
    CommitCopies();
  }
  T next_rows = load_rows(0);
  C of_rows = C(0), row_sums = C(0);
  int stage = 0, buffer = 0;

  // One index of A. `all` is a constant at each call: all rows and columns of the warp exist.
  const auto add = [&](bool all, int trip, C(&sum_a)[kSize], C(&rows)[kRows]) {
    C of_a[kSize];
    ToCompute<T>(unit_of(stage, kUnits - 1), of_a);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      C of_row = C(0);
      if constexpr (kHasRows) {
        of_row = __shfl_sync(kAll, of_rows, (part * kRows + j) * kTogether + trip % kTogether);
      }
      if (!all && j >= live_rows) continue;
      C dy[kSize], full[kFulls == 0 ? 1 : kFulls][kSize];
      ToCompute<T>(unit_of(stage, j), dy);
#pragma unroll
      for (int f = 0; f < kFulls; ++f) ToCompute<T>(unit_of(stage, kRows * (1 + f) + j), full[f]);
      Unit<T, 16> out[kFulls == 0 ? 1 : kFulls];
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        C x[kOperands], g[kGradients];
        int f = 0;
#pragma unroll
        for (int k = 0; k < kOperands; ++k) {
          const int kind = TileKindOf(kKinds, k);
          if (kind == kTileFull) {
            x[k] = full[f++][i];
          } else {
            x[k] = kind == kTileA ? of_a[i] : kind == kTileB ? of_b[j][i] : of_row;
          }
        }
        F::template Gradients<T>(dy[i], x, g);
        f = 0;
#pragma unroll
        for (int k = 0; k < kGradients; ++k) {
          const int kind = TileKindOf(kKinds, k);
          if (kind == kTileA) sum_a[i] += g[k];
          if (kind == kTileB) sum_b[j][i] += g[k];
          if (kind == kTileRow) rows[j] += g[k];
          if (kind == kTileFull) out[f++].elements[i] = FromCompute<T>(g[k]);
        }
      }
      int f = 0;
#pragma unroll
      for (int k = 0; k < kGradients; ++k) {
        if (TileKindOf(kKinds, k) != kTileFull) continue;
        if (p.sum[k].out != nullptr) {
          out[f].Store(static_cast<T*>(p.sum[k].out) +
                       ((first_a + trip * step_a) * p.dy_a + (first_b + j) * p.dy_b + column));
        }
        ++f;
      }
    }
  };

#pragma unroll 1
  for (int trip = 0; trip < trips; ++trip) {
    if (kHasRows && trip % kTogether == 0) {
      of_rows = ToCompute(next_rows);
      next_rows = load_rows(trip + kTogether);
    }
    AwaitCopies<kStages - 1>();
    C sum_a[kSize], rows[kRows];
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum_a[i] = C(0);
#pragma unroll
    for (int j = 0; j < kRows; ++j) rows[j] = C(0);
    if (whole) {
      add(true, trip, sum_a, rows);
    } else {
      add(false, trip, sum_a, rows);
    }
    // The thread has already read the data that it overwrites.
    if (trip + kStages < trips) fill(trip + kStages, stage);
    CommitCopies();
    stage = stage + 1 == kStages ? 0 : stage + 1;

    if constexpr (kHasRows) {
      const TileSum& sum = p.sum[kRow];
      if (sum.out != nullptr) {
        const C value = SumTogether<kRows, kRowLanes>(rows);
        const int at = trip % kTogether;
        if (lane % kTogether == at) row_sums = value;
        if (at == kTogether - 1 || trip == trips - 1) {
          if (lane % kTogether <= at && row_of_lane < p.length_b) {
            const uint32_t a = first_a + (trip - at + lane % kTogether) * step_a;
            const C one[1] = {row_sums};
            PutTileSum<T>(sum, chunk * sum.plane + a * sum.stride_a + row_of_lane * sum.stride_b,
                          one);
          }
        }
      }
    }

    // Pieces of 4 sums of adjacent lanes are contiguous, which avoids bank conflicts.
    const int in_batch = trip % kBatch;
    C* const of_batch = exchange + buffer * Shape::kExchange;
#pragma unroll
    for (int h = 0; h < kPieces; ++h) {
      Unit<C, 16> piece;
#pragma unroll
      for (int i = 0; i < 4; ++i) piece.elements[i] = sum_a[h * 4 + i];
      piece.Store(of_batch + ((in_batch * kTileWarps + warp) * kSplit + part) * kColumns +
                  h * kLanePart + in_row * 4);
    }
    if (in_batch == kBatch - 1 || trip == trips - 1) {
      // One barrier is enough: the other buffer is used next, and this one is written again only
      // after all warps have reached the next barrier.
      if (p.warps_b == 1) {
        __syncwarp();
      } else {
        NamedBarrier(1 + group, 32 * p.warps_b);  // at most 8 groups; there are 15
      }
      const TileSum& sum = p.sum[kA];
      constexpr int kCount = Shape::kFinishSize;
      constexpr uint32_t kUnitsOfRow = kColumns / kCount;
      const uint32_t units = (in_batch + 1) * kUnitsOfRow;
      for (uint32_t u = warp_b * 32 + lane; u < units; u += 32 * p.warps_b) {
        const uint32_t index = u / kUnitsOfRow, at = u % kUnitsOfRow * kCount;
        const uint32_t its_column =
            chunk * kColumns + at % kLanePart / 4 * kSize + at / kLanePart * 4 + at % 4;
        const C* const from =
            of_batch + at + (index * kTileWarps + group * p.warps_b) * (kSplit * kColumns);
        C total[kCount] = {};
#pragma unroll 8
        for (int e = 0; e < p.warps_b * kSplit; ++e) {
          const auto more = Unit<C, kCount * sizeof(C)>::Load(from + e * kColumns);
#pragma unroll
          for (int i = 0; i < kCount; ++i) total[i] += more.elements[i];
        }
        if (its_column < p.n) {
          const uint32_t a = first_a + (trip - in_batch + index) * step_a;
          PutTileSum<T>(sum, box_b * sum.plane + a * sum.stride_a + its_column, total);
        }
      }
      buffer ^= 1;
    }
  }

  // ---- the sums over A of all groups, combined in the ring's memory
  AwaitCopies<0>();
  __syncthreads();
  C* const sums = reinterpret_cast<C*>(memory);
  constexpr int kWarpPieces = kRows * kPieces;
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
#pragma unroll
    for (int h = 0; h < kPieces; ++h) {
      Unit<C, 16> piece;
#pragma unroll
      for (int i = 0; i < 4; ++i) piece.elements[i] = sum_b[j][h * 4 + i];
      piece.Store(sums + ((warp * kWarpPieces + j * kPieces + h) * 32 + lane) * 4);
    }
  }
  __syncthreads();
  const TileSum& sum = p.sum[kB];
  // Every group has this warp's tile. Each group adds up one piece of it.
  for (int piece = group; piece < kWarpPieces; piece += p.groups) {
    C total[4] = {};
    for (int g = 0; g < p.groups; ++g) {
      const auto more = Unit<C, 16>::Load(
          sums + (((g * p.warps_b + warp_b) * kWarpPieces + piece) * 32 + lane) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] += more.elements[i];
    }
    const int j = piece / kPieces, h = piece % kPieces;
    if (j < live_rows) {
      PutTileSum<T>(sum, box_a * sum.plane + (first_b + j) * sum.stride_b + column + h * 4, total);
    }
  }
}

// ---- launching ---------------------------------------------------------------------------------

struct TilePlan {
  bool valid = false;
  int warps_b = 1, groups = 1;
  int64_t chunks = 1, boxes_a = 1, boxes_b = 1;
};

// `sums_rows`: whether there is a gradient of rows. Not valid if the general pass is better.
inline TilePlan PlanTiles(int64_t length_a, int64_t length_b, int64_t n, int element_bytes,
                          int warp_rows, int columns, int arrays, bool sums_rows, int64_t workspace,
                          int processors) {
  // In bytes that an SM could move in the same time; rough, as in PlanBoxes.
  constexpr double kStart = 48e3;
  TilePlan best, p;
  p.chunks = CeilDiv(n, columns);
  double least = 0;
  for (p.warps_b = 1; p.warps_b <= kTileWarps; ++p.warps_b) {
    if (p.warps_b > 1 && (p.warps_b - 1) * warp_rows >= length_b) break;
    p.boxes_b = CeilDiv(length_b, p.warps_b * warp_rows);
    for (int rounds = 1; rounds <= 4; ++rounds) {
      p.boxes_a = std::max<int64_t>(
          1, std::min(length_a, processors * int64_t{rounds} / (p.chunks * p.boxes_b)));
      const int64_t box_a = CeilDiv(length_a, p.boxes_a);
      p.groups = static_cast<int>(std::min<int64_t>(kTileWarps / p.warps_b, box_a));
      const int64_t blocks = p.chunks * p.boxes_a * p.boxes_b;
      if (blocks >= int64_t{1} << 31) continue;
      int64_t partial = p.boxes_a > 1 ? p.boxes_a * length_b * n : 0;
      if (p.boxes_b > 1) partial += p.boxes_b * length_a * n;
      if (sums_rows && p.chunks > 1) partial += p.chunks * length_a * length_b;
      if (partial > workspace || partial >= int64_t{1} << 31) continue;
      // Fewer warps than this do not keep the memory busy.
      const int warps = std::max(12, p.warps_b * p.groups);
      const double bytes = static_cast<double>(CeilDiv(box_a, p.groups)) * warps * warp_rows *
                           columns * element_bytes * arrays;
      const double cost = static_cast<double>(CeilDiv(blocks, processors)) * (bytes + kStart) +
                          (partial == 0 ? 0 : kStart) +
                          5.0 * static_cast<double>(partial) / processors;
      if (best.valid && cost >= least) continue;
      best = p;
      best.valid = true;
      least = cost;
    }
  }
  const double ideal = static_cast<double>(length_a) * static_cast<double>(length_b) *
                       static_cast<double>(n) * element_bytes * arrays / processors;
  // The general pass takes about three times the ideal. For small arrays, this kernel does too.
  if (least > 2.5 * ideal) best.valid = false;
  return best;
}

template <typename F, typename T>
class TileLauncher {
  using C = ComputeType<T>;

 public:
  static constexpr bool kHas = F::kOperands == 3 && F::kGradients == 3 && !F::kMayBeWide &&
                               !F::kBits && !F::kFirstIsFull && sizeof(C) == 4;

  // Launches the kernel if it takes the shape, and after it the general pass's second kernel if
  // there are partial sums. Returns whether it takes the shape.
  static bool Launch(const BroadcastShape& shape, const void* dy, const Operand* operands,
                     const Gradient* gradients, SumWorkspace workspace, cudaStream_t stream,
                     cudaError_t* error) {
    if constexpr (kHas) {
      return LaunchTiles(shape, dy, operands, gradients, workspace, stream, error);
    } else {
      return false;
    }
  }

 private:
  static bool LaunchTiles(const BroadcastShape& shape, const void* dy, const Operand* operands,
                          const Gradient* gradients, SumWorkspace workspace, cudaStream_t stream,
                          cudaError_t* error) {
    if (shape.rank != 3 || shape.elements() >= int64_t{1} << 31) return false;
    constexpr int kSize = 16 / sizeof(T);
    if (shape.inner() % kSize != 0) return false;
    // A is the dimension that the first of the two sums of columns keeps.
    int a = -1, kinds = 0;
    uintptr_t bits = reinterpret_cast<uintptr_t>(dy);
    bool wanted[F::kGradients];
    for (int k = 0; k < F::kOperands; ++k) {
      const int64_t* const in = shape.stride[k];
      const int64_t* const out = shape.stride[F::kOperands + k];
      wanted[k] = gradients[k].data != nullptr;
      if (in[2] == 0) {
        if (wanted[k] && (out[2] != 0 || out[0] == 0 || out[1] == 0)) return false;
        kinds |= kTileRow << (2 * k);
        continue;
      }
      bits |= reinterpret_cast<uintptr_t>(operands[k].data);
      bits |= reinterpret_cast<uintptr_t>(gradients[k].data);
      if (shape.IsFull(k)) {
        if (wanted[k] && (gradients[k].wide || !shape.IsFull(F::kOperands + k))) return false;
        continue;
      }
      if (!wanted[k] || in[2] != 1 || out[2] != 1 || (in[0] == 0) == (in[1] == 0)) return false;
      const int keeps = in[0] != 0 ? 0 : 1;
      if (out[1 - keeps] != 0 || out[keeps] == 0) return false;
      if (in[keeps] % kSize != 0 || out[keeps] % kSize != 0) return false;
      if (a < 0) a = keeps;
      kinds |= (keeps == a ? kTileA : kTileB) << (2 * k);
    }
    if (a < 0 || bits % 16 != 0) return false;
    const int b = 1 - a;
    const int of_a = FindTileKind(kinds, F::kOperands, kTileA);
    const int of_b = FindTileKind(kinds, F::kOperands, kTileB);
    const int row = FindTileKind(kinds, F::kOperands, kTileRow);
    int arrays = 1;
    for (int k = 0; k < F::kOperands; ++k) {
      if (TileKindOf(kinds, k) == kTileFull) arrays += wanted[k] ? 2 : 1;
    }

    Device device;
    if (CurrentDevice(&device) != cudaSuccess) return false;
    void (*chosen)(TileParams<F>) = nullptr;
    int shared = 0, warp_rows = 1, columns = 1;
    Each([&](auto kernel, int its_kinds, int its_rows, int its_columns, int its_shared) {
      if (its_kinds != kinds) return;
      chosen = kernel;
      shared = its_shared;
      warp_rows = its_rows;
      columns = its_columns;
    });
    if (chosen == nullptr || shared > device.shared_per_block) return false;
    const int64_t length_a = shape.size[a], length_b = shape.size[b], n = shape.inner();
    const bool sums_rows = row >= 0 && wanted[row];
    const TilePlan plan = PlanTiles(length_a, length_b, n, sizeof(T), warp_rows, columns, arrays,
                                    sums_rows, workspace.size, device.processors);
    if (!plan.valid) return false;

    TileParams<F> p{};
    p.dy = dy;
    p.dy_a = static_cast<uint32_t>(a == 0 ? shape.size[1] * n : n);
    p.dy_b = static_cast<uint32_t>(b == 0 ? shape.size[1] * n : n);
    for (int k = 0; k < F::kOperands; ++k) {
      p.operand[k] = operands[k].data;
      p.operand_a[k] = static_cast<uint32_t>(shape.stride[k][a]);
      p.operand_b[k] = static_cast<uint32_t>(shape.stride[k][b]);
      const int64_t* const out = shape.stride[F::kOperands + k];
      p.sum[k] = {gradients[k].data, gradients[k].wide, 0, static_cast<uint32_t>(out[a]),
                  static_cast<uint32_t>(out[b])};
    }
    F::Needed(wanted, p.needed);
    p.n = static_cast<uint32_t>(n);
    p.length_a = static_cast<uint32_t>(length_a);
    p.length_b = static_cast<uint32_t>(length_b);
    p.chunks = static_cast<uint32_t>(plan.chunks);
    p.boxes_a = static_cast<uint32_t>(plan.boxes_a);
    p.boxes_b = static_cast<uint32_t>(plan.boxes_b);
    p.warps_b = plan.warps_b;
    p.groups = plan.groups;

    // Partial sums [parts][kept_a][kept_b][kept_inner].
    SumsToFinish unfinished;
    int64_t used = 0;
    const auto divide = [&](int g, int64_t parts, int64_t kept_a, int64_t kept_b,
                            int64_t kept_inner) {
      if (parts == 1) return;
      TileSum& sum = p.sum[g];
      const int64_t plane = kept_a * kept_b * kept_inner;
      C* const at = static_cast<C*>(workspace.data) + used;
      used += parts * plane;
      unfinished.AddPlanes(at, parts, {kept_a, kept_b}, {sum.stride_a, sum.stride_b}, kept_inner,
                           sum.out, sum.wide);
      sum = {at, true, static_cast<uint32_t>(plane), static_cast<uint32_t>(kept_b * kept_inner),
             static_cast<uint32_t>(kept_inner)};
    };
    divide(of_a, plan.boxes_b, length_a, 1, n);
    divide(of_b, plan.boxes_a, 1, length_b, n);
    if (sums_rows) divide(row, plan.chunks, length_a, length_b, 1);

    const unsigned blocks = static_cast<unsigned>(plan.chunks * plan.boxes_a * plan.boxes_b);
    const LaunchConfig config = {
        .grid = dim3(blocks),
        .block = dim3(static_cast<unsigned>(32 * plan.warps_b * plan.groups)),
        .shared = static_cast<size_t>(shared)};
    *error = cuda::Launch(chosen, config, stream, p);
    if (*error == cudaSuccess) *error = unfinished.Launch<T>(stream);
    return true;
  }

  // "Three planes". Other sets of operands are rare, and take the general pass.
  static constexpr bool Occurs(int kinds) {
    return kinds == (kTileA | kTileB << 2 | kTileRow << 4);
  }

  template <typename Use>
  static void Each(const Use& use) {
    if constexpr (kHas) {
      EachKind(use, std::make_integer_sequence<int, 1 << (2 * F::kOperands)>());
    }
  }

  template <typename Use, int... kKinds>
  static void EachKind(const Use& use, std::integer_sequence<int, kKinds...>) {
    (OneKind<kKinds>(use), ...);
  }

  template <int kKinds, typename Use>
  static void OneKind(const Use& use) {
    if constexpr (Occurs(kKinds)) {
      using Shape = TileShape<T, F::kOperands, kKinds>;
      use(KernelOf<typename F::Family, ElementwiseTileKernel<F, T, kKinds>>(), kKinds,
          Shape::kWarpRows, Shape::kColumns, Shape::kSharedBytes);
    }
  }
};

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_TILE_CUH_

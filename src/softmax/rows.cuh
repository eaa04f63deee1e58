// Softmax along the minor axis, where each row is contiguous: how kernels access a row, how threads
// share it, and the kernel that holds it in registers.
//
// All kernels along the minor axis are memory-bound. A row is read once and held on chip by as few
// threads as possible:
//
// - RowsKernel holds rows of up to 16 KB in registers, of a part of a warp up to a small block. A
//   warp holds several rows, and so does a thread if the rows are short, so that enough loads are
//   in flight.
// - SpanKernel (span.cuh) takes short rows that are no whole number of 16-byte units.
// - BlockKernel (block.cuh) holds longer rows in shared memory, of a block or a cluster.
// - GangKernel (gang.cuh) holds still longer rows in several blocks, up to the whole device.
// - ColumnsKernel (columns.cuh) reads rows twice that fit nowhere.
//
// Rows that do not begin or end on a 16-byte boundary are still accessed in aligned 16-byte units,
// if all arrays have the same misalignment; only the units at the ends of a row are handled by
// element.
#ifndef JAX_FASTOPS_SOFTMAX_ROWS_CUH_
#define JAX_FASTOPS_SOFTMAX_ROWS_CUH_

#include <cooperative_groups.h>

#include <cstdint>
#include <type_traits>

#include "core/cuda/async_copy.cuh"
#include "core/cuda/kept.cuh"
#include "core/cuda/row_group.cuh"
#include "core/cuda/unit.cuh"
#include "softmax/math.cuh"
#include "softmax/plan.h"

namespace jax_fastops::cuda::softmax {

// -------------------------------------------------------------------------------------------------
// Accesses

// A sequence of units that covers a row or a part of it. The first unit may begin `before` elements
// before the part, and the last may end after it. With kAligned the units cover the part exactly.
template <typename T, int kBytes, bool kAligned = false>
struct Stretch {
  using U = Unit<T, kBytes>;
  using H = Held<T, kBytes>;
  using Keep = Unit<uint8_t, U::kSize>;
  static constexpr int kSize = U::kSize;

  int64_t origin;  // of the first unit, in elements of the array
  int before;
  int n;                // elements of the part
  const uint8_t* mask;  // of the part's first element

  __device__ __forceinline__ int units() const {
    return n == 0 ? 0 : (before + n + kSize - 1) / kSize;
  }
  __device__ __forceinline__ int First(int unit) const {
    return unit * kSize - (kAligned ? 0 : before);
  }
  __device__ __forceinline__ bool Has(int index) const {
    return static_cast<unsigned>(index) < static_cast<unsigned>(n);
  }
  __device__ __forceinline__ bool IsWhole(int unit) const {
    if constexpr (kAligned) return First(unit) < n;
    return First(unit) >= 0 && First(unit) + kSize <= n;
  }
  __device__ __forceinline__ const T* Address(const void* array, int unit) const {
    return static_cast<const T*>(array) + (origin + int64_t{unit} * kSize);
  }

  // Loads a unit as a whole if it overlaps the part; otherwise it is filled with `outside`. `size`
  // is the size of the array; if the array begins or ends inside the unit, its elements are loaded
  // one by one. Rows bypass L1, so that the mask stays there, which other rows share.
  __device__ __forceinline__ H Load(const void* array, int64_t size, int unit, T outside) const {
    if (First(unit) >= n) return H::Filled(outside);
    const T* address = Address(array, unit);
    const int64_t at = origin + int64_t{unit} * kSize;
    if (kAligned || (at >= 0 && at + kSize <= size)) {
      return H::template Load<CacheHint::kNoAllocate>(address);
    }
    U loaded = H::Filled(outside).Get();
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (Has(First(unit) + i)) loaded.elements[i] = address[i];
    }
    return H(loaded);
  }

  // Sets the elements of a loaded unit that are outside the part. This waits for the unit, so do it
  // after all loads.
  __device__ __forceinline__ void Trim(int unit, H& held, T outside) const {
    if (IsWhole(unit)) return;
    U trimmed = held.Get();
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (!Has(First(unit) + i)) trimmed.elements[i] = outside;
    }
    held = H(trimmed);
  }

  // Copies a unit to `to` that is only partly in the part. There are two in a row, so the code is
  // short rather than fast.
  __device__ __forceinline__ void CopyEnd(const void* array, int unit, T outside, T* to) const {
    const T* address = Address(array, unit);
#pragma unroll 1
    for (int i = 0; i < kSize; ++i) to[i] = Has(First(unit) + i) ? address[i] : outside;
  }

  __device__ __forceinline__ void Store(void* array, int unit, const H& held) const {
    T* address = const_cast<T*>(Address(array, unit));
    if (IsWhole(unit)) {
      held.Store(address);
    } else if constexpr (!kAligned) {
      if (First(unit) < n) {
        const U stored = held.Get();
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if (Has(First(unit) + i)) address[i] = stored.elements[i];
        }
      }
    }
  }

  // The mask bytes of a unit: LoadMask reads them in one load (if p.mask_units), GatherMask one by
  // one. Bytes outside the part are arbitrary.
  __device__ __forceinline__ Keep LoadMask(int unit) const {
    return Keep::Load(mask + (First(unit) < n ? First(unit) : 0));
  }
  __device__ __forceinline__ Keep GatherMask(const Params& p, int unit) const {
    Keep keep;
    const int first = First(unit);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      keep.elements[i] = Has(first + i) ? mask[(first + i) * p.mask_stride] : uint8_t{0};
    }
    return keep;
  }

  __device__ __forceinline__ void TimesZero(int unit, H& held, T excluded) const {
    held.TimesZero([&](int i) { return Has(First(unit) + i); }, excluded);
  }
};

// The units from `begin` to `end` of a row; empty if begin >= end.
template <typename T, int kBytes>
__device__ __forceinline__ Stretch<T, kBytes> PartOfRow(const Params& p, int64_t row, int64_t begin,
                                                        int64_t end) {
  constexpr int kSize = Stretch<T, kBytes>::kSize;
  Stretch<T, kBytes> part;
  const int64_t start = row * p.n;
  const int before = static_cast<int>(
      (reinterpret_cast<uintptr_t>(p.a) / sizeof(T) + static_cast<uint64_t>(start)) % kSize);
  const int64_t first = max(begin * kSize - before, int64_t{0});
  const int64_t last = min(end * kSize - before, p.n);
  part.origin = start - before + begin * kSize;
  part.before = begin == 0 ? before : 0;
  part.n = static_cast<int>(max(last - first, int64_t{0}));
  part.mask = p.mask;
  if (p.mask != nullptr && part.n > 0) {
    part.mask += p.mask_outer.Offset(row) + first * p.mask_stride;
  }
  return part;
}

// A whole row; empty if `live` is false.
template <typename T, int kBytes, bool kAligned>
__device__ __forceinline__ Stretch<T, kBytes, kAligned> WholeRow(const Params& p, int64_t row,
                                                                 bool live) {
  constexpr int kSize = Stretch<T, kBytes>::kSize;
  Stretch<T, kBytes, kAligned> part;
  const int64_t start = row * p.n;
  part.before = kAligned ? 0
                         : static_cast<int>((reinterpret_cast<uintptr_t>(p.a) / sizeof(T) +
                                             static_cast<uint64_t>(start)) %
                                            kSize);
  part.origin = start - part.before;
  part.n = live ? static_cast<int>(p.n) : 0;
  part.mask = p.mask;
  return part;
}

template <typename T, int kBytes>
__device__ __forceinline__ int64_t UnitsOfRow(const Params& p, int64_t row) {
  constexpr int kSize = Stretch<T, kBytes>::kSize;
  const uint64_t before =
      (reinterpret_cast<uintptr_t>(p.a) / sizeof(T) + static_cast<uint64_t>(row * p.n)) % kSize;
  return (static_cast<int64_t>(before) + p.n + kSize - 1) / kSize;
}

// Stores the results of an undefined row with a mask, and reads the mask again for that. `out` is
// the place of the part's first element. The case is rare, so the code is short rather than fast.
template <bool kGrad, typename T>
__device__ __forceinline__ void StoreUndefined(const Params& p, int64_t origin, int n,
                                               const uint8_t* mask, T* out, int thread, int threads,
                                               ComputeType<T> sum) {
  using A = ComputeType<T>;
#pragma unroll 1
  for (int i = thread; i < n; i += threads) {
    T result = ExcludedResult<T, kGrad>(p.log);
    if (mask[i * p.mask_stride] != 0) {
      if constexpr (kGrad) {
        const Gradient<T> gradient(p.log, static_cast<A>(p.scale), sum, false);
        result = FromCompute<T>(gradient(ToCompute(static_cast<const T*>(p.a)[origin + i]),
                                         ToCompute(static_cast<const T*>(p.b)[origin + i])));
      } else {
        result = FromCompute<T>(A(NAN));
      }
    }
    out[i] = result;
  }
}
template <bool kGrad, typename T, int kBytes, bool kAligned>
__device__ __forceinline__ void StoreUndefined(const Params& p,
                                               const Stretch<T, kBytes, kAligned>& part, int thread,
                                               int threads, ComputeType<T> sum) {
  const int64_t origin = part.origin + part.before;
  StoreUndefined<kGrad>(p, origin, part.n, part.mask, static_cast<T*>(p.out) + origin, thread,
                        threads, sum);
}

// -------------------------------------------------------------------------------------------------
// The threads of a row

// Reductions over the threads that hold a row: `lanes` adjacent threads of a warp (a power of two),
// the block, or a cluster of `cluster` blocks. Every thread gets the same result, in an order that
// does not depend on the run. Shared memory is double-buffered, as in RowGroup.
template <typename A, int kCount, int kMostWarps>
struct RowThreads {
  using Scratch = A[2][kCount][kMostWarps];

  Scratch& scratch;
  int lanes;
  int cluster = 1;
  int phase = 0;

  template <typename Op>
  __device__ __forceinline__ void AllReduce(Op op, A (&values)[kCount]) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      if (step >= lanes) continue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[i] = op(values[i], __shfl_xor_sync(0xffffffffu, values[i], step));
      }
    }
    if (kMostWarps == 1 || lanes <= 32) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (cluster == 1) {
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) scratch[phase][i][warp] = values[i];
      }
      __syncthreads();
    } else {
      PutInCluster(values, warp, lane, warps);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      A value = Op::template Identity<A>();
      for (int slot = lane; slot < warps * cluster; slot += 32) {
        value = op(value, scratch[phase][i][slot]);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        value = op(value, __shfl_xor_sync(0xffffffffu, value, step));
      }
      values[i] = value;
    }
    phase ^= 1;
  }

  // Call before the first reduction. A block must not write into the shared memory of a block that
  // has not started yet.
  __device__ __forceinline__ void Begin() const {
    if (cluster > 1) SyncCluster();
  }

 private:
  // Puts the values of a warp into every block of the cluster.
  __device__ __forceinline__ void PutInCluster([[maybe_unused]] const A (&values)[kCount],
                                               [[maybe_unused]] int warp, [[maybe_unused]] int lane,
                                               [[maybe_unused]] int warps) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    const auto blocks = cooperative_groups::this_cluster();
    if (lane < cluster) {
      const int slot = blocks.block_rank() * warps + warp;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        *blocks.map_shared_rank(&scratch[phase][i][slot], lane) = values[i];
      }
    }
#endif
    SyncCluster();
  }

  static __device__ __forceinline__ void SyncCluster() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    cooperative_groups::this_cluster().sync();
#endif
  }
};

// -------------------------------------------------------------------------------------------------
// Rows in registers
//
// A thread holds units of kRows rows: `count` of them, or kUnits if the compiler knows that all are
// used.

template <typename T, int kBytes, int kRows, int kUnits>
using HeldRows = Held<T, kBytes>[kRows][kUnits];

template <typename T, int kBytes, int kRows, int kUnits>
__device__ __forceinline__ void Forget(HeldRows<T, kBytes, kRows, kUnits>& held) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) held[r][k].Forget();
  }
}

// Applies the mask, whose place in each row is known, to the units of the arrays: excluded elements
// of `a` become `excluded`, and those of `b` 0. Loads the bytes of four units before it uses the
// first.
template <bool kGrad, typename T, int kBytes, bool kAligned, int kRows, int kUnits>
__device__ __forceinline__ void ExcludeRows(
    const Params& p, const Stretch<T, kBytes, kAligned> (&part)[kRows], int lane, int lanes,
    int count, T excluded, Held<T, kBytes> (&a)[kRows][kUnits],
    Held<T, kBytes> (&b)[kGrad ? kRows : 1][kGrad ? kUnits : 1]) {
  constexpr int kBatch = kUnits < 4 ? kUnits : 4;
  [[maybe_unused]] const T zero = FromCompute<T>(0);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int from = 0; from < kUnits; from += kBatch) {
      if (from >= count) break;
      typename Stretch<T, kBytes, kAligned>::Keep keep[kBatch];
      if (p.mask_units) {
#pragma unroll
        for (int k = 0; k < kBatch; ++k) keep[k] = part[r].LoadMask(lane + (from + k) * lanes);
      } else {
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          keep[k] = part[r].GatherMask(p, lane + (from + k) * lanes);
        }
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        a[r][from + k].Exclude(keep[k], excluded);
        if constexpr (kGrad) b[r][from + k].Exclude(keep[k], zero);
      }
    }
  }
}

// Replaces the elements of the rows by their results, times `gain` (not for log_softmax). Sets
// `totals` to the sums of the rows.
template <typename T, int kBytes, int kRows, int kUnits, typename Threads>
__device__ __forceinline__ void ForwardRows(const Params& p, Threads& threads, int count,
                                            Held<T, kBytes> (&a)[kRows][kUnits],
                                            ComputeType<T> (&totals)[kRows],
                                            ComputeType<T> gain = 1) {
  using A = ComputeType<T>;
  constexpr int kSize = Held<T, kBytes>::kSize;
  const A scale = static_cast<A>(p.scale);
  A tops[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Top<T, kBytes> top(scale);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (k >= count) break;
      top.Add(a[r][k]);
    }
    tops[r] = top.Get();
  }
  threads.AllReduce(Max(), tops);
  Forget<T, kBytes>(a);
  // The exponentials, or for log_softmax the distances from the top element. 16-bit types keep them
  // in addition to the elements, which costs less than computing them again.
  A values[kRows][kUnits][kSize];
  Branch(p.log, [&](auto is_log) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      tops[r] = TopElement(tops[r], scale);
      const Normalizer<T> normalize(is_log, scale, tops[r]);
      totals[r] = 0;
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        if (k >= count) break;
        a[r][k].Unpack(values[r][k]);
        A powers[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          powers[i] = normalize.Power(values[r][k][i]);
          values[r][k][i] = is_log ? values[r][k][i] - tops[r] : powers[i];
        }
        totals[r] += SumOf(powers);
      }
    }
  });
  threads.AllReduce(Sum(), totals);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Normalizer<T> normalize(p.log, scale, tops[r]);
    normalize.SetTotal(totals[r]);
    const A factor = p.log ? scale : normalize.last * gain;
    const A offset = p.log ? -normalize.last : A(0);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (k >= count) break;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        values[r][k][i] = MulAdd(values[r][k][i], factor, offset);
      }
      a[r][k].Pack(values[r][k]);
    }
  }
}

// Replaces y, in `a`, by the gradient. `scale` is that of the op, times what the cotangent lacks.
template <typename T, int kBytes, int kRows, int kUnits, typename Threads>
__device__ __forceinline__ void BackwardRows(const Params& p, Threads& threads, int count,
                                             Held<T, kBytes> (&a)[kRows][kUnits],
                                             Held<T, kBytes> (&b)[kRows][kUnits],
                                             ComputeType<T> scale,
                                             ComputeType<T> (&totals)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    totals[r] = 0;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (k >= count) break;
      AddTerms(p.log, a[r][k], b[r][k], p.skip_zeros, totals[r]);
    }
  }
  threads.AllReduce(Sum(), totals);
  Forget<T, kBytes>(a);
  Forget<T, kBytes>(b);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const Gradient<T> gradient(p.log, scale, totals[r], p.skip_zeros);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (k >= count) break;
      ToGradient(gradient, a[r][k], b[r][k]);
    }
  }
}

// Sets the elements of the rows to 0 that dropout does not keep.
template <typename T, int kBytes, bool kAligned, int kRows, int kUnits>
__device__ __forceinline__ void DropRows(const Params& p, const PhiloxWords (&seeds)[kRows],
                                         const Stretch<T, kBytes, kAligned> (&part)[kRows],
                                         int lane, int lanes, int count,
                                         Held<T, kBytes> (&a)[kRows][kUnits]) {
  const KeptLimit limit(p.dropout.largest);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (k >= count) break;
      uint32_t kept[Held<T, kBytes>::kSize / 2];
      KeptPairs<kAligned>(seeds[r], part[r].First(lane + k * lanes), limit, kept);
      KeepOnly<T>(kept, a[r][k].words);
    }
  }
}

// Whether the row with this sum has a mask and is undefined.
template <bool kGrad, typename T>
__device__ __forceinline__ bool IsUndefined(const Params& p, ComputeType<T> total) {
  if (p.mask == nullptr) return false;
  if constexpr (kGrad) return Gradient<T>::Undefined(total, static_cast<ComputeType<T>>(p.scale));
  return Normalizer<T>::Undefined(total);
}

// Several rows per thread take blocks of 128 threads: as many as fit with 80 registers, and
// with 72. With dropout they have 80, and so has one row of a thread, unless it is ragged.
constexpr int BlocksPerProcessor(int units, int rows, bool aligned, bool dropout) {
  if (rows > 1) return dropout ? 6 : 5 + units;
  return !dropout ? 0 : aligned ? 3 : 2;
}

// With kDropout, the result of the forward goes through dropout. The backward has x: it computes
// the softmax again, and then its gradient from the cotangent after dropout. The factor of elements
// that are kept goes into the factors of rows.
template <typename T, bool kGrad, int kUnits, int kRows, bool kAligned, bool kDropout = false>
__global__ void __launch_bounds__(kRows > 1 ? 128 : kRowThreads,
                                  BlocksPerProcessor(kUnits, kRows, kAligned, kDropout))
    RowsKernel(const __grid_constant__ Params p, const __grid_constant__ RowsParams q) {
  using A = ComputeType<T>;
  using Part = Stretch<T, 16, kAligned>;
  using H = typename Part::H;

  const int lanes = q.lanes;
  const int group = lanes > 32 ? 0 : threadIdx.x >> q.log_lanes;
  const int lane = lanes > 32 ? threadIdx.x : threadIdx.x & (lanes - 1);
  const int count = kAligned ? kUnits : q.units;
  constexpr bool kOfX = !kGrad || kDropout;
  const T excluded = Excluded<T, !kOfX>(p.log, p);
  [[maybe_unused]] const T zero = FromCompute<T>(0);
  const int64_t size = p.outer * p.n;

  Part part[kRows];
  int64_t rows[kRows];
  H a[kRows][kUnits], b[kGrad ? kRows : 1][kGrad ? kUnits : 1];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rows[r] = (int64_t{blockIdx.x} * kRows + r) * q.groups + group;
    const bool live = rows[r] < p.outer;
    if (!live) rows[r] = 0;
    part[r] = WholeRow<T, 16, kAligned>(p, rows[r], live);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (k >= count) break;
      a[r][k] = part[r].Load(p.a, size, lane + k * lanes, excluded);
      if constexpr (kGrad) b[r][k] = part[r].Load(p.b, size, lane + k * lanes, zero);
    }
  }
  [[maybe_unused]] PhiloxWords seeds[kRows];
  if constexpr (kDropout) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) seeds[r] = LoadSeed(p.dropout.seeds, rows[r]);
  }
  if constexpr (!kAligned) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        if (k >= count) break;
        part[r].Trim(lane + k * lanes, a[r][k], excluded);
        if constexpr (kGrad) part[r].Trim(lane + k * lanes, b[r][k], zero);
      }
    }
  }
  if (kOfX && p.zero_scale) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        if (k >= count) break;
        part[r].TimesZero(lane + k * lanes, a[r][k], excluded);
      }
    }
  }
  if (p.mask != nullptr) {
    p.mask_outer.ToOffsets(rows);
#pragma unroll
    for (int r = 0; r < kRows; ++r) part[r].mask += rows[r];
    ExcludeRows<kGrad>(p, part, lane, lanes, count, excluded, a, b);
  }
  Forget<T, 16>(a);
  if constexpr (kGrad) Forget<T, 16>(b);

  using Threads = RowThreads<A, kRows, kRowThreads / 32>;
  __shared__ typename Threads::Scratch scratch;
  Threads threads{scratch, lanes};
  A totals[kRows];
  const A gain = static_cast<A>(kDropout ? p.dropout.scale : 1);
  if constexpr (kOfX) ForwardRows(p, threads, count, a, totals, kGrad ? A(1) : gain);
  if constexpr (kDropout) {
    bool undefined = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) undefined |= IsUndefined<false, T>(p, totals[r]);
    if (undefined) ExcludeRows<kGrad>(p, part, lane, lanes, count, zero, a, b);
    if constexpr (kGrad) {
      DropRows(p, seeds, part, lane, lanes, count, b);
    } else {
      DropRows(p, seeds, part, lane, lanes, count, a);
    }
  }
  if constexpr (kGrad) {
    const A scale = p.zero_scale ? A(0) : static_cast<A>(p.scale) * gain;
    BackwardRows(p, threads, count, a, b, scale, totals);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if constexpr (!kDropout) {
      if (IsUndefined<kGrad, T>(p, totals[r])) {
        StoreUndefined<kGrad>(p, part[r], lane, lanes, totals[r]);
        continue;
      }
    }
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (k >= count) break;
      part[r].Store(p.out, lane + k * lanes, a[r][k]);
    }
  }
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_ROWS_CUH_

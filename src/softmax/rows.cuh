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
// if all arrays have the same misalignment. Only the ends of a row are handled by element:
// RowsKernel gives each thread at most one of their elements. The other kernels handle the units at
// the ends in longer code, which costs them little: their rows are long, or in shared memory.
#ifndef JAX_FASTOPS_SOFTMAX_ROWS_CUH_
#define JAX_FASTOPS_SOFTMAX_ROWS_CUH_

#include <cooperative_groups.h>

#include <cstdint>
#include <type_traits>

#include "core/cuda/async_copy.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/kept.cuh"
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
  using H = Vec<T, kBytes>;
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

// What a thread holds of a row: up to kUnits units, and with kEnd also an element of those before
// the first unit and after the last.
template <typename T, int kBytes, int kUnits, bool kEnd>
struct HeldRow {
  Vec<T, kBytes> units[kUnits];
  Vec<T, sizeof(T)> end[1];

  __device__ __forceinline__ void Forget() {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) units[k].Forget();
  }
};

// Calls run(unit) for `count` units, and for the element at the end. Several arguments are
// structures of the same form: run(unit of the first, unit of the second).
template <int kUnits, bool kEnd, typename Run, typename... Rows>
__device__ __forceinline__ void ForUnits(int count, const Run& run, Rows&... rows) {
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    if (k >= count) break;
    run(rows.units[k]...);
  }
  if constexpr (kEnd) run(rows.end[0]...);
}

// Applies the mask to a thread's units of a row: excluded elements of `a` become `excluded`, and
// those of `b` 0. Loads the bytes of four units before it uses the first.
template <bool kGrad, typename T, int kBytes, bool kAligned, int kUnits>
__device__ __forceinline__ void ExcludeUnits(const Params& p,
                                             const Stretch<T, kBytes, kAligned>& part, int lane,
                                             int lanes, int count, T excluded,
                                             Vec<T, kBytes> (&a)[kUnits],
                                             Vec<T, kBytes> (&b)[kUnits]) {
  constexpr int kBatch = kUnits < 4 ? kUnits : 4;
  [[maybe_unused]] const T zero = FromCompute<T>(0);
#pragma unroll
  for (int from = 0; from < kUnits; from += kBatch) {
    if (from >= count) break;
    typename Stretch<T, kBytes, kAligned>::Keep keep[kBatch];
    if (p.mask_units) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k) keep[k] = part.LoadMask(lane + (from + k) * lanes);
    } else {
#pragma unroll
      for (int k = 0; k < kBatch; ++k) keep[k] = part.GatherMask(p, lane + (from + k) * lanes);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      a[from + k].Exclude(keep[k], excluded);
      if constexpr (kGrad) b[from + k].Exclude(keep[k], zero);
    }
  }
}

// Replaces the elements of the rows by their results, times `gain` (not for log_softmax). Sets
// `totals` to the sums of the rows.
template <typename T, int kBytes, int kUnits, bool kEnd, int kRows, typename Threads>
__device__ __forceinline__ void ForwardRows(const Params& p, Threads& threads, int count,
                                            HeldRow<T, kBytes, kUnits, kEnd> (&a)[kRows],
                                            ComputeType<T> (&totals)[kRows],
                                            ComputeType<T> gain = 1) {
  using A = ComputeType<T>;
  const A scale = static_cast<A>(p.scale);
  A tops[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Top<T, kBytes> top(scale);
    ForUnits<kUnits, false>(count, [&](const auto& unit) { top.Add(unit); }, a[r]);
    tops[r] = top.Get();
    if constexpr (kEnd) {
      Top<T, sizeof(T)> of_end(scale);
      of_end.Add(a[r].end[0]);
      tops[r] = fmax(tops[r], of_end.Get());
    }
  }
  threads.AllReduce(Max(), tops);
#pragma unroll
  for (int r = 0; r < kRows; ++r) a[r].Forget();
  // The exponentials, or for log_softmax the distances from the top element. 16-bit types keep them
  // in addition to the elements, which costs less than computing them again.
  struct {
    A units[kUnits][Vec<T, kBytes>::kSize];
    A end[1][1];
  } values[kRows];
  Branch(p.log, [&](auto is_log) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      tops[r] = TopElement(tops[r], scale);
      const Normalizer<T> normalize(is_log, scale, tops[r]);
      totals[r] = 0;
      const auto add = [&](const auto& unit, auto& x) {
        constexpr int kSize = std::remove_reference_t<decltype(unit)>::kSize;
        unit.Unpack(x);
        A powers[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          powers[i] = normalize.Power(x[i]);
          x[i] = is_log ? x[i] - tops[r] : powers[i];
        }
        totals[r] += SumOf(powers);
      };
      ForUnits<kUnits, kEnd>(count, add, a[r], values[r]);
    }
  });
  threads.AllReduce(Sum(), totals);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Normalizer<T> normalize(p.log, scale, tops[r]);
    normalize.SetTotal(totals[r]);
    const A factor = p.log ? scale : normalize.last * gain;
    const A offset = p.log ? -normalize.last : A(0);
    const auto scale_unit = [&](auto& unit, auto& x) {
#pragma unroll
      for (auto& value : x) value = MulAdd(value, factor, offset);
      unit.Pack(x);
    };
    ForUnits<kUnits, kEnd>(count, scale_unit, a[r], values[r]);
  }
}

// Replaces y, in `a`, by the gradient. `scale` is that of the op, times what the cotangent lacks.
template <typename T, int kBytes, int kUnits, bool kEnd, int kRows, typename Threads>
__device__ __forceinline__ void BackwardRows(const Params& p, Threads& threads, int count,
                                             HeldRow<T, kBytes, kUnits, kEnd> (&a)[kRows],
                                             HeldRow<T, kBytes, kUnits, kEnd> (&b)[kRows],
                                             ComputeType<T> scale,
                                             ComputeType<T> (&totals)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    totals[r] = 0;
    const auto add = [&](const auto& y, const auto& dy) {
      AddTerms(p.log, y, dy, p.skip_zeros, totals[r]);
    };
    ForUnits<kUnits, kEnd>(count, add, a[r], b[r]);
  }
  threads.AllReduce(Sum(), totals);
#pragma unroll
  for (int r = 0; r < kRows; ++r) a[r].Forget();
#pragma unroll
  for (int r = 0; r < kRows; ++r) b[r].Forget();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const Gradient<T> gradient(p.log, scale, totals[r], p.skip_zeros);
    ForUnits<kUnits, kEnd>(
        count, [&](auto& y, const auto& dy) { ToGradient(gradient, y, dy); }, a[r], b[r]);
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
// with 72. With dropout they have 80, and so has one row of a thread.
constexpr int BlocksPerProcessor(int units, int rows, bool dropout) {
  if (rows > 1) return dropout ? 6 : 5 + units;
  return dropout ? 3 : 0;
}

// What a thread does with the elements of a row that are outside whole units.
enum class Ends {
  kNone,      // there are none
  kElements,  // it takes one of them at most, besides its units
  kTrimmed,   // they are in its units, which begin before the row or end after it
};

// The place of a row, and the thread's part of it; empty if `live` is false. With kElements, a row
// has up to 2 * (kSize - 1) elements outside whole units, and at least as many threads.
template <typename T, Ends kEnds>
struct RowPart {
  static constexpr int kSize = Stretch<T, 16>::kSize;

  int64_t start;
  int n;
  int head;  // elements before the first unit, with kElements
  int at;    // index of the element outside units
  const uint8_t* mask;
  Stretch<T, 16, kEnds != Ends::kTrimmed> units;
  Stretch<T, sizeof(T), true> end;

  RowPart() = default;
  __device__ __forceinline__ RowPart(const Params& p, int64_t row, bool live, int lane)
      : start(row * p.n), n(live ? static_cast<int>(p.n) : 0), head(0), at(0) {
    const uint64_t place = reinterpret_cast<uintptr_t>(p.a) / sizeof(T) + start;
    int before = 0, whole = n;
    if constexpr (kEnds == Ends::kTrimmed) before = static_cast<int>(place % kSize);
    if constexpr (kEnds == Ends::kElements) {
      head = min(n, static_cast<int>(-place % kSize));
      whole = (n - head) / kSize * kSize;
      at = lane < head ? lane : whole + lane;
      end = {start + at, 0, at < n ? 1 : 0, nullptr};
    }
    units = {start + head - before, before, whole, nullptr};
  }

  __device__ __forceinline__ void SetMask(const Params& p, int64_t offset) {
    mask = p.mask + offset;
    units.mask = mask + head * p.mask_stride;
    end.mask = mask + at * p.mask_stride;
  }
};

// With kDropout, the result of the forward goes through dropout. The backward has x: it computes
// the softmax again, and then its gradient from the cotangent after dropout. The factor of elements
// that are kept goes into the factors of rows.
template <typename T, bool kGrad, int kUnits, int kRows, bool kAligned, bool kDropout = false>
__global__ void __launch_bounds__(kRows > 1 ? 128 : kRowThreads,
                                  BlocksPerProcessor(kUnits, kRows, kDropout))
    RowsKernel(const __grid_constant__ Params p, const __grid_constant__ RowsParams q) {
  using A = ComputeType<T>;
  // Elements outside units need a thread each. SpanKernel takes shorter rows, but not with dropout.
  constexpr Ends kEnds = kAligned ? Ends::kNone : kDropout ? Ends::kTrimmed : Ends::kElements;
  constexpr bool kEnd = kEnds == Ends::kElements;

  const int lanes = q.lanes;
  const int group = lanes > 32 ? 0 : threadIdx.x >> q.log_lanes;
  const int lane = lanes > 32 ? threadIdx.x : threadIdx.x & (lanes - 1);
  constexpr bool kOfX = !kGrad || kDropout;
  const T excluded = Excluded<T, !kOfX>(p.log, p);
  [[maybe_unused]] const T zero = FromCompute<T>(0);
  const int64_t size = p.outer * p.n;

  RowPart<T, kEnds> part[kRows];
  int64_t rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rows[r] = (int64_t{blockIdx.x} * kRows + r) * q.groups + group;
    const bool live = rows[r] < p.outer;
    if (!live) rows[r] = 0;
    part[r] = RowPart<T, kEnds>(p, rows[r], live, lane);
  }
  HeldRow<T, 16, kUnits, kEnd> a[kRows], b[kRows];  // `b` only with kGrad
  // Calls run(r, part of row r, index of a unit in the part, units of `a` and `b`).
  const auto for_units = [&](const auto& run) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        run(r, part[r].units, lane + k * lanes, a[r].units[k], b[r].units[k]);
      }
      if constexpr (kEnd) run(r, part[r].end, 0, a[r].end[0], b[r].end[0]);
    }
  };
  const auto exclude = [&](T replacement) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      ExcludeUnits<kGrad>(p, part[r].units, lane, lanes, kUnits, replacement, a[r].units,
                          b[r].units);
      if constexpr (kEnd) {
        ExcludeUnits<kGrad>(p, part[r].end, 0, 1, 1, replacement, a[r].end, b[r].end);
      }
    }
  };

  for_units([&](int, const auto& of_row, int unit, auto& x, [[maybe_unused]] auto& dy) {
    x = of_row.Load(p.a, size, unit, excluded);
    if constexpr (kGrad) dy = of_row.Load(p.b, size, unit, zero);
  });
  [[maybe_unused]] PhiloxWords seeds[kRows];
  if constexpr (kDropout) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) seeds[r] = p.dropout.seeds.At(rows[r]);
  }
  if constexpr (kEnds == Ends::kTrimmed) {
    for_units([&](int, const auto& of_row, int unit, auto& x, [[maybe_unused]] auto& dy) {
      of_row.Trim(unit, x, excluded);
      if constexpr (kGrad) of_row.Trim(unit, dy, zero);
    });
  }
  if (kOfX && p.zero_scale) {
    for_units([&](int, const auto& of_row, int unit, auto& x, auto&) {
      of_row.TimesZero(unit, x, excluded);
    });
  }
  if (p.mask != nullptr) {
    p.mask_outer.ToOffsets(rows);
#pragma unroll
    for (int r = 0; r < kRows; ++r) part[r].SetMask(p, rows[r]);
    exclude(excluded);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) a[r].Forget();
  if constexpr (kGrad) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) b[r].Forget();
  }

  using Threads = RowThreads<A, kRows, kRowThreads / 32>;
  __shared__ typename Threads::Scratch scratch;
  Threads threads{scratch, lanes};
  A totals[kRows];
  const A gain = static_cast<A>(kDropout ? p.dropout.scale : 1);
  if constexpr (kOfX) ForwardRows(p, threads, kUnits, a, totals, kGrad ? A(1) : gain);
  if constexpr (kDropout) {
    bool undefined = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) undefined |= IsUndefined<false, T>(p, totals[r]);
    if (undefined) exclude(zero);
    const KeptLimit limit(p.dropout.largest);
    for_units([&](int r, const auto& of_row, int unit, auto& y, [[maybe_unused]] auto& dy) {
      if (!kAligned && unit >= q.units * lanes) return;
      uint32_t kept[RowPart<T, kEnds>::kSize / 2];
      KeptPairs<kAligned>(seeds[r], of_row.First(unit), limit, kept);
      KeepOnly<T>(kept, (kGrad ? dy : y).words);
    });
  }
  if constexpr (kGrad) {
    const A scale = p.zero_scale ? A(0) : static_cast<A>(p.scale) * gain;
    BackwardRows(p, threads, kUnits, a, b, scale, totals);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if constexpr (!kDropout) {
      if (IsUndefined<kGrad, T>(p, totals[r])) {
        const int64_t start = part[r].start;
        StoreUndefined<kGrad>(p, start, part[r].n, part[r].mask, static_cast<T*>(p.out) + start,
                              lane, lanes, totals[r]);
        continue;
      }
    }
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      part[r].units.Store(p.out, lane + k * lanes, a[r].units[k]);
    }
    if constexpr (kEnd) part[r].end.Store(p.out, 0, a[r].end[0]);
  }
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_ROWS_CUH_

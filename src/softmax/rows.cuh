// Softmax along the minor axis, where each row is contiguous.
//
// All of these kernels are memory-bound. A row is read once and held on chip by as few threads as
// possible:
//
// - RowsKernel holds rows of up to 16 KB in registers, of 2 to 32 lanes of a warp or of a small
//   block. A warp holds several rows, and so does a thread if the rows are short, so that enough
//   loads are in flight.
// - BlockKernel holds a row in the shared memory of a block, or on sm_90 and later of a cluster of
//   up to 16 blocks. The copies are asynchronous and take no registers. A thread accesses only data
//   that it has copied itself, so the reductions are the only barriers. Several blocks share an SM:
//   some load while others compute or store.
// - GangKernel (softmax_gang.cuh) holds longer rows in several blocks, up to the whole device.
// - LongKernel reads rows that do not fit anywhere twice, the second time from L2.
//
// Rows that do not begin or end on a 16-byte boundary are still accessed in aligned 16-byte units,
// if all arrays have the same misalignment; only the units at the ends of a row are handled by
// element. Arrays of different misalignment and very short unaligned rows use units of one element.
#ifndef JAX_FASTOPS_SOFTMAX_ROWS_CUH_
#define JAX_FASTOPS_SOFTMAX_ROWS_CUH_

#include <cstdint>

#include "core/cuda/row_group.cuh"
#include "core/cuda/unit.cuh"
#include "softmax/math.cuh"

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

  // `size` is the size of the array. A unit is read as a whole unless the array begins or ends
  // inside it; elements outside the part are set to `outside`. Rows bypass L1, so that the mask
  // stays there, which other rows share.
  __device__ __forceinline__ H Load(const void* array, int64_t size, int unit, T outside) const {
    const T* address = Address(array, unit);
    if (IsWhole(unit)) return H::template Load<CacheHint::kNoAllocate>(address);
    U loaded = H::Filled(outside).Get();
    if constexpr (!kAligned) {
      if (First(unit) < n) {
        const int64_t at = origin + int64_t{unit} * kSize;
        if (at >= 0 && at + kSize <= size) {
          loaded = U::Load(address);
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            if (!Has(First(unit) + i)) loaded.elements[i] = outside;
          }
        } else {
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            if (Has(First(unit) + i)) loaded.elements[i] = address[i];
          }
        }
      }
    }
    return H(loaded);
  }

  template <CacheHint kHint = CacheHint::kDefault>
  __device__ __forceinline__ void Store(void* array, int unit, const H& held) const {
    T* address = const_cast<T*>(Address(array, unit));
    if (IsWhole(unit)) {
      held.template Store<kHint>(address);
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

// Stores the results of an undefined row with a mask, and reads the mask again for that. The case
// is rare, so the code is short rather than fast.
template <Op kOp, typename T, int kBytes, bool kAligned>
__device__ __forceinline__ void StoreUndefined(const Params& p,
                                               const Stretch<T, kBytes, kAligned>& part, int thread,
                                               int threads, ComputeType<T> sum) {
  using A = ComputeType<T>;
  const int64_t origin = part.origin + part.before;
#pragma unroll 1
  for (int i = thread; i < part.n; i += threads) {
    T result = ExcludedResult<T, kOp>();
    if (part.mask[i * p.mask_stride] != 0) {
      if constexpr (IsGrad(kOp)) {
        const Gradient<T, IsLog(kOp)> gradient(static_cast<A>(p.scale), sum, false);
        result = FromCompute<T>(gradient(ToCompute(static_cast<const T*>(p.a)[origin + i]),
                                         ToCompute(static_cast<const T*>(p.b)[origin + i])));
      } else {
        result = FromCompute<T>(A(NAN));
      }
    }
    static_cast<T*>(p.out)[origin + i] = result;
  }
}

// -------------------------------------------------------------------------------------------------
// Rows held by a few lanes or a small block

// The r-th row of this thread's group.
template <int kGroups, int kRows>
__device__ __forceinline__ int64_t RowIndex(int r, int lanes) {
  return (int64_t{blockIdx.x} * kRows + r) * kGroups + static_cast<int>(threadIdx.x) / lanes;
}

// Threads of a block: a warp or less holds a row and the block has several, or the whole block
// holds one.
constexpr int RowThreads(int lanes) { return lanes <= 32 ? 128 : lanes; }

template <typename T, Op kOp, int kLanes, int kUnits, int kRows, int kBytes, bool kAligned>
__global__ void __launch_bounds__(RowThreads(kLanes)) RowsKernel(const __grid_constant__ Params p) {
  using A = ComputeType<T>;
  using Part = Stretch<T, kBytes, kAligned>;
  using Group = RowGroup<kLanes>;
  constexpr bool kGrad = IsGrad(kOp);
  constexpr bool kLog = IsLog(kOp);
  constexpr int kGroups = RowThreads(kLanes) / kLanes;
  constexpr int kSize = Part::kSize;

  const int lane = Group::Rank();
  const A scale = static_cast<A>(p.scale);
  const T excluded = Excluded<T, kOp>(scale);
  [[maybe_unused]] const T zero = FromCompute<T>(0);
  const int64_t rows = p.outer, size = p.outer * p.n;

  Part part[kRows];
  typename Part::H a[kRows][kUnits];
  [[maybe_unused]] typename Part::H b[kGrad ? kRows : 1][kGrad ? kUnits : 1];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = RowIndex<kGroups, kRows>(r, kLanes);
    const bool live = row < rows;
    part[r] = WholeRow<T, kBytes, kAligned>(p, live ? row : 0, live);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      a[r][k] = part[r].Load(p.a, size, lane + k * kLanes, excluded);
      if constexpr (kGrad) b[r][k] = part[r].Load(p.b, size, lane + k * kLanes, zero);
    }
  }
  if (!kGrad && p.zero_scale) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) part[r].TimesZero(lane + k * kLanes, a[r][k], excluded);
    }
  }
  if (kOp != Op::kSoftmaxGrad && p.mask != nullptr) {
    int64_t offsets[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      offsets[r] = part[r].n == 0 ? 0 : RowIndex<kGroups, kRows>(r, kLanes);
    }
    p.mask_outer.ToOffsets(offsets);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      part[r].mask += offsets[r];
      const auto exclude = [&](int k, const typename Part::Keep& keep) {
        a[r][k].Exclude(keep, excluded);
        if constexpr (kGrad) b[r][k].Exclude(keep, zero);
      };
      if (p.mask_units) {
        typename Part::Keep keep[kUnits];
#pragma unroll
        for (int k = 0; k < kUnits; ++k) keep[k] = part[r].LoadMask(lane + k * kLanes);
#pragma unroll
        for (int k = 0; k < kUnits; ++k) exclude(k, keep[k]);
      } else {
#pragma unroll
        for (int k = 0; k < kUnits; ++k) exclude(k, part[r].GatherMask(p, lane + k * kLanes));
      }
    }
  }
  const auto forget = [&] {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        a[r][k].Forget();
        if constexpr (kGrad) b[r][k].Forget();
      }
    }
  };
  forget();

  __shared__ typename Group::template Scratch<A, kRows> scratch;
  int phase = 0;
  // The exponentials stay in registers. 16-bit types keep them in addition to the elements, which
  // costs less than computing them again.
  [[maybe_unused]] A powers[kRows][kUnits][kSize];
  [[maybe_unused]] A tops[kRows];
  A totals[kRows] = {};
  if constexpr (!kGrad) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Top<T, kBytes> top(scale);
#pragma unroll
      for (int k = 0; k < kUnits; ++k) top.Add(a[r][k]);
      tops[r] = top.Get();
    }
    Group::AllReduce(Max(), tops, scratch, phase);
#pragma unroll
    for (int r = 0; r < kRows; ++r) tops[r] = TopElement(tops[r], scale);
    forget();
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if constexpr (kGrad) {
        AddTerms<kLog>(a[r][k], b[r][k], p.skip_zeros, totals[r]);
      } else {
        const Normalizer<T, kLog> normalize(scale, tops[r]);
        a[r][k].Unpack(powers[r][k]);
        A summed[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          summed[i] = normalize.Power(powers[r][k][i]);
          if constexpr (!kLog) powers[r][k][i] = summed[i];
        }
        totals[r] += SumOf(summed);
      }
    }
  }
  Group::AllReduce(Sum(), totals, scratch, phase);
  forget();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if constexpr (kGrad) {
      if (kLog && p.mask != nullptr && Gradient<T, kLog>::Undefined(totals[r], scale)) {
        StoreUndefined<kOp>(p, part[r], lane, kLanes, totals[r]);
        continue;
      }
      const Gradient<T, kLog> gradient(scale, totals[r], p.skip_zeros);
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        ToGradient(gradient, a[r][k], b[r][k]);
        part[r].Store(p.out, lane + k * kLanes, a[r][k]);
      }
    } else {
      using Normalize = Normalizer<T, kLog>;
      if (p.mask != nullptr && Normalize::Undefined(totals[r])) {
        StoreUndefined<kOp>(p, part[r], lane, kLanes, totals[r]);
        continue;
      }
      Normalize normalize(scale, tops[r]);
      normalize.SetTotal(totals[r]);
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        if constexpr (kLog) {
          ToResult<false>(normalize, a[r][k]);
        } else {
#pragma unroll
          for (int i = 0; i < kSize; ++i) powers[r][k][i] *= normalize.last;
          a[r][k].Pack(powers[r][k]);
        }
        part[r].Store(p.out, lane + k * kLanes, a[r][k]);
      }
    }
  }
}

// -------------------------------------------------------------------------------------------------
// Rows held by a block or a cluster

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define JAX_FASTOPS_HAS_CLUSTERS 1
#else
#define JAX_FASTOPS_HAS_CLUSTERS 0
#endif

template <int kBytes>
__device__ __forceinline__ void CopyAsync(void* shared, const void* global) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
                 "l"(__cvta_generic_to_global(global))
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(global)), "n"(kBytes)
                 : "memory");
  }
}

__device__ __forceinline__ void AwaitCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// `block_units` is the number of a row's units per block of the cluster. Only one thread accesses a
// unit, so it waits only for its own copies.
template <typename T, Op kOp, int kThreads, int kCluster>
__device__ __forceinline__ void BlockOfRow(const Params& p, int block_units) {
  using A = ComputeType<T>;
  using Part = Stretch<T, 16>;
  using H = typename Part::H;
  using Group = RowGroup<kThreads, kCluster>;
  constexpr bool kGrad = IsGrad(kOp);
  constexpr bool kLog = IsLog(kOp);
  constexpr int kUnroll = sizeof(T) == 2 ? 2 : 4;

  extern __shared__ uint4 shared[];
  __shared__ typename Group::template Scratch<A, 1> scratch;
  int phase = 0;

  const int64_t row = blockIdx.x / kCluster, size = p.outer * p.n;
  const int64_t begin = Group::BlockRank() * int64_t{block_units};
  const Part part =
      PartOfRow<T, 16>(p, row, begin, min(begin + block_units, UnitsOfRow<T, 16>(p, row)));
  const A scale = static_cast<A>(p.scale);
  const T excluded = Excluded<T, kOp>(scale);
  [[maybe_unused]] const T zero = FromCompute<T>(0);
  const int units = part.units();
  H* const a = reinterpret_cast<H*>(shared);
  [[maybe_unused]] H* const b = a + block_units;

#pragma unroll 4
  for (int u = threadIdx.x; u < units; u += kThreads) {
    if (part.IsWhole(u)) {
      CopyAsync<16>(a + u, part.Address(p.a, u));
      if constexpr (kGrad) CopyAsync<16>(b + u, part.Address(p.b, u));
    } else {
      part.Load(p.a, size, u, excluded).Store(a + u);
      if constexpr (kGrad) part.Load(p.b, size, u, zero).Store(b + u);
    }
  }
  Group::Begin();

  // The first pass, which also applies the mask. The mask is loaded before the thread waits for its
  // copies.
  Top<T, 16> top(scale);
  A total[1] = {};
  const bool masked = kOp != Op::kSoftmaxGrad && p.mask != nullptr;
  for (int first = threadIdx.x; first < units; first += kUnroll * kThreads) {
    typename Part::Keep keep[kUnroll];
    if (masked && p.mask_units) {
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) keep[k] = part.LoadMask(first + k * kThreads);
    }
    AwaitCopies();
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int u = first + k * kThreads;
      if (u >= units) break;
      H held = H::Load(a + u), other;
      if constexpr (kGrad) other = H::Load(b + u);
      if (!kGrad && p.zero_scale) {
        part.TimesZero(u, held, excluded);
        held.Store(a + u);
      }
      const auto exclude = [&](const typename Part::Keep& of_unit) {
        held.Exclude(of_unit, excluded);
        held.Store(a + u);
        if constexpr (kGrad) {
          other.Exclude(of_unit, zero);
          other.Store(b + u);
        }
      };
      if (masked && p.mask_units) {
        exclude(keep[k]);
      } else if (masked) {
        exclude(part.GatherMask(p, u));
      }
      if constexpr (kGrad) {
        AddTerms<kLog>(held, other, p.skip_zeros, total[0]);
      } else {
        top.Add(held);
      }
    }
  }

  if constexpr (kGrad) {
    Group::AllReduce(Sum(), total, scratch, phase);
    if (kLog && p.mask != nullptr && Gradient<T, kLog>::Undefined(total[0], scale)) {
      return StoreUndefined<kOp>(p, part, threadIdx.x, kThreads, total[0]);
    }
    const Gradient<T, kLog> gradient(scale, total[0], p.skip_zeros);
#pragma unroll kUnroll
    for (int u = threadIdx.x; u < units; u += kThreads) {
      H held = H::Load(a + u);
      ToGradient(gradient, held, H::Load(b + u));
      part.Store(p.out, u, held);
    }
  } else {
    A tops[1] = {top.Get()};
    Group::AllReduce(Max(), tops, scratch, phase);
    Normalizer<T, kLog> normalize(scale, TopElement(tops[0], scale));
#pragma unroll kUnroll
    for (int u = threadIdx.x; u < units; u += kThreads) {
      H held = H::Load(a + u);
      AddPowers(normalize, held, total[0]);
      if constexpr (kKeepsPowers<T, kLog>) held.Store(a + u);
    }
    Group::AllReduce(Sum(), total, scratch, phase);
    if (p.mask != nullptr && Normalizer<T, kLog>::Undefined(total[0])) {
      return StoreUndefined<kOp>(p, part, threadIdx.x, kThreads, total[0]);
    }
    normalize.SetTotal(total[0]);
#pragma unroll kUnroll
    for (int u = threadIdx.x; u < units; u += kThreads) {
      H held = H::Load(a + u);
      ToResult<kKeepsPowers<T, kLog>>(normalize, held);
      part.Store(p.out, u, held);
    }
  }
}

template <typename T, Op kOp, int kThreads, int kCluster>
__global__ void __launch_bounds__(kThreads, 1536 / kThreads)
    BlockKernel(const __grid_constant__ Params p, int block_units) {
#if JAX_FASTOPS_HAS_CLUSTERS
  BlockOfRow<T, kOp, kThreads, kCluster>(p, block_units);
#else  // cluster kernels are never launched here
  if constexpr (kCluster == 1) BlockOfRow<T, kOp, kThreads, 1>(p, block_units);
#endif
}

// -------------------------------------------------------------------------------------------------
// Rows that are read twice
//
// Blocks draw tickets. A ticket means either to reduce a chunk of a row or to write one. Reductions
// run ahead of the writes by `lead` chunks. The lead is large enough that the last chunk of a row
// is reduced about when the first write of the row is drawn, and small enough that the row is still
// in L2. A write waits only for tickets that were drawn before it, and reductions wait for nothing.
// So there is no deadlock, however few blocks run at once.
//
// A ticket costs its block one barrier. The next ticket is drawn before the current one is
// finished.

inline constexpr int kLongThreads = 256;
inline constexpr int kLongWarps = kLongThreads / 32;

inline constexpr int kLongUnits = 4;  // per thread
inline constexpr int kBatchUnits = kLongThreads * kLongUnits;

// Located in the workspace. The counters start at 0.
struct LongParams {
  uint32_t* ticket;
  uint32_t* done;   // of each row: chunks that are reduced
  uint32_t* ready;  // of each row: whether its results are available
  void* results;    // of each row: the sum and, in the forward, the maximum
  void* partials;   // of each chunk of each row: the same
  int64_t chunks;   // per row
  int batches;      // per chunk; a block holds one batch in registers
  int64_t lead;
};

// The maximum and the sum over the lanes of a warp. While the maximum is -inf, nothing is
// subtracted.
template <typename T, bool kGrad>
struct LongSum {
  using A = ComputeType<T>;
  using Warp = RowGroup<32>;

  A total[1] = {};
  A top[1] = {Max::Identity<A>()};

  __device__ __forceinline__ void AllReduce(A scale) {
    typename Warp::template Scratch<A, 1> scratch;
    int phase = 0;
    if constexpr (!kGrad) {
      const A own = top[0];
      Warp::AllReduce(Max(), top, scratch, phase);
      total[0] = Corrected(total[0], own, top[0], scale);
    }
    Warp::AllReduce(Sum(), total, scratch, phase);
  }
  // Adds another sum and maximum, as stored, to those of this lane.
  __device__ __forceinline__ void Add(A other_total, A other_top, A scale) {
    if constexpr (kGrad) {
      total[0] += other_total;
    } else {
      const A both = fmax(top[0], other_top);
      total[0] =
          Corrected(total[0], top[0], both, scale) + Corrected(other_total, other_top, both, scale);
      top[0] = both;
    }
  }
};

template <typename T, Op kOp>
__global__ void __launch_bounds__(kLongThreads, 4)
    LongKernel(const __grid_constant__ Params p, const __grid_constant__ LongParams q) {
  using A = ComputeType<T>;
  using Part = Stretch<T, 16>;
  constexpr bool kGrad = IsGrad(kOp);
  constexpr bool kLog = IsLog(kOp);
  constexpr int kValues = kGrad ? 1 : 2;

  __shared__ A of_warps[2][kValues][kLongWarps];
  __shared__ uint32_t drawn[2];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t jobs = p.outer * q.chunks, size = p.outer * p.n;
  const A scale = static_cast<A>(p.scale);
  const T excluded = Excluded<T, kOp>(scale);
  [[maybe_unused]] const T zero = FromCompute<T>(0);
  A* const results = static_cast<A*>(q.results);
  A* const partials = static_cast<A*>(q.partials);

  if (threadIdx.x == 0) drawn[1] = atomicAdd(q.ticket, 1u);
  __syncthreads();
  int64_t ticket = drawn[1];
  for (int phase = 0; ticket < 2 * jobs; phase ^= 1) {
    uint32_t next = 0;
    if (threadIdx.x == 0) next = atomicAdd(q.ticket, 1u);

    // The order of tickets: `lead` reductions, then writes and reductions in alternation, then the
    // remaining writes.
    bool write = false;
    int64_t job = ticket;
    if (ticket >= 2 * jobs - q.lead) {
      write = true;
      job = ticket - jobs;
    } else if (ticket >= q.lead) {
      write = (ticket - q.lead) % 2 == 0;
      job = (ticket - q.lead) / 2 + (write ? 0 : q.lead);
    }
    const int64_t row = job / q.chunks, chunk_units = int64_t{q.batches} * kBatchUnits;
    const int64_t begin = (job - row * q.chunks) * chunk_units;
    const Part part =
        PartOfRow<T, 16>(p, row, begin, min(begin + chunk_units, UnitsOfRow<T, 16>(p, row)));
    const int units = part.units();

    LongSum<T, kGrad> sum;
    Normalizer<T, kLog> normalize(scale, A(0));
    Gradient<T, kLog> gradient(scale, A(0), p.skip_zeros);
    bool undefined = false;
    for (int first = threadIdx.x; first - static_cast<int>(threadIdx.x) < units;
         first += kBatchUnits) {
      typename Part::H a[kLongUnits];
      [[maybe_unused]] typename Part::H b[kGrad ? kLongUnits : 1];
      const auto unit = [&](int k) { return first + k * kLongThreads; };
#pragma unroll
      for (int k = 0; k < kLongUnits; ++k) {
        a[k] = part.Load(p.a, size, unit(k), excluded);
        if constexpr (kGrad) b[k] = part.Load(p.b, size, unit(k), zero);
      }
      if (!kGrad && p.zero_scale) {
#pragma unroll
        for (int k = 0; k < kLongUnits; ++k) part.TimesZero(unit(k), a[k], excluded);
      }
      if (kOp != Op::kSoftmaxGrad && p.mask != nullptr) {
        const auto exclude = [&](int k, const typename Part::Keep& keep) {
          a[k].Exclude(keep, excluded);
          if constexpr (kGrad) b[k].Exclude(keep, zero);
        };
#pragma unroll
        for (int k = 0; k < kLongUnits; ++k) {
          if (p.mask_units) {
            exclude(k, part.LoadMask(unit(k)));
          } else {
            exclude(k, part.GatherMask(p, unit(k)));
          }
        }
      }
      const auto forget = [&] {
#pragma unroll
        for (int k = 0; k < kLongUnits; ++k) {
          a[k].Forget();
          if constexpr (kGrad) b[k].Forget();
        }
      };
      forget();

      if (write) {
        if (first == static_cast<int>(threadIdx.x)) {  // the loads of the first batch are in flight
          if (threadIdx.x == 0) {
            while (*static_cast<volatile uint32_t*>(q.ready + row) == 0) __nanosleep(100);
            __threadfence();
          }
          __syncthreads();
          const A total = __ldcg(results + kValues * row);
          if constexpr (kGrad) {
            undefined = kLog && p.mask != nullptr && gradient.Undefined(total, scale);
            gradient = Gradient<T, kLog>(scale, total, p.skip_zeros);
          } else {
            undefined = p.mask != nullptr && normalize.Undefined(total);
            normalize.top = TopElement(__ldcg(results + kValues * row + kValues - 1), scale);
            normalize.SetTotal(total);
          }
          if (undefined) {
            StoreUndefined<kOp>(p, part, threadIdx.x, kLongThreads, total);
            break;
          }
        }
#pragma unroll
        for (int k = 0; k < kLongUnits; ++k) {
          if constexpr (kGrad) {
            ToGradient(gradient, a[k], b[k]);
          } else {
            ToResult<false>(normalize, a[k]);
          }
          part.template Store<CacheHint::kEvictFirst>(p.out, unit(k), a[k]);
        }
      } else if constexpr (kGrad) {
#pragma unroll
        for (int k = 0; k < kLongUnits; ++k) AddTerms<kLog>(a[k], b[k], p.skip_zeros, sum.total[0]);
      } else {
        Top<T, 16> top(scale);
#pragma unroll
        for (int k = 0; k < kLongUnits; ++k) top.Add(a[k]);
        forget();
        const A both = Max()(sum.top[0], top.Get());
        normalize.top = PartTopElement(both, scale);
        A total = 0;
#pragma unroll
        for (int k = 0; k < kLongUnits; ++k) {
          A powers[Part::kSize];
          a[k].Unpack(powers);
#pragma unroll
          for (int i = 0; i < Part::kSize; ++i) powers[i] = normalize.Power(powers[i]);
          total += SumOf(powers);
        }
        sum.total[0] = Corrected(sum.total[0], sum.top[0], both, scale) + total;
        sum.top[0] = both;
      }
    }
    if (!write) {
      sum.AllReduce(scale);
      if (lane == 0) {
        of_warps[phase][0][warp] = sum.total[0];
        if constexpr (!kGrad) of_warps[phase][kValues - 1][warp] = sum.top[0];
      }
    }

    if (threadIdx.x == 0) drawn[phase] = next;
    __syncthreads();
    ticket = drawn[phase];

    if (!write && warp == 0) {  // the other warps continue
      sum = LongSum<T, kGrad>();
      if (lane < kLongWarps) {
        sum.total[0] = of_warps[phase][0][lane];
        if constexpr (!kGrad) sum.top[0] = of_warps[phase][kValues - 1][lane];
      }
      sum.AllReduce(scale);
      bool is_last = false;
      if (lane == 0) {
        partials[kValues * job] = sum.total[0];
        if constexpr (!kGrad) partials[kValues * job + kValues - 1] = sum.top[0];
        __threadfence();
        is_last = atomicAdd(q.done + row, 1u) == q.chunks - 1;
        __threadfence();
      }
      if (__shfl_sync(0xffffffffu, is_last, 0)) {
        const A* const of_row = partials + kValues * row * q.chunks;
        sum = LongSum<T, kGrad>();
#pragma unroll 4
        for (int64_t c = lane; c < q.chunks; c += 32) {
          sum.Add(__ldcg(of_row + kValues * c), __ldcg(of_row + kValues * c + kValues - 1), scale);
        }
        sum.AllReduce(scale);
        if (lane == 0) {
          // The row has only -inf, so it is undefined, as in all other kernels.
          if (!kGrad && IsBottom(sum.top[0], scale)) sum.total[0] = A(NAN);
          results[kValues * row] = sum.total[0];
          if constexpr (!kGrad) results[kValues * row + kValues - 1] = sum.top[0];
          __threadfence();
          atomicExch(q.ready + row, 1u);
        }
      }
    }
  }
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_ROWS_CUH_

// Softmax along the minor axis for rows that do not fit into a cluster, or for which a cluster is
// slower: a gang of blocks, up to all blocks of the device, holds a row.
//
// Blocks are persistent, one per SM, and go from row to row. A thread holds its part of the row in
// registers. In addition, shared memory is a ring of slots that each belong to one thread. The
// parts of the following rows are copied into it asynchronously. So loads are always in flight,
// even while a gang waits for its slowest block, and a row is read only once.
//
// The blocks of a gang exchange sums through global memory and wait for each other. So a launch
// whose gangs have more than one block must be cooperative: all blocks have to run at once.
#ifndef JAX_FASTOPS_SOFTMAX_GANG_CUH_
#define JAX_FASTOPS_SOFTMAX_GANG_CUH_

#include <cstdint>

#include "core/cuda/async_copy.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/unit.cuh"
#include "softmax/math.cuh"
#include "softmax/plan.h"
#include "softmax/rows.cuh"

namespace jax_fastops::cuda::softmax {

// The thread's k-th unit of a part.
__device__ __forceinline__ int GangUnit(int k) {
  return static_cast<int>(threadIdx.x) + k * kGangThreads;
}

// The maximum and the sum over the lanes of a warp. While the maximum is -inf, nothing is
// subtracted.
template <typename T, bool kGrad>
struct PartSum {
  using A = ComputeType<T>;

  A total[1] = {};
  A top[1] = {Max::Identity<A>()};

  __device__ __forceinline__ void AllReduce(A scale) {
    using Warp = RowGroup<32>;
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

// A thread's copies, numbered in the order in which they begin. A row takes kPerRow of them:
// kGangUnits of the first array and, in the backward, as many of the second. Copy c uses slot c %
// kSlots as soon as copy c - kSlots is no longer needed.
template <typename T, bool kGrad, bool kLog>
struct GangRing {
  using Part = Stretch<T, 16>;
  using H = typename Part::H;
  static constexpr int kPerRow = kGangUnits * (kGrad ? 2 : 1);
  static constexpr int kSlots = kGangSlots;
  // How many rows ahead copies may begin.
  static constexpr int kAhead = (kPerRow + kSlots - 1) / kPerRow;

  const Params& p;
  uint4* slots;
  int first;  // the slot of the row's first copy

  __device__ __forceinline__ GangRing(const Params& p, uint4* shared)
      : p(p), slots(shared + threadIdx.x), first(0) {}

  __device__ __forceinline__ uint4* Slot(int copy) const {
    int slot = first + copy % kSlots;
    if (slot >= kSlots) slot -= kSlots;
    return slots + slot * kGangThreads;
  }

  __device__ __forceinline__ void Advance() {
    first += kPerRow % kSlots;
    if (first >= kSlots) first -= kSlots;
  }

  // Begins the copy of a unit, if the part contains the whole unit. Commits a copy group in any
  // case.
  __device__ __forceinline__ void Begin(const Part& part, int of_row, uint4* slot) const {
    const int unit = GangUnit(of_row % kGangUnits);
    if (part.IsWhole(unit)) {
      CopyAsync<16, true>(slot, part.Address(of_row < kGangUnits ? p.a : p.b, unit));
    }
    CommitCopies();
  }

  // Begins a copy by its number, counted from the first copy of the current row. `parts` are those
  // of the current row and of the following ones.
  __device__ __forceinline__ void Begin(int copy, const Part (&parts)[kAhead + 1]) const {
    Begin(parts[copy / kPerRow], copy % kPerRow, Slot(copy));
  }

  // Begins as many copies as there are slots.
  __device__ __forceinline__ void BeginAll(const Part (&parts)[kAhead + 1]) const {
#pragma unroll
    for (int row = 0; row <= kAhead; ++row) {
#pragma unroll 1
      for (int k = 0; k < min(kPerRow, kSlots - row * kPerRow); ++k) {
        Begin(parts[row], k, slots + (row * kPerRow + k) * kGangThreads);
      }
    }
  }

  // Prepares the copied units of a row, from number `copy` on, for the computation. It loads the
  // units that are only partly in the part, and then applies the mask and a scale of zero.
  __device__ __forceinline__ void Complete(const Part& part, int copy, T outside) const {
    const int units = part.units();
    const void* array = copy < kGangUnits ? p.a : p.b;
#pragma unroll 1
    for (int end = 0; end < 2; ++end) {
      const int unit = end == 0 ? 0 : units - 1;
      if (units == 0 || part.IsWhole(unit) || unit % kGangThreads != threadIdx.x) continue;
      part.CopyEnd(array, unit, outside, reinterpret_cast<T*>(Slot(copy + unit / kGangThreads)));
    }
    const bool masked = (!kGrad || kLog) && p.mask != nullptr;
    const bool zero = !kGrad && p.zero_scale;
    if (!masked && !zero) return;
    constexpr int kBatch = 4;
#pragma unroll 1
    for (int start = 0; GangUnit(start) < units; start += kBatch) {
      typename Part::Keep keep[kBatch];
      if (masked) {
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int unit = GangUnit(start + k);
          keep[k] = p.mask_units ? part.LoadMask(unit) : part.GatherMask(p, unit);
        }
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (GangUnit(start + k) >= units) break;
        uint4* const slot = Slot(copy + start + k);
        H held = H::Load(slot);
        if (zero) part.TimesZero(GangUnit(start + k), held, outside);
        if (masked) held.Exclude(keep[k], outside);
        held.Store(slot);
      }
    }
  }
};

// Stores the results of a part. Units that are only partly in the part wait in shared memory until
// the others are stored.
template <typename T>
struct GangStores {
  using Part = Stretch<T, 16>;
  using H = typename Part::H;
  using Ends = T[2][H::kSize];

  T* out;
  Ends& ends;

  __device__ __forceinline__ void Store(const Part& part, int k, const H& result) const {
    const int unit = GangUnit(k);
    if (part.IsWhole(unit)) {
      result.Store(const_cast<T*>(part.Address(out, unit)));
    } else if (unit < part.units()) {
      result.Store(ends[unit == 0 ? 0 : 1]);
    }
  }

  __device__ __forceinline__ void Finish(const Part& part) const {
    const int units = part.units();
#pragma unroll 1
    for (int end = 0; end < 2; ++end) {
      const int unit = end == 0 ? 0 : units - 1;
      if (units == 0 || part.IsWhole(unit) || unit % kGangThreads != threadIdx.x) continue;
#pragma unroll 1
      for (int i = 0; i < H::kSize; ++i) {
        if (part.Has(part.First(unit) + i)) {
          const_cast<T*>(part.Address(out, unit))[i] = ends[unit == 0 ? 0 : 1][i];
        }
      }
    }
  }
};

// Combines the sums, and maxima, of a gang's threads. Blocks exchange them through global memory,
// where all bits are set initially. This bit pattern is never stored as a value, so any other
// pattern says that the value has arrived.
template <typename T, bool kGrad>
struct GangSum {
  static_assert(sizeof(T) < 8, "units of longer types go along no row");
  using Sum = PartSum<T, kGrad>;
  static constexpr int kValues = kGrad ? 1 : 2;
  static constexpr uint32_t kAbsent = 0xffffffffu;

  struct Shared {
    float of_warps[2][kValues][kGangThreads / 32];
    float of_blocks[kValues][kMostGangBlocks];
  };

  Shared& shared;
  uint32_t* partials;
  int blocks;
  int rank;
  int phase;

  __device__ __forceinline__ GangSum(Shared& shared, const GangParams& q, int rank)
      : shared(shared), partials(q.partials), blocks(q.blocks), rank(rank), phase(0) {}

  __device__ __forceinline__ uint32_t* Place(int64_t row, int block) const {
    return partials + kValues * (row * blocks + block);
  }

  // Reduces the threads' sums to that of the block, in every thread, and publishes it to the other
  // blocks.
  __device__ __forceinline__ void Publish(int64_t row, Sum& sum, float scale) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    sum.AllReduce(scale);
    if (lane == 0) {
      shared.of_warps[phase][0][warp] = sum.total[0];
      if constexpr (!kGrad) shared.of_warps[phase][kValues - 1][warp] = sum.top[0];
    }
    __syncthreads();
    sum = Sum();
    if (lane < kGangThreads / 32) {
      sum.total[0] = shared.of_warps[phase][0][lane];
      if constexpr (!kGrad) sum.top[0] = shared.of_warps[phase][kValues - 1][lane];
    }
    sum.AllReduce(scale);
    phase ^= 1;
    if (blocks > 1 && threadIdx.x < kValues) {
      const float value = threadIdx.x == 0 ? sum.total[0] : sum.top[0];
      const uint32_t bits = __float_as_uint(value);
      *static_cast<volatile uint32_t*>(Place(row, rank) + threadIdx.x) =
          bits == kAbsent ? 0x7fffffffu : bits;
    }
  }

  // Combines the sums of the blocks to that of the row.
  __device__ __forceinline__ void Collect(int64_t row, Sum& sum, float scale) {
    if (blocks == 1) return;
    __syncthreads();  // others may still read the values of the last call
    if (threadIdx.x < blocks) {
      const volatile uint32_t* from = Place(row, threadIdx.x);
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        uint32_t bits;
        do {
          bits = from[i];
        } while (bits == kAbsent);
        shared.of_blocks[i][threadIdx.x] = __uint_as_float(bits);
      }
    }
    __syncthreads();
    sum = Sum();
    for (int block = threadIdx.x % 32; block < blocks; block += 32) {
      sum.Add(shared.of_blocks[0][block], shared.of_blocks[kValues - 1][block], scale);
    }
    sum.AllReduce(scale);
  }
};

// A block's place in its gang.
template <typename T>
struct GangPlace {
  using Part = Stretch<T, 16>;
  const Params& p;
  const GangParams& q;
  int gang;
  int rank;

  __device__ __forceinline__ GangPlace(const Params& p, const GangParams& q)
      : p(p), q(q), gang(blockIdx.x / q.blocks), rank(blockIdx.x - gang * q.blocks) {}

  // This block's part of a row; empty for rows after the last one.
  __device__ __forceinline__ Part PartOf(int64_t row) const {
    const int64_t begin = int64_t{rank} * q.block_units;
    const bool live = row < p.outer;
    const int64_t units = live ? UnitsOfRow<T, 16>(p, row) : 0;
    return PartOfRow<T, 16>(p, live ? row : 0, begin, min(begin + q.block_units, units));
  }

  // Shifts `parts` by one row: from those of the previous row to those of `row` and the gang's
  // following rows.
  template <int kCount>
  __device__ __forceinline__ void NextParts(int64_t row, Part (&parts)[kCount]) const {
#pragma unroll
    for (int i = 0; i + 1 < kCount; ++i) parts[i] = parts[i + 1];
    parts[kCount - 1] = PartOf(row + (kCount - 1) * int64_t{q.gangs});
  }
  template <int kCount>
  __device__ __forceinline__ void FirstParts(Part (&parts)[kCount]) const {
#pragma unroll 1  // to limit the code size
    for (int i = 1 - kCount; i <= 0; ++i) NextParts(gang + i * int64_t{q.gangs}, parts);
  }
};

// While a row waits for the other blocks of its gang, this block already sums up the next row.
template <typename T, bool kLog>
__device__ __forceinline__ void GangForward(const Params& p, const GangParams& q, uint4* slots) {
  using A = ComputeType<T>;
  using Ring = GangRing<T, false, kLog>;
  using Part = typename Ring::Part;
  using H = typename Part::H;
  constexpr int kBatch = 4;

  __shared__ typename GangSum<T, false>::Shared shared;
  __shared__ alignas(16) typename GangStores<T>::Ends ends;
  const GangStores<T> stores{static_cast<T*>(p.out), ends};
  const GangPlace<T> place(p, q);
  GangSum<T, false> meeting(shared, q, place.rank);
  const A scale = static_cast<A>(p.scale);
  const T excluded = Excluded<T, false>(kLog, p);

  // The parts of the row to write, of the row to sum up (parts[0]), and of the rows after it.
  Part written{}, parts[Ring::kAhead + 1];
  place.FirstParts(parts);
  Ring ring(p, slots);
  ring.BeginAll(parts);

  H held[kGangUnits];
  PartSum<T, false> last;
  for (int64_t row = place.gang; row - q.gangs < p.outer; row += q.gangs) {
    PartSum<T, false> sum;
    if (row < p.outer) {
      const Part& part = parts[0];
      const int units = part.units();
      AwaitCopies<Ring::kSlots - Ring::kPerRow>();
      ring.Complete(part, 0, excluded);
#pragma unroll 1
      for (int first = 0; first < kGangUnits && GangUnit(first) < units; first += kBatch) {
        H x[kBatch];
        Top<T, 16> top(scale);
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          x[k] = GangUnit(first + k) < units ? H::Load(ring.Slot(first + k)) : H::Filled(excluded);
          top.Add(x[k]);
        }
        const A both = Max()(sum.top[0], top.Get());
        const Normalizer<T> normalize(kLog, scale, PartTopElement(both, scale));
        A total = 0;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          x[k].Forget();
          AddPowers(normalize, x[k], total);
        }
        sum.total[0] = Corrected(sum.total[0], sum.top[0], both, scale) + total;
        sum.top[0] = both;
      }
      meeting.Publish(row, sum, scale);
    }

    const int64_t to_write = row - q.gangs;
    const bool writes = to_write >= 0;
    if (writes) meeting.Collect(to_write, last, scale);
    // The row has only -inf, so it is undefined, as in all other kernels.
    const A total = IsBottom(last.top[0], scale) ? A(NAN) : last.total[0];
    Normalizer<T> normalize(kLog, scale, TopElement(last.top[0], scale));
    normalize.SetTotal(total);
    const bool undefined = p.mask != nullptr && normalize.Undefined(total);
    if (writes && undefined) {
      StoreUndefined<false>(p, written, threadIdx.x, kGangThreads, total);
    }
#pragma unroll
    for (int k = 0; k < kGangUnits; ++k) {
      if (writes && !undefined && GangUnit(k) < written.units()) {
        ToResult<false>(normalize, held[k]);
        stores.Store(written, k, held[k]);
      }
      held[k] = H::Load(ring.Slot(k));  // outside the part's units: arbitrary, never stored
      ring.Begin(k + Ring::kSlots, parts);
    }
    if (writes && !undefined) stores.Finish(written);

    last = sum;
    ring.Advance();
    written = parts[0];
    place.NextParts(row + q.gangs, parts);
  }
}

// y moves to registers and dy stays in the ring. The ring has no room for a whole second row, only
// for the part of it that is being copied.
template <typename T, bool kLog>
__device__ __forceinline__ void GangBackward(const Params& p, const GangParams& q, uint4* slots) {
  using A = ComputeType<T>;
  using Ring = GangRing<T, true, kLog>;
  using Part = typename Ring::Part;
  using H = typename Part::H;
  constexpr int kPending = Ring::kSlots - kGangUnits;

  __shared__ typename GangSum<T, true>::Shared shared;
  __shared__ alignas(16) typename GangStores<T>::Ends ends;
  const GangStores<T> stores{static_cast<T*>(p.out), ends};
  const GangPlace<T> place(p, q);
  GangSum<T, true> meeting(shared, q, place.rank);
  const A scale = static_cast<A>(p.scale);
  const T excluded = Excluded<T, true>(kLog, p), zero = FromCompute<T>(0);

  Part parts[Ring::kAhead + 1];
  place.FirstParts(parts);
  Ring ring(p, slots);
  ring.BeginAll(parts);

  for (int64_t row = place.gang; row < p.outer; row += q.gangs) {
    const Part& part = parts[0];
    const int units = part.units();
    H y[kGangUnits];
    PartSum<T, true> sum;

    AwaitCopies<kPending>();
    ring.Complete(part, 0, excluded);
#pragma unroll
    for (int k = 0; k < kGangUnits; ++k) {
      y[k] = H::Load(ring.Slot(k));
      ring.Begin(k + Ring::kSlots, parts);
    }
    AwaitCopies<kPending>();
    ring.Complete(part, kGangUnits, zero);
#pragma unroll
    for (int k = 0; k < kGangUnits; ++k) {
      if (GangUnit(k) < units) {
        AddTerms(kLog, y[k], H::Load(ring.Slot(kGangUnits + k)), p.skip_zeros, sum.total[0]);
      }
    }
    meeting.Publish(row, sum, scale);
    meeting.Collect(row, sum, scale);

    const Gradient<T> gradient(kLog, scale, sum.total[0], p.skip_zeros);
    const bool undefined = kLog && p.mask != nullptr && gradient.Undefined(sum.total[0], scale);
    if (undefined) StoreUndefined<true>(p, part, threadIdx.x, kGangThreads, sum.total[0]);
#pragma unroll
    for (int k = 0; k < kGangUnits; ++k) {
      if (GangUnit(k) < units && !undefined) {
        ToGradient(gradient, y[k], H::Load(ring.Slot(kGangUnits + k)));
        stores.Store(part, k, y[k]);
      }
      ring.Begin(kGangUnits + k + Ring::kSlots, parts);
    }
    if (!undefined) stores.Finish(part);

    ring.Advance();
    place.NextParts(row + q.gangs, parts);
  }
}

// The static shared memory must fit into what Limits leaves for it.
static_assert(sizeof(GangSum<float, false>::Shared) + sizeof(GangStores<float>::Ends) <= 2048);

// log_softmax is not a flag here: the kernel is bound by its size in the instruction cache.
template <typename T, bool kGrad, bool kLog>
__global__ void __launch_bounds__(kGangThreads, 1)
    GangKernel(const __grid_constant__ Params p, const __grid_constant__ GangParams q) {
  extern __shared__ uint4 slots[];
  if constexpr (kGrad) {
    GangBackward<T, kLog>(p, q, slots);
  } else {
    GangForward<T, kLog>(p, q, slots);
  }
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_GANG_CUH_

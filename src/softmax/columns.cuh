// Softmax along any axis except the minor one, where adjacent elements belong to different rows.
//
// A block takes a tile: a few adjacent units of inner elements, usually at least 64 bytes, by all
// of n, which is distributed over lanes. A thread stays in one column of units and has a maximum
// and a sum for each element of the unit. A tile that fits into shared memory is copied there
// asynchronously and all at once, and the passes read it from there. As in SharedRowsKernel, a
// thread accesses only what it has copied itself. Larger tiles are read twice, and their sums are
// rescaled when a maximum rises. If there are few such tiles, several blocks share a tile, in two
// launches.
//
// With units of one element the kernel takes any array, also rows along the minor axis. It is the
// only kernel for float64.
#ifndef JAX_FASTOPS_SOFTMAX_COLUMNS_CUH_
#define JAX_FASTOPS_SOFTMAX_COLUMNS_CUH_

#include <cstdint>

#include "core/cuda/async_copy.cuh"
#include "softmax/column.cuh"
#include "softmax/math.cuh"
#include "softmax/plan.h"

namespace jax_fastops::cuda::softmax {

// What a thread of ColumnsKernel knows of its column, and the passes over it.
template <typename T, bool kGrad, bool kLog, int kBytes>
struct ColumnPasses {
  using A = ComputeType<T>;
  using H = Vec<T, kBytes>;
  using Part = Column<T, kGrad, kBytes>;
  static constexpr int kThreads = ColumnThreads(kGrad);
  static constexpr int kSize = H::kSize;
  static constexpr int kBatch = (kBytes >= 8 ? 4 : 8) / (kGrad ? 2 : 1);

  const Params& p;
  const ColumnsParams& q;
  A* scratch;
  int lanes;
  int lane;
  int64_t column;
  bool live;
  int64_t begin;
  int64_t count;  // this thread's units along n
  Part part;
  A scale;
  int places;  // units in shared memory
  H* held_a;
  H* held_b;
  A tops[kSize];
  A totals[kSize];

  __device__ __forceinline__ ColumnPasses(const Params& p, const ColumnsParams& q, uint4* shared)
      : p(p),
        q(q),
        scratch(reinterpret_cast<A*>(shared + q.scratch)),
        lanes(kThreads >> q.log_width),
        lane(q.adjacent ? threadIdx.x & (lanes - 1) : threadIdx.x >> q.log_width),
        column((int64_t{blockIdx.x} << q.log_width) +
               (q.adjacent ? threadIdx.x / lanes : threadIdx.x & ((1 << q.log_width) - 1))),
        live(column < q.columns),
        begin(blockIdx.y * q.chunk + lane),
        count(Count()),
        part(p, kLog, q.row_units, live ? column : 0, begin, lanes),
        scale(static_cast<A>(p.scale)),
        places(q.held ? static_cast<int>(count) : 0),
        held_a(reinterpret_cast<H*>(shared) + threadIdx.x),
        held_b(held_a + (q.chunk + lanes - 1) / lanes * kThreads) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      tops[i] = Max::Identity<A>();
      totals[i] = 0;
    }
  }

  __device__ __forceinline__ int64_t Count() const {
    const int64_t end = live ? min(p.n, (blockIdx.y + 1) * q.chunk) : 0;
    return end > begin ? (end - begin + lanes - 1) / lanes : 0;
  }

  // The unit with this index, before mask and scale are applied.
  __device__ __forceinline__ void Load(int64_t index, H& a, [[maybe_unused]] H& b) const {
    a = part.Load(p.a, index);
    if constexpr (kGrad) b = part.Load(p.b, index);
  }
  __device__ __forceinline__ void Raise(int i, A to) {
    if (to > tops[i]) {
      // While the maximum is -inf, nothing is subtracted, and the sum is 0 or NaN.
      if (totals[i] != 0) totals[i] *= Exp((tops[i] - to) * fabs(scale));
      tops[i] = to;
    }
  }
  __device__ __forceinline__ A TopOf(int i) const { return PartTopElement(tops[i], scale); }
  // Replaces the elements of a unit by their exponentials, and adds these to the sums.
  __device__ __forceinline__ void AddPowers(A (&xs)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      xs[i] = Normalizer<T>(kLog, scale, TopOf(i)).Power(xs[i]);
      totals[i] += xs[i];
    }
  }

  // Copies the column into shared memory.
  __device__ __forceinline__ void Copy() {
    [[maybe_unused]] const T* from_a = part.Address(p.a, 0);
    [[maybe_unused]] const T* from_b = kGrad ? part.Address(p.b, 0) : nullptr;
#pragma unroll 4
    for (int k = 0; k < places; ++k) {
      if constexpr (kBytes >= 4) {
        CopyAsync<kBytes, kBytes == 16>(held_a + k * kThreads, from_a);
        if constexpr (kGrad) CopyAsync<kBytes, kBytes == 16>(held_b + k * kThreads, from_b);
        from_a += part.step;
        if constexpr (kGrad) from_b += part.step;
      } else if (k % kBatch == 0) {
        H a[kBatch], b[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (k + i < places) Load(k + i, a[i], b[i]);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (k + i < places) {
            a[i].Store(held_a + (k + i) * kThreads);
            if constexpr (kGrad) b[i].Store(held_b + (k + i) * kThreads);
          }
        }
      }
    }
    AwaitAllCopies();
  }

  // Applies mask and scale, and finds the top elements, or in the backward adds up the terms.
  __device__ __forceinline__ void FirstPassHeld() {
    const bool changes = part.Changes();
    [[maybe_unused]] ColumnTops<T, kBytes> largest(scale);
#pragma unroll 4
    for (int k = 0; k < places; ++k) {
      H a = H::Load(held_a + k * kThreads), b;
      if constexpr (kGrad) b = H::Load(held_b + k * kThreads);
      if (changes) {
        part.Change(k, a, b);
        a.Store(held_a + k * kThreads);
        if constexpr (kGrad) b.Store(held_b + k * kThreads);
      }
      if constexpr (kGrad) {
        AddColumnTerms(kLog, a, b, p.skip_zeros, totals);
      } else {
        largest.Add(a);
      }
    }
    if constexpr (!kGrad) largest.Get(tops);
  }

  // The same for a column that is not held; the forward also adds up the exponentials.
  __device__ __forceinline__ void FirstPassRead() {
    const bool changes = part.Changes();
    for (int64_t first = 0; first < count; first += kBatch) {
      H a[kBatch], b[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (first + k < count) {
          Load(first + k, a[k], b[k]);
        } else {
          a[k] = H::Filled(part.excluded);
          b[k] = H::Filled(FromCompute<T>(0));
        }
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (changes && first + k < count) part.Change(first + k, a[k], b[k]);
        a[k].Forget();
      }
      if constexpr (kGrad) {
#pragma unroll
        for (int k = 0; k < kBatch; ++k) AddColumnTerms(kLog, a[k], b[k], p.skip_zeros, totals);
      } else {
        AddBatch(a);
      }
    }
  }

  __device__ __forceinline__ void AddBatch(H (&a)[kBatch]) {
    A largest[kSize], as[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) largest[i] = Max::Identity<A>();
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      a[k].Unpack(as);
#pragma unroll
      for (int i = 0; i < kSize; ++i) largest[i] = Max()(largest[i], scale < 0 ? -as[i] : as[i]);
      a[k].Forget();
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) Raise(i, largest[i]);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      a[k].Unpack(as);
      AddPowers(as);
    }
  }

  // Adds up what the blocks of the first launch have written.
  __device__ __forceinline__ void ReadPartials() {
    if (!live) return;
    for (int64_t c = lane; c < q.chunks; c += lanes) {
      const A* partial = static_cast<const A*>(q.partials) + (2 * c * q.columns + column) * kSize;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        A total = partial[q.columns * kSize + i];
        if constexpr (!kGrad) {
          Raise(i, partial[i]);
          if (total != 0) total *= Exp((partial[i] - tops[i]) * fabs(scale));
        }
        totals[i] += total;
      }
    }
  }
  __device__ __forceinline__ void WritePartials() const {
    if (lane != 0 || !live) return;
    A* partial =
        static_cast<A*>(q.partials) + (2 * int64_t{blockIdx.y} * q.columns + column) * kSize;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if constexpr (!kGrad) partial[i] = tops[i];
      partial[q.columns * kSize + i] = totals[i];
    }
  }

  // Reduces over the lanes.
  template <typename Op>
  __device__ __forceinline__ void Reduce(Op op, A (&values)[kSize]) const {
    if (q.adjacent) {
      ReduceAdjacent(op, values, lanes);
    } else {
      ReduceLanes(op, values, scratch, q.log_width, kThreads);
    }
  }

  __device__ __forceinline__ void ReduceTops() {
    A top[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) top[i] = tops[i];
    Reduce(Max(), top);
#pragma unroll
    for (int i = 0; i < kSize; ++i) Raise(i, top[i]);
  }

  __device__ __forceinline__ void AddPowersHeld() {
#pragma unroll 4
    for (int k = 0; k < places; ++k) {
      A as[kSize];
      H a = H::Load(held_a + k * kThreads);
      a.Unpack(as);
      AddPowers(as);
      if (kKeepsPowers<T> && !kLog) {
        a.Pack(as);
        a.Store(held_a + k * kThreads);
      }
    }
  }

  // Writes the results.
  __device__ __forceinline__ void Write() {
    if constexpr (!kGrad) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (IsBottom(tops[i], scale)) totals[i] = A(NAN);
      }
    }
    const uint32_t undefined =
        ToFactors<kGrad, T>(p, kLog, [&](int i) { return TopOf(i); }, totals);
    const auto store = [&](int64_t index, T* to, H& a, const H& b) {
      ToColumnResults<kGrad>(
          p, kLog, kKeepsPowers<T> && q.held, totals, [&](int i) { return TopOf(i); }, a, b);
      if (undefined != 0) {  // rare; excluded elements of such rows are known only from the mask
        auto results = a.Get();
        const auto keep = part.LoadMask(index);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if ((undefined >> i & 1) != 0 && keep.elements[i] == 0) {
            results.elements[i] = ExcludedResult<T, kGrad>(kLog);
          }
        }
        a = H(results);
      }
      a.Store(to);
    };
    if (q.held) {
      T* to = part.Address(p.out, 0);
#pragma unroll 4
      for (int k = 0; k < places; ++k) {
        H a = H::Load(held_a + k * kThreads), b;
        if constexpr (kGrad) b = H::Load(held_b + k * kThreads);
        store(k, to, a, b);
        to += part.step;
      }
      return;
    }
    const bool changes = part.Changes();
    for (int64_t first = 0; first < count; first += kBatch) {
      H a[kBatch], b[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (first + k < count) Load(first + k, a[k], b[k]);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (first + k >= count) break;
        if (changes) part.Change(first + k, a[k], b[k]);
        store(first + k, part.Address(p.out, first + k), a[k], b[k]);
      }
    }
  }
};

template <typename T, bool kGrad, bool kLog, int kBytes>
__device__ __forceinline__ void NormalizeColumn(const Params& p, const ColumnsParams& q,
                                                uint4* shared) {
  ColumnPasses<T, kGrad, kLog, kBytes> passes(p, q, shared);
  if (q.stage == RowStage::kWrite) {
    passes.ReadPartials();
  } else if (q.held) {
    passes.Copy();
    passes.FirstPassHeld();
  } else {
    passes.FirstPassRead();
  }
  if constexpr (!kGrad) {
    passes.ReduceTops();
    if (q.held) passes.AddPowersHeld();
  }
  passes.Reduce(Sum(), passes.totals);
  if (q.stage == RowStage::kReduce) {
    passes.WritePartials();
  } else {
    passes.Write();
  }
}

// log_softmax has code of its own: a branch within each pass would stand between its units.
template <typename T, bool kGrad, int kBytes>
__global__ void __launch_bounds__(ColumnThreads(kGrad), kGrad ? 2 : 3)
    ColumnsKernel(const __grid_constant__ Params p, const __grid_constant__ ColumnsParams q) {
  extern __shared__ uint4 shared[];
  Branch(p.log, [&](auto is_log) {
    NormalizeColumn<T, kGrad, decltype(is_log)::value, kBytes>(p, q, shared);
  });
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_COLUMNS_CUH_

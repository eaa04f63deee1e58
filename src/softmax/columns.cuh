// Softmax along any axis except the minor one, where adjacent elements belong to different rows.
//
// A block takes a tile: a few adjacent units of inner elements, usually at least 64 bytes, by all
// of n, which is distributed over lanes. A thread stays in one column of units and has a maximum
// and a sum for each element of the unit. A tile that fits into shared memory is copied there
// asynchronously and all at once, and the passes read it from there. As in BlockKernel, a thread
// accesses only what it has copied itself. Larger tiles are read twice, and their sums are rescaled
// when a maximum rises. If there are few such tiles, several blocks share a tile, in two launches.
//
// With units of one element the kernel takes any array, also rows along the minor axis. It is the
// only kernel for float64, and takes the rows that no other kernel holds: a row of whole units is a
// column of units, whose sums are folded into one.
#ifndef JAX_FASTOPS_SOFTMAX_COLUMNS_CUH_
#define JAX_FASTOPS_SOFTMAX_COLUMNS_CUH_

#include <cstdint>

#include "core/cuda/async_copy.cuh"
#include "core/cuda/row_group.cuh"
#include "core/cuda/unit.cuh"
#include "core/fast_divide.h"
#include "softmax/math.cuh"
#include "softmax/plan.h"

namespace jax_fastops::cuda::softmax {

// A thread's part of one column of units: every `lanes`-th index of n, starting at `first`.
template <typename T, bool kGrad, int kBytes>
struct Column {
  using H = Held<T, kBytes>;
  using Keep = Unit<uint8_t, H::kSize>;

  const Params& p;
  T excluded;
  int64_t origin;  // of the first unit, in elements of the array
  int64_t step;
  const uint8_t* mask;  // of the first unit
  int64_t mask_step;

  // `column` is the index among the units of all of outer and inner.
  __device__ __forceinline__ Column(const Params& p, bool log, const FastDivisor64& row_units,
                                    int64_t column, int64_t first, int lanes)
      : p(p),
        excluded(Excluded<T, kGrad>(log, p)),
        step(p.inner * lanes),
        mask(p.mask),
        mask_step(p.mask_stride * lanes) {
    const int64_t outer = Divide(static_cast<uint64_t>(column), row_units);
    const int64_t in_row = (column - outer * static_cast<int64_t>(row_units.divisor)) * H::kSize;
    origin = (outer * p.n + first) * p.inner + in_row;
    if (mask != nullptr) {
      mask += p.mask_outer.Offset(outer) + p.mask_inner.Offset(in_row) + first * p.mask_stride;
    }
  }

  // The unit with this index in the thread's part.
  __device__ __forceinline__ T* Address(const void* array, int64_t index) const {
    return const_cast<T*>(static_cast<const T*>(array)) + (origin + index * step);
  }
  __device__ __forceinline__ H Load(const void* array, int64_t index) const {
    return H::template Load<CacheHint::kNoAllocate>(Address(array, index));
  }
  __device__ __forceinline__ Keep LoadMask(int64_t index) const {
    const uint8_t* bytes = mask + index * mask_step;
    if (p.mask_units) return Keep::Load(bytes);
    Keep keep;  // broadcast over inner, or a unit of one element
#pragma unroll
    for (int i = 0; i < H::kSize; ++i) keep.elements[i] = *bytes;
    return keep;
  }

  // Applies the mask and a scale of zero. Changes() says whether there is anything to apply.
  __device__ __forceinline__ bool Changes() const {
    return mask != nullptr || (!kGrad && p.zero_scale);
  }
  __device__ __forceinline__ void TimesZero(H& a) const {
    a.TimesZero([](int) { return true; }, excluded);
  }
  __device__ __forceinline__ void Exclude(const Keep& keep, H& a, [[maybe_unused]] H& b) const {
    a.Exclude(keep, excluded);
    if constexpr (kGrad) b.Exclude(keep, FromCompute<T>(0));
  }
  __device__ __forceinline__ void Change(int64_t index, H& a, H& b) const {
    if (!kGrad && p.zero_scale) TimesZero(a);
    if (mask != nullptr) Exclude(LoadMask(index), a, b);
  }
};

// The maximum for each element of a unit; see Top.
template <typename T, int kBytes>
struct ColumnTops {
  using A = ComputeType<T>;
  using H = Held<T, kBytes>;
  static constexpr int kSize = H::kSize;

  A values[kSize];
  PairOf<std::conditional_t<sizeof(T) == 2, T, __half>> pairs[H::kWords];
  bool negative;

  explicit __device__ __forceinline__ ColumnTops(A scale) : negative(scale < 0) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = Max::Identity<A>();
    if constexpr (H::kPairs) {
#pragma unroll
      for (int i = 0; i < H::kWords; ++i) {
        pairs[i] = H::Filled(FromCompute<T>(-A(INFINITY))).Pair(0);
      }
    }
  }
  __device__ __forceinline__ void Add(const H& x) {
    if constexpr (H::kPairs) {
      const uint32_t sign = negative ? 0x80008000u : 0u;
#pragma unroll
      for (int i = 0; i < H::kWords; ++i) {
        H flipped;
        flipped.words[0] = x.words[i] ^ sign;
        pairs[i] = __hmax2(pairs[i], flipped.Pair(0));
      }
    } else {
      A xs[kSize];
      x.Unpack(xs);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = Max()(values[i], negative ? -xs[i] : xs[i]);
    }
  }
  __device__ __forceinline__ void Get(A (&tops)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) tops[i] = values[i];
    if constexpr (H::kPairs) {
#pragma unroll
      for (int i = 0; i < H::kWords; ++i) {
        tops[2 * i] = ToCompute(pairs[i].x);
        tops[2 * i + 1] = ToCompute(pairs[i].y);
      }
    }
  }
};

// Adds the terms of each element of a unit to its sum.
template <typename T, int kBytes>
__device__ __forceinline__ void AddColumnTerms(bool log, const Held<T, kBytes>& y,
                                               const Held<T, kBytes>& dy, bool skip_zeros,
                                               ComputeType<T> (&totals)[Held<T, kBytes>::kSize]) {
  constexpr int kSize = Held<T, kBytes>::kSize;
  Branch(log, [&](auto is_log) {
    ComputeType<T> ys[kSize], dys[kSize];
    y.Unpack(ys);
    dy.Unpack(dys);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      totals[i] += Gradient<T>::Term(is_log, ys[i], dys[i], skip_zeros);
    }
  });
}

// Replaces the elements of a unit by their results. `kept` says that they are exponentials.
// `factors` are Normalizer::last or Gradient::sum of each element, and tops(i) its top element.
template <bool kGrad, typename T, int kBytes, typename Tops>
__device__ __forceinline__ void ToColumnResults(
    const Params& p, bool log, bool kept, const ComputeType<T> (&factors)[Held<T, kBytes>::kSize],
    const Tops& tops, Held<T, kBytes>& a, [[maybe_unused]] const Held<T, kBytes>& b) {
  using A = ComputeType<T>;
  constexpr int kSize = Held<T, kBytes>::kSize;
  const A scale = static_cast<A>(p.scale);
  Branch(log, [&](auto is_log) {
    A as[kSize];
    a.Unpack(as);
    if constexpr (kGrad) {
      A bs[kSize];
      b.Unpack(bs);
      Gradient<T> gradient(is_log, scale, A(0), p.skip_zeros);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        gradient.sum = factors[i];
        as[i] = gradient(as[i], bs[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        Normalizer<T> normalize(is_log, scale, tops(i));
        normalize.last = factors[i];
        as[i] = kept && !is_log ? as[i] * normalize.last : normalize(as[i]);
      }
    }
    a.Pack(as);
  });
}

// Replaces the sums of each element by the factors of ToColumnResults. Returns a bit for each
// element whose row is undefined; 0 if there is no mask.
template <bool kGrad, typename T, int kSize, typename Tops>
__device__ __forceinline__ uint32_t ToFactors(const Params& p, bool log, const Tops& tops,
                                              ComputeType<T> (&totals)[kSize]) {
  using A = ComputeType<T>;
  const A scale = static_cast<A>(p.scale);
  uint32_t undefined = 0;
  if ((!kGrad || log) && p.mask != nullptr) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      bool is_undefined;
      if constexpr (kGrad) {
        is_undefined = Gradient<T>::Undefined(totals[i], scale);
      } else {
        is_undefined = Normalizer<T>::Undefined(totals[i]);
      }
      undefined |= uint32_t{is_undefined} << i;
    }
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if constexpr (kGrad) {
      totals[i] = Gradient<T>(log, scale, totals[i], false).sum;
    } else {
      Normalizer<T> normalize(log, scale, tops(i));
      normalize.SetTotal(totals[i]);
      totals[i] = normalize.last;
    }
  }
  return undefined;
}

// Reduces each of `values` over the lanes of a column, which are adjacent threads of a warp.
template <typename Op, typename A, int kSize>
__device__ __forceinline__ void ReduceAdjacent(Op op, A (&values)[kSize], int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      values[i] = op(values[i], __shfl_xor_sync(0xffffffffu, values[i], step));
    }
  }
}

// Reduces each of `values` over the lanes of a column. `threads` are those of the tile: the whole
// block, or 32 if each warp has its own tile. The lanes of a column are 1 << log_width threads
// apart. `scratch` has room for the `values` of all columns of the tile, once per warp or once per
// lane, whichever is fewer.
template <typename Op, typename A, int kSize>
__device__ __forceinline__ void ReduceLanes(Op op, A (&values)[kSize], A* scratch, int log_width,
                                            int threads) {
  constexpr int kPiece = kSize * sizeof(A) < 16 ? kSize * sizeof(A) : 16;
  using Piece = Unit<A, kPiece>;
  const int width = 1 << log_width;
  for (int lanes = width; lanes < 32; lanes *= 2) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      values[i] = op(values[i], __shfl_xor_sync(0xffffffffu, values[i], lanes));
    }
  }
  const int parts = threads / max(width, 32);
  if (parts == 1) return;
  const int column = threadIdx.x & (width - 1);
  const int part = width < 32 ? threadIdx.x / 32 : threadIdx.x >> log_width;
  __syncthreads();  // others may still read the values of the last reduction
  if (threadIdx.x % 32 < width) {
#pragma unroll
    for (int at = 0; at < kSize; at += Piece::kSize) {
      Piece piece;
#pragma unroll
      for (int i = 0; i < Piece::kSize; ++i) piece.elements[i] = values[at + i];
      piece.Store(scratch + (part * width + column) * kSize + at);
    }
  }
  __syncthreads();
  // One thread combines each value. If every thread combined all that it needs, the number of
  // instructions would multiply.
  for (int at = threadIdx.x; at < width * kSize; at += threads) {
    A value = scratch[at];
#pragma unroll 4
    for (int other = 1; other < parts; ++other) {
      value = op(value, scratch[other * width * kSize + at]);
    }
    scratch[at] = value;
  }
  __syncthreads();
#pragma unroll
  for (int at = 0; at < kSize; at += Piece::kSize) {
    const Piece piece = Piece::Load(scratch + column * kSize + at);
#pragma unroll
    for (int i = 0; i < Piece::kSize; ++i) values[at + i] = piece.elements[i];
  }
}

// What a thread of ColumnsKernel knows of its column, and the passes over it.
template <typename T, bool kGrad, int kBytes>
struct ColumnPasses {
  using A = ComputeType<T>;
  using H = Held<T, kBytes>;
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
        part(p, p.log, q.row_units, live ? column : 0, begin, lanes),
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
      if (totals[i] != 0) totals[i] *= ExpOf((tops[i] - to) * fabs(scale));
      tops[i] = to;
    }
  }
  __device__ __forceinline__ A TopOf(int i) const { return PartTopElement(tops[i], scale); }
  // Replaces the elements of a unit by their exponentials, and adds these to the sums.
  __device__ __forceinline__ void AddPowers(A (&xs)[kSize]) {
    Branch(p.log, [&](auto is_log) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        xs[i] = Normalizer<T>(is_log, scale, TopOf(i)).Power(xs[i]);
        totals[i] += xs[i];
      }
    });
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
        AddColumnTerms(p.log, a, b, p.skip_zeros, totals);
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
        for (int k = 0; k < kBatch; ++k) AddColumnTerms(p.log, a[k], b[k], p.skip_zeros, totals);
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
          if (total != 0) total *= ExpOf((partial[i] - tops[i]) * fabs(scale));
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

  // Reduces over the lanes, and with `fold` over the elements of the unit, too.
  template <typename Op>
  __device__ __forceinline__ void Reduce(Op op, A (&values)[kSize], bool fold) const {
    if (q.adjacent) {
      ReduceAdjacent(op, values, lanes);
    } else {
      ReduceLanes(op, values, scratch, q.log_width, kThreads);
    }
    if (kSize == 1 || !fold) return;
    A value = values[0];
#pragma unroll
    for (int i = 1; i < kSize; ++i) value = op(value, values[i]);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = value;
  }

  __device__ __forceinline__ void ReduceTops() {
    A top[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) top[i] = tops[i];
    Reduce(Max(), top, q.fold);
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
      if (kKeepsPowers<T> && !p.log) {
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
        ToFactors<kGrad, T>(p, p.log, [&](int i) { return TopOf(i); }, totals);
    const auto store = [&](int64_t index, H& a, const H& b) {
      ToColumnResults<kGrad>(
          p, p.log, kKeepsPowers<T> && q.held, totals, [&](int i) { return TopOf(i); }, a, b);
      if (undefined != 0) {  // rare; excluded elements of such rows are known only from the mask
        auto results = a.Get();
        const auto keep = part.LoadMask(index);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if ((undefined >> i & 1) != 0 && keep.elements[i] == 0) {
            results.elements[i] = ExcludedResult<T, kGrad>(p.log);
          }
        }
        a = H(results);
      }
      a.Store(part.Address(p.out, index));
    };
    if (q.held) {
#pragma unroll 4
      for (int k = 0; k < places; ++k) {
        H a = H::Load(held_a + k * kThreads), b;
        if constexpr (kGrad) b = H::Load(held_b + k * kThreads);
        store(k, a, b);
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
        store(first + k, a[k], b[k]);
      }
    }
  }
};

template <typename T, bool kGrad, int kBytes>
__global__ void __launch_bounds__(ColumnThreads(kGrad), kGrad ? 2 : 3)
    ColumnsKernel(const __grid_constant__ Params p, const __grid_constant__ ColumnsParams q) {
  extern __shared__ uint4 shared[];
  ColumnPasses<T, kGrad, kBytes> passes(p, q, shared);
  if (q.stage == Stage::kWrite) {
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
  // Sums of chunks are folded when they are read.
  passes.Reduce(Sum(), passes.totals, q.fold && q.stage != Stage::kReduce);
  if (q.stage == Stage::kReduce) {
    passes.WritePartials();
  } else {
    passes.Write();
  }
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_COLUMNS_CUH_

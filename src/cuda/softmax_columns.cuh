// Softmax along any other axis: what is contiguous are neighbours of different rows.
//
// A block takes a tile: a few neighbouring units of inner elements, 64 bytes of them or more, by
// all of n, dealt out to lanes. A thread keeps to one column of units, and has a maximum and a sum
// for each of the unit's elements. A tile that fits into shared memory is copied there,
// asynchronously and all at once, and read from there in each of the passes; as in BlockKernel a
// thread touches only what it has copied itself. Other tiles are read twice, with the sums
// corrected as the maxima rise, and if there are few of them, by several blocks each, in two
// launches.
//
// With units of one element it takes any array, rows along the minor axis too.
#ifndef JAX_FASTOPS_CUDA_SOFTMAX_COLUMNS_CUH_
#define JAX_FASTOPS_CUDA_SOFTMAX_COLUMNS_CUH_

#include <cstdint>

#include "cuda/row_group.cuh"
#include "cuda/softmax_math.cuh"
#include "cuda/softmax_rows.cuh"
#include "cuda/unit.cuh"

namespace jax_fastops::cuda::softmax {

constexpr int ColumnThreads(bool grad) { return grad ? 512 : 256; }

enum class Stage { kAll, kReduce, kWrite };

struct ColumnsParams {
  FastDivisor64 row_units;  // units of inner elements
  int64_t columns;          // units of all of outer and inner
  int log_width;            // a tile is 1 << log_width units wide
  bool held;                // in shared memory
  Stage stage;
  int64_t chunk;  // how much of n a block takes
  int64_t chunks;
  void* partials;  // of each chunk: the maxima of all rows, then their sums
  int scratch;     // where in shared memory, in units of 16 bytes, lanes meet
};

// Reduces each of `values` over the lanes of a column.
template <int kThreads, typename Op, typename A, int kSize>
__device__ __forceinline__ void ReduceLanes(Op op, A (&values)[kSize], A* scratch, int log_width) {
  constexpr int kPiece = kSize * sizeof(A) < 16 ? kSize * sizeof(A) : 16;
  using Piece = Unit<A, kPiece>;
  const int width = 1 << log_width;
  for (int lanes = width; lanes < 32; lanes *= 2) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      values[i] = op(values[i], __shfl_xor_sync(0xffffffffu, values[i], lanes));
    }
  }
  const int parts = kThreads / max(width, 32);
  if (parts == 1) return;
  const int column = threadIdx.x & (width - 1);
  const int part = width < 32 ? threadIdx.x / 32 : threadIdx.x >> log_width;
  __syncthreads();  // others may still read what the last reduction has left
  if (threadIdx.x % 32 < width) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) scratch[(part * width + column) * kSize + i] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSize; ++i) values[i] = Op::template Identity<A>();
#pragma unroll 4
  for (int other = 0; other < parts; ++other) {
#pragma unroll
    for (int at = 0; at < kSize; at += Piece::kSize) {
      const Piece piece = Piece::Load(scratch + (other * width + column) * kSize + at);
#pragma unroll
      for (int i = 0; i < Piece::kSize; ++i) {
        values[at + i] = op(values[at + i], piece.elements[i]);
      }
    }
  }
}

template <typename T, Op kOp, int kBytes>
__global__ void __launch_bounds__(ColumnThreads(IsGrad(kOp)), IsGrad(kOp) ? 2 : 3)
    ColumnsKernel(const __grid_constant__ Params p, const __grid_constant__ ColumnsParams q) {
  using A = ComputeType<T>;
  using H = Held<T, kBytes>;
  using Keep = Unit<uint8_t, H::kSize>;
  constexpr bool kGrad = IsGrad(kOp);
  constexpr bool kLog = IsLog(kOp);
  constexpr int kThreads = ColumnThreads(kGrad);
  constexpr bool kReadsMask = kOp != Op::kSoftmaxGrad;
  constexpr int kSize = H::kSize;
  constexpr int kBatch = (kBytes >= 8 ? 4 : 8) / (kGrad ? 2 : 1);
  using Normalize = Normalizer<T, kLog>;

  extern __shared__ uint4 shared[];
  A* const scratch = reinterpret_cast<A*>(shared + q.scratch);

  const int width = 1 << q.log_width;
  const int lanes = kThreads >> q.log_width;
  const int lane = threadIdx.x >> q.log_width;
  const int64_t column = int64_t{blockIdx.x} * width + (threadIdx.x & (width - 1));
  const bool live = column < q.columns;
  const int64_t outer = Divide(static_cast<uint64_t>(live ? column : 0), q.row_units);
  const int64_t in_row =
      live ? (column - outer * static_cast<int64_t>(q.row_units.divisor)) * kSize : 0;
  const int64_t begin = blockIdx.y * q.chunk + lane;
  const int64_t end = live ? min(p.n, (blockIdx.y + 1) * q.chunk) : 0;
  // How many elements of n are this thread's.
  const int64_t count = end > begin ? (end - begin + lanes - 1) / lanes : 0;
  const int64_t step = p.inner * lanes;
  const int64_t origin = (outer * p.n + begin) * p.inner + in_row;

  const uint8_t* mask = kReadsMask ? p.mask : nullptr;
  if (mask != nullptr) {
    mask += p.mask_outer.Offset(outer) + p.mask_inner.Offset(in_row) + begin * p.mask_stride;
  }
  const A scale = static_cast<A>(p.scale);
  const T excluded = Excluded<T, kOp>(scale);
  [[maybe_unused]] const T zero = FromCompute<T>(0);
  const int places = q.held ? static_cast<int>(count) : 0;
  H* const held_a = reinterpret_cast<H*>(shared) + threadIdx.x;
  H* const held_b = held_a + (q.chunk + lanes - 1) / lanes * kThreads;

  const auto address = [&](const void* array, int64_t index) {
    return static_cast<const T*>(array) + (origin + index * step);
  };
  // The index-th of this thread, as it is in the array.
  const auto load = [&](int64_t index, H& a, H& b) {
    a = H::template Load<CacheHint::kNoAllocate>(address(p.a, index));
    if constexpr (kGrad) b = H::template Load<CacheHint::kNoAllocate>(address(p.b, index));
  };
  // What the mask and the scale make of it; and whether they do anything.
  const bool changes = mask != nullptr || (!kGrad && p.zero_scale);
  const auto load_mask = [&](int64_t index) {
    const uint8_t* bytes = mask + index * lanes * p.mask_stride;
    if (p.mask_units) return Keep::Load(bytes);
    Keep keep;  // broadcast over inner, or a unit of one element
#pragma unroll
    for (int i = 0; i < kSize; ++i) keep.elements[i] = *bytes;
    return keep;
  };
  const auto change = [&](int64_t index, H& a, [[maybe_unused]] H& b) {
    if (!kGrad && p.zero_scale) a.TimesZero([](int) { return true; }, excluded);
    if (mask == nullptr) return;
    const Keep keep = load_mask(index);
    a.Exclude(keep, excluded);
    if constexpr (kGrad) b.Exclude(keep, zero);
  };

  [[maybe_unused]] A tops[kSize];
  A totals[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    tops[i] = Max::Identity<A>();
    totals[i] = 0;
  }
  const auto raise = [&](int i, A to) {
    if (to > tops[i]) {
      // While the maximum is -inf nothing is subtracted, and the sum is 0, or NaN.
      if (totals[i] != 0) totals[i] *= ExpOf((tops[i] - to) * fabs(scale));
      tops[i] = to;
    }
  };
  const auto normalizer = [&](int i) {
    return Normalize(scale, tops[i] == -A(INFINITY) ? A(0) : TopElement(tops[i], scale));
  };

  const auto add_terms = [&](const H& a, const H& b) {
    A as[kSize], bs[kSize];
    a.Unpack(as);
    b.Unpack(bs);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      totals[i] += Gradient<T, kLog>::Term(as[i], bs[i], p.skip_zeros);
    }
  };
  const auto add_tops = [&](const H& a) {
    A as[kSize];
    a.Unpack(as);
#pragma unroll
    for (int i = 0; i < kSize; ++i) tops[i] = Max()(tops[i], scale < 0 ? -as[i] : as[i]);
  };

  if (q.stage != Stage::kWrite && q.held) {
    [[maybe_unused]] const T* from_a = address(p.a, 0);
    [[maybe_unused]] const T* from_b = kGrad ? address(p.b, 0) : nullptr;
#pragma unroll 4
    for (int k = 0; k < places; ++k) {
      if constexpr (kBytes >= 4) {
        CopyAsync<kBytes>(held_a + k * kThreads, from_a);
        if constexpr (kGrad) CopyAsync<kBytes>(held_b + k * kThreads, from_b);
        from_a += step;
        if constexpr (kGrad) from_b += step;
      } else if (k % kBatch == 0) {
        H a[kBatch], b[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (k + i < places) load(k + i, a[i], b[i]);
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
    AwaitCopies();
    [[maybe_unused]] PairOf<std::conditional_t<sizeof(T) == 2, T, __half>> pairs[H::kWords];
    if constexpr (H::kPairs) {
#pragma unroll
      for (int i = 0; i < H::kWords; ++i) {
        pairs[i] = H::Filled(FromCompute<T>(-A(INFINITY))).Pair(0);
      }
    }
#pragma unroll 4
    for (int k = 0; k < places; ++k) {
      H a = H::Load(held_a + k * kThreads), b;
      if constexpr (kGrad) b = H::Load(held_b + k * kThreads);
      if (changes) {
        change(k, a, b);
        a.Store(held_a + k * kThreads);
        if constexpr (kGrad) b.Store(held_b + k * kThreads);
      }
      if constexpr (kGrad) {
        add_terms(a, b);
      } else if constexpr (H::kPairs) {
#pragma unroll
        for (int i = 0; i < H::kWords; ++i) {
          a.words[i] ^= scale < 0 ? 0x80008000u : 0u;
          pairs[i] = __hmax2(pairs[i], a.Pair(i));
        }
      } else {
        add_tops(a);
      }
    }
    if constexpr (!kGrad && H::kPairs) {
#pragma unroll
      for (int i = 0; i < H::kWords; ++i) {
        tops[2 * i] = ToCompute(pairs[i].x);
        tops[2 * i + 1] = ToCompute(pairs[i].y);
      }
    }
  } else if (q.stage != Stage::kWrite) {
    for (int64_t first = 0; first < count; first += kBatch) {
      H a[kBatch], b[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (first + k < count) {
          load(first + k, a[k], b[k]);
        } else {
          a[k] = H::Filled(excluded);
          b[k] = H::Filled(zero);
        }
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (changes && first + k < count) change(first + k, a[k], b[k]);
        a[k].Forget();
      }
      if constexpr (kGrad) {
#pragma unroll
        for (int k = 0; k < kBatch; ++k) add_terms(a[k], b[k]);
      } else {
        A batch[kSize], as[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) batch[i] = Max::Identity<A>();
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          a[k].Unpack(as);
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            batch[i] = Max()(batch[i], scale < 0 ? -as[i] : as[i]);
          }
          a[k].Forget();
        }
#pragma unroll
        for (int i = 0; i < kSize; ++i) raise(i, batch[i]);
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          a[k].Unpack(as);
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            totals[i] += normalizer(i).Power(as[i]);
          }
        }
      }
    }
  } else if (live) {
    for (int64_t c = lane; c < q.chunks; c += lanes) {
      const A* partial = static_cast<const A*>(q.partials) + (2 * c * q.columns + column) * kSize;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        A total = partial[q.columns * kSize + i];
        if constexpr (!kGrad) {
          raise(i, partial[i]);
          if (total != 0) total *= ExpOf((partial[i] - tops[i]) * fabs(scale));
        }
        totals[i] += total;
      }
    }
  }

  if constexpr (!kGrad) {
    A top[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) top[i] = tops[i];
    ReduceLanes<kThreads>(Max(), top, scratch, q.log_width);
#pragma unroll
    for (int i = 0; i < kSize; ++i) raise(i, top[i]);
    if (q.held) {
#pragma unroll 4
      for (int k = 0; k < places; ++k) {
        A as[kSize];
        H a = H::Load(held_a + k * kThreads);
        a.Unpack(as);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          as[i] = normalizer(i).Power(as[i]);
          totals[i] += as[i];
        }
        if constexpr (kKeepsPowers<T, kLog>) {
          a.Pack(as);
          a.Store(held_a + k * kThreads);
        }
      }
    }
  }
  ReduceLanes<kThreads>(Sum(), totals, scratch, q.log_width);

  if (q.stage == Stage::kReduce) {
    if (lane == 0 && live) {
      A* partial =
          static_cast<A*>(q.partials) + (2 * int64_t{blockIdx.y} * q.columns + column) * kSize;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if constexpr (!kGrad) partial[i] = tops[i];
        partial[q.columns * kSize + i] = totals[i];
      }
    }
    return;
  }

  // From here on: undefined rows with a mask, and in the place of the sum what comes of it.
  uint32_t undefined = 0;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if constexpr (kGrad) {
      undefined |= uint32_t{Gradient<T, kLog>::Undefined(totals[i], scale)} << i;
      totals[i] = Gradient<T, kLog>(scale, totals[i], false).sum;
    } else {
      if (tops[i] == -A(INFINITY)) totals[i] = A(NAN);
      undefined |= uint32_t{Normalize::Undefined(totals[i])} << i;
      Normalize normalize = normalizer(i);
      normalize.SetTotal(totals[i]);
      totals[i] = normalize.last;
    }
  }
  if (mask == nullptr) undefined = 0;

  const auto store = [&](int64_t index, T* to, H& a, [[maybe_unused]] const H& b) {
    A as[kSize];
    a.Unpack(as);
    if constexpr (kGrad) {
      A bs[kSize];
      b.Unpack(bs);
      Gradient<T, kLog> gradient(scale, A(0), p.skip_zeros);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        gradient.sum = totals[i];
        as[i] = gradient(as[i], bs[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        Normalize normalize = normalizer(i);
        normalize.last = totals[i];
        as[i] = kKeepsPowers<T, kLog> && q.held ? as[i] * normalize.last : normalize(as[i]);
      }
    }
    if (undefined != 0) {  // rare: what the mask leaves out is known by its bytes alone
      const Keep keep = load_mask(index);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if ((undefined >> i & 1) != 0 && keep.elements[i] == 0) {
          as[i] = ToCompute(ExcludedResult<T, kOp>());
        }
      }
    }
    a.Pack(as);
    a.Store(to);
  };
  if (q.held) {
    T* to = const_cast<T*>(address(p.out, 0));
#pragma unroll 4
    for (int k = 0; k < places; ++k) {
      H a = H::Load(held_a + k * kThreads), b;
      if constexpr (kGrad) b = H::Load(held_b + k * kThreads);
      store(k, to, a, b);
      to += step;
    }
    return;
  }
  for (int64_t first = 0; first < count; first += kBatch) {
    H a[kBatch], b[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (first + k < count) load(first + k, a[k], b[k]);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (first + k >= count) break;
      if (changes) change(first + k, a[k], b[k]);
      store(first + k, const_cast<T*>(address(p.out, first + k)), a[k], b[k]);
    }
  }
}

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_CUDA_SOFTMAX_COLUMNS_CUH_

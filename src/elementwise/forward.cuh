// out = f(operands), element by element, over operands that are broadcast along any dimensions and
// never expanded. A new op is a functor:
//
//   struct F {
//     using Family = ...;  // of KernelOf
//     static constexpr int kOperands = ...;
//     // Whether an operand may have the accumulator type.
//     static constexpr bool kMayBeWide = ...;
//     // Whether there is a kernel for a set of operands with one element per unit, one bit each,
//     // or for all sets (kAnyOnes; only of ragged rows). `wide`: also for wide operands. At least
//     // one operand has more elements.
//     static constexpr bool HasForward(ForwardKind kind, int ones, bool wide);
//     // Calls visit(choice) with a value of the class that has Value: of this one, or of one that
//     is
//     // chosen at run time.
//     template <typename Visit>
//     __device__ void Choose(const Visit& visit) const;
//     template <typename T>
//     static __device__ ComputeType<T> Value(const ComputeType<T> (&x)[kOperands]);
//   };
//
// The kernel is bound by memory: a thread takes units of 16 bytes of the flat result, several of
// them in flight. Operands with the result's shape are read like the result. A single element is
// read once by each thread. For other operands the thread computes the offset of a unit (not of
// each element) by multiplications with reciprocals from the host. It does so for all of its units
// together: a dimension's constants are loaded once, and the units' chains of multiplications
// overlap. This takes time in which the warp has no loads in flight, because the addresses are not
// known yet.
//
// If rows are not a whole number of units ("ragged"), a unit begins at any address of the broadcast
// operands, and is read by aligned words and a shift (shifted.cuh). A unit in which one row ends
// and the next begins (one of 125 in rows of 1001 elements of 16 bits) is read element by element,
// and so is a unit at the end of an operand. The unit is a single element for rows shorter than a
// unit, unaligned pointers, ragged arrays of 2^31 elements or more, ragged rows of operands without
// a kernel, and float64.
//
// Kernels for wide operands need twice the registers for them, so they are separate kernels: for
// two operands of 16 bits, 122 registers instead of 64, and half the occupancy.
#ifndef JAX_FASTOPS_ELEMENTWISE_FORWARD_CUH_
#define JAX_FASTOPS_ELEMENTWISE_FORWARD_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/cuda/dispatch.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/shifted.cuh"
#include "core/dtype.h"
#include "core/fast_divide.h"
#include "core/integer.h"
#include "elementwise/broadcast.h"
#include "elementwise/operands.cuh"
#include "elementwise/plan.h"

namespace jax_fastops::cuda {

enum class ForwardKind {
  kFlat,    // every operand has the result's shape or one element
  kRows,    // rows are a whole number of units
  kRagged,  // rows are not a whole number of units
};

template <typename F>
struct ForwardParams {
  static constexpr int kOperands = F::kOperands;
  Operand operand[kOperands];
  Reach reach[kOperands];  // within a unit; if ragged, along the innermost dimension
  bool full[kOperands];
  uint32_t words_end[kOperands];  // ragged: the operand's elements in whole words
  void* out;
  int64_t elements;
  int rank;
  int64_t inner;
  // Sizes of the dimensions, major to minor; the innermost one in units (ragged: in elements).
  FastDivisor small[kMaxBroadcastRank];
  FastDivisor64 large[kMaxBroadcastRank];
  int64_t stride[kOperands][kMaxBroadcastRank];
  F f;
};

// Finds the rows of kCount units, the positions within them, and each operand's offset of the row.
template <typename Index, typename F>
struct RowFinder {
  static constexpr int kOperands = F::kOperands;
  const ForwardParams<F>& p;

  // Divides `n` by the length of dimension `d`: `n` becomes the remainder, `over` the quotient.
  template <int kCount>
  __device__ __forceinline__ void Divide(int d, Index (&n)[kCount], Index (&over)[kCount]) const {
    const auto divide = [&](auto divisor) {
      const Index length = static_cast<Index>(divisor.divisor);
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        over[u] = cuda::Divide(n[u], divisor);
        n[u] -= over[u] * length;
      }
    };
    if constexpr (sizeof(Index) == 4) {
      divide(p.small[d]);
    } else {
      divide(p.large[d]);
    }
  }
  template <int kCount>
  __device__ __forceinline__ void Rows(Index (&place)[kCount], Index (&row)[kCount]) const {
    Divide(p.rank - 1, place, row);
  }
  template <int kCount>
  __device__ __forceinline__ void Offsets(const Index (&row)[kCount],
                                          Index (&offset)[kCount][kOperands]) const {
    Index digit[kCount], over[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      over[u] = row[u];
#pragma unroll
      for (int k = 0; k < kOperands; ++k) offset[u][k] = 0;
    }
#pragma unroll 1
    for (int d = p.rank - 2; d >= 0; --d) {
#pragma unroll
      for (int u = 0; u < kCount; ++u) digit[u] = over[u];
      if (d > 0) Divide(d, digit, over);
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        const Index stride = static_cast<Index>(p.stride[k][d]);
#pragma unroll
        for (int u = 0; u < kCount; ++u) offset[u][k] += digit[u] * stride;
      }
    }
  }
};

inline constexpr int kForwardThreads = 256;

// Units of a thread, all in flight at once.
template <typename T, int kBytes, ForwardKind kKind, bool kWide>
inline constexpr int kForwardUnits = kBytes < 16                                                ? 8
                                     : sizeof(T) == 8 || kKind == ForwardKind::kRagged || kWide ? 2
                                                                                                : 4;

// The operands with one element per unit, one bit each. kAnyOnes means that it is looked up at run
// time.
inline constexpr int kAnyOnes = -1;

// An operand's elements for a unit at any address, which may span two rows if the operand is
// broadcast.
template <typename T, bool kMayBeWide>
struct Straddling {
  using C = ComputeType<T>;
  static constexpr int kSize = 16 / sizeof(T);
  static constexpr bool kWide = kMayBeWide && sizeof(T) < sizeof(C);

  Shifted<T, kSize> neighbours;
  Shifted<C, kSize> wide_neighbours;
  T ones[2];
  C wide_ones[2];

  // For an operand with the result's shape: its elements, aligned.
  __device__ __forceinline__ void LoadFull(const Operand& operand, int64_t first) {
    if constexpr (kWide) {
      if (operand.wide) {
        wide_neighbours.LoadAligned(operand.data, first);
        return;
      }
    }
    neighbours.LoadAligned(operand.data, first);
  }

  // The first `left` elements begin at offset `here`, the others at `next`.
  __device__ __forceinline__ void Load(const Operand& operand, Reach reach, uint32_t here,
                                       uint32_t next, int left, uint32_t words_end) {
    const auto load = [&](auto& some, auto& one) {
      using E = std::remove_reference_t<decltype(one[0])>;
      const E* data = static_cast<const E*>(operand.data);
      if (reach == Reach::kOne) {
        one[0] = data[here];
        one[1] = data[next];
      } else if (left < kSize || here + (kSize - 1) >= words_end) {
        some.Gather(data, here, next, left);
      } else {
        some.Load(data, here);
      }
    };
    if constexpr (kWide) {
      if (operand.wide) {
        load(wide_neighbours, wide_ones);
        return;
      }
    }
    load(neighbours, ones);
  }

  __device__ __forceinline__ void Expand(C (&values)[kSize], Reach reach, bool wide, bool full,
                                         int left) const {
    const auto expand = [&](const auto& some, const auto& one) {
      using E = std::remove_const_t<std::remove_reference_t<decltype(one[0])>>;
      if (reach == Reach::kOne) {
        const C first = ToCompute(one[0]), second = ToCompute(one[1]);
#pragma unroll
        for (int i = 0; i < kSize; ++i) values[i] = i < left ? first : second;
      } else {
        E elements[kSize];
        if (full) {
          some.TakeAligned(elements);
        } else {
          some.Take(elements);
        }
        ToCompute<E>(elements, values);
      }
    };
    if constexpr (kWide) {
      if (wide) {
        expand(wide_neighbours, wide_ones);
        return;
      }
    }
    expand(neighbours, ones);
  }
};

// The result of one unit, by the functor or one that it chose.
template <typename F, typename T, int kOperands, int kSize>
__device__ __forceinline__ Unit<T, kSize * sizeof(T)> ValuesOf(
    const ComputeType<T> (&values)[kOperands][kSize]) {
  Unit<T, kSize * sizeof(T)> y;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    ComputeType<T> x[kOperands];
#pragma unroll
    for (int k = 0; k < kOperands; ++k) x[k] = values[k][i];
    y.elements[i] = FromCompute<T>(F::template Value<T>(x));
  }
  return y;
}

template <typename F, typename T, int kBytes, ForwardKind kKind, typename Index, int kOnes,
          bool kWide>
__global__ __launch_bounds__(kForwardThreads) void ElementwiseForwardKernel(
    const __grid_constant__ ForwardParams<F> p) {
  using C = ComputeType<T>;
  constexpr bool kRagged = kKind == ForwardKind::kRagged;
  using Operands = std::conditional_t<kRagged, Straddling<T, kWide>, Loaded<T, kBytes, kWide>>;
  constexpr int kSize = kBytes / sizeof(T);
  constexpr int kUnits = kForwardUnits<T, kBytes, kKind, kWide>;
  constexpr int kOperands = F::kOperands;
  const RowFinder<Index, F> find{p};
  T* const out = static_cast<T*>(p.out);
  const auto reach = [&](int k) {
    if constexpr (kOnes == kAnyOnes) return p.reach[k];
    return kOnes >> k & 1 ? Reach::kOne : Reach::kNeighbours;
  };
  // In a unit of one element, adjacent elements are that one.
  const auto in_unit = [&](int k) { return kSize == 1 ? Reach::kOne : reach(k); };

  const int64_t first = int64_t{blockIdx.x} * (kForwardThreads * kUnits) + threadIdx.x;
  const int64_t whole = p.elements / kSize;
  // The number of the thread's units that exist.
  const int live = static_cast<int>(min(max(whole - first, int64_t{0}) + (kForwardThreads - 1),
                                        int64_t{kForwardThreads} * kUnits)) /
                   kForwardThreads;

  Operands loaded[kUnits][kOperands];
  // Operands with the result's shape are loaded before the offsets of the others are known.
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (u >= live) break;
    const int64_t place = (first + u * kForwardThreads) * kSize;
#pragma unroll
    for (int k = 0; k < kOperands; ++k) {
      if (!p.full[k]) continue;
      if constexpr (kRagged) {
        loaded[u][k].LoadFull(p.operand[k], place);
      } else {
        loaded[u][k].Load(p.operand[k].data, place, in_unit(k), p.operand[k].wide);
      }
    }
  }

  Index within[kUnits], row[kUnits], offset[kUnits][kOperands];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    within[u] = static_cast<Index>(first + u * kForwardThreads) * (kRagged ? kSize : 1);
    row[u] = 0;
#pragma unroll
    for (int k = 0; k < kOperands; ++k) offset[u][k] = 0;
  }
  if constexpr (kKind != ForwardKind::kFlat) {
    find.Rows(within, row);
    find.Offsets(row, offset);
  }
  int left[kUnits];  // ragged: elements from the unit's first one to the end of its row
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (u >= live) break;
    if constexpr (kRagged) {
      left[u] = static_cast<int>(p.inner) - static_cast<int>(within[u]);
      Index next[1][kOperands];
#pragma unroll
      for (int k = 0; k < kOperands; ++k) next[0][k] = offset[u][k];
      if (left[u] < kSize) {
        const Index behind[1] = {row[u] + 1};
        find.Offsets(behind, next);
      }
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        if (p.full[k]) continue;
        const Index in_row = reach(k) == Reach::kOne ? 0 : within[u];
        loaded[u][k].Load(p.operand[k], reach(k), offset[u][k] + in_row, next[0][k], left[u],
                          p.words_end[k]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        if (p.full[k]) continue;
        const Index in_row = reach(k) == Reach::kOne || kKind == ForwardKind::kFlat ? 0 : within[u];
        loaded[u][k].Load(p.operand[k].data, static_cast<int64_t>(offset[u][k] + in_row * kSize),
                          in_unit(k), p.operand[k].wide);
      }
    }
  }

  p.f.Choose([&](auto choice) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (u >= live) break;
      C values[kOperands][kSize];
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        if constexpr (kRagged) {
          loaded[u][k].Expand(values[k], reach(k), p.operand[k].wide, p.full[k], left[u]);
        } else {
          loaded[u][k].Expand(values[k], in_unit(k), p.operand[k].wide);
        }
      }
      ValuesOf<decltype(choice), T>(values).Store(out + (first + u * kForwardThreads) * kSize);
    }
  });

  // The elements after the last whole unit, by the first threads of the last block.
  if (kSize > 1 && blockIdx.x == gridDim.x - 1) {
    const int64_t e = whole * kSize + threadIdx.x;
    if (e < p.elements) {
      Index rest[1] = {static_cast<Index>(e)}, its_row[1], its_offset[1][kOperands] = {};
      if constexpr (kRagged) {  // otherwise elements are left only if there is one row
        find.Rows(rest, its_row);
        find.Offsets(its_row, its_offset);
      }
      C x[kOperands];
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        const Index place = its_offset[0][k] + (reach(k) == Reach::kOne ? 0 : rest[0]);
        const int64_t at = p.full[k] ? e : static_cast<int64_t>(place);
        const void* data = p.operand[k].data;
        x[k] = kWide && p.operand[k].wide ? static_cast<const C*>(data)[at]
                                          : ToCompute(static_cast<const T*>(data)[at]);
      }
      p.f.Choose(
          [&](auto choice) { out[e] = FromCompute<T>(decltype(choice)::template Value<T>(x)); });
    }
  }
}

// The properties of a kernel.
struct ForwardTraits {
  int bytes;  // of a unit
  int units;  // of a thread
  ForwardKind kind;
  bool large;  // also arrays of 2^31 elements or more
  int ones;
  bool wide;  // also wide operands
};

template <typename F, typename T, int kBytes, ForwardKind kKind, typename Index, int kOnes,
          bool kWide, typename Use>
void UseElementwiseForward(const Use& use) {
  use(KernelOf<typename F::Family,
               ElementwiseForwardKernel<F, T, kBytes, kKind, Index, kOnes, kWide>>(),
      ForwardTraits{kBytes, kForwardUnits<T, kBytes, kKind, kWide>, kKind, sizeof(Index) == 8,
                    kOnes, kWide});
}

// Passes to `use` the kernels for a set of operands that have one element per unit.
template <typename F, typename T, bool kWide, int kOnes, typename Use>
void UseElementwiseForwardOf(const Use& use) {
  constexpr ForwardKind kFlat = ForwardKind::kFlat, kRows = ForwardKind::kRows;
  constexpr ForwardKind kRagged = ForwardKind::kRagged;
  if constexpr (F::HasForward(kFlat, kOnes, kWide)) {
    UseElementwiseForward<F, T, 16, kFlat, int64_t, kOnes, kWide>(use);
  }
  if constexpr (F::HasForward(kRows, kOnes, kWide)) {
    UseElementwiseForward<F, T, 16, kRows, uint32_t, kOnes, kWide>(use);
  }
  if constexpr (F::HasForward(kRagged, kOnes, kWide)) {
    UseElementwiseForward<F, T, 16, kRagged, uint32_t, kOnes, kWide>(use);
  }
}

template <typename F, typename T, bool kWide, typename Use, int... kOnes>
void EachElementwiseForwardOf(const Use& use, std::integer_sequence<int, kOnes...>) {
  UseElementwiseForwardOf<F, T, kWide, kAnyOnes>(use);
  (UseElementwiseForwardOf<F, T, kWide, kOnes>(use), ...);
}

// Calls `use` with every kernel of a functor and element type, and its properties, the more special
// ones last.
template <typename F, typename T, typename Use>
void EachElementwiseForward(const Use& use) {
  constexpr bool kWide = F::kMayBeWide && sizeof(T) < sizeof(ComputeType<T>);
  constexpr ForwardKind kRows = ForwardKind::kRows;
  UseElementwiseForward<F, T, sizeof(T), kRows, int64_t, kAnyOnes, kWide>(use);
  if constexpr (sizeof(T) < 8) {
    UseElementwiseForward<F, T, sizeof(T), kRows, uint32_t, kAnyOnes, kWide>(use);
    UseElementwiseForward<F, T, 16, kRows, int64_t, kAnyOnes, kWide>(use);
    const auto ones = std::make_integer_sequence<int, (1 << F::kOperands) - 1>();
    if constexpr (kWide) EachElementwiseForwardOf<F, T, true>(use, ones);
    EachElementwiseForwardOf<F, T, false>(use, ones);
  }
}

template <typename F, typename T>
cudaError_t LaunchElementwiseForward(const F& f, const BroadcastShape& shape,
                                     const Operand* operands, void* out, cudaStream_t stream) {
  constexpr int kOperands = F::kOperands;
  ForwardParams<F> p{};
  p.f = f;
  p.elements = shape.elements();
  if (p.elements == 0) return cudaSuccess;
  p.out = out;
  p.inner = shape.inner();
  bool flat = true, wide = false;
  int ones = 0;
  uintptr_t bits = reinterpret_cast<uintptr_t>(out);
  for (int k = 0; k < kOperands; ++k) {
    p.operand[k] = operands[k];
    p.full[k] = shape.IsFull(k);
    const bool scalar = shape.IsScalar(k);
    // For a single element, "full" and "scalar" are equivalent.
    p.reach[k] = shape.InnerStride(k) != 0 || p.full[k] ? Reach::kNeighbours : Reach::kOne;
    flat = flat && (p.full[k] || scalar);
    if (p.reach[k] == Reach::kNeighbours) bits |= reinterpret_cast<uintptr_t>(operands[k].data);
    ones |= (p.reach[k] == Reach::kOne) << k;
    const bool is_wide = operands[k].wide && sizeof(T) < sizeof(ComputeType<T>);
    wide = wide || is_wide;
    int64_t last = 0;
    for (int d = 0; d < shape.rank; ++d) {
      p.stride[k][d] = shape.stride[k][d];
      last += (shape.size[d] - 1) * shape.stride[k][d];
    }
    const int64_t per_word = 16 / (is_wide ? sizeof(ComputeType<T>) : sizeof(T));
    p.words_end[k] = static_cast<uint32_t>((last + 1) / per_word * per_word);
  }
  p.rank = flat ? 1 : shape.rank;
  constexpr int kSize = 16 / sizeof(T);
  const bool large = p.elements >= (int64_t{1} << 31) - 32 * kForwardThreads;
  const ForwardKind kind = flat                   ? ForwardKind::kFlat
                           : p.inner % kSize == 0 ? ForwardKind::kRows
                                                  : ForwardKind::kRagged;
  const bool short_units =
      bits % 16 != 0 || (kind == ForwardKind::kRagged && (large || p.inner < kSize));

  void (*chosen)(ForwardParams<F>) = nullptr;
  ForwardTraits traits{};
  const auto choose = [&](bool by_element) {
    EachElementwiseForward<F, T>([&](auto kernel, const ForwardTraits& its) {
      if ((its.bytes < 16) != by_element || (wide && !its.wide) || (large && !its.large)) return;
      // The general kernel for rows takes flat arrays, too, as one row.
      const bool one_row = kind == ForwardKind::kFlat && its.kind == ForwardKind::kRows;
      if (!by_element && its.kind != kind && !(one_row && its.ones == kAnyOnes)) return;
      if (its.ones != kAnyOnes && its.ones != ones) return;
      chosen = kernel;
      traits = its;
    });
  };
  choose(short_units);
  if (chosen == nullptr) choose(true);

  const int size = traits.bytes / static_cast<int>(sizeof(T));
  for (int d = 0; d < p.rank; ++d) {
    const bool in_units = d == p.rank - 1 && traits.kind == ForwardKind::kRows;
    int64_t length = flat ? p.elements : shape.size[d];
    if (in_units) length = std::max<int64_t>(length / size, 1);
    if (!large) p.small[d] = FastDivisor(static_cast<uint32_t>(length));
    p.large[d] = FastDivisor64(static_cast<uint64_t>(length));
  }
  const int64_t per_block = int64_t{kForwardThreads} * traits.units * size;
  const int64_t blocks = CeilDiv(p.elements, per_block);
  return Launch(chosen,
                {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kForwardThreads)},
                stream, p);
}

// The launcher for an element type that is known at run time.
template <typename F>
cudaError_t ElementwiseForward(const F& f, const BroadcastShape& given, DType dtype,
                               const Operand* operands, void* out, cudaStream_t stream) {
  BroadcastShape shape;
  if (!WithRows(given, &shape)) return cudaErrorInvalidValue;
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    return LaunchElementwiseForward<F, T>(f, shape, operands, out, stream);
  });
}

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_FORWARD_CUH_

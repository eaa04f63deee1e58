// out = f(operands), element by element, over operands that are broadcast along any dimensions and
// never expanded. An op is a functor:
//
//   struct F {
//     using Family = ...;  // of kernels (core/cuda/launch.h)
//     static constexpr int kOperands = ...;
//     // Whether an operand may have the accumulator type.
//     static constexpr bool kMayBeWide = ...;
//     template <typename T>
//     static __device__ ComputeType<T> Value(const ComputeType<T> (&x)[kOperands]);
//   };
//
// The kernel is bound by memory: a thread takes units of 16 bytes of the flat result, several of
// them in flight. Operands with the result's shape are read like the result. For other operands the
// thread computes the offset of a unit (not of each element) by multiplications with reciprocals
// from the host. It does so for all of its units together: a dimension's constants are loaded once,
// and the units' chains of multiplications overlap. This takes time in which the warp has no loads
// in flight, because the addresses are not known yet.
//
// If rows are not a whole number of units ("ragged"), a unit begins at any address of the broadcast
// operands, and is read by aligned words and a shift (shifted.cuh). A unit in which one row ends
// and the next begins (one of 125 in rows of 1001 elements of 16 bits) is read element by element,
// and so is a unit at the end of an operand. The unit is a single element for rows shorter than a
// unit, unaligned pointers, ragged arrays of 2^31 elements or more, and float64.
//
// Kernels for wide operands need twice the registers for them, so they are separate kernels: for
// two operands of 16 bits, 122 registers instead of 64, and half the occupancy.
#ifndef JAX_FASTOPS_ELEMENTWISE_FORWARD_CUH_
#define JAX_FASTOPS_ELEMENTWISE_FORWARD_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/cuda/dispatch.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/shifted.cuh"
#include "core/dtype.h"
#include "core/fast_divide.h"
#include "core/integer.h"
#include "elementwise/broadcast.h"
#include "elementwise/elementwise.h"
#include "elementwise/operands.cuh"
#include "elementwise/plan.h"

namespace jax_fastops::cuda {

template <int kOperands>
struct ForwardParams {
  Operand operand[kOperands];
  bool one[kOperands];  // one element for each row
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
};

// Finds the rows of kCount units, the positions within them, and each operand's offset of the row.
template <typename Index, int kOperands>
struct RowFinder {
  const ForwardParams<kOperands>& p;

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
template <int kBytes, bool kRagged, bool kWide>
inline constexpr int kForwardUnits = kBytes < 16        ? 8
                                     : kRagged || kWide ? 2
                                                        : 4;

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
  __device__ __forceinline__ void Load(const Operand& operand, bool is_one, uint32_t here,
                                       uint32_t next, int left, uint32_t words_end) {
    const auto load = [&](auto& some, auto& one) {
      using E = std::remove_reference_t<decltype(one[0])>;
      const E* data = static_cast<const E*>(operand.data);
      if (is_one) {
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

  __device__ __forceinline__ void Expand(C (&values)[kSize], bool is_one, bool wide, bool full,
                                         int left) const {
    const auto expand = [&](const auto& some, const auto& one) {
      using E = std::remove_const_t<std::remove_reference_t<decltype(one[0])>>;
      if (is_one) {
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

// The result of one unit.
template <typename F, typename T, int kSize>
__device__ __forceinline__ Unit<T, kSize * sizeof(T)> ValuesOf(
    const ComputeType<T> (&values)[F::kOperands][kSize]) {
  Unit<T, kSize * sizeof(T)> y;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    ComputeType<T> x[F::kOperands];
#pragma unroll
    for (int k = 0; k < F::kOperands; ++k) x[k] = values[k][i];
    y.elements[i] = FromCompute<T>(F::template Value<T>(x));
  }
  return y;
}

template <typename F, typename T, int kBytes, bool kRagged, typename Index, bool kWide>
__global__ __launch_bounds__(kForwardThreads) void ElementwiseForwardKernel(
    const __grid_constant__ ForwardParams<F::kOperands> p) {
  using C = ComputeType<T>;
  using Operands = std::conditional_t<kRagged, Straddling<T, kWide>, Loaded<T, kBytes, kWide>>;
  constexpr int kSize = kBytes / sizeof(T);
  constexpr int kUnits = kForwardUnits<kBytes, kRagged, kWide>;
  constexpr int kOperands = F::kOperands;
  const RowFinder<Index, kOperands> find{p};
  T* const out = static_cast<T*>(p.out);

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
        loaded[u][k].Load(p.operand[k].data, place, false, kWide && p.operand[k].wide);
      }
    }
  }

  Index within[kUnits], row[kUnits], offset[kUnits][kOperands];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    within[u] = static_cast<Index>(first + u * kForwardThreads) * (kRagged ? kSize : 1);
  }
  find.Rows(within, row);
  find.Offsets(row, offset);
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
        const Index in_row = p.one[k] ? 0 : within[u];
        loaded[u][k].Load(p.operand[k], p.one[k], offset[u][k] + in_row, next[0][k], left[u],
                          p.words_end[k]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        if (p.full[k]) continue;
        const Index in_row = p.one[k] ? 0 : within[u];
        loaded[u][k].Load(p.operand[k].data, static_cast<int64_t>(offset[u][k] + in_row * kSize),
                          p.one[k], kWide && p.operand[k].wide);
      }
    }
  }

#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (u >= live) break;
    C values[kOperands][kSize];
#pragma unroll
    for (int k = 0; k < kOperands; ++k) {
      const bool wide = kWide && p.operand[k].wide;
      if constexpr (kRagged) {
        loaded[u][k].Expand(values[k], p.one[k], wide, p.full[k], left[u]);
      } else {
        loaded[u][k].Expand(values[k], p.one[k], wide);
      }
    }
    ValuesOf<F, T>(values).Store(out + (first + u * kForwardThreads) * kSize);
  }

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
        const Index place = its_offset[0][k] + (p.one[k] ? 0 : rest[0]);
        const int64_t at = p.full[k] ? e : static_cast<int64_t>(place);
        const void* data = p.operand[k].data;
        x[k] = kWide && p.operand[k].wide ? static_cast<const C*>(data)[at]
                                          : ToCompute(static_cast<const T*>(data)[at]);
      }
      out[e] = FromCompute<T>(F::template Value<T>(x));
    }
  }
}

// What the choice of a kernel depends on.
struct ForwardShape {
  bool by_element = false;  // units of one element
  bool ragged = false;      // rows are not a whole number of units
  bool large = false;       // 2^31 elements or more
  bool wide = false;        // some operand has the accumulator type
};

template <typename F, typename T>
class ForwardLauncher {
  static constexpr int kOperands = F::kOperands;
  static constexpr int kSize = 16 / sizeof(T);
  static constexpr bool kMayBeWide = F::kMayBeWide && sizeof(T) < sizeof(ComputeType<T>);
  using Kernel = void (*)(ForwardParams<kOperands>);

 public:
  static cudaError_t Launch(const BroadcastShape& shape, const Operand* operands, void* out,
                            cudaStream_t stream) {
    ForwardParams<kOperands> p{};
    const ForwardShape form = SetOperands(shape, operands, out, &p);
    int units;
    const Kernel kernel = Choose(form, &units);
    const int size = form.by_element ? 1 : kSize;
    for (int d = 0; d < p.rank; ++d) {
      const bool in_units = d == p.rank - 1 && !form.ragged;
      const int64_t length = d >= shape.rank ? 1 : shape.size[d] / (in_units ? size : 1);
      if (!form.large) p.small[d] = FastDivisor(static_cast<uint32_t>(length));
      p.large[d] = FastDivisor64(static_cast<uint64_t>(length));
    }
    const int64_t blocks = CeilDiv(p.elements, int64_t{kForwardThreads} * units * size);
    const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(blocks)),
                                 .block = dim3(kForwardThreads)};
    return cuda::Launch(kernel, config, stream, p);
  }

 private:
  static ForwardShape SetOperands(const BroadcastShape& shape, const Operand* operands, void* out,
                                  ForwardParams<kOperands>* p) {
    p->elements = shape.elements();
    p->out = out;
    p->rank = std::max(shape.rank, 1);
    p->inner = shape.inner();
    ForwardShape form;
    bool flat = true;
    int64_t bits = reinterpret_cast<intptr_t>(out);  // of addresses, in bytes
    for (int k = 0; k < kOperands; ++k) {
      p->operand[k] = operands[k];
      p->full[k] = shape.IsFull(k);
      p->one[k] = shape.InnerStride(k) == 0 && !p->full[k];
      flat = flat && (p->full[k] || shape.IsScalar(k));
      p->operand[k].wide = operands[k].wide && kMayBeWide;
      form.wide = form.wide || p->operand[k].wide;
      const int64_t element = p->operand[k].wide ? sizeof(ComputeType<T>) : sizeof(T);
      if (!p->one[k]) bits |= reinterpret_cast<intptr_t>(operands[k].data);
      int64_t last = 0;
      for (int d = 0; d < shape.rank; ++d) {
        p->stride[k][d] = shape.stride[k][d];
        last += (shape.size[d] - 1) * shape.stride[k][d];
      }
      const int64_t per_word = 16 / element;
      p->words_end[k] = static_cast<uint32_t>((last + 1) / per_word * per_word);
    }
    form.large = p->elements >= (int64_t{1} << 31) - 32 * kForwardThreads;
    form.ragged = !flat && !InUnits(shape, *p);
    form.by_element = sizeof(T) == 8 || bits % 16 != 0 || p->inner < kSize ||
                      (form.large && (form.ragged || form.wide));
    if (form.by_element) form.ragged = false;
    return form;
  }

  // Whether the units of all rows of all operands are aligned.
  static bool InUnits(const BroadcastShape& shape, const ForwardParams<kOperands>& p) {
    int64_t bits = shape.inner();
    for (int k = 0; k < kOperands; ++k) {
      for (int d = 0; d + 1 < shape.rank && !p.one[k]; ++d) bits |= shape.stride[k][d];
    }
    return bits % kSize == 0;
  }

  static Kernel Choose(const ForwardShape& form, int* units) {
    Kernel chosen = nullptr;
    const auto offer = [&]<int kBytes, bool kRagged, typename Index, bool kWide>() {
      const Kernel kernel =
          KernelOf<typename F::Family,
                   ElementwiseForwardKernel<F, T, kBytes, kRagged, Index, kWide>>();
      if (form.by_element ? kBytes == 16 : kBytes < 16) return;
      if (kBytes == 16 && (form.ragged != kRagged || form.wide != kWide)) return;
      if (form.large && sizeof(Index) == 4) return;
      chosen = kernel;
      *units = kForwardUnits<kBytes, kRagged, kWide>;
    };
    offer.template operator()<sizeof(T), false, int64_t, kMayBeWide>();
    if constexpr (sizeof(T) < 8) {
      offer.template operator()<16, false, int64_t, false>();
      offer.template operator()<16, false, uint32_t, false>();
      offer.template operator()<16, true, uint32_t, false>();
      if constexpr (kMayBeWide) {
        offer.template operator()<16, false, uint32_t, true>();
        offer.template operator()<16, true, uint32_t, true>();
      }
    }
    return chosen;
  }
};

// Arrays of `shape`: the operands.
template <typename F>
cudaError_t ElementwiseForward(const BroadcastShape& given, DType dtype, const Operand* operands,
                               void* out, cudaStream_t stream) {
  BroadcastShape shape;
  if (!WithRows(given, &shape)) return cudaErrorInvalidValue;
  if (shape.elements() == 0) return cudaSuccess;
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    return ForwardLauncher<F, T>::Launch(shape, operands, out, stream);
  });
}

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_FORWARD_CUH_

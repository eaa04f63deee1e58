// out = f(operands), element by element, over operands that are broadcast along any dimensions and
// never expanded. A new op is a functor:
//
//   struct F {
//     static constexpr int kOperands = ...;
//     // Whether an operand may be of the accumulator's type.
//     static constexpr bool kMayBeWide = ...;
//     template <typename T>
//     static __device__ ComputeType<T> Value(const ComputeType<T> (&x)[kOperands]);
//   };
//
// Bound by memory, so shaped by its accesses: a thread takes units of 16 bytes of the flat result,
// several in flight. Operands of the result's shape are read like it; one element for everything is
// read once by each thread; for the others the thread finds the place of a unit, not of an element,
// by multiplications with reciprocals that the host prepares. Where rows are no whole number of
// units ("ragged") a unit may lie across two rows or more; then the elements of the broadcast
// operands are read one by one, those of the others as ever.
#ifndef JAX_FASTOPS_CUDA_ELEMENTWISE_FORWARD_CUH_
#define JAX_FASTOPS_CUDA_ELEMENTWISE_FORWARD_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "broadcast.h"
#include "cuda/divide.cuh"
#include "cuda/elementwise.cuh"
#include "cuda/elementwise_plan.h"
#include "dtype.h"

namespace jax_fastops::cuda {

enum class ForwardKind {
  kFlat,    // every operand has the result's shape or one element
  kRows,    // rows are a whole number of units
  kRagged,  // they are not
};

template <int kOperands>
struct ForwardParams {
  Operand operand[kOperands];
  Reach reach[kOperands];  // within a unit; of a ragged one, along the innermost dimension
  bool full[kOperands];
  void* out;
  int64_t elements;
  int rank;
  int64_t inner;
  // Of the dimensions, major to minor; of the innermost one in units (ragged: in elements).
  FastDivisor small[kMaxBroadcastRank];
  FastDivisor64 large[kMaxBroadcastRank];
  int64_t stride[kOperands][kMaxBroadcastRank];
};

// The row of a place and where in it it is; then each operand's offset of the row.
template <typename Index, int kOperands>
struct RowFinder {
  const ForwardParams<kOperands>& p;

  __device__ __forceinline__ Index Over(Index n, int d) const {
    if constexpr (sizeof(Index) == 4) {
      return Divide(n, p.small[d]);
    } else {
      return Divide(n, p.large[d]);
    }
  }
  __device__ __forceinline__ Index Row(Index place, Index* within) const {
    const Index row = Over(place, p.rank - 1);
    const Index length = sizeof(Index) == 4 ? static_cast<Index>(p.small[p.rank - 1].divisor)
                                            : static_cast<Index>(p.large[p.rank - 1].divisor);
    *within = place - row * length;
    return row;
  }
  __device__ __forceinline__ void Offsets(Index row, Index (&offset)[kOperands]) const {
#pragma unroll
    for (int k = 0; k < kOperands; ++k) offset[k] = 0;
    for (int d = p.rank - 2; d >= 0; --d) {
      Index digit = row;
      if (d > 0) {
        row = Over(digit, d);
        digit -= row * (sizeof(Index) == 4 ? static_cast<Index>(p.small[d].divisor)
                                           : static_cast<Index>(p.large[d].divisor));
      }
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        offset[k] += digit * static_cast<Index>(p.stride[k][d]);
      }
    }
  }
};

inline constexpr int kForwardThreads = 256;

template <typename T, int kBytes>
inline constexpr int kForwardUnits = kBytes == 16 ? (sizeof(T) == 8 ? 2 : 4) : 8;

// Which operands have one element for a unit, a bit each; kAnyOnes: it is looked up while the
// kernel runs.
inline constexpr int kAnyOnes = -1;

template <typename F, typename T, int kBytes, ForwardKind kKind, typename Index, int kOnes>
__global__ __launch_bounds__(kForwardThreads) void ElementwiseForwardKernel(
    const ForwardParams<F::kOperands> p) {
  using C = ComputeType<T>;
  using Elements = Unit<T, kBytes>;
  using Operands = Loaded<T, kBytes, F::kMayBeWide>;
  constexpr int kSize = Elements::kSize;
  constexpr int kUnits = kForwardUnits<T, kBytes>;
  const RowFinder<Index, F::kOperands> find{p};
  T* const out = static_cast<T*>(p.out);
  const auto reach = [&](int k) {
    if constexpr (kOnes == kAnyOnes) return p.reach[k];
    return kOnes >> k & 1 ? Reach::kOne : Reach::kNeighbours;
  };

  const auto element = [&](int k, int64_t offset) -> C {
    if constexpr (Operands::kWide) {
      if (p.operand[k].wide) return static_cast<const C*>(p.operand[k].data)[offset];
    }
    return ToCompute(static_cast<const T*>(p.operand[k].data)[offset]);
  };

  const int64_t first = int64_t{blockIdx.x} * (kForwardThreads * kUnits) + threadIdx.x;
  const int64_t whole = p.elements / kSize;
  Operands loaded[kUnits][F::kOperands];
  if constexpr (kKind != ForwardKind::kRagged) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int64_t unit = first + u * kForwardThreads;
      if (unit >= whole) break;
      Index offset[F::kOperands];
      if constexpr (kKind == ForwardKind::kFlat) {
#pragma unroll
        for (int k = 0; k < F::kOperands; ++k) offset[k] = 0;
      } else {
        Index within;
        const Index row = find.Row(static_cast<Index>(unit), &within);
        find.Offsets(row, offset);
#pragma unroll
        for (int k = 0; k < F::kOperands; ++k) {
          if (reach(k) == Reach::kNeighbours) offset[k] += within * kSize;
        }
      }
#pragma unroll
      for (int k = 0; k < F::kOperands; ++k) {
        loaded[u][k].Load(p.operand[k].data,
                          p.full[k] ? unit * kSize : static_cast<int64_t>(offset[k]), reach(k),
                          p.operand[k].wide);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int64_t unit = first + u * kForwardThreads;
      if (unit >= whole) break;
      C values[F::kOperands][kSize];
#pragma unroll
      for (int k = 0; k < F::kOperands; ++k) {
        loaded[u][k].Expand(values[k], reach(k), p.operand[k].wide);
      }
      Elements y;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        C x[F::kOperands];
#pragma unroll
        for (int k = 0; k < F::kOperands; ++k) x[k] = values[k][i];
        y.elements[i] = FromCompute<T>(F::template Value<T>(x));
      }
      y.Store(out + unit * kSize);
    }
  } else {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int64_t unit = first + u * kForwardThreads;
      if (unit >= whole) break;
#pragma unroll
      for (int k = 0; k < F::kOperands; ++k) {
        if (p.full[k]) {
          loaded[u][k].Load(p.operand[k].data, unit * kSize, Reach::kNeighbours, p.operand[k].wide);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int64_t unit = first + u * kForwardThreads;
      if (unit >= whole) break;
      Index within;
      Index row = find.Row(static_cast<Index>(unit * kSize), &within);
      Index offset[F::kOperands];
      find.Offsets(row, offset);
      C values[F::kOperands][kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (within == static_cast<Index>(p.inner)) {
          within = 0;
          find.Offsets(++row, offset);
        }
#pragma unroll
        for (int k = 0; k < F::kOperands; ++k) {
          if (!p.full[k]) {
            values[k][i] = element(k, offset[k] + (reach(k) == Reach::kOne ? 0 : within));
          }
        }
        ++within;
      }
#pragma unroll
      for (int k = 0; k < F::kOperands; ++k) {
        if (p.full[k]) loaded[u][k].Expand(values[k], Reach::kNeighbours, p.operand[k].wide);
      }
      Elements y;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        C x[F::kOperands];
#pragma unroll
        for (int k = 0; k < F::kOperands; ++k) x[k] = values[k][i];
        y.elements[i] = FromCompute<T>(F::template Value<T>(x));
      }
      y.Store(out + unit * kSize);
    }
  }

  // What is left behind the last whole unit, by the first threads of the last block.
  if (kSize > 1 && blockIdx.x == gridDim.x - 1) {
    const int64_t e = whole * kSize + threadIdx.x;
    if (e < p.elements) {
      Index offset[F::kOperands];
      Index within = 0;
      if constexpr (kKind == ForwardKind::kRagged) {
        const Index row = find.Row(static_cast<Index>(e), &within);
        find.Offsets(row, offset);
      } else {  // there is something left only if there is one row
#pragma unroll
        for (int k = 0; k < F::kOperands; ++k) offset[k] = 0;
        within = static_cast<Index>(e);
      }
      C x[F::kOperands];
#pragma unroll
      for (int k = 0; k < F::kOperands; ++k) {
        const Index place = offset[k] + (reach(k) == Reach::kOne ? 0 : within);
        x[k] = element(k, p.full[k] ? e : static_cast<int64_t>(place));
      }
      out[e] = FromCompute<T>(F::template Value<T>(x));
    }
  }
}

// Calls `use` with every kernel of a functor and an element type, and what it is for: bytes of a
// unit, kind, whether for arrays of 2^31 elements and more too, and for which operands.
template <typename F, typename T, typename Use, int... kOnes>
void EachElementwiseForwardOf(const Use& use, std::integer_sequence<int, kOnes...>) {
  (use(ElementwiseForwardKernel<F, T, 16, ForwardKind::kFlat, int64_t, kOnes>, 16,
       ForwardKind::kFlat, true, kOnes),
   ...);
  (use(ElementwiseForwardKernel<F, T, 16, ForwardKind::kRows, uint32_t, kOnes>, 16,
       ForwardKind::kRows, false, kOnes),
   ...);
}

template <typename F, typename T, typename Use>
void EachElementwiseForward(const Use& use) {
  use(ElementwiseForwardKernel<F, T, sizeof(T), ForwardKind::kRows, int64_t, kAnyOnes>, sizeof(T),
      ForwardKind::kRows, true, kAnyOnes);
  use(ElementwiseForwardKernel<F, T, 16, ForwardKind::kRagged, uint32_t, kAnyOnes>, 16,
      ForwardKind::kRagged, false, kAnyOnes);
  use(ElementwiseForwardKernel<F, T, 16, ForwardKind::kRows, int64_t, kAnyOnes>, 16,
      ForwardKind::kRows, true, kAnyOnes);
  EachElementwiseForwardOf<F, T>(use, std::make_integer_sequence<int, 1 << F::kOperands>());
}

template <typename F, typename T>
cudaError_t LaunchElementwiseForward(const BroadcastShape& shape, const Operand* operands,
                                     void* out, cudaStream_t stream) {
  constexpr int kOperands = F::kOperands;
  ForwardParams<kOperands> p{};
  p.elements = shape.elements();
  if (p.elements == 0) return cudaSuccess;
  p.out = out;
  p.rank = std::max(shape.rank, 1);
  p.inner = shape.inner();
  bool flat = true;
  uintptr_t bits = reinterpret_cast<uintptr_t>(out);
  for (int k = 0; k < kOperands; ++k) {
    p.operand[k] = operands[k];
    p.full[k] = shape.IsFull(k);
    const bool scalar = shape.IsScalar(k);
    // Of a single element "full" is as good as "scalar".
    p.reach[k] = shape.InnerStride(k) != 0 || p.full[k] ? Reach::kNeighbours : Reach::kOne;
    flat = flat && (p.full[k] || scalar);
    if (p.reach[k] == Reach::kNeighbours) bits |= reinterpret_cast<uintptr_t>(operands[k].data);
    for (int d = 0; d < shape.rank; ++d) p.stride[k][d] = shape.stride[k][d];
  }
  constexpr int kSize = 16 / sizeof(T);
  const bool aligned = bits % 16 == 0;
  const bool rows = p.inner % kSize == 0;
  const bool large = p.elements >= (int64_t{1} << 31) - 16 * kForwardThreads;
  const auto launch = [&](auto kernel, int size, int units, int64_t row_length) {
    for (int d = 0; d < shape.rank; ++d) {
      const int64_t length = d == shape.rank - 1 ? row_length : shape.size[d];
      if (large) {
        p.large[d] = FastDivisor64(static_cast<uint64_t>(length));
      } else {
        p.small[d] = FastDivisor(static_cast<uint32_t>(length));
        p.large[d] = FastDivisor64(static_cast<uint64_t>(length));
      }
    }
    const int64_t per_block = int64_t{kForwardThreads} * units * size;
    const int64_t blocks = (p.elements + per_block - 1) / per_block;
    kernel<<<static_cast<unsigned>(blocks), kForwardThreads, 0, stream>>>(p);
    return cudaGetLastError();
  };
  // Choose among the kernels there are: the ones made for these operands come last.
  ForwardKind kind = flat ? ForwardKind::kFlat : rows ? ForwardKind::kRows : ForwardKind::kRagged;
  const bool short_units = !aligned || (kind == ForwardKind::kRagged && large);
  if (short_units) kind = ForwardKind::kRows;
  int ones = 0;
  for (int k = 0; k < kOperands; ++k) ones |= (p.reach[k] == Reach::kOne) << k;
  void (*chosen)(ForwardParams<kOperands>) = nullptr;
  EachElementwiseForward<F, T>(
      [&](auto kernel, int bytes, ForwardKind its_kind, bool its_large, int its_ones) {
        if ((bytes == 16) == short_units || its_kind != kind || (its_ones >= 0 && its_ones != ones))
          return;
        if (its_large || !(large || short_units)) chosen = kernel;
      });
  if (short_units) {
    return launch(chosen, 1, kForwardUnits<T, sizeof(T)>, p.inner);
  }
  return launch(chosen, kSize, kForwardUnits<T, 16>,
                kind == ForwardKind::kRows ? p.inner / kSize : p.inner);
}

// Gives every kernel of the forward to `load`.
template <typename F, typename Load>
void LoadElementwiseForward(const Load& load) {
  const auto give = [&load](auto kernel, int, ForwardKind, bool, int) {
    load(reinterpret_cast<const void*>(kernel));
  };
  EachElementwiseForward<F, float>(give);
  EachElementwiseForward<F, __nv_bfloat16>(give);
  EachElementwiseForward<F, __half>(give);
  EachElementwiseForward<F, double>(give);
}

// The launcher of an element type that is known when the program runs.
template <typename F>
cudaError_t ElementwiseForward(const BroadcastShape& given, DType dtype, const Operand* operands,
                               void* out, cudaStream_t stream) {
  BroadcastShape shape;
  if (!WithRows(given, &shape)) return cudaErrorInvalidValue;
  switch (dtype) {
    case DType::kF32:
      return LaunchElementwiseForward<F, float>(shape, operands, out, stream);
    case DType::kBF16:
      return LaunchElementwiseForward<F, __nv_bfloat16>(shape, operands, out, stream);
    case DType::kF16:
      return LaunchElementwiseForward<F, __half>(shape, operands, out, stream);
    case DType::kF64:
      return LaunchElementwiseForward<F, double>(shape, operands, out, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CUDA_ELEMENTWISE_FORWARD_CUH_

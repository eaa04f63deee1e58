// y = max(x, 0) and z = max(x + y, 0), with a mask of one bit per element as the residual, and the
// backward pass that reads this mask.
//
// All of these are memory-bound. The forward reads and writes every element once and writes one bit
// more (2% of the traffic in float32, 3% in bfloat16). The backward reads that bit instead of the
// element. The kernels are therefore designed around their memory accesses, as relu_tiles.cuh
// describes.
#include "relu/relu.h"

#include <type_traits>

#include "core/alignment.h"
#include "core/cuda/bitmask.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/relu_tiles.cuh"
#include "core/cuda/vec.cuh"

namespace jax_fastops::cuda {

struct ReluFamily;

namespace {

// -------------------------------------------------------------------------------------------------
// Kernels

struct ReluParams {
  const void* a;  // x, or dy
  const void* b;  // the second summand
  void* out;      // y, z or dx
  int64_t size;   // elements
  int64_t mask_bytes;
  ReluMask mask;  // written by the forward; read by the backward
};

template <typename T>
struct NoAddends {
  struct One {};
  using Sum = T;
  using Values = One;
  static constexpr int kStep = kReluTogether;

  __device__ __forceinline__ One Load(int64_t) const { return {}; }
  static __device__ __forceinline__ T Add(T x, One) { return x; }
  __device__ __forceinline__ void Load(int64_t, int64_t, Values (&)[kStep]) const {}
  static __device__ __forceinline__ uint32_t ReluInPlace(Unit<T>& x, Values) {
    return cuda::ReluInPlace(x);
  }
};

template <typename T>
struct OtherArray {
  using One = T;
  using Sum = T;
  using Values = Unit<T>;
  static constexpr int kStep = kReluTogether;

  const T* y;

  __device__ __forceinline__ T Load(int64_t element) const { return y[element]; }
  static __device__ __forceinline__ T Add(T x, T addend) { return SumOf(x, addend); }
  __device__ __forceinline__ void Load(int64_t first, int64_t stride,
                                       Values (&units)[kStep]) const {
#pragma unroll
    for (int k = 0; k < kStep; ++k) units[k] = LoadWord(y + first + k * stride);
  }
  static __device__ __forceinline__ uint32_t ReluInPlace(Unit<T>& x, const Values& addends) {
    x = SumOf(x, addends);
    return cuda::ReluInPlace(x);
  }
};

template <typename T, bool kAdd>
__device__ __forceinline__ auto AddendsOf(const ReluParams& p) {
  if constexpr (kAdd) {
    return OtherArray<T>{static_cast<const T*>(p.b)};
  } else {
    return NoAddends<T>();
  }
}

// Clears the elements whose bit is not set. This is a selection, not a product, because an element
// may be infinite or NaN.
template <typename U>
__device__ __forceinline__ Unit<U> Select(uint32_t bits, Unit<U> x) {
  if constexpr (sizeof(U) == 2) {
    Unit<uint32_t> pairs = Reinterpret<uint32_t>(x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(bits & 1u << 2 * i)) pairs[i] &= 0xffff0000u;
      if (!(bits & 2u << 2 * i)) pairs[i] &= 0x0000ffffu;
    }
    return Reinterpret<U>(pairs);
  } else {
#pragma unroll
    for (int i = 0; i < x.kSize; ++i) x[i] = bits & 1u << i ? x[i] : U{0};
    return x;
  }
}

// The backward only moves bits: U is the unsigned integer type of the element's size.
template <typename U>
__device__ __forceinline__ void BackwardChunk(const ReluParams& p, int64_t begin) {
  const int lane = threadIdx.x % kWarpSize;
  const U* dy = static_cast<const U*>(p.a) + begin + lane;
  U* dx = static_cast<U*>(p.out) + begin + lane;
  const int count = static_cast<int>(min(p.size - begin, int64_t{kReluChunk}));
  const int rest = count - lane;

  U values[kReluTogether];
#pragma unroll
  for (int k = 0; k < kReluTogether; ++k) {
    values[k] = k * kWarpSize < rest ? dy[k * kWarpSize] : U{0};
  }
  const uint32_t word = LoadMaskWord(p.mask.layout, p.mask.data, p.mask_bytes, begin, count);
#pragma unroll
  for (int k = 0; k < kReluTogether; ++k) {
    const U value = BitOfRow(word, k) ? values[k] : U{0};
    if (k * kWarpSize < rest) dx[k * kWarpSize] = value;
  }
}

template <typename U, bool kRagged>
__device__ __forceinline__ void BackwardTile(const ReluParams& p, int64_t begin) {
  constexpr int kField = Unit<U>::kSize;
  constexpr int kLoads = 32 / kField;
  constexpr int kStride = kField * kWarpSize;
  static_assert(kReluWords<U> * kLoads == kReluTogether);

  const int lane = threadIdx.x % kWarpSize;
  const U* dy = static_cast<const U*>(p.a) + begin + lane * kField;
  U* dx = static_cast<U*>(p.out) + begin + lane * kField;

  // Issue the loads of the mask first, because everything else depends on them.
  uint32_t words[kReluWords<U>];
  if constexpr (!kRagged) {
    const uint32_t* mask = reinterpret_cast<const uint32_t*>(p.mask.data + begin / 8);
#pragma unroll
    for (int i = 0; i < kReluWords<U>; ++i) {
      words[i] = mask[i * kWarpSize + WordOfLane<kField>(lane)];
    }
  }
  Unit<U> values[kReluTogether];
#pragma unroll
  for (int k = 0; k < kReluTogether; ++k) values[k] = LoadWord(dy + k * kStride);
#pragma unroll
  for (int i = 0; i < kReluWords<U>; ++i) {
    if constexpr (kRagged) {
      words[i] =
          LoadMaskFields<kField>(p.mask.layout, p.mask.data, p.mask_bytes, begin + i * kMaskTile);
    } else {
      words[i] = TransposeFields<kField>(words[i]);
    }
  }
#pragma unroll
  for (int k = 0; k < kReluTogether; ++k) {
    const uint32_t bits = words[k / kLoads] >> k % kLoads * kField;
    StoreWord(dx + k * kStride, Select(bits, values[k]));
  }
}

template <typename T, bool kAdd>
__global__ void __launch_bounds__(kReluThreads) ForwardKernel(const ReluParams p) {
  const auto addends = AddendsOf<T, kAdd>(p);
  const T* const x = static_cast<const T*>(p.a);
  T* const z = static_cast<T*>(p.out);
  ForEachReluTile<kReluTile<T>>(
      p.size, [&](int64_t begin) { ReluForwardTile(p.mask, addends, x, z, p.size, begin); },
      [&](int64_t begin) { ReluForwardChunk(p.mask, addends, x, z, p.size, begin); });
}

template <typename T, bool kAdd>
__global__ void __launch_bounds__(kReluThreads) ForwardChunksKernel(const ReluParams p) {
  const int64_t begin = ReluWarp() * kReluChunk;
  if (begin < p.size) {
    ReluForwardChunk(p.mask, AddendsOf<T, kAdd>(p), static_cast<const T*>(p.a),
                     static_cast<T*>(p.out), p.size, begin);
  }
}

template <typename U, bool kRagged>
__global__ void __launch_bounds__(kReluThreads) BackwardKernel(const ReluParams p) {
  ForEachReluTile<kReluTile<U>>(
      p.size, [&](int64_t begin) { BackwardTile<U, kRagged>(p, begin); },
      [&](int64_t begin) { BackwardChunk<U>(p, begin); });
}

template <typename U>
__global__ void __launch_bounds__(kReluThreads) BackwardChunksKernel(const ReluParams p) {
  const int64_t begin = ReluWarp() * kReluChunk;
  if (begin < p.size) BackwardChunk<U>(p, begin);
}

// -------------------------------------------------------------------------------------------------
// Launches

using Kernel = void (*)(ReluParams);

template <typename T, bool kAdd>
Kernel ForwardOf(bool tiles) {
  if constexpr (sizeof(T) < 8) {
    if (tiles) return KernelOf<ReluFamily, ForwardKernel<T, kAdd>>();
  }
  return KernelOf<ReluFamily, ForwardChunksKernel<T, kAdd>>();
}

template <typename T>
Kernel BackwardOf(bool tiles, bool ragged) {
  using U = std::conditional_t<sizeof(T) == 2, uint16_t,
                               std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  if constexpr (sizeof(T) < 8) {
    if (tiles && ragged) return KernelOf<ReluFamily, BackwardKernel<U, true>>();
    if (tiles) return KernelOf<ReluFamily, BackwardKernel<U, false>>();
  }
  return KernelOf<ReluFamily, BackwardChunksKernel<U>>();
}

enum class Operation { kRelu, kAddRelu, kBackward };

cudaError_t Run(Operation operation, DType dtype, const void* a, const void* b, void* out,
                uint8_t* mask, int64_t rows, int64_t columns, cudaStream_t stream) {
  const int64_t size = rows * columns;
  if (size == 0) return cudaSuccess;
  // Rows that fill whole mask bytes have a flat mask, so treat them as a single row.
  const bool flat = mask == nullptr || columns % 8 == 0;
  if (flat) {
    rows = 1;
    columns = size;
  }
  const ReluMask masked(mask, columns, flat && CommonAlignment({mask}) >= 4);
  const ReluParams params = {
      a, b, out, size, rows * static_cast<int64_t>(masked.layout.row_bytes), masked};
  const bool aligned = CommonAlignment({a, b, out}) == 16;

  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    const int64_t tile = aligned && sizeof(T) < 8 ? kReluTile<T> : 0;
    const Kernel kernel = operation == Operation::kRelu ? ForwardOf<T, false>(tile > 0)
                          : operation == Operation::kAddRelu
                              ? ForwardOf<T, true>(tile > 0)
                              : BackwardOf<T>(tile > 0, masked.ragged);
    return LaunchRelu(kernel, size, tile, params, stream);
  });
}

}  // namespace

cudaError_t Relu(DType dtype, const void* x, void* y, uint8_t* mask, int64_t rows, int64_t columns,
                 cudaStream_t stream) {
  return Run(Operation::kRelu, dtype, x, nullptr, y, mask, rows, columns, stream);
}

cudaError_t ReluBackward(DType dtype, const uint8_t* mask, const void* dy, void* dx, int64_t rows,
                         int64_t columns, cudaStream_t stream) {
  // ReluParams has one mask pointer for both directions. The backward kernels only read the mask.
  return Run(Operation::kBackward, dtype, dy, nullptr, dx, const_cast<uint8_t*>(mask), rows,
             columns, stream);
}

cudaError_t AddRelu(DType dtype, const void* x, const void* y, void* z, uint8_t* mask, int64_t rows,
                    int64_t columns, cudaStream_t stream) {
  return Run(Operation::kAddRelu, dtype, x, y, z, mask, rows, columns, stream);
}

cudaError_t LoadReluKernels() { return LoadKernels<ReluFamily>(); }

}  // namespace jax_fastops::cuda

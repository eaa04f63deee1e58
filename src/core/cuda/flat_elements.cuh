// The flat loop of the element-wise ops (elements.cuh), for arrays whose elements are found without
// the dimensions of the result: full ones, and rows at a constant distance, such as the halves of
// one array.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "core/cuda/dispatch.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/vec.cuh"
#include "core/dtype.h"
#include "core/fast_divide.h"
#include "core/integer.h"

namespace jax_fastops::cuda {

inline constexpr int kElementsThreads = 256;

template <typename F>
struct FlatParams {
  const void* in[F::kIn];
  void* out[F::kOut];  // null: not requested
  uint32_t units;      // words, or elements
  FastDivisor row;     // units of a row
  int64_t gap;         // bytes between the rows of pitched arrays
  F f;
};

// Every array is full, or pitched (F::kPitched).
template <typename F, typename T, int kBytes>
__device__ __forceinline__ void FlatLoop(const FlatParams<F>& p) {
  using C = ComputeType<T>;
  using Word = Vec<T, kBytes>;
  constexpr int kIn = F::kIn, kOut = F::kOut, kSize = Word::kSize;
  constexpr int kWords = kBytes == 16 ? F::kWords : 8;
  const auto is_pitched = [](int array) { return (F::kPitched >> array & 1) != 0; };

  Word word[kWords][kIn];
  int64_t at[kWords], pitched[kWords];  // in bytes
  const uint32_t first = blockIdx.x * (kElementsThreads * kWords) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
    const uint32_t unit = first + u * kElementsThreads;
    if (unit >= p.units) continue;
    at[u] = int64_t{unit} * kBytes;
    pitched[u] = at[u] + Divide(unit, p.row) * p.gap;
#pragma unroll
    for (int k = 0; k < kIn; ++k) {
      word[u][k] =
          Word::Load(static_cast<const char*>(p.in[k]) + (is_pitched(k) ? pitched : at)[u]);
    }
  }
  p.f.Choose([&](auto choice) {
#pragma unroll
    for (int u = 0; u < kWords; ++u) {
      if (first + u * kElementsThreads >= p.units) break;
      C values[kIn][kSize], results[kOut][kSize];
#pragma unroll
      for (int k = 0; k < kIn; ++k) word[u][k].Unpack(values[k]);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        C x[kIn], y[kOut];
#pragma unroll
        for (int k = 0; k < kIn; ++k) x[k] = values[k][i];
        decltype(choice)::template Apply<T>(x, y);
#pragma unroll
        for (int o = 0; o < kOut; ++o) results[o][i] = y[o];
      }
#pragma unroll
      for (int o = 0; o < kOut; ++o) {
        if (kOut > 1 && p.out[o] == nullptr) continue;
        Word y;
        y.Pack(results[o]);
        y.Store(static_cast<char*>(p.out[o]) + (is_pitched(kIn + o) ? pitched : at)[u]);
      }
    }
  });
}

template <typename F, typename T>
__global__ void __launch_bounds__(kElementsThreads)
    FlatKernel(const __grid_constant__ FlatParams<F> p) {
  FlatLoop<F, T, 16>(p);
}

// Single elements.
template <typename F>
struct FlatElements {
  static constexpr int kBlocks = F::kOut > 1 ? 4 : 5;
  FlatParams<F> p;

  template <typename T>
  __device__ __forceinline__ void Run() const {
    FlatLoop<F, T, sizeof(T)>(p);
  }
};

// A launch has at most this many elements, so that 32 bits hold every index.
inline constexpr int64_t kMaxElements = int64_t{1} << 30;

// Rows of n elements. The rows of pitched arrays are `pitch` elements apart, the others dense.
template <typename F>
cudaError_t PitchedElements(const F& f, int64_t rows, int64_t n, int64_t pitch, DType dtype,
                            const void* const* inputs, void* const* outputs, cudaStream_t stream) {
  const int64_t itemsize = DTypeSize(dtype);
  const bool flat = pitch == n || rows == 1;
  FlatParams<F> p{};
  p.f = f;
  uintptr_t bits = 0;
  for (int k = 0; k < F::kIn; ++k) bits |= reinterpret_cast<uintptr_t>(p.in[k] = inputs[k]);
  for (int o = 0; o < F::kOut; ++o) bits |= reinterpret_cast<uintptr_t>(p.out[o] = outputs[o]);
  bits |= static_cast<uintptr_t>((flat ? rows : 1) * n * itemsize);
  if (!flat) bits |= static_cast<uintptr_t>(pitch * itemsize);
  const bool aligned = itemsize < 8 && bits % 16 == 0;  // float64 has one kernel
  const int64_t unit = aligned ? 16 : itemsize;
  // A launch takes whole lines: rows, or units if the array is one row.
  const int64_t lines = flat ? rows * n * itemsize / unit : rows;
  const int64_t line = flat ? unit : n * itemsize;
  const int64_t line_pitch = flat ? unit : pitch * itemsize;
  const int64_t step = std::max<int64_t>(1, kMaxElements * unit / line);
  if (line / unit > kMaxElements) return cudaErrorInvalidValue;
  p.row = FastDivisor(static_cast<uint32_t>(line / unit));
  p.gap = line_pitch - line;
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    using Family = typename F::Family;
    for (int64_t begin = 0; begin < lines; begin += step) {
      p.units = static_cast<uint32_t>(std::min(step, lines - begin) * (line / unit));
      const LaunchConfig config =
          Grid(CeilDiv(p.units, kElementsThreads * (aligned ? F::kWords : 8)), kElementsThreads);
      cudaError_t error;
      if (!aligned) {
        error = LaunchAnyType<Family, kElementsThreads>(dtype, config, stream, FlatElements<F>{p});
      } else if constexpr (sizeof(T) < 8) {
        error = Launch(KernelOf<Family, FlatKernel<F, T>>(), config, stream, p);
      }
      if (error != cudaSuccess) return error;
      const auto advance = [&](auto*& array, int index) {
        if (array == nullptr) return;
        const int64_t bytes = step * (F::kPitched >> index & 1 ? line_pitch : line);
        array = const_cast<char*>(static_cast<const char*>(array)) + bytes;
      };
      for (int k = 0; k < F::kIn; ++k) advance(p.in[k], k);
      for (int o = 0; o < F::kOut; ++o) advance(p.out[o], F::kIn + o);
    }
    return cudaSuccess;
  });
}

}  // namespace jax_fastops::cuda

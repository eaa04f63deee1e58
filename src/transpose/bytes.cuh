// What the kernels that transpose share: division of indices, and loads of bytes at any address.
#pragma once

#include <cstdint>

#include "core/cuda/divide.cuh"
#include "core/cuda/vec.cuh"

namespace jax_fastops::cuda::transpose {

// Divides n by d and returns the remainder.
template <typename Index, typename Divisor>
__device__ __forceinline__ Index TakeRemainder(Index& n, const Divisor& d) {
  const Index quotient = Divide(n, d);
  const Index remainder = n - quotient * d.divisor;
  n = quotient;
  return remainder;
}

template <typename T>
__device__ __forceinline__ T Load(const void* p) {
  return *static_cast<const T*>(p);
}
template <typename T>
__device__ __forceinline__ void Store(void* p, T value) {
  *static_cast<T*>(p) = value;
}

__device__ __forceinline__ const char* AlignDown(const char* p, int alignment) {
  return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(p) & ~uintptr_t(alignment - 1));
}
__device__ __forceinline__ int Misalignment(const char* p, int alignment) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(p)) & (alignment - 1);
}
// The number of bytes from p to the next multiple of `alignment`.
__device__ __forceinline__ int ToAlignment(const char* p, int alignment) {
  return -Misalignment(p, alignment) & (alignment - 1);
}

// The 16 bytes at any address. Both aligned chunks that contain them must be readable.
using Window = Shifted<uint8_t, 16>;

__device__ __forceinline__ uint4 Bytes(const uint4& v) { return v; }
__device__ __forceinline__ uint4 Bytes(const Window& window) {
  uint4 bytes;
  window.Take(bytes);
  return bytes;
}

// The 16 bytes at any address, byte by byte, without reading at or after `end`.
__device__ __forceinline__ uint4 LoadBytes(const char* p, const char* end) {
  uint32_t words[4] = {};
  for (int i = 0; i < 16 && p + i < end; ++i) {
    const uint32_t byte = uint32_t{Load<uint8_t>(p + i)} << i % 4 * 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] |= i / 4 == j ? byte : 0;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace jax_fastops::cuda::transpose

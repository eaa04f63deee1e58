// Units: what a thread moves at once, 1 to 16 bytes, as elements.
#ifndef JAX_FASTOPS_CUDA_UNIT_CUH_
#define JAX_FASTOPS_CUDA_UNIT_CUH_

#include <cstdint>
#include <cstring>

#include "cuda/packed.cuh"

namespace jax_fastops::cuda {

// The elements of a unit. Addresses must be aligned to kBytes.
template <typename T, int kBytes>
struct Unit {
  static_assert(kBytes % sizeof(T) == 0);
  static constexpr int kSize = kBytes / sizeof(T);
  using Bits = Word<kBytes>;

  T elements[kSize];

  template <CacheHint kHint = CacheHint::kDefault>
  static __device__ __forceinline__ Unit Load(const void* p) {
    Unit unit;
    if constexpr (kBytes == 16 && kHint != CacheHint::kDefault) {
      const Packed128<T> packed = LoadPacked<kHint>(static_cast<const T*>(p));
      memcpy(unit.elements, packed.payload, kBytes);
    } else {  // of narrower units the neighbours are soon wanted: they pass through the caches
      const Bits bits = *static_cast<const Bits*>(p);
      memcpy(unit.elements, &bits, kBytes);
    }
    return unit;
  }

  template <CacheHint kHint = CacheHint::kDefault>
  __device__ __forceinline__ void Store(void* p) const {
    if constexpr (kBytes == 16 && kHint != CacheHint::kDefault) {
      Packed128<T> packed;
      memcpy(packed.payload, elements, kBytes);
      StorePacked<kHint>(static_cast<T*>(p), packed);
    } else {
      Bits bits;
      memcpy(&bits, elements, kBytes);
      *static_cast<Bits*>(p) = bits;
    }
  }
};

// Element i of the bits of several. A load that is conditional is best kept as bits until it is
// used: of 16-bit elements the compiler otherwise takes each out of its register right behind the
// load, which so waits for the memory before the next one is issued.
template <typename T, typename Bits>
__device__ __forceinline__ T ElementOf(const Bits& bits, int i) {
  T elements[sizeof(Bits) / sizeof(T)];
  memcpy(elements, &bits, sizeof(Bits));
  return elements[i];
}

// kSize elements of a parameter of type P, from element `first` on, in the type that T is computed
// in. Aligned to kSize elements, or to 16 bytes where that is less.
template <typename T, typename P, int kSize>
__device__ __forceinline__ void LoadParameter(const void* parameter, int64_t first,
                                              ComputeType<T> (&values)[kSize]) {
  constexpr int kBytes = kSize * sizeof(P);
  constexpr int kPiece = kBytes < 16 ? kBytes : 16;  // 8 elements of 16 bits have 32 bytes of float
  using Piece = Unit<P, kPiece>;
  const char* p = static_cast<const char*>(parameter) + first * int64_t{sizeof(P)};
#pragma unroll
  for (int at = 0; at < kSize; at += Piece::kSize) {
    const Piece piece = Piece::Load(p + at * sizeof(P));
#pragma unroll
    for (int i = 0; i < Piece::kSize; ++i) values[at + i] = ToCompute(piece.elements[i]);
  }
}

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CUDA_UNIT_CUH_

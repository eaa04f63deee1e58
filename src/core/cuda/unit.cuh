// Units: 1 to 16 bytes of elements that a thread loads or stores with one instruction.
#ifndef JAX_FASTOPS_CORE_CUDA_UNIT_CUH_
#define JAX_FASTOPS_CORE_CUDA_UNIT_CUH_

#include <cstdint>
#include <cstring>

#include "core/cuda/packed.cuh"

namespace jax_fastops::cuda {

// Addresses must be aligned to kBytes.
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
    } else {  // for units below 16 bytes too: their neighbors in the same sector are read soon
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

// Extracts element i from the raw bits of several elements. Keep the result of a conditional load
// as bits until it is used. Otherwise, for 16-bit types, the compiler unpacks the elements right
// after the load; the unpacking waits for memory, and the next load is issued only after that.
template <typename T, typename Bits>
__device__ __forceinline__ T ElementOf(const Bits& bits, int i) {
  T elements[sizeof(Bits) / sizeof(T)];
  memcpy(elements, &bits, sizeof(Bits));
  return elements[i];
}

// Loads kSize elements of a parameter of type P, starting at element `first`, and converts them to
// the compute type of T. The address must be aligned to kSize elements or to 16 bytes, whichever is
// smaller.
template <typename T, typename P, int kSize>
__device__ __forceinline__ void LoadParameter(const void* parameter, int64_t first,
                                              ComputeType<T> (&values)[kSize]) {
  constexpr int kBytes = kSize * sizeof(P);
  constexpr int kPiece = kBytes < 16 ? kBytes : 16;  // 8 float parameters take two loads
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

#endif  // JAX_FASTOPS_CORE_CUDA_UNIT_CUH_

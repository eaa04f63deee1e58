// Units: 1 to 16 bytes of elements that a thread loads or stores with one instruction, with a hint
// that says how to cache the bytes; and conversions of elements.
//
// A warp moves the most bytes per instruction, and keeps the most bytes in flight for the fewest
// address registers, when each lane accesses 16 bytes.
#ifndef JAX_FASTOPS_CORE_CUDA_UNIT_CUH_
#define JAX_FASTOPS_CORE_CUDA_UNIT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace jax_fastops::cuda {

// How a kernel expects the bytes that it accesses to be used later.
enum class CacheHint {
  kDefault,     // may be read again soon, by this kernel or by the next one from L2
  kStreaming,   // accessed once (ld.cs, st.cs): evicted first, from L1 and from L2
  kNoAllocate,  // loads only: read once by this SM; bypasses L1, uses L2 as usual
  kEvictFirst,  // as kNoAllocate, and evicted first from L2 by an explicit policy
};

// Unsigned type of kBytes bytes that a single load or store moves.
template <int kBytes>
struct WordOfSize;
template <>
struct WordOfSize<1> {
  using Type = uint8_t;
};
template <>
struct WordOfSize<2> {
  using Type = uint16_t;
};
template <>
struct WordOfSize<4> {
  using Type = uint32_t;
};
template <>
struct WordOfSize<8> {
  using Type = uint2;
};
template <>
struct WordOfSize<16> {
  using Type = uint4;
};
template <int kBytes>
using Word = typename WordOfSize<kBytes>::Type;

namespace internal {

// CUDA has no intrinsics for these cache qualifiers. `volatile` keeps a batch of loads together and
// in program order. It does not tell the compiler that memory is read: a load may move across the
// kernel's own stores, so no kernel may load this way what it has stored itself.
__device__ __forceinline__ uint4 LoadNoAllocate(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(p)));
  return v;
}

__device__ __forceinline__ uint4 LoadEvictFirst(const uint4* p) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(p)), "l"(policy));
  return v;
}

__device__ __forceinline__ void StoreEvictFirst(uint4* p, uint4 v) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(
                   __cvta_generic_to_global(p)),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy)
               : "memory");
}

template <CacheHint kHint>
__device__ __forceinline__ uint4 LoadBits(const void* p) {
  const uint4* address = static_cast<const uint4*>(p);
  if constexpr (kHint == CacheHint::kStreaming) {
    return __ldcs(address);
  } else if constexpr (kHint == CacheHint::kNoAllocate) {
    return LoadNoAllocate(address);
  } else if constexpr (kHint == CacheHint::kEvictFirst) {
    return LoadEvictFirst(address);
  } else {
    return __ldca(address);
  }
}

template <CacheHint kHint>
__device__ __forceinline__ void StoreBits(void* p, uint4 bits) {
  static_assert(kHint != CacheHint::kNoAllocate, "stores never allocate in L1");
  uint4* address = static_cast<uint4*>(p);
  if constexpr (kHint == CacheHint::kStreaming) {
    __stcs(address, bits);
  } else if constexpr (kHint == CacheHint::kEvictFirst) {
    StoreEvictFirst(address, bits);
  } else {
    __stwb(address, bits);
  }
}

}  // namespace internal

// Elements that a thread accesses as a whole. Addresses must be aligned to kBytes.
template <typename T, int kBytes = 16>
struct Unit {
  static_assert(kBytes % sizeof(T) == 0);
  static constexpr int kSize = kBytes / sizeof(T);
  using Bits = Word<kBytes>;

  T elements[kSize];

  __device__ __forceinline__ T& operator[](int i) { return elements[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return elements[i]; }

  template <CacheHint kHint = CacheHint::kDefault>
  static __device__ __forceinline__ Unit Load(const void* p) {
    Bits bits;
    if constexpr (kBytes == 16 && kHint != CacheHint::kDefault) {
      bits = internal::LoadBits<kHint>(p);
    } else {  // for units below 16 bytes too: their neighbors in the same sector are read soon
      bits = *static_cast<const Bits*>(p);
    }
    Unit unit;
    memcpy(unit.elements, &bits, kBytes);
    return unit;
  }

  template <CacheHint kHint = CacheHint::kDefault>
  __device__ __forceinline__ void Store(void* p) const {
    Bits bits;
    memcpy(&bits, elements, kBytes);
    if constexpr (kBytes == 16 && kHint != CacheHint::kDefault) {
      internal::StoreBits<kHint>(p, bits);
    } else {
      *static_cast<Bits*>(p) = bits;
    }
  }
};

// Accesses of 16 bytes by an intrinsic: the compiler may split those of Load and Store into
// narrower ones if the value comes from several registers.
template <CacheHint kHint = CacheHint::kDefault, typename T>
__device__ __forceinline__ Unit<T> LoadWord(const T* p) {
  const uint4 bits = internal::LoadBits<kHint>(p);
  Unit<T> unit;
  memcpy(unit.elements, &bits, 16);
  return unit;
}
template <CacheHint kHint = CacheHint::kDefault, typename T>
__device__ __forceinline__ void StoreWord(T* p, const Unit<T>& unit) {
  uint4 bits;
  memcpy(&bits, unit.elements, 16);
  internal::StoreBits<kHint>(p, bits);
}

// Reinterprets 16 bytes as elements of another type.
template <typename U, typename T>
__device__ __forceinline__ Unit<U> Reinterpret(const Unit<T>& unit) {
  Unit<U> other;
  memcpy(other.elements, unit.elements, 16);
  return other;
}

// Kernels compute in float, and in double for double. Conversions to the compute type are exact;
// conversions back round to nearest even. Subnormals are kept.
template <typename T>
struct ComputeTypeOf {
  using Type = float;
};
template <>
struct ComputeTypeOf<double> {
  using Type = double;
};
template <typename T>
using ComputeType = typename ComputeTypeOf<T>::Type;

__device__ __forceinline__ float ToCompute(float x) { return x; }
__device__ __forceinline__ double ToCompute(double x) { return x; }
__device__ __forceinline__ float ToCompute(__half x) { return __half2float(x); }
__device__ __forceinline__ float ToCompute(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T FromCompute(ComputeType<T> x) {
  if constexpr (sizeof(T) >= 4) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// Two 16-bit elements in one register, for the instructions that work on both at once.
template <typename T>
using PairOf = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

__device__ __forceinline__ __half2 Broadcast(__half x) { return __half2half2(x); }
__device__ __forceinline__ __nv_bfloat162 Broadcast(__nv_bfloat16 x) {
  return __bfloat162bfloat162(x);
}

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

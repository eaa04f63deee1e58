// Wide memory accesses and element conversions: what every memory-bound kernel of this library
// starts from.
//
// A warp moves most bytes per instruction, and keeps most bytes in flight per register of
// bookkeeping, when each lane accesses 16 bytes. `Packed128<T>` is those 16 bytes as elements; it
// is loaded and stored whole, with a hint that says whether the bytes are worth keeping in the
// caches.
#ifndef JAX_FASTOPS_CUDA_PACKED_CUH_
#define JAX_FASTOPS_CUDA_PACKED_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace jax_fastops::cuda {

// What a kernel knows about the future of the bytes that it touches.
enum class CacheHint {
  kDefault,     // may be read again soon: by this kernel, or by the next one while they are in L2
  kStreaming,   // touched once (ld.cs, st.cs): first to be evicted, from L1 and from L2
  kNoAllocate,  // loads only: touched once by this SM; takes no line of L1, L2 as usual
  kEvictFirst,  // as kNoAllocate, and first to be evicted from L2 by an explicit policy
};

template <typename T>
struct alignas(16) Packed128 {
  static_assert(16 % sizeof(T) == 0);
  static constexpr int kSize = 16 / sizeof(T);

  T payload[kSize];

  __device__ __forceinline__ T& operator[](int i) { return payload[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return payload[i]; }
};

// The register type of so many bytes that are moved at once, whatever they are.
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

// The same 16 bytes as elements of another type.
template <typename U, typename T>
__device__ __forceinline__ Packed128<U> Reinterpret(const Packed128<T>& packed) {
  Packed128<U> other;
  memcpy(other.payload, packed.payload, 16);
  return other;
}

namespace internal {

// The qualifiers have no intrinsic. `volatile` keeps a batch of loads together and in the order
// written; it says nothing about memory, so no kernel may load this way what it has stored itself.
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

}  // namespace internal

// `p` must be aligned to 16 bytes. The default goes through an intrinsic too: a plain assignment of
// 16 bytes may be split into narrower ones when they come from several registers.
template <CacheHint kHint = CacheHint::kDefault, typename T>
__device__ __forceinline__ Packed128<T> LoadPacked(const T* p) {
  const uint4* address = reinterpret_cast<const uint4*>(p);
  uint4 bits;
  if constexpr (kHint == CacheHint::kStreaming) {
    bits = __ldcs(address);
  } else if constexpr (kHint == CacheHint::kNoAllocate) {
    bits = internal::LoadNoAllocate(address);
  } else if constexpr (kHint == CacheHint::kEvictFirst) {
    bits = internal::LoadEvictFirst(address);
  } else {
    bits = __ldca(address);
  }
  Packed128<T> packed;
  memcpy(packed.payload, &bits, 16);
  return packed;
}

template <CacheHint kHint = CacheHint::kDefault, typename T>
__device__ __forceinline__ void StorePacked(T* p, const Packed128<T>& packed) {
  static_assert(kHint != CacheHint::kNoAllocate, "stores never allocate in L1");
  uint4* address = reinterpret_cast<uint4*>(p);
  uint4 bits;
  memcpy(&bits, packed.payload, 16);
  if constexpr (kHint == CacheHint::kStreaming) {
    __stcs(address, bits);
  } else if constexpr (kHint == CacheHint::kEvictFirst) {
    internal::StoreEvictFirst(address, bits);
  } else {
    __stwb(address, bits);
  }
}

// Arithmetic is done in float, for double in double. Both directions are exact where they can be,
// and round to nearest even where not; subnormals are kept.
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

// Two elements of a 16-bit type in one register, for the instructions that work on both at once.
template <typename T>
using PairOf = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

__device__ __forceinline__ __half2 Broadcast(__half x) { return __half2half2(x); }
__device__ __forceinline__ __nv_bfloat162 Broadcast(__nv_bfloat16 x) {
  return __bfloat162bfloat162(x);
}

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CUDA_PACKED_CUH_

// Vectorized memory accesses and element conversions, the base of every memory-bound kernel of this
// library.
//
// A warp moves the most bytes per instruction, and keeps the most bytes in flight for the fewest
// address registers, when each lane accesses 16 bytes. `Packed128<T>` holds those 16 bytes as
// elements. It is loaded and stored as a whole, with a hint that says how to cache the bytes.
#ifndef JAX_FASTOPS_CORE_CUDA_PACKED_CUH_
#define JAX_FASTOPS_CORE_CUDA_PACKED_CUH_

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

template <typename T>
struct alignas(16) Packed128 {
  static_assert(16 % sizeof(T) == 0);
  static constexpr int kSize = 16 / sizeof(T);

  T payload[kSize];

  __device__ __forceinline__ T& operator[](int i) { return payload[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return payload[i]; }
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

// Reinterprets the 16 bytes as elements of another type.
template <typename U, typename T>
__device__ __forceinline__ Packed128<U> Reinterpret(const Packed128<T>& packed) {
  Packed128<U> other;
  memcpy(other.payload, packed.payload, 16);
  return other;
}

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

}  // namespace internal

// `p` must be aligned to 16 bytes. The default also uses an intrinsic: the compiler may split a
// plain 16-byte assignment into narrower accesses if the value comes from several registers.
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

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CORE_CUDA_PACKED_CUH_

// A vector of elements in registers: loads, stores, and conversions to the compute type.
#ifndef JAX_FASTOPS_CORE_CUDA_VEC_CUH_
#define JAX_FASTOPS_CORE_CUDA_VEC_CUH_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/cuda/unit.cuh"

namespace jax_fastops::cuda {

// Elements of 1 to 16 bytes in a thread's registers. 16-bit elements stay packed, two to a
// register, between the passes over them. As an array of elements they would take one register
// each.
template <typename T, int kBytes>
struct Vec {
  using A = ComputeType<T>;
  using U = Unit<T, kBytes>;
  using W = std::conditional_t<kBytes == 2, uint16_t, uint32_t>;
  static constexpr int kSize = U::kSize;
  static constexpr int kWords = kBytes / sizeof(W);
  static constexpr bool kPairs = sizeof(T) == 2 && kBytes > 2;

  W words[kWords];

  Vec() = default;
  explicit __device__ __forceinline__ Vec(const U& unit) { memcpy(words, unit.elements, kBytes); }

  template <CacheHint kHint = CacheHint::kDefault>
  static __device__ __forceinline__ Vec Load(const void* p) {
    return Vec(U::template Load<kHint>(p));
  }
  template <CacheHint kHint = CacheHint::kDefault>
  __device__ __forceinline__ void Store(void* p) const {
    Get().template Store<kHint>(p);
  }

  // Stores 16 bytes by one instruction. The compiler may split other stores.
  __device__ __forceinline__ void StoreWord(T* p) const {
    static_assert(kBytes == 16);
    cuda::StoreWord(p, Get());
  }

  __device__ __forceinline__ U Get() const {
    U unit;
    memcpy(unit.elements, words, kBytes);
    return unit;
  }

  // Loads 16 bytes that are read once, or zeros without a load. The compiler does not know which,
  // so it unpacks nothing before all loads of a thread are under way.
  static __device__ __forceinline__ Vec LoadIf(bool load, const void* p) {
    static_assert(kBytes == 16 && sizeof(W) == 4);
    Vec v;
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %4, 0;\n"
        "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
        "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%5]; }"
        : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
        : "r"(static_cast<uint32_t>(load)), "l"(__cvta_generic_to_global(p)));
    return v;
  }

  // The same, with other words than zeros if there is no load.
  static __device__ __forceinline__ Vec LoadOr(bool load, const void* p, uint32_t otherwise) {
    static_assert(kBytes == 16 && sizeof(W) == 4);
    Vec v;
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %4, 0;\n"
        "mov.u32 %0, %6; mov.u32 %1, %6; mov.u32 %2, %6; mov.u32 %3, %6;\n"
        "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%5]; }"
        : "=&r"(v.words[0]), "=&r"(v.words[1]), "=&r"(v.words[2]), "=&r"(v.words[3])
        : "r"(static_cast<uint32_t>(load)), "l"(__cvta_generic_to_global(p)), "r"(otherwise));
    return v;
  }

  static __device__ __forceinline__ Vec Filled(T value) {
    U unit;
#pragma unroll
    for (int i = 0; i < kSize; ++i) unit.elements[i] = value;
    return Vec(unit);
  }

  __device__ __forceinline__ void Unpack(A (&values)[kSize]) const {
    if constexpr (kPairs && std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        values[2 * i] = __uint_as_float(words[i] << 16);
        values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      }
    } else if constexpr (kPairs) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const float2 both = __half22float2(Pair(i));
        values[2 * i] = both.x;
        values[2 * i + 1] = both.y;
      }
    } else {
      const U unit = Get();
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = ToCompute(unit.elements[i]);
    }
  }

  __device__ __forceinline__ void Pack(const A (&values)[kSize]) {
    if constexpr (kPairs) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        PairOf<T> pair;
        if constexpr (std::is_same_v<T, __half>) {
          pair = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
        } else {
          pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
        }
        memcpy(words + i, &pair, 4);
      }
    } else {
      U unit;
#pragma unroll
      for (int i = 0; i < kSize; ++i) unit.elements[i] = FromCompute<T>(values[i]);
      memcpy(words, unit.elements, kBytes);
    }
  }

  __device__ __forceinline__ PairOf<T> Pair(int i) const {
    PairOf<T> pair;
    memcpy(&pair, words + i, 4);
    return pair;
  }

  // Call between passes. It keeps the compiler from holding the unpacked values for the next pass.
  __device__ __forceinline__ void Forget() {
    if constexpr (kPairs) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(words[i]));
    }
  }

  // Replaces by `excluded` the elements whose mask byte (0 or 1) is 0.
  __device__ __forceinline__ void Exclude(const Unit<uint8_t, kSize>& keep, T excluded) {
    if constexpr (kPairs && kSize % 4 == 0) {
      const uint32_t pair = Filled(excluded).words[0];
#pragma unroll
      for (int i = 0; i < kWords; i += 2) {
        uint32_t bytes;
        memcpy(&bytes, keep.elements + 2 * i, 4);
        bytes *= 0xff;
        const uint32_t low = __byte_perm(bytes, 0, 0x1100), high = __byte_perm(bytes, 0, 0x3322);
        words[i] = (words[i] & low) | (pair & ~low);
        words[i + 1] = (words[i + 1] & high) | (pair & ~high);
      }
    } else {
      U unit = Get();
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (keep.elements[i] == 0) unit.elements[i] = excluded;
      }
      memcpy(words, unit.elements, kBytes);
    }
  }

  // Replaces x by x * 0, which is NaN if x is infinite or NaN. Elements for which `inside` is false
  // become `excluded`.
  template <typename Inside>
  __device__ __forceinline__ void TimesZero(const Inside& inside, T excluded) {
    U unit = Get();
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const T zero = FromCompute<T>(ToCompute(unit.elements[i]) * A(0));
      unit.elements[i] = inside(i) ? zero : excluded;
    }
    memcpy(words, unit.elements, kBytes);
  }
};

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CORE_CUDA_VEC_CUH_

// Shared by the element-wise kernels over broadcast operands: how a thread loads a unit of 16 bytes
// of adjacent elements of an operand, for any broadcast.
//
// Loads are separate from conversions: a thread issues the loads of all operands before it uses any
// of them. So loaded data is kept as raw bits. If it were kept as elements, the compiler would
// unpack 16-bit elements directly after a conditional load, and wait for it. That cost a third of
// the bandwidth.
#ifndef JAX_FASTOPS_ELEMENTWISE_OPERANDS_CUH_
#define JAX_FASTOPS_ELEMENTWISE_OPERANDS_CUH_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/cuda/unit.cuh"

namespace jax_fastops::cuda {

// Converts several elements, from bits or from an array, to the type in which T is computed. Two
// bfloat16 elements take a shift and a mask. The library's conversion (`asm volatile`) would first
// extract each from its word.
template <typename T, typename Bits, int kSize>
__device__ __forceinline__ void ToCompute(const Bits& bits, ComputeType<T> (&values)[kSize]) {
  static_assert(sizeof(Bits) == kSize * sizeof(T));
  if constexpr (std::is_same_v<T, __nv_bfloat16> && kSize % 2 == 0) {
    uint32_t pairs[kSize / 2];
    memcpy(pairs, &bits, sizeof(bits));
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      values[i] = __uint_as_float(pairs[i / 2] << 16);
      values[i + 1] = __uint_as_float(pairs[i / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = ToCompute(ElementOf<T>(bits, i));
  }
}

// Loads those of 16 bytes' elements that have a bit in `elements`. The others become 0. For the
// ends of rows and for addresses that are not aligned, so the code is short rather than fast.
template <typename T>
__device__ __forceinline__ uint4 GatherUnit(const T* p, uint32_t elements) {
  constexpr int kSize = 16 / sizeof(T);
  uint4 bits = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (int i = kSize - 1; i >= 0; --i) {
    const bool live = (elements >> i & 1) != 0;
    if constexpr (sizeof(T) == 8) {
      const uint2 element = live ? reinterpret_cast<const uint2*>(p)[i] : make_uint2(0, 0);
      bits = make_uint4(element.x, element.y, bits.x, bits.y);
    } else if constexpr (sizeof(T) == 4) {
      const uint32_t element = live ? reinterpret_cast<const uint32_t*>(p)[i] : 0;
      bits = make_uint4(element, bits.x, bits.y, bits.z);
    } else {
      const uint32_t element = live ? reinterpret_cast<const uint16_t*>(p)[i] : 0;
      bits = make_uint4(bits.x << 16 | element, bits.y << 16 | bits.x >> 16,
                        bits.z << 16 | bits.y >> 16, bits.w << 16 | bits.z >> 16);
    }
  }
  return bits;
}

// The loaded bits of an operand's elements for a unit of kBytes: 16, or one element. `one` says
// that a single element serves the whole unit, `wide` that the operand has the accumulator type.
// Both are the same for all threads, so they cost a branch for each unit, and no registers.
template <typename T, int kBytes, bool kMayBeWide>
struct Loaded {
  using C = ComputeType<T>;
  static constexpr int kSize = kBytes / sizeof(T);
  static constexpr bool kWide = kMayBeWide && sizeof(T) < sizeof(C);
  static constexpr int kWideWords = kSize == 1 ? 1 : 2;

  Word<kBytes> bits;
  Word<kSize == 1 ? 4 : 16> wide_bits[kWide ? kWideWords : 1];  // in place of `bits` if wide

  // `at` is in elements. The address of a whole unit must be aligned.
  __device__ __forceinline__ void Load(const void* data, int64_t at, bool one, bool wide) {
    if constexpr (kWide) {
      if (wide) {
        LoadFrom<C>(static_cast<const C*>(data) + at, one, wide_bits);
        return;
      }
    }
    Word<kBytes> words[1];
    LoadFrom<T>(static_cast<const T*>(data) + at, one, words);
    bits = words[0];
  }

  // The same for some elements of a unit, at any address.
  __device__ __forceinline__ void Gather(const void* data, int64_t at, uint32_t elements,
                                         bool wide) {
    static_assert(kBytes == 16);
    if constexpr (kWide) {
      if (wide) {
        const C* p = static_cast<const C*>(data) + at;
        wide_bits[0] = GatherUnit<C>(p, elements);
        wide_bits[1] = GatherUnit<C>(p + kSize / 2, elements >> (kSize / 2));
        return;
      }
    }
    bits = GatherUnit<T>(static_cast<const T*>(data) + at, elements);
  }

  // Converts the elements. A single element is repeated as bits first: a branch around conversions
  // would keep all converted elements of all operands in registers at once.
  __device__ __forceinline__ void Expand(C (&values)[kSize], bool one, bool wide) const {
    if constexpr (kWide) {
      if (wide) {
        C elements[kSize];
        memcpy(elements, wide_bits, sizeof(elements));
#pragma unroll
        for (int i = 0; i < kSize; ++i) values[i] = one ? elements[0] : elements[i];
        return;
      }
    }
    Word<kBytes> repeated = bits;
    if constexpr (kSize > 1) {
      if (one) repeated = Repeated(bits);
    }
    ToCompute<T>(repeated, values);
  }

 private:
  static __device__ __forceinline__ uint4 Repeated(uint4 bits) {
    if constexpr (sizeof(T) == 2) {
      bits.x = __byte_perm(bits.x, 0, 0x1010);
      return make_uint4(bits.x, bits.x, bits.x, bits.x);
    } else if constexpr (sizeof(T) == 4) {
      return make_uint4(bits.x, bits.x, bits.x, bits.x);
    } else {
      return make_uint4(bits.x, bits.y, bits.x, bits.y);
    }
  }

  template <typename E, typename Bits, int kWords>
  static __device__ __forceinline__ void LoadFrom(const E* p, bool one, Bits (&words)[kWords]) {
    if constexpr (kSize == 1) {
      words[0] = *reinterpret_cast<const Word<sizeof(E)>*>(p);
    } else if (!one) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(p)[i];
    } else if constexpr (sizeof(E) == 8) {
      const uint2 element = *reinterpret_cast<const uint2*>(p);
      words[0].x = element.x;
      words[0].y = element.y;
    } else {
      words[0].x = *reinterpret_cast<const Word<sizeof(E)>*>(p);
    }
  }
};

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_OPERANDS_CUH_

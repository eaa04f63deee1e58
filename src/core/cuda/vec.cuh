// Elements in a thread's registers: types, conversions, loads and stores.
//
// A warp moves the most bytes per instruction, and keeps the most bytes in flight for the fewest
// address registers, when each lane accesses 16 bytes.
//
// - `Unit`: elements that a thread loads or stores with one instruction, as an array.
// - `Vec`: elements as words of 32 bits, which stay packed until they are used; of one or several
//   accesses.
// - `Shifted`: elements at any address, from aligned words.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

namespace jax_fastops::cuda {

// How a kernel expects the bytes that it accesses to be used later.
enum class CacheHint {
  kDefault,     // may be read again soon, by this kernel or by the next one from L2
  kReadOnly,    // loads only (ld.nc): the kernel does not write the bytes
  kStreaming,   // accessed once (ld.cs, st.cs): evicted first, from L1 and from L2
  kNoAllocate,  // loads only: read once by this SM; bypasses L1, uses L2 as usual
};

// Unsigned type of kBytes bytes that a single load or store moves.
template <int kBytes>
using Word = std::tuple_element_t<std::countr_zero(unsigned{kBytes}),
                                  std::tuple<uint8_t, uint16_t, uint32_t, uint2, uint4>>;

namespace internal {

template <CacheHint kHint>
__device__ __forceinline__ uint4 LoadBits(const void* p) {
  const uint4* address = static_cast<const uint4*>(p);
  if constexpr (kHint == CacheHint::kStreaming) {
    return __ldcs(address);
  } else if constexpr (kHint == CacheHint::kNoAllocate) {
    // There is no intrinsic. `volatile` keeps a batch of loads together and in program order. It
    // does not tell the compiler that memory is read: a load may move across the kernel's own
    // stores, so no kernel may load this way what it has stored itself.
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(__cvta_generic_to_global(address)));
    return v;
  } else if constexpr (kHint == CacheHint::kReadOnly) {
    return __ldg(address);
  } else {
    return __ldca(address);
  }
}

template <CacheHint kHint>
__device__ __forceinline__ void StoreBits(void* p, uint4 bits) {
  static_assert(kHint != CacheHint::kNoAllocate && kHint != CacheHint::kReadOnly,
                "stores never allocate in L1");
  uint4* address = static_cast<uint4*>(p);
  if constexpr (kHint == CacheHint::kStreaming) {
    __stcs(address, bits);
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

// `a` if the condition holds, otherwise `b`. Written as a conditional expression, the compiler
// would choose between their addresses, and keep both in local memory.
template <typename T, int kBytes>
__device__ __forceinline__ Unit<T, kBytes> Choose(bool condition, const Unit<T, kBytes>& a,
                                                  const Unit<T, kBytes>& b) {
  Unit<T, kBytes> chosen;
#pragma unroll
  for (int i = 0; i < chosen.kSize; ++i) chosen[i] = condition ? a[i] : b[i];
  return chosen;
}

// Kernels compute in float, and in double for double. Conversions to the compute type are exact;
// conversions back round to nearest even. Subnormals are kept.
template <typename T>
using ComputeType = std::conditional_t<std::is_same_v<T, double>, double, float>;

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

// -------------------------------------------------------------------------------------------------
// Elements of up to 16 bytes, or of a multiple of that, in a thread's registers. 16-bit elements
// stay packed, two to a register, until they are used. As an array of elements they would take one
// register each, and the compiler would unpack them right after the load, which waits for memory:
// the next load would be issued only after that.
template <typename T, int kBytes = 16>
struct Vec {
  using A = ComputeType<T>;
  using W = Word<(kBytes < 4 ? kBytes : 4)>;
  static constexpr int kAccess = kBytes < 16 ? kBytes : 16;  // bytes of a load or store
  static constexpr int kAccesses = kBytes / kAccess;
  using U = Unit<T, kAccess>;
  static constexpr int kSize = kBytes / sizeof(T);
  static constexpr int kWords = kBytes / sizeof(W);
  static constexpr bool kPairs = sizeof(T) == 2 && kBytes > 2;
  static_assert(kAccesses * kAccess == kBytes && kSize * sizeof(T) == kBytes);

  W words[kWords];

  Vec() = default;
  explicit __device__ __forceinline__ Vec(const U& unit) {
    static_assert(kAccesses == 1);
    memcpy(words, unit.elements, kBytes);
  }
  explicit __device__ __forceinline__ Vec(const T (&elements)[kSize]) {
    memcpy(words, elements, kBytes);
  }

  template <CacheHint kHint = CacheHint::kDefault>
  static __device__ __forceinline__ Vec Load(const void* p) {
    Vec v;
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      v.Set(i, U::template Load<kHint>(static_cast<const char*>(p) + i * kAccess));
    }
    return v;
  }
  template <CacheHint kHint = CacheHint::kDefault>
  __device__ __forceinline__ void Store(void* p) const {
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      Get(i).template Store<kHint>(static_cast<char*>(p) + i * kAccess);
    }
  }

  // The elements i for which has(i), one by one: at any address, and no others. Loads set the
  // others to 0.
  template <typename Has>
  static __device__ __forceinline__ Vec LoadElements(const T* p, const Has& has) {
    T elements[kSize];
    memset(elements, 0, sizeof(elements));
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (has(i)) elements[i] = p[i];
    }
    return Vec(elements);
  }
  template <typename Has>
  __device__ __forceinline__ void StoreElements(T* p, const Has& has) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (has(i)) p[i] = (*this)[i];
    }
  }

  // Stores 16 bytes by one instruction. The compiler may split other stores.
  __device__ __forceinline__ void StoreWord(T* p) const {
    static_assert(kBytes == 16);
    cuda::StoreWord(p, Get());
  }

  // The elements of an access.
  __device__ __forceinline__ U Get(int access = 0) const {
    U unit;
    memcpy(unit.elements, words + access * (kWords / kAccesses), kAccess);
    return unit;
  }
  __device__ __forceinline__ void Set(int access, const U& unit) {
    memcpy(words + access * (kWords / kAccesses), unit.elements, kAccess);
  }
  __device__ __forceinline__ T operator[](int i) const {
    T elements[kSize];
    memcpy(elements, words, kBytes);
    return elements[i];
  }

  // Loads 16 bytes that are read once, or other words without a load. The compiler does not know
  // which, so it unpacks nothing before all loads of a thread are under way.
  static __device__ __forceinline__ Vec LoadOr(bool load, const void* p, uint32_t otherwise = 0) {
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
    T elements[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) elements[i] = value;
    return Vec(elements);
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
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = ToCompute((*this)[i]);
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
      T elements[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) elements[i] = FromCompute<T>(values[i]);
      memcpy(words, elements, kBytes);
    }
  }
  static __device__ __forceinline__ Vec Packed(const A (&values)[kSize]) {
    Vec v;
    v.Pack(values);
    return v;
  }

  // Keeps the elements whose bit is set, and sets the others to 0.
  __device__ __forceinline__ Vec Select(uint32_t bits) const {
    T elements[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      elements[i] = bits >> i & 1 ? (*this)[i] : FromCompute<T>(0);
    }
    return Vec(elements);
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
    static_assert(kAccesses == 1);
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

  // Replaces x by x * 0, which is NaN if x is infinite or NaN.
  __device__ __forceinline__ void TimesZero() {
    static_assert(kAccesses == 1);
    U unit = Get();
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      unit.elements[i] = FromCompute<T>(ToCompute(unit.elements[i]) * A(0));
    }
    memcpy(words, unit.elements, kBytes);
  }
};

// -------------------------------------------------------------------------------------------------
// Elements at any address, by aligned loads: the 16-byte words that contain the first and the last
// element, and a shift. The words are loaded like any others, and shifted when they are used. Eight
// elements of 16 bits take two loads instead of eight, and a warp touches each of its cache lines
// twice instead of eight times.

// The distance from the beginning of the aligned word to the address, in bytes.
__device__ __forceinline__ int WordShift(const void* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) & 15);
}

// The aligned word that contains the address.
__device__ __forceinline__ const uint4* WordOf(const void* address) {
  return reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(address) & ~uintptr_t{15});
}

// Sets `out`, one word fewer than there are `words`, to the bytes that begin `shift` bytes (0 to
// 15) after the beginning of `words`. `shift` is a multiple of kElement bytes.
template <int kElement, int kWords, typename Out>
__device__ __forceinline__ void ShiftWords(const uint4 (&words)[kWords], int shift, Out& out) {
  constexpr int kOut = 4 * (kWords - 1);
  static_assert(sizeof(Out) == 4 * kOut);
  uint32_t w[kOut + 4], two[kOut + 2], one[kOut + 1];
  memcpy(w, words, sizeof(w));
#pragma unroll
  for (int i = 0; i < kOut + 2; ++i) two[i] = shift & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < kOut + 1; ++i) one[i] = kElement < 8 && shift & 4 ? two[i + 1] : two[i];
  if constexpr (kElement < 4) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) one[i] = __funnelshift_r(one[i], one[i + 1], (shift & 3) * 8);
  }
  memcpy(&out, one, sizeof(out));
}

// kSize elements, 16 or 32 bytes in total.
template <typename T, int kSize>
struct Shifted {
  static constexpr int kWords = kSize * sizeof(T) / 16;
  static constexpr int kPerWord = 16 / sizeof(T);

  uint4 words[kWords + 1];
  int shift;  // in bytes, from 0 to 15

  Shifted() = default;
  __device__ __forceinline__ Shifted(const uint4& low, const uint4& high, int shift)
      : words{low, high}, shift(shift) {
    static_assert(kWords == 1);
  }

  // Loads the words that contain the elements at any address. All of them must be readable.
  explicit __device__ __forceinline__ Shifted(const void* address) : shift(WordShift(address)) {
#pragma unroll
    for (int i = 0; i <= kWords; ++i) words[i] = WordOf(address)[i];
  }
  // Whether these words are within an array.
  static __device__ __forceinline__ bool IsReadable(const char* address, const char* begin,
                                                    const char* end) {
    const char* low = reinterpret_cast<const char*>(WordOf(address));
    return low >= begin && low + 16 * (kWords + 1) <= end;
  }

  // Loads elements of an aligned array, beginning with `first`. The word of the last one must lie
  // completely within the array: first + kSize - 1 < (the array's size, rounded down to words).
  __device__ __forceinline__ void Load(const void* data, uint32_t first) {
    const T* p = static_cast<const T*>(data);
    shift = static_cast<int>(first % kPerWord * sizeof(T));
    const uint4* low = reinterpret_cast<const uint4*>(p + first / kPerWord * kPerWord);
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldg(low + i);
    // Without a shift this loads the last word again, so no condition is needed.
    const uint32_t last = (first + kSize - 1) / kPerWord * kPerWord;
    words[kWords] = __ldg(reinterpret_cast<const uint4*>(p + last));
  }

  // Loads elements of an aligned array, beginning with `first`, a multiple of kSize.
  __device__ __forceinline__ void LoadAligned(const void* data, int64_t first) {
    const T* p = static_cast<const T*>(data) + first;
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(p)[i];
  }

  // Loads element by element: `left` elements beginning with `first`, then those beginning with
  // `next`.
  __device__ __forceinline__ void Gather(const void* data, int64_t first, int64_t next, int left) {
    const T* here = static_cast<const T*>(data) + first;
    const T* there = static_cast<const T*>(data) + (next - left);
    T elements[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) elements[i] = (i < left ? here : there)[i];
    memcpy(words, elements, sizeof(elements));
    shift = 0;
  }

  __device__ __forceinline__ void TakeAligned(T (&elements)[kSize]) const {
    memcpy(elements, words, sizeof(elements));
  }

  template <typename Out>
  __device__ __forceinline__ void Take(Out& elements) const {
    ShiftWords<sizeof(T)>(words, shift, elements);
  }
};

}  // namespace jax_fastops::cuda

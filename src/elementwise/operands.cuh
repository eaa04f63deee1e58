// Shared by the element-wise kernels over broadcast operands: how a thread loads a unit of adjacent
// elements of an operand, for any broadcast.
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
#include <utility>

#include "core/cuda/unit.cuh"
#include "elementwise/elementwise.h"

namespace jax_fastops::cuda {

// How an operand relates to the elements of one unit.
enum class Reach : uint8_t {
  kNeighbours,  // its elements are adjacent, too, and aligned like the unit
  kOne,         // one element for the whole unit
};

// The kind of an operand and its gradient, two bits each, in the backward. kAnyKinds means that all
// kinds are looked up at run time.
enum Kind : int {
  kPlain = 0,   // the operand's elements are adjacent; its gradient is full or not requested
  kColumn = 1,  // the operand's elements are adjacent; its gradient is a sum of columns
  kRow = 2,     // the operand has one element per row
};
inline constexpr int kAnyKinds = -1;

// The kinds of the operands, in their order.
template <typename... Kinds>
constexpr int KindsOf(Kinds... kinds) {
  int all = 0, shift = 0;
  ((all |= kinds << shift, shift += 2), ...);
  return all;
}

constexpr int KindOf(int kinds, int gradient) { return kinds >> (2 * gradient) & 3; }

constexpr int CountKind(int kinds, int gradients, int kind) {
  int count = 0;
  for (int g = 0; g < gradients; ++g) count += KindOf(kinds, g) == kind;
  return count;
}

// Calls visit.operator()<kinds>() for each member of a list.
template <int... kKinds, typename Visit>
void ForKinds(std::integer_sequence<int, kKinds...>, const Visit& visit) {
  (visit.template operator()<kKinds>(), ...);
}

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

// The loaded bits of an operand's elements.
template <typename T, int kBytes, bool kMayBeWide>
struct Loaded {
  using C = ComputeType<T>;
  static constexpr int kSize = kBytes / sizeof(T);
  static constexpr bool kWide = kMayBeWide && sizeof(T) < sizeof(C);

  Word<kBytes> neighbours;
  T one;
  C wide_neighbours[kWide ? kSize : 1];
  C wide_one;

  // `offset` is in elements.
  __device__ __forceinline__ void Load(const void* data, int64_t offset, Reach reach, bool wide) {
    if constexpr (kWide) {
      if (wide) {
        const C* p = static_cast<const C*>(data) + offset;
        if (reach == Reach::kOne) {
          wide_one = *p;
        } else {
          constexpr int kPiece = kSize * sizeof(C) < 16 ? kSize * sizeof(C) : 16;
          using Piece = Unit<C, kPiece>;
#pragma unroll
          for (int at = 0; at < kSize; at += Piece::kSize) {
            const Piece piece = Piece::Load(p + at);
#pragma unroll
            for (int i = 0; i < Piece::kSize; ++i) wide_neighbours[at + i] = piece.elements[i];
          }
        }
        return;
      }
    }
    const T* p = static_cast<const T*>(data) + offset;
    if (reach == Reach::kOne) {
      one = *p;
    } else {
      neighbours = *reinterpret_cast<const Word<kBytes>*>(p);
    }
  }

  // The elements in the type in which T is computed. Branches on the access once per unit.
  __device__ __forceinline__ void Expand(C (&values)[kSize], Reach reach, bool wide) const {
    if constexpr (kWide) {
      if (wide) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          values[i] = reach == Reach::kOne ? wide_one : wide_neighbours[i];
        }
        return;
      }
    }
    if (reach == Reach::kOne) {
      const C the_one = ToCompute(one);  // once: conversions are not merged
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = the_one;
    } else {
      ToCompute<T>(neighbours, values);
    }
  }
};

// The gradients of the elements of a unit.
template <typename F, typename T, int kSize>
__device__ __forceinline__ void GradientsOf(const F& f, const ComputeType<T> (&dy)[kSize],
                                            const ComputeType<T> (&x)[F::kOperands][kSize],
                                            ComputeType<T> (&values)[F::kGradients][kSize]) {
  f.Choose([&](auto choice) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      ComputeType<T> of_element[F::kOperands], g[F::kGradients];
#pragma unroll
      for (int k = 0; k < F::kOperands; ++k) of_element[k] = x[k][i];
      decltype(choice)::template Gradients<T>(dy[i], of_element, g);
#pragma unroll
      for (int q = 0; q < F::kGradients; ++q) values[q][i] = g[q];
    }
  });
}

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_ELEMENTWISE_OPERANDS_CUH_

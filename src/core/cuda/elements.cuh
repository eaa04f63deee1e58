// y = f(x) for every element, over inputs that are broadcast along any dimensions and never
// expanded: the flat loop of the element-wise ops. What is computed is a functor:
//
//   struct F {
//     using Family = ...;  // of KernelOf
//     static constexpr int kIn = ...;
//     static constexpr int kOut = ...;  // PitchedElements; Elements has one output
//     static constexpr int kWords = ...;  // 16-byte words of each array per thread
//     // Calls visit(choice) with a value of the class that has Apply: of this one, or of one that
//     // is chosen at run time.
//     template <typename Visit>
//     __device__ void Choose(const Visit& visit) const;
//     template <typename T>
//     static __device__ void Apply(const ComputeType<T> (&x)[kIn], ComputeType<T> (&y)[kOut]);
//     // PitchedElements: the arrays whose rows are apart, inputs and then outputs, one bit each.
//     static constexpr int kPitched = ...;
//     // Elements: whether an input may have the accumulator type; and the sets of inputs with one
//     // element per row, one bit each, for which there are kernels.
//     static constexpr bool kMayBeWide = ...;
//     using RowSets = std::integer_sequence<int, ...>, RaggedSets = ...;
//   };
//
// The kernel is bound by memory: a thread takes 16-byte words of the flat result, several of them
// in flight, and neighboring threads take neighboring words. An array belongs to a class:
//
//   kFull    has the result's shape: read like the result;
//   kRow     its elements are adjacent along the rows: a value per position in a row;
//   kColumn  one value per row;
//   kOne     a single element.
//
// For arrays that are not full the thread computes the offset of a word (not of each element) by
// multiplications with reciprocals from the host, for all of its words together: a dimension's
// constants are loaded once, and the words' chains of multiplications overlap. It takes time in
// which the addresses are not known yet, so full arrays are loaded before that.
//
// If rows are not a whole number of words ("ragged"), a word begins at any address of the broadcast
// inputs, and is read by aligned words and a shift (Shifted). A word in which one row ends and
// the next begins (one of 125 in rows of 1001 elements of 16 bits) is read element by element, and
// so is a word at the end of an input. Single elements per access remain for rows shorter than a
// word, unaligned pointers, and float64.
//
// Loads are separate from conversions: a thread issues the loads of all inputs before it uses any
// of them, and loaded data is kept as raw bits. As elements, the compiler would unpack 16-bit
// elements directly after a conditional load, and wait for it. That cost a third of the bandwidth
// (docs/dev/log/elementwise.md).
//
// Kernels for wide inputs need twice the registers for them, so they are separate kernels. Sets
// that are looked up at run time cost up to 2.0 times the time, those of a functor's lists nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/broadcast.h"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/flat_elements.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/vec.cuh"
#include "core/dtype.h"
#include "core/fast_divide.h"
#include "core/integer.h"

namespace jax_fastops::cuda {

enum class OperandClass : uint8_t { kFull, kRow, kColumn, kOne };

// Whether an array has one element for all elements of a row.
__host__ __device__ constexpr bool IsOneInRow(OperandClass c) {
  return c == OperandClass::kColumn || c == OperandClass::kOne;
}

inline OperandClass OperandClassOf(const BroadcastShape& shape, int array) {
  if (shape.IsFull(array)) return OperandClass::kFull;
  if (shape.IsScalar(array)) return OperandClass::kOne;
  return shape.InnerStride(array) == 0 ? OperandClass::kColumn : OperandClass::kRow;
}

// How the elements are accessed.
enum class Access {
  kRows,      // words; rows are a whole number of words
  kRagged,    // words of full arrays; rows are not a whole number of words
  kElements,  // single elements
};

// The set of inputs with one element is looked up at run time.
inline constexpr int kAnySet = -1;

template <typename F>
struct ElementsParams {
  const void* in[F::kIn];
  void* out;
  OperandClass in_class[F::kIn];
  bool wide[F::kIn];
  uint32_t words_end[F::kIn];  // ragged: the input's elements in whole words
  uint32_t elements, inner;
  int rank;
  // The lengths of the dimensions, major to minor; the innermost one in words (ragged: elements).
  FastDivisor length[kMaxBroadcastRank];
  uint32_t stride[F::kIn][kMaxBroadcastRank];
  F f;
  DType dtype;
};

// The loaded bits of an input's elements of one word.
template <typename T, int kBytes, bool kMayBeWide>
struct LoadedWord {
  using C = ComputeType<T>;
  static constexpr int kSize = kBytes / sizeof(T);
  static constexpr bool kWide = kMayBeWide && sizeof(T) < sizeof(C);

  Vec<T, kBytes> word;
  T one;
  C wide_word[kWide ? kSize : 1];
  C wide_one;

  // `offset` is in elements.
  __device__ __forceinline__ void Load(const void* data, int64_t offset, bool is_one, bool wide) {
    if constexpr (kWide) {
      if (wide) {
        const C* p = static_cast<const C*>(data) + offset;
        if (is_one) {
          wide_one = *p;
        } else {
          LoadParameter<C, C>(p, 0, wide_word);
        }
        return;
      }
    }
    const T* p = static_cast<const T*>(data) + offset;
    if (is_one) {
      one = *p;
    } else {
      word = Vec<T, kBytes>::Load(p);
    }
  }

  // Branches on the class once per word.
  __device__ __forceinline__ void Expand(C (&values)[kSize], bool is_one, bool wide) const {
    if constexpr (kWide) {
      if (wide) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) values[i] = is_one ? wide_one : wide_word[i];
        return;
      }
    }
    if (is_one) {
      const C the_one = ToCompute(one);  // once: conversions are not merged
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = the_one;
    } else {
      word.Unpack(values);
    }
  }
};

// An input's elements of a word at any address, which may span two rows if it is broadcast.
template <typename T, bool kMayBeWide>
struct StraddlingWord {
  using C = ComputeType<T>;
  static constexpr int kSize = 16 / sizeof(T);
  static constexpr bool kWide = kMayBeWide && sizeof(T) < sizeof(C);

  Shifted<T, kSize> word;
  Shifted<C, kSize> wide_word;
  T ones[2];
  C wide_ones[2];

  // For a full input: its elements, aligned.
  __device__ __forceinline__ void LoadFull(const void* data, int64_t first, bool wide) {
    if constexpr (kWide) {
      if (wide) {
        wide_word.LoadAligned(data, first);
        return;
      }
    }
    word.LoadAligned(data, first);
  }

  // The first `left` elements begin at offset `here`, the others at `next`.
  __device__ __forceinline__ void Load(const void* data, uint32_t here, uint32_t next, int left,
                                       uint32_t words_end, bool is_one, bool wide) {
    const auto load = [&](auto& some, auto& one) {
      using E = std::remove_reference_t<decltype(one[0])>;
      const E* p = static_cast<const E*>(data);
      if (is_one) {
        one[0] = p[here];
        one[1] = p[next];
      } else if (left < kSize || here + (kSize - 1) >= words_end) {
        some.Gather(p, here, next, left);
      } else {
        some.Load(p, here);
      }
    };
    if constexpr (kWide) {
      if (wide) {
        load(wide_word, wide_ones);
        return;
      }
    }
    load(word, ones);
  }

  __device__ __forceinline__ void Expand(C (&values)[kSize], bool is_one, bool full, bool wide,
                                         int left) const {
    const auto expand = [&](const auto& some, const auto& one) {
      using E = std::remove_const_t<std::remove_reference_t<decltype(one[0])>>;
      if (is_one) {
        const C first = ToCompute(one[0]), second = ToCompute(one[1]);
#pragma unroll
        for (int i = 0; i < kSize; ++i) values[i] = i < left ? first : second;
      } else {
        E elements[kSize];
        if (full) {
          some.TakeAligned(elements);
        } else {
          some.Take(elements);
        }
        if constexpr (sizeof(E) == sizeof(T)) {
          Vec<T, 16> whole;
          memcpy(whole.words, elements, 16);
          whole.Unpack(values);
        } else {
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] = elements[i];
        }
      }
    };
    if constexpr (kWide) {
      if (wide) {
        expand(wide_word, wide_ones);
        return;
      }
    }
    expand(word, ones);
  }
};

// Finds the rows of kCount words, the positions within them, and the row's offset in each array.
template <typename F>
struct RowFinder {
  const ElementsParams<F>& p;

  // Divides `n` by the length of dimension `d`: `n` becomes the remainder, `over` the quotient.
  template <int kCount>
  __device__ __forceinline__ void Divide(int d, uint32_t (&n)[kCount],
                                         uint32_t (&over)[kCount]) const {
    const FastDivisor divisor = p.length[d];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      over[u] = cuda::Divide(n[u], divisor);
      n[u] -= over[u] * divisor.divisor;
    }
  }

  template <int kCount>
  __device__ __forceinline__ void Offsets(const uint32_t (&row)[kCount],
                                          uint32_t (&offset)[kCount][F::kIn]) const {
    uint32_t digit[kCount], over[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      over[u] = row[u];
#pragma unroll
      for (int k = 0; k < F::kIn; ++k) offset[u][k] = 0;
    }
#pragma unroll 1
    for (int d = p.rank - 2; d >= 0; --d) {
#pragma unroll
      for (int u = 0; u < kCount; ++u) digit[u] = over[u];
      if (d > 0) Divide(d, digit, over);
#pragma unroll
      for (int k = 0; k < F::kIn; ++k) {
        const uint32_t stride = p.stride[k][d];
#pragma unroll
        for (int u = 0; u < kCount; ++u) offset[u][k] += digit[u] * stride;
      }
    }
  }
};

// Computes element `e`, which is in no whole word. Unless rows are ragged, there is only one.
template <typename F, typename T, bool kRagged, bool kWide>
__device__ __forceinline__ void ComputeOne(const ElementsParams<F>& p, uint32_t e) {
  using C = ComputeType<T>;
  uint32_t in_row[1] = {e}, row[1], offset[1][F::kIn] = {};
  if constexpr (kRagged) {
    const RowFinder<F> find{p};
    find.Divide(p.rank - 1, in_row, row);
    find.Offsets(row, offset);
  }
  C x[F::kIn], y[1];
#pragma unroll
  for (int k = 0; k < F::kIn; ++k) {
    const uint32_t at = p.in_class[k] == OperandClass::kFull ? e
                        : IsOneInRow(p.in_class[k])          ? offset[0][k]
                                                             : offset[0][k] + in_row[0];
    x[k] = kWide && p.wide[k] ? static_cast<const C*>(p.in[k])[at]
                              : ToCompute(static_cast<const T*>(p.in[k])[at]);
  }
  p.f.Choose([&](auto choice) { decltype(choice)::template Apply<T>(x, y); });
  static_cast<T*>(p.out)[e] = FromCompute<T>(y[0]);
}

// The words of a thread, all in flight at once.
template <typename F, typename T, Access kAccess, bool kWide>
inline constexpr int kElementsWords = kAccess == Access::kElements          ? 8
                                      : kAccess == Access::kRagged || kWide ? 2
                                                                            : F::kWords;

template <typename F, typename T, Access kAccess, int kSet, bool kWide>
__device__ __forceinline__ void ElementsLoop(const ElementsParams<F>& p) {
  using C = ComputeType<T>;
  constexpr bool kRagged = kAccess == Access::kRagged;
  constexpr int kBytes = kAccess == Access::kElements ? sizeof(T) : 16;
  constexpr int kSize = kBytes / sizeof(T), kWords = kElementsWords<F, T, kAccess, kWide>;
  constexpr int kIn = F::kIn;
  using Loaded =
      std::conditional_t<kRagged, StraddlingWord<T, kWide>, LoadedWord<T, kBytes, kWide>>;
  const RowFinder<F> find{p};
  const auto is_full = [&](int k) { return p.in_class[k] == OperandClass::kFull; };
  const auto is_one = [&](int k) {
    if constexpr (kSet == kAnySet) return IsOneInRow(p.in_class[k]);
    return (kSet >> k & 1) != 0;
  };
  // Of a word; a word of one element has one.
  const auto is_one_of_word = [&](int k) { return kSize == 1 || is_one(k); };

  const int64_t first = int64_t{blockIdx.x} * (kElementsThreads * kWords) + threadIdx.x;
  const int64_t whole = p.elements / kSize;
  // The number of the thread's words that exist.
  const int live = static_cast<int>(min(max(whole - first, int64_t{0}) + (kElementsThreads - 1),
                                        int64_t{kElementsThreads} * kWords)) /
                   kElementsThreads;

  Loaded loaded[kWords][kIn];
  // Full arrays are loaded before the offsets of the others are known.
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
    if (u >= live) break;
    const int64_t at = (first + u * kElementsThreads) * kSize;
#pragma unroll
    for (int k = 0; k < kIn; ++k) {
      if (!is_full(k)) continue;
      if constexpr (kRagged) {
        loaded[u][k].LoadFull(p.in[k], at, p.wide[k]);
      } else {
        loaded[u][k].Load(p.in[k], at, is_one_of_word(k), p.wide[k]);
      }
    }
  }

  // The row of each word, the position in it, and the offset of the row in each array.
  uint32_t in_row[kWords], row[kWords], offset[kWords][kIn];
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
    in_row[u] = static_cast<uint32_t>(first + u * kElementsThreads) * (kRagged ? kSize : 1);
  }
  find.Divide(p.rank - 1, in_row, row);
  find.Offsets(row, offset);

  int left[kWords];  // ragged: elements from the word's first one to the end of its row
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
    if (u >= live) break;
    if constexpr (kRagged) {
      left[u] = static_cast<int>(p.inner) - static_cast<int>(in_row[u]);
      uint32_t next[1][kIn];
#pragma unroll
      for (int k = 0; k < kIn; ++k) next[0][k] = offset[u][k];
      if (left[u] < kSize) {
        const uint32_t behind[1] = {row[u] + 1};
        find.Offsets(behind, next);
      }
#pragma unroll
      for (int k = 0; k < kIn; ++k) {
        if (is_full(k)) continue;
        const uint32_t here = offset[u][k] + (is_one(k) ? 0 : in_row[u]);
        loaded[u][k].Load(p.in[k], here, next[0][k], left[u], p.words_end[k], is_one(k), p.wide[k]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kIn; ++k) {
        if (is_full(k)) continue;
        loaded[u][k].Load(p.in[k], offset[u][k] + (is_one(k) ? 0 : in_row[u] * kSize),
                          is_one_of_word(k), p.wide[k]);
      }
    }
  }

  p.f.Choose([&](auto choice) {
#pragma unroll
    for (int u = 0; u < kWords; ++u) {
      if (u >= live) break;
      C values[kIn][kSize], results[kSize];
#pragma unroll
      for (int k = 0; k < kIn; ++k) {
        if constexpr (kRagged) {
          loaded[u][k].Expand(values[k], is_one(k), is_full(k), p.wide[k], left[u]);
        } else {
          loaded[u][k].Expand(values[k], is_one_of_word(k), p.wide[k]);
        }
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        C x[kIn], y[1];
#pragma unroll
        for (int k = 0; k < kIn; ++k) x[k] = values[k][i];
        decltype(choice)::template Apply<T>(x, y);
        results[i] = y[0];
      }
      Vec<T, kBytes> y;
      y.Pack(results);
      y.Store(static_cast<T*>(p.out) + (first + u * kElementsThreads) * kSize);
    }
  });

  // The elements after the last whole word, by the first threads of the last block.
  if (kSize > 1 && blockIdx.x == gridDim.x - 1) {
    const uint32_t e = static_cast<uint32_t>(whole) * kSize + threadIdx.x;
    if (e < p.elements) ComputeOne<F, T, kRagged, kWide>(p, e);
  }
}

// Whether both types of 16 bits have one kernel.
template <Access kAccess, bool kWide>
inline constexpr bool kIsCommon = kAccess == Access::kRagged && !kWide;

template <typename F, typename T, Access kAccess, int kSet, bool kWide>
__global__ void __launch_bounds__(kElementsThreads)
    ElementsKernel(const __grid_constant__ ElementsParams<F> p) {
  ForCommonTypes<T, kIsCommon<kAccess, kWide>>(
      p.dtype, [&]<typename U>(TypeTag<U>) { ElementsLoop<F, U, kAccess, kSet, kWide>(p); });
}

template <typename F>
struct SingleElements {
  static constexpr int kBlocks = 0;
  ElementsParams<F> p;

  template <typename T>
  __device__ __forceinline__ void Run() const {
    ElementsLoop<F, T, Access::kElements, kAnySet, F::kMayBeWide && sizeof(T) == 2>(p);
  }
};

// A kernel for a set, and the words of its threads.
template <typename F>
struct ElementsChoice {
  void (*kernel)(ElementsParams<F>) = nullptr;
  int words = 1;
};

// The kernel for a set of a list, or none.
template <typename F, typename T, Access kAccess, bool kWide, int... kSets>
ElementsChoice<F> ElementsKernelOf(int set, std::integer_sequence<int, kSets...>) {
  ElementsChoice<F> choice = {nullptr, kElementsWords<F, T, kAccess, kWide>};
  using Of = CommonType<T, kIsCommon<kAccess, kWide>>;
  const auto consider = [&](int its_set, auto kernel) {
    if (its_set == kAnySet ? choice.kernel == nullptr : its_set == set) choice.kernel = kernel;
  };
  (consider(kSets, KernelOf<typename F::Family, ElementsKernel<F, Of, kAccess, kSets, kWide>>()),
   ...);
  return choice;
}

// No kernel for single elements, or for sets without a kernel.
template <typename F, typename T, bool kWide>
ElementsChoice<F> ChooseElements(Access access, int set) {
  if constexpr (sizeof(T) < 8) {
    if (access == Access::kRows) {
      return ElementsKernelOf<F, T, Access::kRows, kWide>(set, typename F::RowSets());
    }
    if (access == Access::kRagged) {
      return ElementsKernelOf<F, T, Access::kRagged, kWide>(set, typename F::RaggedSets());
    }
  }
  return {};
}

template <typename F, typename T>
cudaError_t LaunchElements(const F& f, const BroadcastShape& given, const Operand* inputs,
                           void* out, cudaStream_t stream) {
  using C = ComputeType<T>;
  constexpr int kIn = F::kIn, kSize = 16 / sizeof(T);
  BroadcastShape shape = given;
  Operand in[kIn];
  std::copy(inputs, inputs + kIn, in);
  const auto is_wide = [&](int k) { return in[k].wide && sizeof(T) < sizeof(C); };

  while (shape.rank > 1 && shape.size[0] == 1) shape.DropMajor();
  if (shape.elements() > kMaxElements) {
    // Halves of the most major dimension. 64 elements or rows keep the alignment.
    const int64_t size = shape.size[0], half = size < 128 ? size / 2 : size / 128 * 64;
    shape.size[0] = half;
    const cudaError_t error = LaunchElements<F, T>(f, shape, in, out, stream);
    if (error != cudaSuccess) return error;
    for (int k = 0; k < kIn; ++k) {
      in[k].data = static_cast<const char*>(in[k].data) +
                   half * shape.stride[k][0] * int64_t(is_wide(k) ? sizeof(C) : sizeof(T));
    }
    out = static_cast<T*>(out) + shape.elements();
    shape.size[0] = size - half;
    return LaunchElements<F, T>(f, shape, in, out, stream);
  }

  ElementsParams<F> p{};
  p.f = f;
  p.dtype = kDTypeOf<T>;
  p.out = out;
  p.elements = static_cast<uint32_t>(shape.elements());
  if (p.elements == 0) return cudaSuccess;
  p.inner = static_cast<uint32_t>(shape.inner());
  bool flat = true, wide = false;
  int set = 0;
  uintptr_t bits = reinterpret_cast<uintptr_t>(out);
  for (int k = 0; k < kIn; ++k) {
    const OperandClass its_class = OperandClassOf(shape, k);
    p.in[k] = in[k].data;
    p.in_class[k] = its_class;
    p.wide[k] = is_wide(k);
    wide = wide || p.wide[k];
    flat = flat && (its_class == OperandClass::kFull || its_class == OperandClass::kOne);
    set |= IsOneInRow(its_class) << k;
    if (!IsOneInRow(its_class)) bits |= reinterpret_cast<uintptr_t>(in[k].data);
    int64_t last = 0;
    for (int d = 0; d < shape.rank; ++d) {
      p.stride[k][d] = static_cast<uint32_t>(shape.stride[k][d]);
      last += (shape.size[d] - 1) * shape.stride[k][d];
    }
    const int64_t per_word = 16 / (p.wide[k] ? sizeof(C) : sizeof(T));
    p.words_end[k] = static_cast<uint32_t>((last + 1) / per_word * per_word);
  }
  const bool aligned = bits % 16 == 0;
  // Flat arrays are one row, whose last elements may be in no word.
  p.rank = flat ? 1 : shape.rank;
  Access access = !aligned                       ? Access::kElements
                  : flat || p.inner % kSize == 0 ? Access::kRows
                  : p.inner < kSize              ? Access::kElements
                                                 : Access::kRagged;
  ElementsChoice<F> choice;
  if constexpr (F::kMayBeWide && sizeof(T) < sizeof(C)) {
    choice =
        wide ? ChooseElements<F, T, true>(access, set) : ChooseElements<F, T, false>(access, set);
  } else {
    choice = ChooseElements<F, T, false>(access, set);
  }
  if (choice.kernel == nullptr) {
    access = Access::kElements;
    choice.words = kElementsWords<F, T, Access::kElements, false>;
  }
  const int size = access == Access::kElements ? 1 : kSize;
  for (int d = 0; d < p.rank; ++d) {
    int64_t length = flat ? p.elements : shape.size[d];
    if (d == p.rank - 1 && access == Access::kRows) length = std::max<int64_t>(length / size, 1);
    p.length[d] = FastDivisor(static_cast<uint32_t>(length));
  }
  const LaunchConfig config =
      Grid(CeilDiv(shape.elements(), kElementsThreads * choice.words * size), kElementsThreads);
  if (choice.kernel == nullptr) {
    return LaunchAnyType<typename F::Family, kElementsThreads>(kDTypeOf<T>, config, stream,
                                                               SingleElements<F>{p});
  }
  return Launch(choice.kernel, config, stream, p);
}

// Arrays of `shape`: the inputs.
template <typename F>
cudaError_t Elements(const F& f, const BroadcastShape& given, DType dtype, const Operand* inputs,
                     void* out, cudaStream_t stream) {
  BroadcastShape shape;
  if (!WithRows(given, &shape)) return cudaErrorInvalidValue;
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    return LaunchElements<F, T>(f, shape, inputs, out, stream);
  });
}

}  // namespace jax_fastops::cuda

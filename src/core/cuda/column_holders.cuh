// Where a thread's part of a column is between its reductions and its results (held_columns.cuh):
// in registers or in shared memory. The functions of Column are those of a row (row_holders.cuh);
// a word has elements of adjacent columns.
#pragma once

#include <cstdint>

#include "core/cuda/async_copy.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/offsets.cuh"
#include "core/cuda/row_holders.cuh"
#include "core/cuda/vec.cuh"
#include "core/fast_divide.h"
#include "core/plan_columns.h"

namespace jax_fastops::cuda {

// A boolean array that is broadcast to [outer, n, inner]; `rows` are the outer elements.
struct ColumnMask : RowMask {
  Offsets<kMaxRowMaskRank> inner;
};

// Arrays [outer, n, inner]. The elements with the same outer and inner index are a column.
struct HeldColumns {
  const void* in[2];  // the second one is unused if the functor has one
  void* out;
  int64_t n;
  int64_t inner;
  ColumnMask mask;
};

// The words of a column that a thread has: those with the indices first, first + step, ... of n.
template <typename T, int kBytes>
struct ColumnSlice {
  static constexpr int kSize = kBytes / sizeof(T);
  using Keep = Unit<uint8_t, kSize>;

  const HeldColumns& of;
  int step;
  int64_t origin;       // of the first word, in elements of the array
  const uint8_t* mask;  // of the first word

  // `column` is the index among the words of all of outer and inner, of which a row of inner
  // elements has `row_words`.
  __device__ __forceinline__ ColumnSlice(const HeldColumns& of, const FastDivisor64& row_words,
                                         int64_t column, int64_t first, int step)
      : of(of), step(step), mask(of.mask.data) {
    const int64_t outer = Divide(static_cast<uint64_t>(column), row_words);
    const int64_t inner = (column - outer * static_cast<int64_t>(row_words.divisor)) * kSize;
    origin = (outer * of.n + first) * of.inner + inner;
    if (mask != nullptr) {
      mask += of.mask.rows.Offset(outer) + of.mask.inner.Offset(inner) + first * of.mask.stride;
    }
  }

  // Without the first words.
  __device__ __forceinline__ ColumnSlice After(int64_t words) const {
    ColumnSlice rest = *this;
    rest.origin += words * Stride();
    if (mask != nullptr) rest.mask += words * of.mask.stride * step;
    return rest;
  }

  // Elements from a word to the next one.
  __device__ __forceinline__ int64_t Stride() const { return of.inner * step; }
  // The first word of an array.
  __device__ __forceinline__ const T* In(int input) const {
    return static_cast<const T*>(of.in[input]) + origin;
  }
  __device__ __forceinline__ T* Out() const { return static_cast<T*>(of.out) + origin; }
  __device__ __forceinline__ Keep LoadMask(int k) const {
    const uint8_t* bytes = mask + k * of.mask.stride * step;
    if (of.mask.words) return Keep::Load(bytes);
    Keep keep;  // broadcast over inner, or a word of one element
#pragma unroll
    for (int i = 0; i < kSize; ++i) keep.elements[i] = *bytes;
    return keep;
  }
};

// Loads or stores a word as integers. If the compiler saw 16-bit elements in a conditional load, it
// would split the word into elements and wait for each load before issuing the next one.
template <typename Word>
__device__ __forceinline__ Word LoadIntegers(const void* p) {
  const auto unit = Unit<typename Word::W, sizeof(Word)>::Load(p);
  Word word;
#pragma unroll
  for (int i = 0; i < Word::kWords; ++i) word.words[i] = unit.elements[i];
  return word;
}
template <typename Word>
__device__ __forceinline__ void StoreIntegers(void* p, const Word& word) {
  Unit<typename Word::W, sizeof(Word)> unit;
#pragma unroll
  for (int i = 0; i < Word::kWords; ++i) unit.elements[i] = word.words[i];
  unit.Store(p);
}

// Up to kMaxWords words of each array, in registers. If two arrays would take too many, the second
// one is in shared memory, so that each memory holds half of the tile. Without kHeld, the words are
// loaded again for the results.
template <typename T, int kInputs, int kBytes, int kMaxWords, bool kHeld>
struct WordsInRegisters {
  using Word = Vec<T, kBytes>;
  static constexpr bool kKeeps = kHeld && sizeof(T) >= 4;
  static constexpr int kMax = kMaxWords;
  static constexpr bool kSplit = SecondInShared(kMaxWords, kBytes, kInputs);

  Word first[kMaxWords];
  Word second[kInputs == 2 && !kSplit ? kMaxWords : 1];
  Word* shared;  // of this thread, blockDim.x apart

  explicit __device__ __forceinline__ WordsInRegisters(uint4* memory)
      : shared(reinterpret_cast<Word*>(memory) + threadIdx.x) {}

  template <int kInput>
  __device__ __forceinline__ Word Get(int k) const {
    if constexpr (kInput == 0) {
      return first[k];
    } else if constexpr (kSplit) {
      return LoadIntegers<Word>(shared + k * blockDim.x);
    } else {
      return second[k];
    }
  }
  template <int kInput>
  __device__ __forceinline__ void Set(int k, const Word& word) {
    if constexpr (kInput == 0) {
      first[k] = word;
    } else if constexpr (kSplit) {
      StoreIntegers(shared + k * blockDim.x, word);
    } else {
      second[k] = word;
    }
  }
  template <int kInput>
  __device__ __forceinline__ void Load(int k, const T* from) {
    if constexpr (kInput == 1 && kSplit) {
      CopyAsync<kBytes, kBytes == 16>(shared + k * blockDim.x, from);
    } else {
      Set<kInput>(k, LoadIntegers<Word>(from));
    }
  }
  // Before the loads: the first word, if the column does not have it. The compiler forgets that the
  // elements are constants.
  __device__ __forceinline__ void Fill(const T (&outside)[kInputs], bool has_first) {
    Word word = Word::Filled(outside[0]);
    word.Forget();
    Set<0>(0, word);
    if constexpr (kInputs == 2) {
      word = Word::Filled(outside[1]);
      word.Forget();
      if (!kSplit || !has_first) Set<1>(0, word);
    }
  }
  __device__ __forceinline__ void Forget(int k) {
    first[k].Forget();
    if constexpr (kInputs == 2 && !kSplit) second[k].Forget();
  }
};

// Any number of words in shared memory.
template <typename T, int kInputs, int kBytes>
struct WordsInShared {
  using Word = Vec<T, kBytes>;
  static constexpr bool kKeeps = sizeof(T) >= 4;
  static constexpr int kMax = 0;

  Word* words[kInputs];  // of this thread, blockDim.x apart

  // There is room for `room` words of each thread and each array.
  __device__ __forceinline__ WordsInShared(uint4* memory, int room) {
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      words[i] = reinterpret_cast<Word*>(memory) + i * room * blockDim.x + threadIdx.x;
    }
  }
  template <int kInput>
  __device__ __forceinline__ Word Get(int k) const {
    return Word::Load(words[kInput] + k * blockDim.x);
  }
  template <int kInput>
  __device__ __forceinline__ void Set(int k, const Word& word) {
    word.Store(words[kInput] + k * blockDim.x);
  }
  template <int kInput>
  __device__ __forceinline__ void Load(int k, const T* from) {
    if constexpr (kBytes >= 4) {
      CopyAsync<kBytes, kBytes == 16>(words[kInput] + k * blockDim.x, from);
    } else {
      Set<kInput>(k, LoadIntegers<Word>(from));
    }
  }
  __device__ __forceinline__ void Fill(const T (&)[kInputs], bool) {}
  __device__ __forceinline__ void Forget(int) {}
};

template <typename T, int kInputs, int kBytes, typename Words>
struct Column {
  using A = ComputeType<T>;
  using Word = Vec<T, kBytes>;
  using Slice = ColumnSlice<T, kBytes>;
  static constexpr int kSize = Word::kSize;
  static constexpr bool kKeeps = Words::kKeeps;

  Slice slice;
  int count;  // of words
  int begin;  // words before this one are outside
  Words words;

  __device__ __forceinline__ Column(const Slice& slice, int count, int begin, const Words& words)
      : slice(slice), count(count), begin(begin), words(words) {}

  __device__ __forceinline__ bool Has(int k) const { return k >= begin; }

  // Calls run(k) for each word.
  template <typename Run>
  __device__ __forceinline__ void ForWords(const Run& run) const {
    if constexpr (Words::kMax > 0) {
#pragma unroll
      for (int k = 0; k < Words::kMax; ++k) {
        if (k >= count) break;
        run(k);
      }
    } else {
#pragma unroll 4
      for (int k = 0; k < count; ++k) run(k);
    }
  }

  __device__ __forceinline__ void Load(const T (&outside)[kInputs]) {
    words.Fill(outside, Has(0));
    const T* first = slice.In(0);
    const T* second = slice.In(kInputs - 1);
    const int64_t stride = slice.Stride();
    ForWords([&](int k) {
      if (Has(k)) {
        words.template Load<0>(k, first);
        if constexpr (kInputs == 2) words.template Load<1>(k, second);
      }
      first += stride;
      second += stride;
    });
    AwaitAllCopies();
  }

  template <typename Visit>
  __device__ __forceinline__ void Change(const Visit& visit) {
    ForWords([&](int k) {
      if (!Has(k)) return;
      Word word = words.template Get<0>(k);
      visit(word);
      word.Forget();
      words.template Set<0>(k, word);
    });
  }

  // The bytes of several words are loaded before the first is used.
  __device__ __forceinline__ void Exclude(const T (&outside)[kInputs]) {
    constexpr int kBatch = Words::kMax > 0 && Words::kMax < 4 ? Words::kMax : 4;
    if constexpr (Words::kMax > 0) {
#pragma unroll
      for (int from = 0; from < Words::kMax; from += kBatch) {
        if (from >= count) break;
        ExcludeBatch<kBatch>(from, outside);
      }
    } else {
#pragma unroll 1
      for (int from = 0; from < count; from += kBatch) ExcludeBatch<kBatch>(from, outside);
    }
  }

  // Keeps the compiler from holding unpacked elements, and addresses, for the next pass.
  __device__ __forceinline__ void Forget() {
    asm volatile("" : "+l"(slice.origin), "+r"(slice.step));
    ForWords([&](int k) { words.Forget(k); });
  }

  template <typename Visit>
  __device__ __forceinline__ void Each(const Visit& visit) const {
    ForWords([&](int k) {
      if constexpr (kInputs == 1) {
        visit(words.template Get<0>(k));
      } else {
        visit(words.template Get<0>(k), words.template Get<1>(k));
      }
    });
  }

  template <typename Change>
  __device__ __forceinline__ void Map(const Change& change) {
    ForWords([&](int k) {
      A values[kSize];
      Word word = words.template Get<0>(k);
      word.Unpack(values);
      change(values);
      if constexpr (kKeeps) {
        word.Pack(values);
        words.template Set<0>(k, word);
      }
    });
  }

  template <typename Again, typename Last>
  __device__ __forceinline__ void Write([[maybe_unused]] const Again& again, const Last& last) {
    T* to = slice.Out();
    ForWords([&](int k) {
      A values[kSize];
      words.template Get<0>(k).Unpack(values);
      if constexpr (!kKeeps) again(values);
      last(values);
      Store(k, to, Word::Packed(values));
    });
  }
  template <typename Result>
  __device__ __forceinline__ void Write(const Result& result) {
    T* to = slice.Out();
    ForWords([&](int k) {
      A x[kSize], y[kSize];
      words.template Get<0>(k).Unpack(x);
      words.template Get<kInputs - 1>(k).Unpack(y);
      result(x, y);
      Store(k, to, Word::Packed(x));
    });
  }

  // Overwrites the results of masked elements in the columns whose bits are set. Rare, so the code
  // is short rather than fast.
  __device__ __forceinline__ void Overwrite(uint32_t columns, T value) const {
#pragma unroll 1
    for (int k = begin; k < count; ++k) {
      const typename Slice::Keep keep = slice.LoadMask(k);
      T* const to = slice.Out() + k * slice.Stride();
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if ((columns >> i & 1) != 0 && keep.elements[i] == 0) to[i] = value;
      }
    }
  }

 private:
  template <int kBatch>
  __device__ __forceinline__ void ExcludeBatch(int from, const T (&outside)[kInputs]) {
    typename Slice::Keep keep[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (from + k < count && Has(from + k)) keep[k] = slice.LoadMask(from + k);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (from + k >= count || !Has(from + k)) continue;
      Exclude<0>(from + k, keep[k], outside[0]);
      if constexpr (kInputs == 2) Exclude<1>(from + k, keep[k], outside[1]);
    }
  }
  template <int kInput>
  __device__ __forceinline__ void Exclude(int k, const typename Slice::Keep& keep, T outside) {
    Word word = words.template Get<kInput>(k);
    word.Exclude(keep, outside);
    words.template Set<kInput>(k, word);
  }
  // Advances to the next word of the result.
  __device__ __forceinline__ void Store(int k, T*& to, const Word& word) const {
    if (Has(k)) StoreIntegers(to, word);
    to += slice.Stride();
  }
};

}  // namespace jax_fastops::cuda

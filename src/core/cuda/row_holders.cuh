// Where a row is between its reductions and its results (held_rows.cuh): in registers or in shared
// memory, of the threads that have loaded it. A row has:
//
//   Each(visit)         visit(word) or visit(word of the first array, word of the second), a Vec
//   Map(change)         change(elements), in place, of the compute type
//   Write(again, last)  last(elements), as Map has left them, then stores them. If the row does not
//                       keep what Map did (kKeeps), again(elements) is called before
//   Write(result)       result(elements of the first array, elements of the second), in place
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/cuda/async_copy.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/offsets.cuh"
#include "core/cuda/vec.cuh"
#include "core/plan_rows.h"

namespace jax_fastops::cuda {

inline constexpr int kMaxRowMaskRank = 16;

// A boolean array that is broadcast to the rows: a byte, 0 or 1, for each of its own elements.
struct RowMask {
  const uint8_t* data = nullptr;  // null: none
  int64_t stride = 0;             // along a row
  bool words = false;             // the bytes of a word are contiguous, and aligned to their number
  Offsets<kMaxRowMaskRank> rows;
};

// Rows in contiguous memory.
struct HeldRows {
  const void* in[2];  // the second one is unused if the functor has one
  void* out;
  int64_t count;
  int n;
  RowMask mask;
};

// What a thread has of a row: every `step`-th word from `first` to `end`, and perhaps an edge.
template <typename T, int kInputs, int kBytes = 16>
struct RowSlice {
  static constexpr int kSize = kBytes / sizeof(T);
  using Keep = Unit<uint8_t, kSize>;

  const T* in[kInputs];  // of the row
  T* out;
  const uint8_t* mask;
  int head;  // elements before the first word
  int first, step, end;
  int edge;  // index in the row
  bool has_edge;

  RowSlice() = default;
  // A slice for `lane`. Without `edges`, the row begins and ends with a word.
  __device__ __forceinline__ RowSlice(const HeldRows& rows, bool edges, int64_t row, bool exists,
                                      int lane, int lanes)
      : head(0), first(lane), step(lanes), edge(0), has_edge(false) {
    const int64_t start = exists ? row * rows.n : 0;
    const int n = exists ? rows.n : 0;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) in[i] = static_cast<const T*>(rows.in[i]) + start;
    out = static_cast<T*>(rows.out) + start;
    if (edges) {
      const int past = static_cast<int>(reinterpret_cast<uintptr_t>(in[0]) % kBytes / sizeof(T));
      head = min(n, (kSize - past) % kSize);
    }
    end = (n - head) / kSize;
    if (edges) {
      edge = lane < head ? lane : lane + end * kSize;
      has_edge = edge < n;
    }
  }

  __device__ __forceinline__ void SetMask(const RowMask& of_rows, int64_t row) {
    mask = of_rows.data + of_rows.rows.Offset(row);
  }
  __device__ __forceinline__ int Index(int word) const { return head + word * kSize; }

  // The mask bytes of a word by one load, if the mask has words, or else one by one. Of a word that
  // the row does not have, they are arbitrary.
  __device__ __forceinline__ Keep LoadMask(int word) const {
    return Keep::Load(mask + (word < end ? Index(word) : 0));
  }
  __device__ __forceinline__ Keep GatherMask(const RowMask& of_rows, int word) const {
    Keep keep;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      keep.elements[i] = word < end ? mask[(Index(word) + i) * of_rows.stride] : uint8_t{0};
    }
    return keep;
  }

  // Overwrites the results of masked elements. Rare, so the code is short rather than fast.
  __device__ __forceinline__ void Overwrite(const RowMask& of_rows, T value) const {
#pragma unroll 1
    for (int word = first; word < end; word += step) {
#pragma unroll 1
      for (int i = Index(word); i < Index(word + 1); ++i) {
        if (mask[i * of_rows.stride] == 0) out[i] = value;
      }
    }
    if (has_edge && mask[edge * of_rows.stride] == 0) out[edge] = value;
  }
};

// In registers. Short rows have words of one element. `kHeld`: it is still there when it is
// written, and is no chunk that is loaded again.
template <typename T, int kInputs, int kBytes, int kWords, bool kEdges, bool kHeld = true>
struct RegisterRow {
  using A = ComputeType<T>;
  using Word = Vec<T, kBytes>;
  using Single = Vec<T, sizeof(T)>;
  static constexpr int kSize = Word::kSize;
  static constexpr bool kKeeps = kHeld;

  RowSlice<T, kInputs, kBytes> slice;
  int count = kWords;  // of words, the same for all rows; less only if words have one element
  Word words[kInputs][kWords];
  Single edges[kInputs];
  A values[kWords][kSize];
  A value[1];

  __device__ __forceinline__ bool Has(int k) const {
    return slice.first + k * slice.step < slice.end;
  }
  __device__ __forceinline__ int Index(int k) const {
    return slice.Index(slice.first + k * slice.step);
  }

  template <typename Run>
  __device__ __forceinline__ void ForWords(const Run& run) const {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      if (kBytes < 16 && k >= count) break;
      run(k);
    }
  }

  __device__ __forceinline__ void Load(const T (&outside)[kInputs]) {
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      ForWords([&](int k) {
        const T* const from = slice.in[i] + Index(k);
        if constexpr (kBytes == 16) {
          words[i][k] = Word::LoadOr(Has(k), from, Vec<T, 4>::Filled(outside[i]).words[0]);
        } else {
          words[i][k] = Has(k) ? Word::Load(from) : Word::Filled(outside[i]);
        }
      });
    }
    if constexpr (kEdges) {
#pragma unroll
      for (int i = 0; i < kInputs; ++i) {
        edges[i] = Single::Filled(outside[i]);
        if (slice.has_edge) edges[i] = Single::Load(slice.in[i] + slice.edge);
      }
    }
  }
  __device__ __forceinline__ void Await() const {}

  // Changes the words of the first array, without those that the row does not have.
  template <typename Visit>
  __device__ __forceinline__ void Change(const Visit& visit) {
    ForWords([&](int k) {
      if (Has(k)) visit(words[0][k]);
    });
    if (kEdges && slice.has_edge) visit(edges[0]);
  }

  __device__ __forceinline__ void Exclude(const RowMask& mask, const T (&outside)[kInputs]) {
    using Keep = typename RowSlice<T, kInputs, kBytes>::Keep;
    const auto exclude = [&](int k, const Keep& keep) {
#pragma unroll
      for (int i = 0; i < kInputs; ++i) words[i][k].Exclude(keep, outside[i]);
    };
    if (kBytes == 16 && mask.words) {
      Keep keep[kWords];  // all are loaded before the first is used
      ForWords([&](int k) { keep[k] = slice.LoadMask(slice.first + k * slice.step); });
      ForWords([&](int k) { exclude(k, keep[k]); });
    } else {
      ForWords([&](int k) {
        exclude(k, slice.GatherMask(mask, slice.first + k * slice.step));
        words[0][k].Forget();  // a byte takes a register, so those of one word at a time
      });
    }
    if (kEdges && slice.has_edge && slice.mask[slice.edge * mask.stride] == 0) {
#pragma unroll
      for (int i = 0; i < kInputs; ++i) edges[i] = Single::Filled(outside[i]);
    }
  }

  // Keeps the compiler from holding unpacked elements, and addresses, for the next pass.
  __device__ __forceinline__ void Forget() {
    if constexpr (kBytes == 16) asm volatile("" : "+r"(slice.first));
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      ForWords([&](int k) { words[i][k].Forget(); });
    }
  }

  template <typename Visit>
  __device__ __forceinline__ void Each(const Visit& visit) const {
    if constexpr (kInputs == 1) {
      ForWords([&](int k) { visit(words[0][k]); });
      if constexpr (kEdges) visit(edges[0]);
    } else {
      ForWords([&](int k) { visit(words[0][k], words[1][k]); });
      if constexpr (kEdges) visit(edges[0], edges[1]);
    }
  }

  template <typename Change>
  __device__ __forceinline__ void Map(const Change& change) {
    ForWords([&](int k) {
      words[0][k].Unpack(values[k]);
      change(values[k]);
    });
    if constexpr (kEdges) {
      edges[0].Unpack(value);
      change(value);
    }
  }

  // Results as elements of the first array.
  template <typename Last>
  __device__ __forceinline__ void Finish(const Last& last) {
    ForWords([&](int k) {
      last(values[k]);
      words[0][k].Pack(values[k]);
    });
    if constexpr (kEdges) {
      last(value);
      edges[0].Pack(value);
    }
  }

  __device__ __forceinline__ void Store() const {
    ForWords([&](int k) {
      if (!Has(k)) return;
      if constexpr (kBytes == 16) {
        words[0][k].StoreWord(slice.out + Index(k));
      } else {
        words[0][k].Store(slice.out + Index(k));
      }
    });
    if (kEdges && slice.has_edge) edges[0].Store(slice.out + slice.edge);
  }

  template <typename Again, typename Last>
  __device__ __forceinline__ void Write([[maybe_unused]] const Again& again, const Last& last) {
    if constexpr (!kKeeps) Map(again);
    Finish(last);
    Store();
  }
  template <typename Result>
  __device__ __forceinline__ void Write(const Result& result) {
    const auto finish = [&](auto& first, const auto& second) {
      A x[std::remove_reference_t<decltype(first)>::kSize];
      A y[std::remove_reference_t<decltype(first)>::kSize];
      first.Unpack(x);
      second.Unpack(y);
      result(x, y);
      first.Pack(x);
    };
    ForWords([&](int k) { finish(words[0][k], words[kInputs - 1][k]); });
    if constexpr (kEdges) finish(edges[0], edges[kInputs - 1]);
    Store();
  }
};

// In shared memory.
template <typename T, int kInputs>
struct SharedRow {
  using A = ComputeType<T>;
  using Word = Vec<T, 16>;
  using Single = Vec<T, sizeof(T)>;
  // Elements that are as wide as the compute type may be replaced by what Map returns.
  static constexpr bool kKeeps = sizeof(T) >= 4;
  static constexpr int kUnroll = sizeof(T) == 2 ? 2 : 4;

  RowSlice<T, kInputs> slice;
  Word* words[kInputs];  // of this thread, `slice.step` apart
  Single edges[kInputs];
  A value[1];

  // Calls run(word of the row, its place in shared memory).
  template <typename Run>
  __device__ __forceinline__ void ForWords(const Run& run) const {
    int at = 0;
#pragma unroll kUnroll
    for (int word = slice.first; word < slice.end; word += slice.step, at += slice.step) {
      run(word, at);
    }
  }

  __device__ __forceinline__ void Load(const T (&outside)[kInputs]) {
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      int at = 0;
#pragma unroll 4
      for (int word = slice.first; word < slice.end; word += slice.step, at += slice.step) {
        CopyAsync<16, true>(words[i] + at, slice.in[i] + slice.Index(word));
      }
      edges[i] = Single::Filled(outside[i]);
      if (slice.has_edge) edges[i] = Single::Load(slice.in[i] + slice.edge);
    }
  }
  __device__ __forceinline__ void Await() const { AwaitAllCopies(); }
  __device__ __forceinline__ void Forget() const {}

  template <typename Visit>
  __device__ __forceinline__ void Change(const Visit& visit) {
    AwaitAllCopies();
    ForWords([&](int, int at) {
      Word word = Word::Load(words[0] + at);
      visit(word);
      word.Store(words[0] + at);
    });
    if (slice.has_edge) visit(edges[0]);
  }

  // Loads bytes of the mask before it waits for the copies.
  __device__ __forceinline__ void Exclude(const RowMask& mask, const T (&outside)[kInputs]) {
    using Keep = typename RowSlice<T, kInputs>::Keep;
    const auto exclude = [&](int at, const Keep& keep) {
#pragma unroll
      for (int i = 0; i < kInputs; ++i) {
        Word word = Word::Load(words[i] + at);
        word.Exclude(keep, outside[i]);
        word.Store(words[i] + at);
      }
    };
    if (mask.words) {
      int at = 0;
      for (int from = slice.first; from < slice.end; from += kUnroll * slice.step) {
        Keep keep[kUnroll];
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) keep[k] = slice.LoadMask(from + k * slice.step);
        AwaitAllCopies();
#pragma unroll
        for (int k = 0; k < kUnroll; ++k, at += slice.step) {
          if (from + k * slice.step < slice.end) exclude(at, keep[k]);
        }
      }
    } else {
      AwaitAllCopies();
      ForWords([&](int word, int at) { exclude(at, slice.GatherMask(mask, word)); });
    }
    if (slice.has_edge && slice.mask[slice.edge * mask.stride] == 0) {
#pragma unroll
      for (int i = 0; i < kInputs; ++i) edges[i] = Single::Filled(outside[i]);
    }
  }

  template <typename Visit>
  __device__ __forceinline__ void Each(const Visit& visit) const {
    if constexpr (kInputs == 1) {
      ForWords([&](int, int at) { visit(Word::Load(words[0] + at)); });
      visit(edges[0]);
    } else {
      ForWords([&](int, int at) { visit(Word::Load(words[0] + at), Word::Load(words[1] + at)); });
      visit(edges[0], edges[1]);
    }
  }

  template <typename Change>
  __device__ __forceinline__ void Map(const Change& change) {
    ForWords([&](int, int at) {
      A values[Word::kSize];
      Word word = Word::Load(words[0] + at);
      word.Unpack(values);
      change(values);
      if constexpr (kKeeps) {
        word.Pack(values);
        word.Store(words[0] + at);
      }
    });
    edges[0].Unpack(value);
    change(value);
  }

  template <typename Again, typename Last>
  __device__ __forceinline__ void Write(const Again& again, const Last& last) {
    ForWords([&](int index, int at) {
      A values[Word::kSize];
      Word word = Word::Load(words[0] + at);
      word.Unpack(values);
      if constexpr (!kKeeps) again(values);
      last(values);
      word.Pack(values);
      word.StoreWord(slice.out + slice.Index(index));
    });
    last(value);
    edges[0].Pack(value);
    StoreEdge();
  }
  template <typename Result>
  __device__ __forceinline__ void Write(const Result& result) {
    ForWords([&](int index, int at) {
      A x[Word::kSize], y[Word::kSize];
      Word word = Word::Load(words[0] + at);
      word.Unpack(x);
      Word::Load(words[kInputs - 1] + at).Unpack(y);
      result(x, y);
      word.Pack(x);
      word.StoreWord(slice.out + slice.Index(index));
    });
    A y[1];
    edges[0].Unpack(value);
    edges[kInputs - 1].Unpack(y);
    result(value, y);
    edges[0].Pack(value);
    StoreEdge();
  }

 private:
  __device__ __forceinline__ void StoreEdge() const {
    if (slice.has_edge) edges[0].Store(slice.out + slice.edge);
  }
};

// The elements of the rows of a block, in an array and in shared memory. A word of the array is a
// word of the copy.
template <typename T>
struct RowsInShared {
  static constexpr int kSize = 16 / sizeof(T);

  T* array;
  T* copy;
  int before, count;

  __device__ __forceinline__ RowsInShared(const void* from, int64_t first, int count, uint4* words)
      : array(const_cast<T*>(static_cast<const T*>(from)) + first),
        before(static_cast<int>(reinterpret_cast<uintptr_t>(array) % 16 / sizeof(T))),
        count(count) {
    copy = reinterpret_cast<T*>(words) + before;
  }
  // Calls whole(i) for the first element i of each word, and single(i) for the others.
  template <typename Whole, typename One>
  __device__ __forceinline__ void ForWords(const Whole& whole, const One& single) const {
    for (int i = static_cast<int>(threadIdx.x) * kSize - before; i < count;
         i += static_cast<int>(blockDim.x) * kSize) {
      if (i >= 0 && i + kSize <= count) {
        whole(i);
      } else {
#pragma unroll 1
        for (int k = max(i, 0); k < min(i + kSize, count); ++k) single(k);
      }
    }
  }
  __device__ __forceinline__ void Read() const {
    ForWords([&](int i) { CopyAsync<16, true>(copy + i, array + i); },
             [&](int i) { copy[i] = array[i]; });
  }
  // Writes the copy to another array, whose words are where those of this array are if `same`.
  __device__ __forceinline__ void Write(T* to, bool same) const {
    if (same) {
      ForWords(
          [&](int i) {
            *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(copy + i);
          },
          [&](int i) { to[i] = copy[i]; });
    } else {
      for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = copy[i];
    }
  }
};

// Launches a kernel over rows or columns; once more to write, if `launch` only reduces.
template <typename Arrays, typename L, typename Params>
cudaError_t LaunchStages(void (*kernel)(Arrays, L, Params), const LaunchConfig& config,
                         cudaStream_t stream, const Arrays& arrays, L launch,
                         const Params& params) {
  const cudaError_t error = Launch(kernel, config, stream, arrays, launch, params);
  if (error != cudaSuccess || launch.stage != RowStage::kReduce) return error;
  launch.stage = RowStage::kWrite;
  return Launch(kernel, config, stream, arrays, launch, params);
}

// Sets `*limits` to what plans need to know of the current device, and loads the family's kernels.
// The largest cluster is that of blocks of `threads` threads of this kernel, with up to `shared`
// bytes of shared memory.
template <typename Family, auto kKernel>
cudaError_t GetLimits(int threads, int shared, int max_cluster, HeldLimits* limits) {
  static PerDevice<HeldLimits> known;
  return known.Get(limits, [&](HeldLimits* found) {
    Device device;
    cudaError_t error = CurrentDevice(&device);
    if (error == cudaSuccess) error = LoadKernels<Family>();
    if (error != cudaSuccess) return error;
    found->processors = device.processors;
    // Without the static shared memory of the kernels, and the system's part.
    found->shared_bytes = device.shared_per_block - 2048;
    const LaunchConfig config = {
        .block = dim3(static_cast<unsigned>(threads)),
        .shared = static_cast<size_t>(std::min(found->shared_bytes, shared))};
    const auto kernel = reinterpret_cast<const void*>(KernelOf<Family, kKernel>());
    found->max_cluster = LargestCluster(kernel, config, max_cluster);
    return cudaSuccess;
  });
}

}  // namespace jax_fastops::cuda

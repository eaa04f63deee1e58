// How the backward of layer norm and RMS norm reads its rows: through a ring of stages in shared
// memory that is filled by bulk copies (by cp.async before sm_90). backward.cu explains the
// design.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/cuda/async_copy.cuh"
#include "core/cuda/vec.cuh"
#include "norm/plan.h"
#include "norm/shape.h"

namespace jax_fastops::cuda {
namespace {

constexpr int kBlock = kNormBackwardThreads;

// The arrays that are read for each row.
enum Array { kDy, kS, kRstd, kMean, kDsum, kDy2, kArrays };

struct Params {
  DType dtype;
  const void* arrays[kArrays];  // null: absent (mean in RMS norm; dsum, dy2)
  NormParameter scale;
  void* dx;
  void* dscale;
  void* dbias;
  void* dinput_bias;
  int64_t rows;  // of each batch entry
  int64_t all_rows;
  int64_t n;
  int64_t sums;
  int64_t partials;  // of all batch entries
  NormRing ring;
  bool aligned_sums;  // rows of partial sums allow 16-byte stores
  RowDropout dropout;
  float gain;       // its scale
  void* dresidual;  // only with dropout; null: not stored
};

// The rows of a partial sum.
struct Range {
  int64_t begin;
  int64_t end;
};
__device__ __forceinline__ Range RowsOf(int64_t partial, int64_t rows, int64_t sums) {
  const int64_t batch = partial / sums, sum = partial - batch * sums;
  return {batch * rows + sum * rows / sums, batch * rows + (sum + 1) * rows / sums};
}

// One array, as it is copied into the stages: `width` bytes of each row; rows are `pitch` bytes
// apart.
struct Source {
  const char* data;   // of row 0; null: absent
  const char* begin;  // the outermost 16-byte boundaries inside the array
  const char* end;
  int64_t pitch;
  int width;
  int slot;  // offset in a stage

  // Copies `rows` rows, starting at row `row`, into the stage. They keep the offset from a 16-byte
  // boundary that they have in global memory. `thread` of `threads` threads copies its share. The
  // first thread also copies the bytes at the ends of the array, outside the 16-byte boundaries,
  // with ordinary loads and stores. With bulk copies a single thread does everything and arrives at
  // the barrier.
  __device__ __forceinline__ void Copy(char* stage, Barrier* barrier, int64_t row, int rows,
                                       [[maybe_unused]] int thread,
                                       [[maybe_unused]] int threads) const {
    const char* first = data + row * pitch;
    const char* last = first + (rows - 1) * pitch + width;
    const char* low = Floor(first);
    char* to = stage + slot;  // where `low` goes
    const char* from = low < begin ? begin : low;
    const char* until = Floor(last + 15);
    until = until > end ? end : until;
    if (thread == 0) {  // the ends of the array
      const auto copy = [&](const char* p, const char* stop) {
        for (; p < stop; p += 2) {
          memcpy(__builtin_assume_aligned(to + (p - low), 2), __builtin_assume_aligned(p, 2), 2);
        }
      };
      copy(first, from < last ? from : last);
      copy(until > first ? until : first, last);
    }
    const int bytes = from < until ? static_cast<int>(until - from) : 0;
    to += from - low;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    barrier->ArriveAndExpect(bytes);
    if (bytes > 0) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(SharedAddress(to)),
          "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(SharedAddress(barrier))
          : "memory");
    }
#else
    for (int at = 16 * thread; at < bytes; at += 16 * threads) {
      CopyAsync<16, true>(to + at, from + at);
    }
#endif
  }

  static __device__ __forceinline__ const char* Floor(const char* p) {
    return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(p) & ~uintptr_t{15});
  }
};

template <typename T>
__device__ __forceinline__ Source SourceOf(const Params& p, int array, int first_column,
                                           int columns) {
  using A = ComputeType<T>;
  const bool elements = array != kRstd && array != kMean;
  Source source;
  // Select with constant indices: a dynamic index would copy the kernel parameters to local memory.
  const void* data = p.arrays[kDy];
#pragma unroll
  for (int i = 1; i < kArrays; ++i) data = array == i ? p.arrays[i] : data;
  source.data = array < kArrays ? static_cast<const char*>(data) : nullptr;
  source.pitch = elements ? p.n * int64_t{sizeof(T)} : int64_t{sizeof(A)};
  source.begin = Source::Floor(source.data + 15);
  source.end = Source::Floor(source.data + p.all_rows * source.pitch);
  source.width = elements ? columns * int{sizeof(T)} : int{sizeof(A)};
  if (elements) source.data += source.data != nullptr ? first_column * int64_t{sizeof(T)} : 0;
  source.slot = array == kDy     ? 0
                : array == kS    ? p.ring.slot_bytes
                : array == kRstd ? 2 * p.ring.slot_bytes
                : array == kMean ? 2 * p.ring.slot_bytes + p.ring.stat_bytes
                : array == kDsum
                    ? 2 * p.ring.slot_bytes + 2 * p.ring.stat_bytes
                    : p.ring.stage_bytes - p.ring.slot_bytes;  // after dsum, if present
  return source;
}

// The position of a worker in its sequence of tiles: up to kTile rows from `row`, bounded by `end`.
template <int kTile, int kWorkers>
struct Cursor {
  int64_t partial;
  int64_t row;
  int64_t end;

  __device__ __forceinline__ bool Valid(const Params& p) const { return partial < p.partials; }

  // Moves to the worker's first tile of partial sum `from`, or of the next partial sum in which the
  // worker has a tile.
  __device__ __forceinline__ void Seek(const Params& p, int64_t from, int stride, int worker) {
    for (partial = from; partial < p.partials; partial += stride) {
      const Range range = RowsOf(partial, p.rows, p.sums);
      row = range.begin + worker * kTile;
      end = range.end;
      if (row < end) return;
    }
  }
  __device__ __forceinline__ void Next(const Params& p, int stride, int worker) {
    row += kTile * kWorkers;
    if (row >= end) Seek(p, partial + stride, stride, worker);
  }
  __device__ __forceinline__ int Rows() const {
    return static_cast<int>(min(int64_t{kTile}, end - row));
  }
};

}  // namespace
}  // namespace jax_fastops::cuda

// y = f(x, row) for every element of rows of a 16-bit type, where `row` is one row for all of them,
// such as a bias: the flat loop of elements.cuh for its most common operands. F is a functor of
// elements.cuh with two inputs.
//
// An H200 has about 28 issue slots in the time in which it reads and writes an element of 16 bits,
// and an activation needs half of them. So the rest must be short. A thread has the same columns in
// four adjacent rows: it finds them by one division, and loads and unpacks the row once.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/alignment.h"
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

inline constexpr int kRowElementsRows = 4;  // of a thread, all in flight at once

template <typename F>
struct RowElementsParams {
  const void* x;
  const void* row;
  void* y;
  uint32_t rows, threads;
  FastDivisor words;  // of 16 bytes, in a row
  int rows_each;      // of a thread
  F f;
};

// P is the type of the row.
template <typename F, typename T, typename P>
__global__ void __launch_bounds__(kElementsThreads)
    RowElementsKernel(const __grid_constant__ RowElementsParams<F> p) {
  using C = ComputeType<T>;
  using Word = Vec<T>;
  constexpr int kSize = Word::kSize, kRows = kRowElementsRows;
  const uint32_t thread = blockIdx.x * kElementsThreads + threadIdx.x;
  if (thread >= p.threads) return;
  const uint32_t group = Divide(thread, p.words), words = p.words.divisor;
  const uint32_t column = thread - group * words, first = group * p.rows_each;
  const int live = static_cast<int>(min(static_cast<uint32_t>(p.rows_each), p.rows - first));
  const int64_t at = (int64_t{first} * words + column) * 16, pitch = int64_t{words} * 16;

  Word word[kRows];
  const char* x = static_cast<const char*>(p.x) + at;
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if (u >= live) break;
    word[u] = Word::Load(x + u * pitch);
  }
  C row[kSize];
  LoadParameter<T, P, kSize>(p.row, int64_t{column} * kSize, row);
  char* y = static_cast<char*>(p.y) + at;
  p.f.Choose([&](auto choice) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (u >= live) break;
      C values[kSize], results[kSize];
      word[u].Unpack(values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const C in[2] = {values[i], row[i]};
        C out[1];
        decltype(choice)::template Apply<T>(in, out);
        results[i] = out[0];
      }
      Word::Packed(results).Store(y + u * pitch);
    }
  });
}

// Whether RowElements computes the call, whose arrays are x and the row.
inline bool IsRowElements(const BroadcastShape& shape, DType dtype, const Operand* inputs,
                          const void* out) {
  return DTypeSize(dtype) == 2 && !inputs[0].wide && shape.rank == 2 && shape.IsFull(0) &&
         shape.stride[1][0] == 0 && shape.stride[1][1] == 1 && shape.size[1] % 8 == 0 &&
         shape.elements() <= kMaxElements * 16 &&
         CommonAlignment({inputs[0].data, inputs[1].data, out}) >= 16;
}

template <typename F>
cudaError_t RowElements(const F& f, const BroadcastShape& shape, DType dtype, const Operand* inputs,
                        void* out, cudaStream_t stream) {
  Device device;
  const cudaError_t error = CurrentDevice(&device);
  if (error != cudaSuccess) return error;
  const int64_t rows = shape.size[0], words = shape.size[1] / 8;
  // Small arrays: more blocks rather than more rows of a thread.
  int rows_each = kRowElementsRows;
  while (rows_each > 1 &&
         rows * words < int64_t{2} * device.processors * kElementsThreads * rows_each) {
    rows_each /= 2;
  }
  const int64_t threads = CeilDiv(rows, rows_each) * words;
  const RowElementsParams<F> p = {.x = inputs[0].data,
                                  .row = inputs[1].data,
                                  .y = out,
                                  .rows = static_cast<uint32_t>(rows),
                                  .threads = static_cast<uint32_t>(threads),
                                  .words = FastDivisor(static_cast<uint32_t>(words)),
                                  .rows_each = rows_each,
                                  .f = f};
  const LaunchConfig config = Grid(CeilDiv(threads, kElementsThreads), kElementsThreads);
  using Family = typename F::Family;
  const auto launch = [&]<typename T>(TypeTag<T>) {
    return inputs[1].wide
               ? Launch(KernelOf<Family, RowElementsKernel<F, T, float>>(), config, stream, p)
               : Launch(KernelOf<Family, RowElementsKernel<F, T, T>>(), config, stream, p);
  };
  return dtype == DType::kF16 ? launch(TypeTag<__half>()) : launch(TypeTag<__nv_bfloat16>());
}

}  // namespace jax_fastops::cuda

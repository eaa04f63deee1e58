// Dropout: y = x * scale for the elements that are kept, 0 for the others.
//
// A thread takes units of 16 bytes of the whole array, so that all accesses are coalesced, however
// long the rows are. It draws each block of random bits that its elements belong to: one, if rows
// are multiples of 16 bytes, otherwise mostly two. Neighbors that share a block draw it twice. That
// is hidden behind the memory's time; an exchange between them was not worth its instructions.
#include <algorithm>
#include <cstdint>

#include "core/alignment.h"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/unit.cuh"
#include "core/integer.h"
#include "core/philox.h"
#include "dropout/dropout.h"

namespace jax_fastops::cuda {
struct DropoutFamily;
namespace {

constexpr int kThreads = 256;
constexpr int kTogether = 2;  // units that a thread loads together

// All indices are in the part of the array that one launch takes.
struct Params {
  const char* x;
  const uint32_t* seeds;
  char* y;
  uint32_t count;        // of elements
  uint32_t first_block;  // of the random bits of a row
  FastDivisor columns;
  uint32_t largest;
  double scale;
};

// The elements of one launch fit 31 bits.
constexpr int64_t kMostElements = int64_t{1} << 30;

// The lowest bits of the result say which of the elements `first`, `first` + 1, ... are kept; at
// least kSize, unless the array ends.
template <int kSize>
__device__ __forceinline__ uint32_t KeptFrom(const Params& p, uint32_t first) {
  const uint32_t columns = p.columns.divisor;
  uint32_t row = Divide(first, p.columns), column = first - row * columns, kept = 0;
  for (uint32_t known = 0; known < kSize && first + known < p.count;) {
    PhiloxWords seed;
#pragma unroll
    for (int i = 0; i < kSeedWords; ++i) seed.word[i] = p.seeds[int64_t{row} * kSeedWords + i];
    const PhiloxWords bits = RandomBits(seed, p.first_block + column / kSeedBlock);
    uint32_t block = 0;
#pragma unroll
    for (int i = 0; i < kSeedBlock; ++i) block |= IsKept(bits, i, p.largest) ? 1u << i : 0;
    const uint32_t skipped = column % kSeedBlock;
    const uint32_t found = min(kSeedBlock - skipped, columns - column);
    kept |= (block >> skipped & ((1u << found) - 1)) << known;
    known += found;
    column += found;
    if (column == columns) {
      column = 0;
      ++row;
    }
  }
  return kept;
}

template <typename T, int kBytes>
__global__ void __launch_bounds__(kThreads) DropoutKernel(const __grid_constant__ Params p) {
  using U = Unit<T, kBytes>;
  const uint32_t begin = (blockIdx.x * kTogether * kThreads + threadIdx.x) * U::kSize;
  const ComputeType<T> scale = static_cast<ComputeType<T>>(p.scale);
  U units[kTogether];
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const uint32_t first = begin + k * kThreads * U::kSize;
    const char* x = p.x + int64_t{first} * int64_t{sizeof(T)};
    if (first + U::kSize <= p.count) {
      units[k] = U::template Load<CacheHint::kNoAllocate>(x);
    } else {
#pragma unroll
      for (int i = 0; i < U::kSize; ++i) {
        if (first + i < p.count) units[k].elements[i] = reinterpret_cast<const T*>(x)[i];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const uint32_t first = begin + k * kThreads * U::kSize;
    if (first >= p.count) return;
    const uint32_t kept = KeptFrom<U::kSize>(p, first);
#pragma unroll
    for (int i = 0; i < U::kSize; ++i) {
      const T product = FromCompute<T>(ToCompute(units[k].elements[i]) * scale);
      units[k].elements[i] = kept >> i & 1 ? product : FromCompute<T>(0);
    }
    char* y = p.y + int64_t{first} * int64_t{sizeof(T)};
    if (first + U::kSize <= p.count) {
      units[k].Store(y);
    } else {
#pragma unroll
      for (int i = 0; i < U::kSize; ++i) {
        if (first + i < p.count) reinterpret_cast<T*>(y)[i] = units[k].elements[i];
      }
    }
  }
}

}  // namespace

cudaError_t Dropout(DType dtype, const void* x, const uint32_t* seeds, void* y, int64_t rows,
                    int64_t columns, uint32_t largest, double scale, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  if (CeilDiv(columns, kSeedBlock) > int64_t{1} << 32) return cudaErrorInvalidValue;
  const int64_t itemsize = DTypeSize(dtype);
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    // A launch takes several whole rows, or a part of one.
    const int64_t part = std::min(columns, kMostElements), some = kMostElements / part;
    for (int64_t row = 0; row < rows; row += some) {
      for (int64_t column = 0; column < columns; column += part) {
        const int64_t taken = std::min(part, columns - column);
        const int64_t count = taken * std::min(some, rows - row);
        const int64_t skipped = (row * columns + column) * itemsize;
        const Params params = {
            .x = static_cast<const char*>(x) + skipped,
            .seeds = seeds + row * kSeedWords,
            .y = static_cast<char*>(y) + skipped,
            .count = static_cast<uint32_t>(count),
            .first_block = static_cast<uint32_t>(column / kSeedBlock),
            .columns = FastDivisor(static_cast<uint32_t>(taken)),
            .largest = largest,
            .scale = scale,
        };
        const bool aligned = CommonAlignment({params.x, params.y}) == 16;
        const auto kernel = aligned ? KernelOf<DropoutFamily, DropoutKernel<T, 16>>()
                                    : KernelOf<DropoutFamily, DropoutKernel<T, sizeof(T)>>();
        const int64_t units = CeilDiv(count, aligned ? 16 / itemsize : 1);
        const LaunchConfig config = {
            .grid = dim3(static_cast<unsigned>(CeilDiv(units, kTogether * kThreads))),
            .block = dim3(kThreads),
        };
        const cudaError_t error = Launch(kernel, config, stream, params);
        if (error != cudaSuccess) return error;
      }
    }
    return cudaSuccess;
  });
}

cudaError_t LoadDropoutKernels() { return LoadKernels<DropoutFamily>(); }

}  // namespace jax_fastops::cuda

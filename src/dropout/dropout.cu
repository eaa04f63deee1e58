// Dropout: y = (x + bias) * scale for the elements that are kept, 0 for the others; plus a
// residual.
//
// The bias and the residual are optional. They are branches that all threads take alike, since
// kernels of their own would gain nothing.
//
// Bound by memory, but not by much: a call of Philox takes about 60 instructions, and gives the
// bits of eight elements. So a thread takes one block of eight elements of a row, and draws once.
// It accesses them by 16 bytes where every row begins at a multiple of 16 bytes, else one by one;
// its accesses share cache lines with each other and with those of its neighbors.
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

struct Params {
  const char* x;
  const uint32_t* seeds;
  const void* bias;      // null: absent
  const char* residual;  // null: absent
  char* y;
  int64_t columns;
  uint32_t blocks;  // of all rows of the launch
  FastDivisor row_blocks;
  uint32_t largest;
  double scale;
  bool wide_bias;
};

template <typename T, int kBytes>
__global__ void __launch_bounds__(kThreads) DropoutKernel(const Params p) {
  using U = Unit<T, kBytes>;
  constexpr int kUnits = kSeedBlock / U::kSize;
  const uint32_t at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= p.blocks) return;
  const uint32_t row = Divide(at, p.row_blocks), block = at - row * p.row_blocks.divisor;
  const int64_t first = int64_t{block} * kSeedBlock, begin = row * p.columns + first;
  const int count = static_cast<int>(min(p.columns - first, int64_t{kSeedBlock}));
  const char* x = p.x + begin * int64_t{sizeof(T)};
  char* y = p.y + begin * int64_t{sizeof(T)};

  U units[kUnits], residual[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (u * U::kSize < count) units[u] = U::Load(x + u * kBytes);
  }
  const bool add = p.residual != nullptr;
  if (add) {
    const char* r = p.residual + begin * int64_t{sizeof(T)};
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (u * U::kSize < count) residual[u] = U::Load(r + u * kBytes);
    }
  }
  PhiloxWords seed;
#pragma unroll
  for (int i = 0; i < kSeedWords; ++i) seed.word[i] = p.seeds[int64_t{row} * kSeedWords + i];
  const PhiloxWords bits = RandomBits(seed, block);
  const ComputeType<T> scale = static_cast<ComputeType<T>>(p.scale);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (u * U::kSize >= count) break;
    ComputeType<T> bias[U::kSize] = {};
    if (p.bias != nullptr) {
      if (p.wide_bias) {
        LoadParameter<T, ComputeType<T>>(p.bias, first + u * U::kSize, bias);
      } else {
        LoadParameter<T, T>(p.bias, first + u * U::kSize, bias);
      }
    }
#pragma unroll
    for (int i = 0; i < U::kSize; ++i) {
      ComputeType<T> v = ToCompute(units[u].elements[i]);
      if (p.bias != nullptr) v += bias[i];
      v = IsKept(bits, u * U::kSize + i, p.largest) ? v * scale : 0;
      if (add) v += ToCompute(residual[u].elements[i]);
      units[u].elements[i] = FromCompute<T>(v);
    }
    units[u].Store(y + u * kBytes);
  }
}

// The blocks of one launch fit 31 bits.
constexpr int64_t kMostBlocks = int64_t{1} << 30;

}  // namespace

cudaError_t Dropout(DType dtype, const DropoutArrays& arrays, int64_t rows, int64_t columns,
                    uint32_t largest, double scale, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  const int64_t itemsize = DTypeSize(dtype), row_bytes = columns * itemsize;
  const int64_t row_blocks = CeilDiv(columns, kSeedBlock);
  if (row_blocks > kMostBlocks) return cudaErrorInvalidValue;
  const bool aligned = row_bytes % 16 == 0 &&
                       CommonAlignment({arrays.x, arrays.bias, arrays.residual, arrays.y}) == 16;
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    const auto kernel = aligned ? KernelOf<DropoutFamily, DropoutKernel<T, 16>>()
                                : KernelOf<DropoutFamily, DropoutKernel<T, sizeof(T)>>();
    const int64_t step = kMostBlocks / row_blocks;
    for (int64_t row = 0; row < rows; row += step) {
      const int64_t blocks = std::min(step, rows - row) * row_blocks;
      const auto* const residual = static_cast<const char*>(arrays.residual);
      const Params params = {.x = static_cast<const char*>(arrays.x) + row * row_bytes,
                             .seeds = arrays.seeds + row * kSeedWords,
                             .bias = arrays.bias,
                             .residual = residual == nullptr ? nullptr : residual + row * row_bytes,
                             .y = static_cast<char*>(arrays.y) + row * row_bytes,
                             .columns = columns,
                             .blocks = static_cast<uint32_t>(blocks),
                             .row_blocks = FastDivisor(static_cast<uint32_t>(row_blocks)),
                             .largest = largest,
                             .scale = scale,
                             .wide_bias = arrays.wide_bias};
      const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(CeilDiv(blocks, kThreads))),
                                   .block = dim3(kThreads)};
      const cudaError_t error = Launch(kernel, config, stream, params);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

cudaError_t LoadDropoutKernels() { return LoadKernels<DropoutFamily>(); }

}  // namespace jax_fastops::cuda

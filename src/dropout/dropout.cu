// Dropout: y = (x + bias) * scale for the elements that are kept, 0 for the others; plus a
// residual.
//
// The bias and the residual are optional. They are branches that all threads take alike.
//
// Bound by memory, but not by much: a call of Philox takes about 60 instructions, and gives the
// bits of eight elements. So there are three kernels:
//
// - One for small arrays without a bias or a residual. A thread takes one or two elements, and
//   draws their block of bits: four or eight times as many calls of Philox, but no thread waits for
//   another.
// - One for other rows of whole blocks of eight elements, without a bias or a residual. A thread
//   takes a block, and draws once. Not for float64, in which a block is 64 bytes.
// - One for everything else. A thread takes units of 16 bytes of the whole array, so that all
//   accesses are coalesced, however long the rows are. The threads of a block draw the random bits
//   of its elements, once for each block of bits, and exchange them in shared memory.
#include <algorithm>
#include <cstdint>

#include "core/alignment.h"
#include "core/cuda/bitmask.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/kept.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/vec.cuh"
#include "core/integer.h"
#include "dropout/dropout.h"

namespace jax_fastops::cuda {
struct DropoutFamily;
namespace {

constexpr int kThreads = 256;

// The elements that a block of UnitsKernel takes: 32 bytes for each thread.
constexpr int UnitsTaken(int itemsize) { return kThreads * 32 / itemsize; }
constexpr int kMostTaken = UnitsTaken(2);

// All indices are in the part of the array that one launch takes.
struct Params {
  const char* x;
  RowSeeds seeds;
  const char* bias;      // null: absent
  const char* residual;  // null: absent
  char* y;
  uint32_t count;        // number of elements
  uint32_t first_block;  // the first block of random bits in the row
  FastDivisor columns;
  FastDivisor row_parts;  // parts of a row: what a thread takes (Elements), or blocks of bits
  uint32_t largest;
  double scale;
  bool aligned = false;     // x, the residual and y, to 16 bytes
  bool wide_bias;           // in the compute type
  bool bias_units = false;  // a unit's part of the bias is in one row, and aligned
  bool pairs = false;       // Elements: a thread takes two elements
  DType dtype;
};

// A small array has at most so many elements: kFew in rows that BlocksKernel takes, kSmall in
// others. In those, a thread takes two elements if there are more than kPairs.
constexpr int64_t kFew = int64_t{1} << 15, kPairs = int64_t{1} << 16, kSmall = 5 * kPairs;

// A launch has at most so many elements, so 32-bit indices suffice.
constexpr int64_t kMostElements = int64_t{1} << 30;

// A bit for each element of a block of random bits: whether it is kept.
__device__ __forceinline__ uint32_t KeptBlock(const Params& p, uint32_t row, uint32_t block) {
  const PhiloxWords bits = RandomBits(p.seeds.At(row), p.first_block + block);
  const KeptLimit limit(p.largest);
  uint32_t kept = 0;  // even elements in the lower half, odd elements in the upper one
#pragma unroll
  for (int i = 0; i < kSeedBlock / 2; ++i) {
    kept |= (limit.Halves(bits.word[i]) & 0x80008000u) >> (15 - 2 * i);
  }
  return (kept | kept >> 15) & 0xffu;
}

// `count` and `columns` are multiples of kSeedBlock, and arrays are aligned to 16 bytes.
template <typename T>
__device__ __forceinline__ void TakeBlock(const Params& p) {
  using U = Vec<T>;
  constexpr int kUnits = kSeedBlock / U::kSize;
  const uint32_t first = (blockIdx.x * kThreads + threadIdx.x) * kSeedBlock;
  if (first >= p.count) return;
  const uint32_t row = Divide(first, p.columns), column = first - row * p.columns.divisor;
  const int64_t skipped = int64_t{first} * int64_t{sizeof(T)};
  U units[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) units[u] = U::Load(p.x + skipped + u * 16);
  const PhiloxWords bits = RandomBits(p.seeds.At(row), p.first_block + column / kSeedBlock);
  const ComputeType<T> scale = static_cast<ComputeType<T>>(p.scale);
  const KeptLimit limit(p.largest);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    uint32_t kept[U::kSize / 2];
#pragma unroll
    for (int i = 0; i < U::kSize / 2; ++i) kept[i] = limit.Halves(bits.word[u * U::kSize / 2 + i]);
    ComputeType<T> values[U::kSize];
    units[u].Unpack(values);
#pragma unroll
    for (int i = 0; i < U::kSize; ++i) values[i] *= scale;
    units[u].Pack(values);
    KeepOnly<T>(kept, units[u].words);
    units[u].Store(p.y + skipped + u * 16);
  }
}

// Not for double.
__global__ void __launch_bounds__(kThreads) BlocksKernel(const __grid_constant__ Params p) {
  ForTypesOf<float>(p.dtype, [&]<typename T>(TypeTag<T>) { TakeBlock<T>(p); });
}

template <typename T, typename P, int kSize>
__device__ __forceinline__ void LoadBias(const Params& p, uint32_t first,
                                         ComputeType<T> (&bias)[kSize]) {
  const uint32_t columns = p.columns.divisor;
  uint32_t column = first - Divide(first, p.columns) * columns;
  if (p.bias_units) return LoadParameter<T, P>(p.bias, column, bias);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    bias[i] = ToCompute(reinterpret_cast<const P*>(p.bias)[column]);
    column = column + 1 == columns ? 0 : column + 1;
  }
}

// Loads a unit, by element if the arrays are not aligned. Elements after the end are 0.
template <typename V, typename T>
__device__ __forceinline__ V LoadUnit(const Params& p, const T* x, uint32_t first) {
  if (p.aligned && first + V::kSize <= p.count) {
    return V::template Load<CacheHint::kNoAllocate>(x + first);
  }
  return V::LoadElements(x + first, [&](int i) { return first + i < p.count; });
}

// Sets a bit for each element from `begin` to `end` that is kept. All threads of a block call it.
__device__ __forceinline__ void KeepInShared(const Params& p, uint32_t begin, uint32_t end,
                                             uint32_t (&kept)[kMostTaken / 32 + 1]) {
  SetBits<kThreads>(kept, [&](const auto& set) {
    const uint32_t columns = p.columns.divisor, first_row = Divide(begin, p.columns);
    uint32_t index = first_row * p.row_parts.divisor + (begin - first_row * columns) / kSeedBlock;
    for (index += threadIdx.x;; index += kThreads) {
      const uint32_t row = Divide(index, p.row_parts), block = index - row * p.row_parts.divisor;
      const uint32_t column = block * kSeedBlock, first = row * columns + column;
      if (first >= end) break;
      uint32_t bits = KeptBlock(p, row, block);
      if (columns - column < kSeedBlock) bits &= (1u << (columns - column)) - 1;
      if (first < begin) bits >>= begin - first;
      set(max(first, begin) - begin, bits);
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 5) UnitsKernel(const __grid_constant__ Params p) {
  using U = Vec<T>;
  using A = ComputeType<T>;
  constexpr int kTaken = UnitsTaken(sizeof(T)), kUnits = kTaken / kThreads / U::kSize;
  const uint32_t begin = blockIdx.x * kTaken;
  const A scale = static_cast<A>(p.scale);
  U units[kUnits], residual[kUnits];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const uint32_t first = begin + (k * kThreads + threadIdx.x) * U::kSize;
    units[k] = LoadUnit<U>(p, reinterpret_cast<const T*>(p.x), first);
    if (p.residual != nullptr) {
      residual[k] = LoadUnit<U>(p, reinterpret_cast<const T*>(p.residual), first);
    }
  }
  __shared__ uint32_t kept[kMostTaken / 32 + 1];
  KeepInShared(p, begin, min(begin + kTaken, p.count), kept);
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const uint32_t skipped = (k * kThreads + threadIdx.x) * U::kSize, first = begin + skipped;
    if (first >= p.count) return;
    const uint32_t bits = kept[skipped / 32] >> skipped % 32;
    A values[U::kSize];
    units[k].Unpack(values);
    if (p.bias != nullptr) {
      A bias[U::kSize];
      p.wide_bias ? LoadBias<T, A>(p, first, bias) : LoadBias<T, T>(p, first, bias);
#pragma unroll
      for (int i = 0; i < U::kSize; ++i) values[i] += bias[i];
    }
#pragma unroll
    for (int i = 0; i < U::kSize; ++i) values[i] = bits >> i & 1 ? values[i] * scale : A(0);
    if (p.residual != nullptr) {
      A added[U::kSize];
      residual[k].Unpack(added);
#pragma unroll
      for (int i = 0; i < U::kSize; ++i) values[i] += added[i];
    }
    const U unit = U::Packed(values);
    T* const y = reinterpret_cast<T*>(p.y) + first;
    if (p.aligned && first + U::kSize <= p.count) {
      unit.Store(y);
    } else {
      unit.StoreElements(y, [&](int i) { return first + i < p.count; });
    }
  }
}

// A thread takes an element of a row, or two: in one word of random bits.
// IsKept would index the four words at run time, and so put them into local memory.
struct Elements {
  static constexpr int kBlocks = 8;
  Params p;

  template <typename T>
  __device__ __forceinline__ void Run() const {
    using A = ComputeType<T>;
    const uint32_t columns = p.columns.divisor, part = blockIdx.x * kThreads + threadIdx.x;
    const uint32_t row = Divide(part, p.row_parts);
    const uint32_t column = (part - row * p.row_parts.divisor) << p.pairs;
    const uint32_t first = row * columns + column;
    if (first >= p.count) return;
    const bool both = p.pairs && column + 1 < columns;
    const T* const x = reinterpret_cast<const T*>(p.x) + first;
    T* const y = reinterpret_cast<T*>(p.y) + first;
    const T x0 = x[0];
    T x1 = {};
    if (both) x1 = x[1];
    const PhiloxWords bits = RandomBits(p.seeds.At(row), p.first_block + column / kSeedBlock);
    const uint32_t lower = column & 2 ? bits.word[1] : bits.word[0];
    const uint32_t upper = column & 2 ? bits.word[3] : bits.word[2];
    const uint32_t word = column & 4 ? upper : lower;
    const A scale = static_cast<A>(p.scale);
    const auto drop = [&](T value, uint32_t half) {
      return FromCompute<T>(half <= p.largest ? ToCompute(value) * scale : A(0));
    };
    y[0] = drop(x0, column & 1 ? word >> 16 : word & 0xffffu);
    if (both) y[1] = drop(x1, word >> 16);
  }
};

}  // namespace

cudaError_t Dropout(DType dtype, const DropoutArrays& arrays, int64_t rows, int64_t columns,
                    const RowDropout& dropout, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  if (CeilDiv(columns, kSeedBlock) > int64_t{1} << 32) return cudaErrorInvalidValue;
  const int64_t itemsize = DTypeSize(dtype);
  const int64_t bias_itemsize = arrays.wide_bias ? std::max<int64_t>(itemsize, 4) : itemsize;
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    // A launch takes several whole rows, or a part of one.
    const int64_t part = std::min(columns, kMostElements), some = kMostElements / part;
    for (int64_t row = 0; row < rows; row += some) {
      for (int64_t column = 0; column < columns; column += part) {
        const int64_t taken = std::min(part, columns - column);
        const int64_t count = taken * std::min(some, rows - row);
        const auto at = [](const void* p, int64_t bytes) {
          return p == nullptr ? nullptr : static_cast<const char*>(p) + bytes;
        };
        const int64_t skipped = (row * columns + column) * itemsize;
        Params params = {
            .x = at(arrays.x, skipped),
            .seeds = dropout.seeds.From(row),
            .bias = at(arrays.bias, column * bias_itemsize),
            .residual = at(arrays.residual, skipped),
            .y = static_cast<char*>(arrays.y) + skipped,
            .count = static_cast<uint32_t>(count),
            .first_block = static_cast<uint32_t>(column / kSeedBlock),
            .columns = FastDivisor(static_cast<uint32_t>(taken)),
            .row_parts = FastDivisor(static_cast<uint32_t>(CeilDiv(taken, kSeedBlock))),
            .largest = dropout.largest,
            .scale = dropout.scale,
            .wide_bias = arrays.wide_bias,
            .dtype = dtype,
        };
        params.aligned = CommonAlignment({params.x, params.residual, params.y}) == 16;
        params.bias_units = taken % (16 / itemsize) == 0 && CommonAlignment({params.bias}) == 16;
        const bool added = arrays.bias != nullptr || arrays.residual != nullptr;
        int64_t threads = CeilDiv(count, UnitsTaken(sizeof(T))) * kThreads;
        auto kernel = KernelOf<DropoutFamily, UnitsKernel<T>>();
        const bool whole = sizeof(T) < 8 && params.aligned && taken % kSeedBlock == 0;
        if (!added && count <= (whole ? kFew : kSmall)) {
          kernel = nullptr;
          params.pairs = count > kPairs;
          const int64_t parts = params.pairs ? CeilDiv(taken, 2) : taken;
          params.row_parts = FastDivisor(static_cast<uint32_t>(parts));
          threads = parts * (count / taken);
        } else if (!added && whole) {
          kernel = KernelOf<DropoutFamily, BlocksKernel>();
          threads = count / kSeedBlock;
        }
        const int64_t blocks = CeilDiv(threads, kThreads);
        const cudaError_t error = kernel == nullptr
                                      ? LaunchAnyType<DropoutFamily, kThreads>(
                                            dtype, Grid(blocks, kThreads), stream, Elements{params})
                                      : Launch(kernel, Grid(blocks, kThreads), stream, params);
        if (error != cudaSuccess) return error;
      }
    }
    return cudaSuccess;
  });
}

cudaError_t LoadDropoutKernels() { return LoadKernels<DropoutFamily>(); }

}  // namespace jax_fastops::cuda

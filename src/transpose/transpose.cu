// y = transpose(x, axes): any rank, any permutation, elements of 1, 2, 4, 8 or 16 bytes.
//
// Nothing is computed, so the floor is a copy: every byte is read once and written once. The
// difficulty is that both sides need long contiguous accesses, but contiguous input is not
// contiguous in the output. DRAM and L2 move sectors of 32 bytes, and an SM of an H100 has about 75
// clocks for every 512 bytes that it reads and writes, too few to handle them one by one. A plan,
// computed once per shape and cached (Normalize, then Plan below), chooses one of four kernels.
//
// - Rows (UnitRowsKernel, ByteRowsKernel): the minor dimension stays. A copy of rows; each thread
//   moves four units of 16 bytes that are adjacent in the output. Rows whose length is not a
//   multiple of 16 bytes are still written 16 bytes at a time: an unaligned window of the input is
//   two aligned loads and a shift. If a row ends within the 16 bytes, there is a second window.
// - Tile (TileKernel): the minor dimension moves. A tile has a run of elements that are contiguous
//   in the input on one side, and a run contiguous in the output on the other. A run spans several
//   dimensions if one is short: (96, 97, 98, 99) reversed is, for the tiles, a matrix of
//   9312 rows and 9702 columns, whose rows and columns start at any address. Tiles are 16 KB, read
//   and written 16 bytes at a time, 128 to 512 contiguous bytes per row and column. Elements of 1
//   and 2 bytes are transposed in registers in squares of 4 by 4 and 2 by 2, so that shared memory
//   sees only words, and a swizzle of 16-byte chunks avoids bank conflicts.
//   Rows that are not aligned to 16 bytes are read element by element, and elements of 1 and 2
//   bytes by unaligned windows. Columns that are not aligned are still written in whole aligned
//   sectors: the tile is skewed (see TileKernel).
// - Box (BoxKernel): the two runs need the same dimension, because one is short (3 channels), or
//   dimensions are permuted within a small block. A box of the array, 8 or 16 KB, is copied to
//   shared memory in the input's order, and gathered from there in the order of the output. The
//   source of each element is the same for every box, so a table holds 16-bit addresses. Blocks are
//   persistent: each makes the table once, one dimension at a time. (A chain of divisions per entry
//   took a third of the time for bfloat16.) A thread gathers 16 bytes at a time. If that causes
//   many bank conflicts, it gathers words of 4 bytes instead, from a layout of the box in shared
//   memory that avoids the conflicts. Segments of the output that are not aligned are first
//   gathered into shared memory, and written from there in aligned chunks.
//
// Offsets into the arrays are 64-bit, but are computed once per row of a tile. All other indices
// count tiles, or units within a tile, and fit 32 bits. In the row kernels every thread computes
// offsets, so they exist for 32-bit and 64-bit indices. Divisions are multiplications by
// reciprocals from the plan.
#include "transpose/transpose.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "core/alignment.h"
#include "core/cuda/divide.cuh"
#include "core/cuda/load_kernels.h"
#include "core/cuda/packed.cuh"
#include "core/fast_divide.h"
#include "transpose/permutation.h"

namespace jax_fastops::cuda {
namespace {

constexpr int kThreads = 256;     // of the tile and row kernels
constexpr int kBoxThreads = 128;  // of the box kernel
constexpr int kFewBoxes = 2560;   // about 2.5 for each resident block of an H100
constexpr int kBoxBlocks = 8;     // per SM, shared memory permitting
constexpr int kUnitsPerThread = 4;

// -------------------------------------------------------------------------------------------------
// Index arithmetic

// Divides n by d and returns the remainder.
template <typename Index, typename Divisor>
__device__ __forceinline__ Index TakeRemainder(Index& n, const Divisor& d) {
  const Index quotient = Divide(n, d);
  const Index remainder = n - quotient * d.divisor;
  n = quotient;
  return remainder;
}

// A dimension by which an index is split, with its strides in bytes.
struct Dim {
  FastDivisor size;
  int64_t in_stride;
  int64_t out_stride;
};

// -------------------------------------------------------------------------------------------------
// Words of bytes at any address

template <typename T>
__device__ __forceinline__ T Load(const char* p) {
  return *reinterpret_cast<const T*>(p);
}
template <typename T>
__device__ __forceinline__ void Store(char* p, T value) {
  *reinterpret_cast<T*>(p) = value;
}

__device__ __forceinline__ const char* AlignDown(const char* p, int alignment) {
  return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(p) & ~uintptr_t(alignment - 1));
}
__device__ __forceinline__ int Misalignment(const char* p, int alignment) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(p)) & (alignment - 1);
}

// The 16 bytes at any address, from the two aligned chunks that contain them. Both chunks must be
// readable.
struct Window {
  uint4 low, high;
  int shift;  // bytes

  Window() = default;
  __device__ __forceinline__ Window(uint4 low, uint4 high, int shift)
      : low(low), high(high), shift(shift) {}
  __device__ __forceinline__ explicit Window(const char* p)
      : low(Load<uint4>(AlignDown(p, 16))),
        high(Load<uint4>(AlignDown(p, 16) + 16)),
        shift(Misalignment(p, 16)) {}

  // Whether the chunks of the window at p are within the array.
  static __device__ __forceinline__ bool IsReadable(const char* p, const char* begin,
                                                    const char* end) {
    return AlignDown(p, 16) >= begin && AlignDown(p, 16) + 32 <= end;
  }

  __device__ __forceinline__ uint4 Get() const {
    uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
    uint4 result;
    const int bits = 8 * (shift & 3);
    result.x = __funnelshift_r(words[0], words[1], bits);
    result.y = __funnelshift_r(words[1], words[2], bits);
    result.z = __funnelshift_r(words[2], words[3], bits);
    result.w = __funnelshift_r(words[3], words[4], bits);
    return result;
  }
};

__device__ __forceinline__ uint4 Vector(const uint4& v) { return v; }
__device__ __forceinline__ uint4 Vector(const Window& window) { return window.Get(); }

// The same byte by byte, without reading at or after `end`.
__device__ __forceinline__ uint4 LoadBytes(const char* p, const char* end) {
  uint32_t words[4] = {};
  for (int i = 0; i < 16 && p + i < end; ++i) {
    const uint32_t byte = uint32_t{Load<uint8_t>(p + i)} << i % 4 * 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] |= i / 4 == j ? byte : 0;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// -------------------------------------------------------------------------------------------------
// Rows: the minor dimension stays

template <typename Index>
struct RowDim {
  std::conditional_t<sizeof(Index) == 4, FastDivisor, FastDivisor64> size;
  int64_t in_stride;
};

template <typename Index>
struct RowParams {
  const char* x;
  char* y;
  int64_t bytes;
  Index count;  // units
  int rank;
  RowDim<Index> dims[kMaxPermutationRank];  // minor to major; strides in bytes
};

// The source of byte or unit n of the output. `dims` begins with the row.
template <typename Index>
__device__ __forceinline__ int64_t InputOffset(const RowParams<Index>& p, int first, Index n) {
  int64_t offset = 0;
  for (int d = first; d < p.rank - 1; ++d) {
    offset += static_cast<int64_t>(TakeRemainder(n, p.dims[d].size)) * p.dims[d].in_stride;
  }
  return offset + static_cast<int64_t>(n) * p.dims[p.rank - 1].in_stride;
}

template <int kUnit, typename Index>
__global__ void __launch_bounds__(kThreads)
    UnitRowsKernel(const __grid_constant__ RowParams<Index> p) {
  using T = Word<kUnit>;
  const Index begin = Index{blockIdx.x} * (kThreads * kUnitsPerThread) + threadIdx.x;
  T units[kUnitsPerThread];
#pragma unroll
  for (int k = 0; k < kUnitsPerThread; ++k) {
    const Index n = begin + k * kThreads;
    if (n < p.count) units[k] = Load<T>(p.x + InputOffset(p, 0, n));
  }
#pragma unroll
  for (int k = 0; k < kUnitsPerThread; ++k) {
    const Index n = begin + k * kThreads;
    if (n < p.count) Store<T>(p.y + static_cast<int64_t>(n) * kUnit, units[k]);
  }
}

// The first `count` bytes of a, then those of b.
__device__ __forceinline__ uint4 Merge(uint4 a, uint4 b, int count) {
  const auto merge = [](uint32_t a, uint32_t b, int count) {
    const uint32_t mask = count >= 4 ? ~0u : count <= 0 ? 0u : (1u << 8 * count) - 1;
    return (a & mask) | (b & ~mask);
  };
  a.x = merge(a.x, b.x, count);
  a.y = merge(a.y, b.y, count - 4);
  a.z = merge(a.z, b.z, count - 8);
  a.w = merge(a.w, b.w, count - 12);
  return a;
}

// Rows of at least 16 bytes, of any length and alignment. `count` is in bytes, and so is dims[0].
template <typename Index>
__global__ void __launch_bounds__(kThreads)
    ByteRowsKernel(const __grid_constant__ RowParams<Index> p) {
  constexpr int kChunks = 2;  // per thread
  const int head = (16 - Misalignment(p.y, 16)) & 15;
  const char* end = p.x + p.bytes;
  const int64_t row = p.dims[0].size.divisor;

  Window first[kChunks], second[kChunks];
  int64_t begin[kChunks];  // of the chunk in the output; the first chunk may begin before it
  int rest[kChunks];       // of the row, from there
  bool wide[kChunks];
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const int64_t chunk = int64_t{blockIdx.x} * (kThreads * kChunks) + k * kThreads + threadIdx.x;
    begin[k] = 16 * chunk + head - 16;
    rest[k] = 16;
    wide[k] = begin[k] >= 0 && begin[k] + 16 <= p.bytes;
    if (!wide[k]) continue;
    Index n = static_cast<Index>(begin[k]);
    const int64_t within = static_cast<int64_t>(TakeRemainder(n, p.dims[0].size));
    const char* from = p.x + InputOffset(p, 1, n) + within;
    wide[k] = Window::IsReadable(from, p.x, end);
    if (wide[k]) first[k] = Window(from);
    if (row - within < 16) {
      rest[k] = static_cast<int>(row - within);
      // At the end of the array there is no next row, but then the chunk has no further bytes.
      const char* next = p.x + InputOffset(p, 1, static_cast<Index>(n + 1)) - rest[k];
      wide[k] = wide[k] && Window::IsReadable(next, p.x, end);
      if (wide[k]) second[k] = Window(next);
    }
  }
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (wide[k]) {
      uint4 value = first[k].Get();
      if (rest[k] < 16) value = Merge(value, second[k].Get(), rest[k]);
      Store<uint4>(p.y + begin[k], value);
    } else {
      for (int64_t b = max(begin[k], int64_t{0}); b < min(begin[k] + 16, p.bytes); ++b) {
        Index n = static_cast<Index>(b);
        const int64_t within = static_cast<int64_t>(TakeRemainder(n, p.dims[0].size));
        p.y[b] = p.x[InputOffset(p, 1, n) + within];
      }
    }
  }
}

// -------------------------------------------------------------------------------------------------
// Tiles: the minor dimension moves

// A tile has kRows rows, which are contiguous in the input, of kColumns elements; its columns are
// contiguous in the output.
template <int kElement>
struct TileShape {
  static constexpr int kColumns = kElement == 1 ? 128 : kElement <= 4 ? 64 : 32;
  static constexpr int kRows = kElement <= 2 ? 128 : kElement <= 8 ? 64 : 32;
};

struct TileParams {
  const char* x;
  const char* x_end;
  char* y;
  int64_t columns;  // of the matrix of tiles: the lengths of the runs
  int64_t rows;
  // Tiles are numbered down a band of columns, `band` tiles high, then along it, so that blocks
  // that run together read and write adjacent memory.
  FastDivisor tiles;       // per matrix
  FastDivisor band_tiles;  // per band
  FastDivisor band, last_band;
  uint32_t last_band_index;
  int column_dims, row_dims, rank;
  Dim dims[kMaxPermutationRank];  // of a row, of a column, then the others; each minor to major
};

// The offset of element `index` of a run that spans `count` dimensions.
template <int64_t Dim::* kStride>
__device__ __forceinline__ int64_t RunOffset(const Dim* dims, int count, int64_t index) {
  if (count == 1) return index * dims[0].*kStride;
  int64_t offset = 0;
  uint32_t n = static_cast<uint32_t>(index);
  for (int d = 0; d < count - 1; ++d) {
    offset += static_cast<int64_t>(TakeRemainder(n, dims[d].size)) * (dims[d].*kStride);
  }
  return offset + static_cast<int64_t>(n) * (dims[count - 1].*kStride);
}

__device__ __forceinline__ uint32_t& Component(uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Transposes a square of one word per row in place.
__device__ __forceinline__ void TransposeSquare(uint32_t (&w)[1]) {}
__device__ __forceinline__ void TransposeSquare(uint32_t (&w)[2]) {
  const uint32_t a = w[0], b = w[1];
  w[0] = __byte_perm(a, b, 0x5410);
  w[1] = __byte_perm(a, b, 0x7632);
}
__device__ __forceinline__ void TransposeSquare(uint32_t (&w)[4]) {
  const uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[0], w[1], 0x7362);
  const uint32_t c = __byte_perm(w[2], w[3], 0x5140), d = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(a, c, 0x5410);
  w[1] = __byte_perm(a, c, 0x7632);
  w[2] = __byte_perm(b, d, 0x5410);
  w[3] = __byte_perm(b, d, 0x7632);
}

// Whether rows, or columns, are aligned to 16 bytes. Unaligned columns are also written in aligned
// sectors, because a partially written sector is expensive for L2. In each column, the tile leaves
// the elements before its first sector boundary to the tile above, and takes as many more rows at
// its end. Only the first and the last tile of a column write single elements.
template <int kElement, bool kWideIn, bool kWideOut>
__global__ void __launch_bounds__(kThreads, 4) TileKernel(const __grid_constant__ TileParams p) {
  constexpr int kColumns = TileShape<kElement>::kColumns;
  constexpr int kRows = TileShape<kElement>::kRows;
  constexpr int kSector = 32;  // bytes
  constexpr int kMoreRows = kWideOut ? 0 : kSector / kElement;
  constexpr int kAllRows = kRows + kMoreRows;
  constexpr int kWord = kElement < 4 ? 4 : kElement;  // bytes
  constexpr int kPack = kWord / kElement;             // elements per word
  constexpr int kVector = 16 / kElement;              // elements per chunk of 16 bytes
  constexpr int kChunks = kRows / kVector;            // per column
  constexpr int kMoreChunks = kMoreRows / kVector;
  constexpr int kWordsPerChunk = 16 / kWord;
  constexpr bool kByWords = !kWideIn && kElement >= 4;  // elements are read one by one
  using WordType = Word<kWord>;

  // Column by column. The chunks of a column are permuted by an exclusive or, so that neither the
  // stores of words or chunks below nor the loads of a column's chunks meet in a bank. The chunks
  // of the additional rows follow.
  __shared__ uint4 tile[kColumns * (kChunks + kMoreChunks)];
  __shared__ const char* rows[kAllRows];
  __shared__ char* columns[kColumns];
  const auto chunk_at = [&](int column, int chunk) {
    if (!kWideOut && chunk >= kChunks) {
      return &tile[kColumns * kChunks + column * kMoreChunks + (chunk - kChunks)];
    }
    return &tile[column * kChunks + (chunk ^ (column / (kByWords ? 1 : kVector) % 8))];
  };
  const auto word_at = [&](int column, int word) {
    return reinterpret_cast<WordType*>(chunk_at(column, word / kWordsPerChunk)) +
           word % kWordsPerChunk;
  };

  // The tile's position.
  uint32_t n = blockIdx.x;
  uint32_t index = TakeRemainder(n, p.tiles);
  const uint32_t band = Divide(index, p.band_tiles);
  index -= band * p.band_tiles.divisor;
  const uint32_t row_index = TakeRemainder(index, band == p.last_band_index ? p.last_band : p.band);
  const int64_t first_row = (int64_t{band} * p.band.divisor + row_index) * kRows;
  const int64_t first_column = int64_t{index} * kColumns;
  const int live_rows = static_cast<int>(min(p.rows - first_row, int64_t{kAllRows}));
  const int live_columns = static_cast<int>(min(p.columns - first_column, int64_t{kColumns}));

  const char* x = p.x + first_column * kElement;
  char* y = p.y + first_row * kElement;
  for (int d = p.column_dims + p.row_dims; d < p.rank; ++d) {
    const int64_t i = TakeRemainder(n, p.dims[d].size);
    x += i * p.dims[d].in_stride;
    y += i * p.dims[d].out_stride;
  }

  // The addresses of its rows and columns. Rows after the end repeat the last one, which may be
  // read.
  bool readable = true;  // whether all windows may be read
  for (int i = threadIdx.x; i < kAllRows + kColumns; i += kThreads) {
    if (i < kAllRows) {
      const int64_t row = first_row + min(i, live_rows - 1);
      rows[i] = x + RunOffset<&Dim::in_stride>(p.dims + p.column_dims, p.row_dims, row);
      const char* aligned = AlignDown(rows[i], 16);
      if (aligned < p.x || aligned + (kColumns * kElement + 16) > p.x_end) readable = false;
    } else {
      const int column = min(i - kAllRows, live_columns - 1);
      columns[i - kAllRows] =
          y + RunOffset<&Dim::out_stride>(p.dims, p.column_dims, first_column + column);
    }
  }
  if constexpr (kWideIn || kByWords) {
    __syncthreads();
  } else {
    readable = __syncthreads_and(readable);
  }

  if constexpr (kByWords) {
    // A thread takes as many adjacent rows of one column as fill a chunk.
    constexpr int kTotal = kColumns * (kChunks + kMoreChunks);
    constexpr int kUnits = (kTotal + kThreads - 1) / kThreads;
    WordType v[kUnits][kVector];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = threadIdx.x + u * kThreads;
      const int column = unit % kColumns, chunk = unit / kColumns;
      if ((kTotal % kThreads == 0 || unit < kTotal) && column < live_columns) {
#pragma unroll
        for (int r = 0; r < kVector; ++r) {
          v[u][r] = Load<WordType>(rows[chunk * kVector + r] + column * kElement);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = threadIdx.x + u * kThreads;
      const int column = unit % kColumns, chunk = unit / kColumns;
      if (kTotal % kThreads != 0 && unit >= kTotal) continue;
      uint4 packed;
      memcpy(&packed, v[u], 16);
      *chunk_at(column, chunk) = packed;
    }
  } else {
    // A thread takes 16 bytes of kPack adjacent rows. A warp takes 128 bytes of four such groups.
    constexpr int kAcross = kColumns / kVector / 8;
    constexpr int kTotal = kColumns / kVector * (kAllRows / kPack);
    constexpr int kUnits = (kTotal + kThreads - 1) / kThreads;
    // Windows take twice the registers, so fewer of them are in flight.
    constexpr int kTogether = kWideIn ? kUnits : 4 / kPack;
#pragma unroll
    for (int first = 0; first < kUnits; first += kTogether) {
      uint4 v[kTogether][kPack];
      const auto for_each_unit = [&](const auto& visit) {
#pragma unroll
        for (int u = 0; u < kTogether && first + u < kUnits; ++u) {
          const int unit = threadIdx.x + (first + u) * kThreads;
          const int vector = unit % 8 + unit / 32 % kAcross * 8;
          const int word = unit / 8 % 4 + unit / 32 / kAcross * 4;
          if ((kTotal % kThreads == 0 || unit < kTotal) && vector * kVector < live_columns) {
            visit(u, vector, word);
          }
        }
      };
      const auto load = [&](const auto& load_vector) {
        for_each_unit([&](int u, int vector, int word) {
#pragma unroll
          for (int r = 0; r < kPack; ++r) {
            load_vector(rows[word * kPack + r] + vector * 16, u, r);
          }
        });
      };
      if constexpr (kWideIn) {
        load([&](const char* address, int u, int r) { v[u][r] = Load<uint4>(address); });
      } else if (readable) {
        Window windows[kTogether][kPack];
        load([&](const char* address, int u, int r) { windows[u][r] = Window(address); });
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
#pragma unroll
          for (int r = 0; r < kPack; ++r) v[u][r] = windows[u][r].Get();
        }
      } else {
        load([&](const char* address, int u, int r) { v[u][r] = LoadBytes(address, p.x_end); });
      }
      for_each_unit([&](int u, int vector, int word) {
        if constexpr (kElement == 16) {
          *word_at(vector, word) = v[u][0];
        } else if constexpr (kElement == 8) {
          *word_at(vector * 2, word) = make_uint2(v[u][0].x, v[u][0].y);
          *word_at(vector * 2 + 1, word) = make_uint2(v[u][0].z, v[u][0].w);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            uint32_t square[kPack];
#pragma unroll
            for (int r = 0; r < kPack; ++r) square[r] = Component(v[u][r], i);
            TransposeSquare(square);
#pragma unroll
            for (int r = 0; r < kPack; ++r) {
              *word_at(vector * kVector + i * kPack + r, word) = square[r];
            }
          }
        }
      });
    }
  }
  __syncthreads();

  constexpr int kUnits = kColumns * kChunks / kThreads;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int unit = threadIdx.x + u * kThreads;
    const int chunk = unit % kChunks, column = unit / kChunks;
    if (column >= live_columns) continue;
    if constexpr (kWideOut) {
      if (chunk * kVector < live_rows) {
        Store<uint4>(columns[column] + chunk * 16, *chunk_at(column, chunk));
      }
    } else {
      // The first aligned sector begins `skip` bytes into the column.
      char* address = columns[column];
      const int skip = -Misalignment(address, kSector) & (kSector - 1);
      const int from = skip / 16 + chunk;
      if (skip + chunk * 16 + 16 <= live_rows * kElement) {
        const Window window(*chunk_at(column, from),
                            *chunk_at(column, min(from + 1, kChunks + kMoreChunks - 1)), skip % 16);
        Store<uint4>(address + skip + chunk * 16, window.Get());
      }
    }
  }
  if constexpr (!kWideOut) {
    // The elements before the first sector of a column, and the rest of the last chunk.
    const auto store_element = [&](int column, int row) {
      const char* word = reinterpret_cast<const char*>(word_at(column, row / kPack));
      Store<Word<kElement>>(columns[column] + row * kElement,
                            Load<Word<kElement>>(word + row % kPack * kElement));
    };
    if (first_row == 0) {
      for (int unit = threadIdx.x; unit < kColumns * kMoreRows; unit += kThreads) {
        const int row = unit % kMoreRows, column = unit / kMoreRows;
        if (column >= live_columns) break;
        const int skip = -Misalignment(columns[column], kSector) & (kSector - 1);
        if (row < live_rows && row * kElement < skip) store_element(column, row);
      }
    }
    if (live_rows < kAllRows) {
      for (int unit = threadIdx.x; unit < kColumns * kVector; unit += kThreads) {
        const int column = unit / kVector;
        if (column >= live_columns) break;
        const int skip = -Misalignment(columns[column], kSector) & (kSector - 1);
        const int rest = min(live_rows * kElement - skip, kRows * kElement);
        const int row = (skip + (rest & ~15)) / kElement + unit % kVector;
        if (rest > 0 && row * kElement < skip + rest) store_element(column, row);
      }
    }
  }
}

// -------------------------------------------------------------------------------------------------
// Boxes: the runs share a dimension

// The maximum number of dimensions in a box: 16 KB cannot hold more dimensions of two elements.
constexpr int kMaxBoxRank = 16;

struct BoxDim {
  FastDivisor size;    // of the box
  FastDivisor before;  // entries of the table that come from the dimensions before
  uint32_t shared_stride;
  int64_t stride;  // in the input or the output, in bytes
};

// One side of the boxes: segments that are contiguous in the array. Lengths are in elements.
struct BoxSide {
  FastDivisor length;   // of a segment
  FastDivisor vectors;  // of 16 bytes per segment, rounded up
  FastDivisor words;    // of 4 bytes in `vectors`
  uint32_t pitch;       // `length` rounded up to 16 bytes
  uint32_t count;       // of segments
  int64_t last_offset;  // of the last segment, in bytes
  bool wide;            // whether all segments of an aligned box are aligned to 16 bytes
  int run_dims, segment_dims;
  BoxDim dims[kMaxBoxRank];  // of a segment, then those that number segments; each minor to major
};

// The layout of a box in shared memory. A warp often gathers columns with a power-of-two pitch,
// which would hit few banks, so 16 bytes of padding follow every 2^pad_shift bytes. Padding does
// not separate the four words of a 16-byte chunk, and most patterns take the same word of every
// chunk. So the words of a chunk are rotated, by one more every 2^turn_shift chunks.
struct BoxLayout {
  uint32_t pad_shift = 7;
  uint32_t turn_shift = 31;

  __host__ __device__ uint32_t Pad(uint32_t byte) const { return byte + (byte >> pad_shift) * 16; }
  __host__ __device__ uint32_t Turn(uint32_t byte) const { return byte >> 4 >> turn_shift & 3; }
  // The address of byte b of a box.
  __host__ __device__ uint32_t Place(uint32_t byte) const {
    return Pad(byte & ~15u) + ((byte + 4 * Turn(byte)) & 15);
  }
};

// The words of a chunk, rotated by `turn`.
__device__ __forceinline__ uint4 Rotate(uint4 v, uint32_t turn) {
  if (turn & 1) v = make_uint4(v.w, v.x, v.y, v.z);
  if (turn & 2) v = make_uint4(v.z, v.w, v.x, v.y);
  return v;
}

struct BoxParams {
  const char* x;
  char* y;
  int64_t bytes;
  BoxSide in, out;
  BoxLayout layout;
  // The one or two dimensions that a box contains only partially: the major dimension of the
  // input's and of the output's segments. -1 if there is none. If there are two, each one is the
  // most major dimension that numbers the other side's segments.
  int in_part, out_part;                  // in `dims`
  uint32_t in_part_size, out_part_size;   // of the box
  int64_t in_part_total, out_part_total;  // of the array
  uint32_t table_bytes, data_bytes, staged_bytes;
  uint32_t boxes;
  int rank;
  Dim dims[kMaxPermutationRank];  // of the grid of boxes, minor to major
};

__device__ __forceinline__ int64_t SegmentOffset(const BoxSide& side, uint32_t n) {
  int64_t offset = 0;
  for (int d = side.run_dims; d < side.run_dims + side.segment_dims; ++d) {
    offset += static_cast<int64_t>(TakeRemainder(n, side.dims[d].size)) * side.dims[d].stride;
  }
  return offset;
}

// kWords: whether a thread gathers one word at a time instead of a chunk of 16 bytes. Lanes that
// gather chunks often have distances that are multiples of 16 bytes, and hit a quarter of the
// banks.
template <int kElement, bool kWords>
__global__ void __launch_bounds__(kBoxThreads, kBoxBlocks)
    BoxKernel(const __grid_constant__ BoxParams p) {
  constexpr int kVector = 16 / kElement;
  constexpr int kTogether = 4;
  using Element = Word<kElement>;

  // The default layout is known at compile time, which saves shifts.
  BoxLayout layout;
  if constexpr (kWords) layout = p.layout;

  // The table, the box, the segments' offsets.
  extern __shared__ uint4 shared[];
  uint16_t* table = reinterpret_cast<uint16_t*>(shared);
  char* data = reinterpret_cast<char*>(shared) + p.table_bytes;
  char* staged = data + p.data_bytes;
  int64_t* in_offsets = reinterpret_cast<int64_t*>(staged + p.staged_bytes);
  int64_t* out_offsets = in_offsets + p.in.count;

  for (uint32_t i = threadIdx.x; i < p.in.count; i += kBoxThreads) {
    in_offsets[i] = SegmentOffset(p.in, i);
  }
  for (uint32_t i = threadIdx.x; i < p.out.count; i += kBoxThreads) {
    out_offsets[i] = SegmentOffset(p.out, i);
  }
  // The table, dimension by dimension: each index of a new dimension repeats the existing entries
  // with an offset. Entries between segments exist if a segment does not end on 16 bytes. They may
  // be read, so they must be valid addresses.
  const uint32_t entries = p.out.count * p.out.pitch;
  for (uint32_t i = threadIdx.x; i < entries; i += kBoxThreads) table[i] = 0;
  for (int d = 0; d < p.out.run_dims + p.out.segment_dims; ++d) {
    __syncthreads();
    const BoxDim& dim = p.out.dims[d];
    const uint32_t before = dim.before.divisor, limit = before * dim.size.divisor;
    for (uint32_t i = before + threadIdx.x; i < limit; i += kBoxThreads) {
      uint32_t quotient = i;
      const uint32_t repeated = TakeRemainder(quotient, dim.before);
      table[i] = static_cast<uint16_t>(table[repeated] + quotient * dim.shared_stride);
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < entries; i += kBoxThreads) {
    table[i] = static_cast<uint16_t>(layout.Place(table[i] * kElement));
  }
  const auto element = [&](uint32_t address) { return Load<Element>(data + address); };

  for (uint32_t box = blockIdx.x; box < p.boxes; box += gridDim.x) {
    const char* x = p.x;
    char* y = p.y;
    uint32_t in_length = p.in.length.divisor, in_count = p.in.count;
    uint32_t out_length = p.out.length.divisor, out_count = p.out.count;
    uint32_t n = box;
    for (int d = 0; d < p.rank; ++d) {
      const int64_t i = TakeRemainder(n, p.dims[d].size);
      x += i * p.dims[d].in_stride;
      y += i * p.dims[d].out_stride;
      if (d == p.in_part && (i + 1) * p.in_part_size > p.in_part_total) {
        const uint32_t part = static_cast<uint32_t>(p.in_part_total - i * p.in_part_size);
        in_length = in_length / p.in_part_size * part;
        if (p.in_part == p.out_part) {
          out_length = out_length / p.in_part_size * part;
        } else {
          out_count = out_count / p.in_part_size * part;
        }
      }
      if (d == p.out_part && p.in_part != p.out_part &&
          (i + 1) * p.out_part_size > p.out_part_total) {
        const uint32_t part = static_cast<uint32_t>(p.out_part_total - i * p.out_part_size);
        out_length = out_length / p.out_part_size * part;
        in_count = in_count / p.out_part_size * part;
      }
    }

    __syncthreads();  // the previous box has been read
    const auto load_segments = [&](const auto& load) {
      const uint32_t total = in_count * p.in.vectors.divisor;
      for (uint32_t first = threadIdx.x; first < total; first += kBoxThreads * kTogether) {
        decltype(load(x)) v[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          uint32_t segment = first + k * kBoxThreads;
          const bool live = segment < total;
          const uint32_t within = TakeRemainder(segment, p.in.vectors) * kVector;
          if (live && within < in_length) {
            v[k] = load(x + in_offsets[segment] + within * kElement);
          }
        }
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          uint32_t segment = first + k * kBoxThreads;
          const bool live = segment < total;
          const uint32_t within = TakeRemainder(segment, p.in.vectors) * kVector;
          if (live && within < in_length) {
            const uint32_t at = (segment * p.in.pitch + within) * kElement;
            uint4 value = Vector(v[k]);
            if constexpr (kWords) value = Rotate(value, layout.Turn(at));
            Store<uint4>(data + layout.Pad(at), value);
          }
        }
      }
    };
    const char* end = p.x + p.bytes;
    if (kElement == 16 || (p.in.wide && Misalignment(x, 16) == 0 && in_length % kVector == 0)) {
      load_segments([](const char* address) { return Load<uint4>(address); });
    } else if (AlignDown(x, 16) >= p.x &&
               x + p.in.last_offset + (p.in.length.divisor * kElement + 32) <= end) {
      load_segments([](const char* address) { return Window(address); });
    } else {
      load_segments([&](const char* address) { return LoadBytes(address, end); });
    }
    __syncthreads();

    // The bytes that begin at entry `from` of the table: a word, or a chunk of 16 bytes.
    using Gathered = std::conditional_t<kWords, uint32_t, uint4>;
    constexpr int kGathered = sizeof(Gathered) / kElement;  // elements
    const auto gather = [&](const uint16_t* from) {
      Element elements[kGathered];
      constexpr int kEntries = kGathered < 8 ? kGathered : 8;
#pragma unroll
      for (int i = 0; i < kGathered; i += kEntries) {
        const auto entries = Load<Word<kEntries * 2>>(reinterpret_cast<const char*>(from + i));
        uint16_t addresses[kEntries];
        memcpy(addresses, &entries, sizeof(addresses));
#pragma unroll
        for (int j = 0; j < kEntries; ++j) elements[i + j] = element(addresses[j]);
      }
      Gathered gathered;
      memcpy(&gathered, elements, sizeof(gathered));
      return gathered;
    };
    const FastDivisor& per_segment = kWords ? p.out.words : p.out.vectors;
    constexpr int kUnroll = kWords ? 4 : 2;
    const uint32_t units = out_count * per_segment.divisor;
    if (kElement == 16 || (p.out.wide && Misalignment(y, 16) == 0 && out_length % kVector == 0)) {
#pragma unroll kUnroll
      for (uint32_t unit = threadIdx.x; unit < units; unit += kBoxThreads) {
        uint32_t segment = unit;
        const uint32_t within = TakeRemainder(segment, per_segment) * kGathered;
        if (within < out_length) {
          Store<Gathered>(y + out_offsets[segment] + within * kElement,
                          gather(table + segment * p.out.pitch + within));
        }
      }
    } else if (kElement >= 4 || p.staged_bytes == 0) {
      for (uint32_t unit = threadIdx.x; unit < out_count * p.out.length.divisor;
           unit += kBoxThreads) {
        uint32_t segment = unit;
        const uint32_t within = TakeRemainder(segment, p.out.length);
        if (within < out_length) {
          Store<Element>(y + out_offsets[segment] + within * kElement,
                         element(table[segment * p.out.pitch + within]));
        }
      }
    } else {
      // Gathers to shared memory in the order of the output, and writes from there in aligned
      // chunks.
#pragma unroll kUnroll
      for (uint32_t unit = threadIdx.x; unit < units; unit += kBoxThreads) {
        Store<Gathered>(staged + unit * sizeof(Gathered), gather(table + unit * kGathered));
      }
      __syncthreads();
      const uint32_t total = out_count * p.out.vectors.divisor;
      const int bytes = static_cast<int>(out_length) * kElement;
#pragma unroll 2
      for (uint32_t unit = threadIdx.x; unit < total; unit += kBoxThreads) {
        uint32_t segment = unit;
        const uint32_t chunk = TakeRemainder(segment, p.out.vectors);
        char* address = y + out_offsets[segment];
        const int skip = -Misalignment(address, 16) & 15;
        const int begin = skip + static_cast<int>(chunk) * 16;
        if (begin + 16 <= bytes) {
          const char* from = staged + (segment * p.out.vectors.divisor + chunk) * 16;
          const Window window(Load<uint4>(from), Load<uint4>(from + 16), skip);
          Store<uint4>(address + begin, window.Get());
        }
      }
      // The elements before the first chunk of a segment, and those after the last one.
      constexpr int kEnds = 32 / kElement;
      for (uint32_t unit = threadIdx.x; unit < out_count * kEnds; unit += kBoxThreads) {
        const uint32_t segment = unit / kEnds;
        char* address = y + out_offsets[segment];
        const int skip = min(-Misalignment(address, 16) & 15, bytes);
        int b = static_cast<int>(unit % kEnds) * kElement;
        const int limit = b < 16 ? skip : bytes;
        if (b >= 16) b += skip - 16 + ((bytes - skip) & ~15);
        if (b < limit) {
          const char* from = staged + segment * p.out.vectors.divisor * 16;
          Store<Element>(address + b, Load<Element>(from + b));
        }
      }
    }
  }
}

// -------------------------------------------------------------------------------------------------
// Plans

enum class Variant { kCopy, kUnitRows, kByteRows, kTile, kBox };

// The plan of a shape: everything except the pointers.
struct TransposePlan {
  Variant variant = Variant::kCopy;
  int unit = 1;  // bytes
  bool wide_index = false;
  bool wide_in = false, wide_out = false;
  int64_t blocks = 0;
  bool box_words = false;
  size_t shared_bytes = 0;
  RowParams<uint32_t> rows;
  RowParams<uint64_t> wide_rows;
  TileParams tile;
  BoxParams box;
};

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The dimensions of a permutation in the order of the input, minor to major.
std::vector<int> InputOrder(const Permutation& p) {
  std::vector<int> order(p.rank);
  for (int i = 0; i < p.rank; ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&p](int a, int b) { return p.in_stride[a] < p.in_stride[b]; });
  return order;
}

std::vector<int> OutputOrder(const Permutation& p) {
  std::vector<int> order(p.rank);
  for (int i = 0; i < p.rank; ++i) order[i] = p.rank - 1 - i;
  return order;
}

template <typename Index>
void SetRows(const Permutation& p, bool bytes, RowParams<Index>* rows) {
  rows->bytes = p.count * p.unit;
  rows->count = static_cast<Index>(bytes ? p.count * p.unit : p.count);
  rows->rank = p.rank;
  for (int d = 0; d < p.rank; ++d) {
    const int from = p.rank - 1 - d;
    const int64_t size = p.size[from] * (bytes && d == 0 ? p.unit : 1);
    using Divisor = decltype(rows->dims[d].size);
    // There is no division by the most major dimension, which may be too large for it.
    rows->dims[d].size = d > 0 && d == p.rank - 1 ? Divisor() : Divisor(size);
    rows->dims[d].in_stride = p.in_stride[from] * (bytes && d == 0 ? 1 : p.unit);
  }
}

void PlanRows(const Permutation& p, TransposePlan* plan) {
  const bool bytes = p.unit < 16;
  plan->variant = bytes ? Variant::kByteRows : Variant::kUnitRows;
  const int64_t count = bytes ? p.count * p.unit : p.count;
  // Leaves room for the threads of the last block.
  plan->wide_index = count > (int64_t{1} << 31) - 4096;
  plan->blocks =
      bytes ? CeilDiv(count / 16 + 2, kThreads * 2) : CeilDiv(count, kThreads * kUnitsPerThread);
  if (plan->wide_index) {
    SetRows(p, bytes, &plan->wide_rows);
  } else {
    SetRows(p, bytes, &plan->rows);
  }
}

Dim MakeDim(const Permutation& p, int d, int64_t size) {
  // There is no division by a dimension of 2^31 elements: a run with such a dimension has no other.
  return {FastDivisor(static_cast<uint32_t>(std::min<int64_t>(size, 0x7fffffff))),
          p.in_stride[d] * p.unit, p.out_stride[d] * p.unit};
}

template <int kElement>
bool PlanTiles(const Permutation& p, const TransposeShape& shape, TransposePlan* plan) {
  constexpr int kColumns = TileShape<kElement>::kColumns, kRows = TileShape<kElement>::kRows;
  const std::vector<int> in_order = InputOrder(p);
  std::vector<bool> used(p.rank, false);
  // The runs. A run is long enough if less than 5% of its tiles is wasted. The run that wastes more
  // takes the next dimension first.
  std::vector<int> columns, rows;  // dimensions, minor to major
  int64_t columns_size = 1, rows_size = 1;
  const auto waste = [](int64_t size, int64_t tile) {
    return static_cast<double>(CeilDiv(size, tile) * tile) / static_cast<double>(size);
  };
  const auto take = [&](int d, std::vector<int>* run, int64_t* size) {
    used[d] = true;
    run->push_back(d);
    *size *= p.size[d];
  };
  take(in_order[0], &columns, &columns_size);
  take(p.rank - 1, &rows, &rows_size);
  for (;;) {
    const auto next = [&](const std::vector<int>& run, int64_t size, bool input) {
      const int i = static_cast<int>(run.size());
      if (i >= p.rank) return -1;
      const int d = input ? in_order[i] : p.rank - 1 - i;
      return used[d] || size * p.size[d] > 0x7fffffff ? -1 : d;
    };
    double columns_waste = waste(columns_size, kColumns), rows_waste = waste(rows_size, kRows);
    const int next_column = next(columns, columns_size, true);
    const int next_row = next(rows, rows_size, false);
    if (next_column < 0) columns_waste = 0;
    if (next_row < 0) rows_waste = 0;
    if (std::max(columns_waste, rows_waste) < 1.05) break;
    if (columns_waste >= rows_waste) {
      take(next_column, &columns, &columns_size);
    } else {
      take(next_row, &rows, &rows_size);
    }
  }
  if (waste(columns_size, kColumns) * waste(rows_size, kRows) > 1.34) return false;

  TileParams& tile = plan->tile;
  plan->variant = Variant::kTile;
  tile.columns = columns_size;
  tile.rows = rows_size;
  tile.column_dims = static_cast<int>(columns.size());
  tile.row_dims = static_cast<int>(rows.size());
  tile.rank = 0;
  for (const int d : columns) tile.dims[tile.rank++] = MakeDim(p, d, p.size[d]);
  for (const int d : rows) tile.dims[tile.rank++] = MakeDim(p, d, p.size[d]);
  int64_t matrices = 1;
  for (int d = p.rank - 1; d >= 0; --d) {
    if (used[d]) continue;
    tile.dims[tile.rank++] = MakeDim(p, d, p.size[d]);
    matrices *= p.size[d];
  }

  const int64_t down = CeilDiv(rows_size, kRows), along = CeilDiv(columns_size, kColumns);
  const int64_t band = std::min<int64_t>(down, 32);
  const int64_t bands = CeilDiv(down, band);
  plan->blocks = matrices * down * along;
  if (plan->blocks > 0x7fffffff) return false;
  tile.tiles = FastDivisor(static_cast<uint32_t>(down * along));
  tile.band_tiles = FastDivisor(static_cast<uint32_t>(band * along));
  tile.band = FastDivisor(static_cast<uint32_t>(band));
  tile.last_band = FastDivisor(static_cast<uint32_t>(down - (bands - 1) * band));
  tile.last_band_index = static_cast<uint32_t>(bands - 1);

  // Wide accesses need every row, or column, to begin and end at a multiple of 16 bytes.
  constexpr int kVector = 16 / kElement;
  plan->wide_in = shape.alignment == 16 && columns_size % kVector == 0;
  plan->wide_out = shape.alignment == 16 && rows_size % kVector == 0;
  for (int d = 0; d < p.rank; ++d) {
    const bool in_columns = std::find(columns.begin(), columns.end(), d) != columns.end();
    const bool in_rows = std::find(rows.begin(), rows.end(), d) != rows.end();
    if (!in_columns && p.in_stride[d] % kVector != 0) plan->wide_in = false;
    if (!in_rows && p.out_stride[d] % kVector != 0) plan->wide_out = false;
  }
  return true;
}

// The size of a dimension's parts: a multiple of 32 or 16 if possible.
int64_t RoundPart(int64_t part) {
  if (part >= 32) return part / 32 * 32;
  int64_t power = 1;
  while (power * 2 <= part) power *= 2;
  return power;
}

// The number of shared memory accesses when some warps of the box kernel gather units of `bytes`
// bytes, one element of each at a time.
int GatherAccesses(const BoxParams& box, uint32_t element, uint32_t unit_bytes,
                   const BoxLayout& layout) {
  constexpr uint32_t kWarps = 12;
  const uint32_t per_unit = unit_bytes / element;
  const uint32_t per_segment = box.out.pitch / per_unit;
  const uint32_t units = box.out.count * per_segment;
  int accesses = 0;
  for (uint32_t warp = 0; warp < kWarps; ++warp) {
    const uint32_t first = units * warp / kWarps / 32 * 32;
    for (uint32_t j = 0; j < per_unit; ++j) {
      uint32_t words[32][32], counts[32] = {};  // different words, by bank
      for (uint32_t unit = first; unit < std::min(first + 32, units); ++unit) {
        // Like the kernel when it makes its table.
        uint32_t segment = unit / per_segment;
        uint32_t within = unit % per_segment * per_unit + j;
        uint32_t address = 0;
        if (within >= box.out.length.divisor) continue;
        for (int d = 0; d < box.out.run_dims + box.out.segment_dims; ++d) {
          uint32_t& index = d < box.out.run_dims ? within : segment;
          address += index % box.out.dims[d].size.divisor * box.out.dims[d].shared_stride;
          index /= box.out.dims[d].size.divisor;
        }
        const uint32_t word = layout.Place(address * element) / 4, bank = word % 32;
        uint32_t* end = words[bank] + counts[bank];
        if (std::find(words[bank], end, word) != end) continue;
        *end = word;
        ++counts[bank];
      }
      accesses += static_cast<int>(*std::max_element(counts, counts + 32));
    }
  }
  return accesses;
}

// Returns whether to gather words.
bool ChooseLayout(uint32_t element, BoxParams* box) {
  if (element > 2) return false;
  const int chunks = GatherAccesses(*box, element, 16, box->layout);
  BoxLayout best;
  int fewest = GatherAccesses(*box, element, 4, best);
  for (const uint32_t pad_shift : {7u, 6u, 8u, 9u}) {
    for (const uint32_t turn_shift : {31u, 0u, 1u, 2u, 3u, 4u, 5u, 6u}) {
      BoxLayout layout;
      layout.pad_shift = pad_shift;
      layout.turn_shift = turn_shift;
      const int accesses = GatherAccesses(*box, element, 4, layout);
      if (accesses >= fewest) continue;
      fewest = accesses;
      best = layout;
    }
  }
  // Words cost more instructions per byte, so they pay off only if bank conflicts dominate: if
  // chunks take four times as many accesses as words, or six times with half as many elements per
  // word. Four words have as many bytes as a chunk.
  if (chunks < (element == 1 ? 4 : 6) * 4 * fewest) return false;
  box->layout = best;
  return true;
}

void PlanBoxes(const Permutation& p, const TransposeShape& shape, TransposePlan* plan) {
  plan->variant = Variant::kBox;
  BoxParams& box = plan->box;
  const int vector = static_cast<int>(16 / p.unit);
  const std::vector<int> in_order = InputOrder(p);
  const std::vector<int> out_order = OutputOrder(p);

  // The extents: runs as long as fit. Each block makes its own table, so a small array has smaller
  // boxes, several for each block. On an H100, 9.4 Mi elements of rank 8 go from 3.3 to 2.4 of the
  // floor for 1 byte and from 1.11 to 0.96 for 4 bytes, but from 1.39 to 1.59 for 2 bytes, which
  // keep the larger boxes.
  int64_t box_bytes = p.unit <= 2 ? 8192 : 16384;
  if (p.unit != 2 && p.count * p.unit / box_bytes < kFewBoxes) box_bytes /= 2;
  const int64_t most = box_bytes / p.unit;  // elements
  std::vector<int64_t> extent(p.rank);
  for (int64_t target = most;; target /= 2) {
    std::fill(extent.begin(), extent.end(), 1);
    for (const std::vector<int>* order : {&in_order, &out_order}) {
      int64_t run = 1;
      for (const int d : *order) {
        int64_t part = std::min(p.size[d], CeilDiv(target, run));
        if (part < p.size[d]) part = RoundPart(part);
        extent[d] = std::max(extent[d], part);
        run *= extent[d];
        if (extent[d] < p.size[d] || run >= target) break;
      }
    }
    int64_t volume = 1;
    for (int d = 0; d < p.rank; ++d) volume = std::min(volume * extent[d], int64_t{1} << 40);
    if (volume <= most) break;
  }

  // The resulting runs, and the dimensions that a box contains only partially.
  const auto run_of = [&](const std::vector<int>& order) {
    std::vector<int> run;
    for (const int d : order) {
      if (extent[d] == 1) break;
      run.push_back(d);
      if (extent[d] < p.size[d]) break;
    }
    return run;
  };
  const auto part_of = [&](const std::vector<int>& run) {
    return !run.empty() && extent[run.back()] < p.size[run.back()] ? run.back() : -1;
  };
  const std::vector<int> in_run = run_of(in_order), out_run = run_of(out_order);
  const int in_part = part_of(in_run), out_part = part_of(out_run);

  // The box's other dimensions number the segments of a side, the other side's partial one last.
  const auto segments_of = [&](const std::vector<int>& order, const std::vector<int>& run,
                               int last) {
    std::vector<int> dims;
    for (const int d : order) {
      if (extent[d] == 1 || d == last) continue;
      if (std::find(run.begin(), run.end(), d) == run.end()) dims.push_back(d);
    }
    if (last >= 0 && std::find(run.begin(), run.end(), last) == run.end()) dims.push_back(last);
    return dims;
  };
  const std::vector<int> in_segments = segments_of(in_order, in_run, out_part);
  const std::vector<int> out_segments = segments_of(out_order, out_run, in_part);

  std::vector<uint32_t> shared_stride(p.rank, 0);
  const auto set_side = [&](const std::vector<int>& run, const std::vector<int>& segments,
                            const int64_t* strides, bool input, BoxSide* side) {
    int64_t length = 1, count = 1;
    for (const int d : run) length *= extent[d];
    for (const int d : segments) count *= extent[d];
    side->pitch = static_cast<uint32_t>(CeilDiv(length, vector) * vector);
    if (input) {
      uint32_t stride = 1;
      for (const int d : run) {
        shared_stride[d] = stride;
        stride *= static_cast<uint32_t>(extent[d]);
      }
      stride = side->pitch;
      for (const int d : segments) {
        shared_stride[d] = stride;
        stride *= static_cast<uint32_t>(extent[d]);
      }
    }
    side->length = FastDivisor(static_cast<uint32_t>(length));
    side->vectors = FastDivisor(static_cast<uint32_t>(CeilDiv(length, vector)));
    side->words = FastDivisor(side->vectors.divisor * 4);
    side->count = static_cast<uint32_t>(count);
    side->run_dims = static_cast<int>(run.size());
    side->segment_dims = static_cast<int>(segments.size());
    side->last_offset = 0;
    side->wide = shape.alignment == 16 || p.unit == 16;
    int i = 0;
    uint32_t before = 1;
    for (const std::vector<int>* dims : {&run, &segments}) {
      if (dims == &segments) before = side->pitch;
      for (const int d : *dims) {
        side->dims[i++] = {FastDivisor(static_cast<uint32_t>(extent[d])), FastDivisor(before),
                           shared_stride[d], strides[d] * p.unit};
        before *= static_cast<uint32_t>(extent[d]);
        if (dims != &segments) continue;
        side->last_offset += (extent[d] - 1) * strides[d] * p.unit;
        if (strides[d] % vector != 0) side->wide = false;
      }
    }
  };
  set_side(in_run, in_segments, p.in_stride, true, &box.in);
  set_side(out_run, out_segments, p.out_stride, false, &box.out);

  box.bytes = p.count * p.unit;
  box.in_part = box.out_part = -1;
  box.in_part_size = box.out_part_size = 1;
  box.in_part_total = box.out_part_total = 1;
  box.rank = 0;
  int64_t boxes = 1;
  for (const int d : out_order) {
    const int64_t size = CeilDiv(p.size[d], extent[d]);
    if (size == 1) continue;
    if (d == in_part) {
      box.in_part = box.rank;
      box.in_part_size = static_cast<uint32_t>(extent[d]);
      box.in_part_total = p.size[d];
    }
    if (d == out_part) {
      box.out_part = box.rank;
      box.out_part_size = static_cast<uint32_t>(extent[d]);
      box.out_part_total = p.size[d];
    }
    box.dims[box.rank] = {FastDivisor(static_cast<uint32_t>(size)),
                          p.in_stride[d] * extent[d] * p.unit,
                          p.out_stride[d] * extent[d] * p.unit};
    ++box.rank;
    boxes *= size;
  }
  box.boxes = static_cast<uint32_t>(boxes);
  box.table_bytes = static_cast<uint32_t>(CeilDiv(box.out.count * box.out.pitch * 2, 16) * 16);
  plan->box_words = ChooseLayout(static_cast<uint32_t>(p.unit), &box);
  box.data_bytes =
      box.layout.Pad(static_cast<uint32_t>(box.in.count * box.in.pitch * p.unit)) / 16 * 16 + 32;
  // The few boxes at the end may be unaligned although the others are aligned.
  bool aligned = box.out.wide && box.out.length.divisor % vector == 0;
  for (int d = 0; d < box.rank; ++d) aligned = aligned && box.dims[d].out_stride % 16 == 0;
  box.staged_bytes = aligned || p.unit >= 4
                         ? 0
                         : static_cast<uint32_t>((box.out.count * box.out.pitch + vector) * p.unit);
  plan->shared_bytes =
      box.table_bytes + box.data_bytes + box.staged_bytes + 8 * (box.in.count + box.out.count);
  plan->blocks = boxes;
}

TransposePlan MakePlan(const TransposeShape& shape) {
  const Permutation p = Normalize(shape);
  TransposePlan plan;
  plan.unit = static_cast<int>(p.unit);
  if (p.IsCopy()) return plan;
  if (p.KeepsMinor() && (p.unit == 16 || p.size[p.rank - 1] * p.unit >= 16)) {
    PlanRows(p, &plan);
    return plan;
  }
  bool tiles = false;
  if (!p.KeepsMinor()) {
    switch (p.unit) {
      case 1:
        tiles = PlanTiles<1>(p, shape, &plan);
        break;
      case 2:
        tiles = PlanTiles<2>(p, shape, &plan);
        break;
      case 4:
        tiles = PlanTiles<4>(p, shape, &plan);
        break;
      case 8:
        tiles = PlanTiles<8>(p, shape, &plan);
        break;
      default:
        tiles = PlanTiles<16>(p, shape, &plan);
    }
  }
  if (!tiles) PlanBoxes(p, shape, &plan);
  return plan;
}

// -------------------------------------------------------------------------------------------------
// Launches

using TileFunction = void (*)(TileParams);
using BoxFunction = void (*)(BoxParams);

template <int kElement>
TileFunction TileOf(bool wide_in, bool wide_out) {
  if (wide_in) {
    return wide_out ? TileKernel<kElement, true, true> : TileKernel<kElement, true, false>;
  }
  return wide_out ? TileKernel<kElement, false, true> : TileKernel<kElement, false, false>;
}

TileFunction TileOf(int unit, bool wide_in, bool wide_out) {
  switch (unit) {
    case 1:
      return TileOf<1>(wide_in, wide_out);
    case 2:
      return TileOf<2>(wide_in, wide_out);
    case 4:
      return TileOf<4>(wide_in, wide_out);
    case 8:
      return TileOf<8>(wide_in, wide_out);
    default:
      return TileKernel<16, true, true>;
  }
}

BoxFunction BoxOf(int unit, bool words) {
  switch (unit) {
    case 1:
      return words ? BoxKernel<1, true> : BoxKernel<1, false>;
    case 2:
      return words ? BoxKernel<2, true> : BoxKernel<2, false>;
    case 4:
      return BoxKernel<4, false>;
    case 8:
      return BoxKernel<8, false>;
    default:
      return BoxKernel<16, false>;
  }
}

template <typename Params>
cudaError_t Launch(void (*kernel)(Params), Params params, const void* x, void* y, int64_t blocks,
                   int threads, size_t shared_bytes, cudaStream_t stream) {
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  params.x = static_cast<const char*>(x);
  params.y = static_cast<char*>(y);
  void* arguments[] = {&params};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                          dim3(static_cast<unsigned>(blocks)), dim3(threads), arguments,
                          shared_bytes, stream);
}

// About how many blocks of the box kernel run at once, for a persistent grid.
cudaError_t ResidentBoxes(size_t shared_bytes, int64_t* blocks) {
  int device, processors, shared;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error != cudaSuccess) return error;
  const int64_t fit = shared / static_cast<int64_t>(shared_bytes + 1024);
  *blocks = processors * std::max<int64_t>(1, std::min<int64_t>(fit, kBoxBlocks));
  return cudaSuccess;
}

cudaError_t LaunchPlan(const TransposePlan& plan, const void* x, void* y, int64_t bytes,
                       cudaStream_t stream) {
  switch (plan.variant) {
    case Variant::kCopy:
      return cudaMemcpyAsync(y, x, bytes, cudaMemcpyDeviceToDevice, stream);
    case Variant::kUnitRows:
      if (plan.wide_index) {
        return Launch(UnitRowsKernel<16, uint64_t>, plan.wide_rows, x, y, plan.blocks, kThreads, 0,
                      stream);
      }
      return Launch(UnitRowsKernel<16, uint32_t>, plan.rows, x, y, plan.blocks, kThreads, 0,
                    stream);
    case Variant::kByteRows:
      if (plan.wide_index) {
        return Launch(ByteRowsKernel<uint64_t>, plan.wide_rows, x, y, plan.blocks, kThreads, 0,
                      stream);
      }
      return Launch(ByteRowsKernel<uint32_t>, plan.rows, x, y, plan.blocks, kThreads, 0, stream);
    case Variant::kTile: {
      TileParams params = plan.tile;
      params.x_end = static_cast<const char*>(x) + bytes;
      return Launch(TileOf(plan.unit, plan.wide_in, plan.wide_out), params, x, y, plan.blocks,
                    kThreads, 0, stream);
    }
    case Variant::kBox: {
      int64_t resident;
      const cudaError_t error = ResidentBoxes(plan.shared_bytes, &resident);
      if (error != cudaSuccess) return error;
      return Launch(BoxOf(plan.unit, plan.box_words), plan.box, x, y,
                    std::min(plan.blocks, resident), kBoxThreads, plan.shared_bytes, stream);
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t Transpose(const void* x, void* y, const int64_t* dims, const int* axes, int rank,
                      int64_t itemsize, cudaStream_t stream) {
  TransposeShape shape;
  shape.dims.assign(dims, dims + rank);
  shape.axes.assign(axes, axes + rank);
  shape.itemsize = itemsize;
  shape.alignment = CommonAlignment({x, y});
  int64_t bytes = itemsize;
  for (const int64_t dim : shape.dims) bytes *= dim;
  if (bytes == 0) return cudaSuccess;

  static PlanCache<TransposePlan> plans;
  const std::shared_ptr<const TransposePlan> plan = plans.Get(shape, MakePlan);
  return LaunchPlan(*plan, x, y, bytes, stream);
}

cudaError_t LoadTransposeKernels() {
  static KernelLoader loader;
  return loader.Load([](const auto& load) {
    load(reinterpret_cast<const void*>(UnitRowsKernel<16, uint32_t>));
    load(reinterpret_cast<const void*>(UnitRowsKernel<16, uint64_t>));
    load(reinterpret_cast<const void*>(ByteRowsKernel<uint32_t>));
    load(reinterpret_cast<const void*>(ByteRowsKernel<uint64_t>));
    for (const int unit : {1, 2, 4, 8, 16}) {
      for (const bool words : {false, true})
        load(reinterpret_cast<const void*>(BoxOf(unit, words)));
      for (const bool wide_in : {false, true}) {
        for (const bool wide_out : {false, true})
          load(reinterpret_cast<const void*>(TileOf(unit, wide_in, wide_out)));
      }
    }
  });
}

}  // namespace jax_fastops::cuda

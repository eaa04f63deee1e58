// Transpositions in which the minor dimension moves, by tiles.
//
// A tile has a run of elements that are contiguous in the input on one side, and a run contiguous
// in the output on the other. A run spans several dimensions if one is short: (96, 97, 98, 99)
// reversed is, for the tiles, a matrix of 9312 rows and 9702 columns, whose rows and columns start
// at any address. Tiles are 16 KB, read and written 16 bytes at a time, 128 to 512 contiguous bytes
// per row and column. Elements of 1 and 2 bytes are transposed in registers in squares of 4 by 4
// and 2 by 2, so that shared memory sees only words, and a swizzle of 16-byte chunks avoids bank
// conflicts.
//
// Rows that are not aligned to 16 bytes are read element by element, and elements of 1 and 2 bytes
// by unaligned windows. Columns that are not aligned are still written in whole aligned sectors,
// because a partially written sector is expensive for L2: in each column, the tile leaves the
// elements before its first sector boundary to the tile above, and takes as many more rows at its
// end. Only the first and the last tile of a column write single elements.
#pragma once

#include <cstdint>
#include <cstring>

#include "transpose/bytes.cuh"
#include "transpose/plan.h"

namespace jax_fastops::cuda::transpose {

// kAlignedIn: whether rows are known to be aligned when the kernel is compiled. kAlignedOut: the
// same for columns.
template <int kElement_, bool kAlignedIn_, bool kAlignedOut_>
struct TileShape {
  static constexpr int kElement = kElement_;  // bytes
  static constexpr bool kAlignedIn = kAlignedIn_, kAlignedOut = kAlignedOut_;
  static constexpr int kColumns = TileColumns(kElement);
  static constexpr int kRows = TileRows(kElement);
  static constexpr int kMoreRows = kAlignedOut ? 0 : kSector / kElement;
  static constexpr int kAllRows = kRows + kMoreRows;
  static constexpr int kVector = 16 / kElement;    // elements per chunk of 16 bytes
  static constexpr int kChunks = kRows / kVector;  // per column
  static constexpr int kAllChunks = kAllRows / kVector;
  static constexpr int kWord = kElement < 4 ? 4 : kElement;          // bytes
  static constexpr int kPack = kWord / kElement;                     // elements per word
  static constexpr bool kByElements = !kAlignedIn && kElement >= 4;  // they are read one by one
};

// The shared memory of a block.
template <typename Shape>
struct TileMemory {
  // Column by column. The chunks of a column are permuted by an exclusive or, so that neither the
  // stores of words or chunks nor the loads of a column's chunks meet in a bank. The chunks of the
  // additional rows follow.
  uint4 chunks[Shape::kColumns * Shape::kAllChunks];
  const char* rows[Shape::kAllRows];
  char* columns[Shape::kColumns];

  __device__ __forceinline__ uint4* Chunk(int column, int chunk) {
    if (!Shape::kAlignedOut && chunk >= Shape::kChunks) {
      return &chunks[Shape::kColumns * Shape::kChunks +
                     column * (Shape::kAllChunks - Shape::kChunks) + (chunk - Shape::kChunks)];
    }
    constexpr int kSame = Shape::kByElements ? 1 : Shape::kVector;  // columns
    return &chunks[column * Shape::kChunks + (chunk ^ (column / kSame % 8))];
  }
  __device__ __forceinline__ auto* WordAt(int column, int word) {
    constexpr int kPerChunk = 16 / Shape::kWord;
    return reinterpret_cast<Word<Shape::kWord>*>(Chunk(column, word / kPerChunk)) +
           word % kPerChunk;
  }
};

// The offset of element `index` of a run that spans `count` dimensions.
template <int64_t MovedDim::* kStride>
__device__ __forceinline__ int64_t RunOffset(const MovedDim* dims, int count, int64_t index) {
  if (count == 1) return index * dims[0].*kStride;
  int64_t offset = 0;
  uint32_t n = static_cast<uint32_t>(index);
  for (int d = 0; d < count - 1; ++d) {
    offset += static_cast<int64_t>(TakeRemainder(n, dims[d].size)) * (dims[d].*kStride);
  }
  return offset + static_cast<int64_t>(n) * (dims[count - 1].*kStride);
}

// Where the block's tile is: its first element, and how many rows and columns exist from there.
struct TilePosition {
  int64_t first_row, first_column;
  int live_rows, live_columns;
  int64_t in_offset, out_offset;  // of its matrix
};

template <typename Shape>
__device__ __forceinline__ TilePosition FindTile(const TilePlan& p) {
  uint32_t n = blockIdx.x;
  uint32_t index = TakeRemainder(n, p.tiles);
  const uint32_t band = Divide(index, p.band_tiles);
  index -= band * p.band_tiles.divisor;
  const uint32_t row = TakeRemainder(index, band == p.last_band_index ? p.last_band : p.band);
  TilePosition tile;
  tile.first_row = (int64_t{band} * p.band.divisor + row) * Shape::kRows;
  tile.first_column = int64_t{index} * Shape::kColumns;
  tile.live_rows = static_cast<int>(min(p.rows - tile.first_row, int64_t{Shape::kAllRows}));
  tile.live_columns =
      static_cast<int>(min(p.columns - tile.first_column, int64_t{Shape::kColumns}));
  tile.in_offset = tile.out_offset = 0;
  for (int d = p.column_dims + p.row_dims; d < p.rank; ++d) {
    const int64_t i = TakeRemainder(n, p.dims[d].size);
    tile.in_offset += i * p.dims[d].in_stride;
    tile.out_offset += i * p.dims[d].out_stride;
  }
  return tile;
}

// Sets the addresses of the tile's rows and columns. Those after the end repeat the last one, which
// may be accessed. Returns whether the windows of this thread's rows may be read.
template <typename Shape>
__device__ __forceinline__ bool FindRowsAndColumns(const TilePlan& p, const TilePosition& tile,
                                                   const char* x, const char* x_end, char* y,
                                                   TileMemory<Shape>& memory) {
  bool readable = true;
  const char* in = x + tile.in_offset + tile.first_column * Shape::kElement;
  char* out = y + tile.out_offset + tile.first_row * Shape::kElement;
  for (int i = threadIdx.x; i < Shape::kAllRows + Shape::kColumns; i += kTileThreads) {
    if (i < Shape::kAllRows) {
      const int64_t row = tile.first_row + min(i, tile.live_rows - 1);
      memory.rows[i] =
          in + RunOffset<&MovedDim::in_stride>(p.dims + p.column_dims, p.row_dims, row);
      const char* aligned = AlignDown(memory.rows[i], 16);
      if (aligned < x || aligned + (Shape::kColumns * Shape::kElement + 16) > x_end) {
        readable = false;
      }
    } else {
      const int64_t column = tile.first_column + min(i - Shape::kAllRows, tile.live_columns - 1);
      memory.columns[i - Shape::kAllRows] =
          out + RunOffset<&MovedDim::out_stride>(p.dims, p.column_dims, column);
    }
  }
  return readable;
}

// Reads a tile element by element. A thread takes as many adjacent rows of one column as fill a
// chunk.
template <typename Shape>
__device__ __forceinline__ void ReadElements(const TilePosition& tile, TileMemory<Shape>& memory) {
  using Element = Word<Shape::kElement>;
  constexpr int kTotal = Shape::kColumns * Shape::kAllChunks;
  constexpr int kUnits = (kTotal + kTileThreads - 1) / kTileThreads;
  Element v[kUnits][Shape::kVector];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int unit = threadIdx.x + u * kTileThreads;
    const int column = unit % Shape::kColumns, chunk = unit / Shape::kColumns;
    if ((kTotal % kTileThreads == 0 || unit < kTotal) && column < tile.live_columns) {
#pragma unroll
      for (int r = 0; r < Shape::kVector; ++r) {
        v[u][r] = Load<Element>(memory.rows[chunk * Shape::kVector + r] + column * Shape::kElement);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int unit = threadIdx.x + u * kTileThreads;
    const int column = unit % Shape::kColumns, chunk = unit / Shape::kColumns;
    if (kTotal % kTileThreads != 0 && unit >= kTotal) continue;
    uint4 packed;
    memcpy(&packed, v[u], 16);
    *memory.Chunk(column, chunk) = packed;
  }
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

__device__ __forceinline__ uint32_t Component(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Stores chunk `vector` of kPack adjacent rows as words of columns.
template <typename Shape>
__device__ __forceinline__ void StoreWords(const uint4 (&v)[Shape::kPack], int vector, int word,
                                           TileMemory<Shape>& memory) {
  if constexpr (Shape::kElement == 16) {
    *memory.WordAt(vector, word) = v[0];
  } else if constexpr (Shape::kElement == 8) {
    *memory.WordAt(vector * 2, word) = make_uint2(v[0].x, v[0].y);
    *memory.WordAt(vector * 2 + 1, word) = make_uint2(v[0].z, v[0].w);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t square[Shape::kPack];
#pragma unroll
      for (int r = 0; r < Shape::kPack; ++r) square[r] = Component(v[r], i);
      TransposeSquare(square);
#pragma unroll
      for (int r = 0; r < Shape::kPack; ++r) {
        *memory.WordAt(vector * Shape::kVector + i * Shape::kPack + r, word) = square[r];
      }
    }
  }
}

// Reads a tile 16 bytes at a time: kTogether times kPack adjacent rows, all by load(address) before
// the first is used. A warp takes 128 bytes of four groups of kPack rows.
template <int kTogether, typename Shape, typename LoadChunk>
__device__ __forceinline__ void ReadChunks(const TilePosition& tile, TileMemory<Shape>& memory,
                                           const LoadChunk& load) {
  constexpr int kAcross = Shape::kColumns / Shape::kVector / 8;
  constexpr int kTotal = Shape::kColumns / Shape::kVector * (Shape::kAllRows / Shape::kPack);
  constexpr int kUnits = (kTotal + kTileThreads - 1) / kTileThreads;
  constexpr int kBatch = kTogether < kUnits ? kTogether : kUnits;
#pragma unroll
  for (int first = 0; first < kUnits; first += kBatch) {
    const auto for_each_unit = [&](const auto& visit) {
#pragma unroll
      for (int u = 0; u < kBatch && first + u < kUnits; ++u) {
        const int unit = threadIdx.x + (first + u) * kTileThreads;
        const int vector = unit % 8 + unit / 32 % kAcross * 8;
        const int word = unit / 8 % 4 + unit / 32 / kAcross * 4;
        if ((kTotal % kTileThreads == 0 || unit < kTotal) &&
            vector * Shape::kVector < tile.live_columns) {
          visit(u, vector, word);
        }
      }
    };
    decltype(load(nullptr)) loaded[kBatch][Shape::kPack];
    for_each_unit([&](int u, int vector, int word) {
#pragma unroll
      for (int r = 0; r < Shape::kPack; ++r) {
        loaded[u][r] = load(memory.rows[word * Shape::kPack + r] + vector * 16);
      }
    });
    for_each_unit([&](int u, int vector, int word) {
      uint4 v[Shape::kPack];
#pragma unroll
      for (int r = 0; r < Shape::kPack; ++r) v[r] = Bytes(loaded[u][r]);
      StoreWords(v, vector, word, memory);
    });
  }
}

// Writes the tile's columns 16 bytes at a time.
template <typename Shape>
__device__ __forceinline__ void WriteChunks(const TilePosition& tile, TileMemory<Shape>& memory) {
  constexpr int kUnits = Shape::kColumns * Shape::kChunks / kTileThreads;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int unit = threadIdx.x + u * kTileThreads;
    const int chunk = unit % Shape::kChunks, column = unit / Shape::kChunks;
    if (column >= tile.live_columns) continue;
    char* address = memory.columns[column];
    if constexpr (Shape::kAlignedOut) {
      if (chunk * Shape::kVector < tile.live_rows) {
        Store(address + chunk * 16, *memory.Chunk(column, chunk));
      }
    } else {
      // The first aligned sector begins `skip` bytes into the column.
      const int skip = ToAlignment(address, kSector);
      const int from = skip / 16 + chunk;
      if (skip + chunk * 16 + 16 <= tile.live_rows * Shape::kElement) {
        const Window window(*memory.Chunk(column, from),
                            *memory.Chunk(column, min(from + 1, Shape::kAllChunks - 1)), skip % 16);
        Store(address + skip + chunk * 16, Bytes(window));
      }
    }
  }
}

// Writes the elements before the first sector of a column, and the rest of the last chunk.
template <typename Shape>
__device__ __forceinline__ void WriteEnds(const TilePosition& tile, TileMemory<Shape>& memory) {
  constexpr int kElement = Shape::kElement;
  const auto store_element = [&](int column, int row) {
    const char* word = reinterpret_cast<const char*>(memory.WordAt(column, row / Shape::kPack));
    Store(memory.columns[column] + row * kElement,
          Load<Word<kElement>>(word + row % Shape::kPack * kElement));
  };
  if (tile.first_row == 0) {
    for (int unit = threadIdx.x; unit < Shape::kColumns * Shape::kMoreRows; unit += kTileThreads) {
      const int row = unit % Shape::kMoreRows, column = unit / Shape::kMoreRows;
      if (column >= tile.live_columns) break;
      const int skip = ToAlignment(memory.columns[column], kSector);
      if (row < tile.live_rows && row * kElement < skip) store_element(column, row);
    }
  }
  if (tile.live_rows < Shape::kAllRows) {
    for (int unit = threadIdx.x; unit < Shape::kColumns * Shape::kVector; unit += kTileThreads) {
      const int column = unit / Shape::kVector;
      if (column >= tile.live_columns) break;
      const int skip = ToAlignment(memory.columns[column], kSector);
      const int rest = min(tile.live_rows * kElement - skip, Shape::kRows * kElement);
      const int row = (skip + (rest & ~15)) / kElement + unit % Shape::kVector;
      if (rest > 0 && row * kElement < skip + rest) store_element(column, row);
    }
  }
}

// The blocks that an SM has registers for, at least. Elements that are read one by one need few.
template <int kElement, bool kAlignedIn, bool kAlignedOut>
constexpr int kTileBlocks = kElement == 4 && !kAlignedIn && kAlignedOut ? 6 : 4;

template <int kElement, bool kAlignedIn, bool kAlignedOut>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<kElement, kAlignedIn, kAlignedOut>)
    TileKernel(const char* x, const char* x_end, char* y, const __grid_constant__ TilePlan p) {
  using Shape = TileShape<kElement, kAlignedIn, kAlignedOut>;
  // Windows take twice the registers, so fewer of them are in flight.
  constexpr int kAll = 1 << 20, kFew = 4 / Shape::kPack;
  __shared__ TileMemory<Shape> memory;
  const TilePosition tile = FindTile<Shape>(p);
  bool readable = FindRowsAndColumns(p, tile, x, x_end, y, memory);
  if constexpr (kAlignedIn || Shape::kByElements) {
    __syncthreads();
  } else {
    readable = __syncthreads_and(readable);
  }

  if constexpr (kAlignedIn) {
    ReadChunks<kAll>(tile, memory, [](const char* address) { return Load<uint4>(address); });
  } else if constexpr (Shape::kByElements) {
    ReadElements(tile, memory);
  } else if (readable) {
    ReadChunks<kFew>(tile, memory, [](const char* address) { return Window(address); });
  } else {
    ReadChunks<1>(tile, memory, [&](const char* address) { return LoadBytes(address, x_end); });
  }
  __syncthreads();

  WriteChunks(tile, memory);
  if constexpr (!kAlignedOut) WriteEnds(tile, memory);
}

}  // namespace jax_fastops::cuda::transpose

// Softmax on the CPU: divides an array for the threads, and rows for the caches.
//
// Rows of contiguous elements (inner = 1) are read from memory once. A row of up to kSoftmaxPiece
// elements goes through a buffer in the L1 cache. A longer row is divided into pieces of that size.
// The maxima and sums of the pieces are combined, and the row is read a second time, from the L2 or
// L3 cache. If there are fewer rows than threads, the threads share the pieces of a row. The pieces
// and the order in which they are combined depend only on the shape, so results do not depend on
// the number of threads.
//
// Along other axes, vectors consist of adjacent columns. A tile of columns, as long as the axis,
// goes through a buffer as a whole if it fits the L2 cache. Otherwise it goes through in chunks of
// rows, whose statistics are combined like those of the pieces of a row. If inner is small, several
// rows are folded into one wide row to fill vectors, and the statistics of columns that belong
// together are combined.
//
// A mask is read in place if contiguous elements of x have contiguous mask bytes. Otherwise the
// part for a piece or tile is gathered into a buffer of bytes.
#include "softmax/softmax.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "core/cpu/stream.h"
#include "softmax/softmax_simd.h"

namespace jax_fastops::cpu {
namespace {

const SoftmaxKernels& Kernels() {
  static const SoftmaxKernels& kernels = FASTOPS_KERNELS(softmax_kernels);
  return kernels;
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a - 1) / b + 1; }
int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t Max(int64_t a, int64_t b) { return a < b ? b : a; }
int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

int64_t MaskOffset(const MaskIndex& index, int64_t i) {
  int64_t offset = 0;
  for (int d = index.rank - 1; d >= 0; --d) {
    offset += i % index.size[d] * index.stride[d];
    i /= index.size[d];
  }
  return offset;
}

// ---- Rows ---------------------------------------------------------------------------------------

// The mask of elements [begin, begin + count) of a row as contiguous bytes: in place, or gathered
// into `bytes`.
const uint8_t* RowMask(const SoftmaxMask& mask, int64_t row, int64_t begin, int64_t count,
                       uint8_t* bytes) {
  if (mask.data == nullptr) return nullptr;
  const uint8_t* first = mask.data + MaskOffset(mask.outer, row) + begin * mask.stride;
  if (mask.stride == 1) return first;
  if (mask.stride == 0) {
    std::memset(bytes, *first, static_cast<size_t>(count));
  } else {
    for (int64_t i = 0; i < count; ++i) bytes[i] = first[i * mask.stride];
  }
  return bytes;
}

// Whether the threads share the pieces of one row after another, instead of dividing the rows.
bool ShouldSplitRows(int64_t rows, int64_t row_bytes, const Executor& executor) {
  if (executor.threads() <= 1 || row_bytes < 2 * kParallelBytes) return false;
  return rows < executor.threads() ||
         (rows < 4 * executor.threads() && row_bytes >= int64_t{4} << 20);
}

// Calls body(row, inner executor, state). Each thread has its own state.
template <typename State, typename Body>
void OverLongRows(int64_t rows, int64_t row_bytes, Executor& executor, const State& initial,
                  const Body& body) {
  if (ShouldSplitRows(rows, row_bytes, executor)) {
    State state = initial;
    for (int64_t row = 0; row < rows; ++row) body(row, executor, state);
    return;
  }
  ParallelFor(executor, rows, 1, static_cast<double>(row_bytes), [&](int64_t begin, int64_t end) {
    State state = initial;
    InlineExecutor here;
    for (int64_t row = begin; row < end; ++row) body(row, here, state);
  });
}

// Calls body(piece, begin, count) for each piece of a row.
template <typename Body>
void OverPieces(int64_t n, double bytes_per_element, Executor& executor, const Body& body) {
  ParallelFor(executor, CeilDiv(n, kSoftmaxPiece), 1,
              bytes_per_element * static_cast<double>(kSoftmaxPiece),
              [&](int64_t first, int64_t last) {
                for (int64_t piece = first; piece < last; ++piece) {
                  const int64_t begin = piece * kSoftmaxPiece;
                  body(piece, begin, Min(kSoftmaxPiece, n - begin));
                }
              });
}

// Calls body(row, rows, mask, stride) for runs of rows whose masks have a constant distance.
template <typename Body>
void OverShortRows(const SoftmaxShape& shape, const SoftmaxMask& mask, int64_t row_bytes,
                   Executor& executor, const Body& body) {
  ParallelFor(executor, shape.outer, 1, static_cast<double>(row_bytes),
              [&](int64_t begin, int64_t end) {
                uint8_t bytes[kSoftmaxPiece];
                for (int64_t row = begin; row < end;) {
                  int64_t rows = 1, stride = 0;
                  if (mask.data == nullptr || (mask.stride == 1 && mask.outer.rank == 0)) {
                    rows = end - row;
                  } else if (mask.stride == 1) {
                    const int64_t size = mask.outer.size[mask.outer.rank - 1];
                    rows = Min(end - row, size - row % size);
                    stride = mask.outer.stride[mask.outer.rank - 1];
                  }
                  body(row, rows, RowMask(mask, row, 0, shape.n, bytes), stride);
                  row += rows;
                }
              });
}

struct Stats {
  double maximum = -std::numeric_limits<double>::infinity();
  double sum = 0;
};

Stats Combine(const std::vector<Stats>& pieces) {
  Stats all;
  for (const Stats& piece : pieces) {
    if (piece.maximum > all.maximum) all.maximum = piece.maximum;
  }
  for (const Stats& piece : pieces) {
    // A piece without an element above -inf contributes nothing, but a NaN is kept.
    const bool nothing = piece.maximum == Stats().maximum;
    all.sum += piece.sum * (nothing ? 0 : std::exp(piece.maximum - all.maximum));
  }
  return all;
}

void ForwardRows(const SoftmaxShape& shape, const SoftmaxMask& mask, DType dtype,
                 const SoftmaxCall& call, const char* x, char* y, Executor& executor) {
  const int type = static_cast<int>(dtype);
  const int64_t n = shape.n;
  const int64_t row_bytes = n * static_cast<int64_t>(DTypeSize(dtype));
  if (n > kSoftmaxPiece) {
    const int64_t itemsize = static_cast<int64_t>(DTypeSize(dtype));
    const std::vector<Stats> none(static_cast<size_t>(CeilDiv(n, kSoftmaxPiece)));
    OverLongRows(shape.outer, 2 * row_bytes, executor, none,
                 [&](int64_t row, Executor& inner, std::vector<Stats>& pieces) {
                   OverPieces(n, static_cast<double>(itemsize), inner,
                              [&](int64_t piece, int64_t begin, int64_t count) {
                                uint8_t bytes[kSoftmaxPiece];
                                Stats& stats = pieces[static_cast<size_t>(piece)];
                                Kernels().stats[type](call, x + row * row_bytes + begin * itemsize,
                                                      RowMask(mask, row, begin, count, bytes),
                                                      count, &stats.maximum, &stats.sum);
                              });
                   const Stats all = Combine(pieces);
                   OverPieces(n, static_cast<double>(2 * itemsize), inner,
                              [&](int64_t, int64_t begin, int64_t count) {
                                uint8_t bytes[kSoftmaxPiece];
                                const int64_t at = row * row_bytes + begin * itemsize;
                                Kernels().finish[type](call, x + at,
                                                       RowMask(mask, row, begin, count, bytes),
                                                       y + at, count, all.maximum, all.sum);
                              });
                 });
    return;
  }
  auto* kernel = Kernels().rows[type];
  OverShortRows(shape, mask, 2 * row_bytes, executor,
                [&](int64_t row, int64_t rows, const uint8_t* row_mask, int64_t mask_stride) {
                  const int64_t at = row * row_bytes;
                  kernel(call, x + at, row_mask, mask_stride, y + at, rows, n);
                });
}

void BackwardRows(const SoftmaxShape& shape, const SoftmaxMask& mask, DType dtype,
                  const SoftmaxCall& call, const char* y, const char* dy, char* dx,
                  Executor& executor) {
  const int type = static_cast<int>(dtype);
  const int64_t n = shape.n, itemsize = static_cast<int64_t>(DTypeSize(dtype));
  if (n <= kSoftmaxPiece) {
    auto* kernel = Kernels().backward_rows[type];
    OverShortRows(shape, mask, 3 * n * itemsize, executor,
                  [&](int64_t row, int64_t rows, const uint8_t* row_mask, int64_t mask_stride) {
                    const int64_t at = row * n * itemsize;
                    kernel(call, y + at, dy + at, row_mask, mask_stride, dx + at, rows, n);
                  });
    return;
  }
  const std::vector<double> none(static_cast<size_t>(CeilDiv(n, kSoftmaxPiece)));
  OverLongRows(
      shape.outer, 3 * n * itemsize, executor, none,
      [&](int64_t row, Executor& inner, std::vector<double>& sums) {
        OverPieces(n, static_cast<double>(2 * itemsize), inner,
                   [&](int64_t piece, int64_t begin, int64_t count) {
                     uint8_t bytes[kSoftmaxPiece];
                     const int64_t at = (row * n + begin) * itemsize;
                     sums[static_cast<size_t>(piece)] = Kernels().backward_sum[type](
                         call, y + at, dy + at, RowMask(mask, row, begin, count, bytes), count);
                   });
        double sum = 0;
        for (double piece : sums) sum += piece;
        OverPieces(n, static_cast<double>(3 * itemsize), inner,
                   [&](int64_t, int64_t begin, int64_t count) {
                     uint8_t bytes[kSoftmaxPiece];
                     const int64_t at = (row * n + begin) * itemsize;
                     Kernels().backward_finish[type](call, y + at, dy + at,
                                                     RowMask(mask, row, begin, count, bytes),
                                                     dx + at, count, sum);
                   });
      });
}

// ---- Columns ------------------------------------------------------------------------------------

// The maximum size of the buffer for a whole tile, which makes it possible to read x only once.
// Larger buffers were slower than chunks, although they fit the L2 cache: 0.59 ns per element of
// (1, 100, 4096) with 512 KiB, 0.28 ns with 128 KiB (float32, AVX-512, one thread).
constexpr int64_t kBufferBytes = 128 << 10;
// Taller tiles go through a buffer of kChunkBytes in chunks, and their part of x (or of y and dy),
// about kTileBytes, is read twice. Long contiguous reads are worth more than having all of it in
// the L2 cache the second time.
constexpr int64_t kChunkBytes = 64 << 10;
constexpr int64_t kTileBytes = 1 << 20;
// The number of columns in a tile.
constexpr int64_t kMinColumns = 64, kMaxColumns = kSoftmaxMaxColumns;
// An inner size below kMinColumns is folded to about this size.
constexpr int64_t kFoldedColumns = 512;
// The rows per chunk for the sums of the gradient, whose rounding error grows with this number.
constexpr int64_t kSumRows = 128;

// How [n, inner] is divided: into `rows` folded rows of `fold` * inner elements, and a last one of
// `rest` elements, if not 0. The folded rows are divided into tiles of `columns` columns and chunks
// of `chunk_rows` rows.
struct Cut {
  int64_t n, inner;
  int64_t fold, rows, rest;
  int64_t columns, tiles;
  int64_t chunk_rows, chunks;

  // `buffer_bytes` is the size of an element in a buffer, or 0 without a buffer, and `bytes` its
  // size in the arrays.
  Cut(const SoftmaxShape& shape, int64_t buffer_bytes, int64_t bytes)
      : n(shape.n), inner(shape.inner) {
    fold = inner >= kMinColumns ? 1 : Min(n, Max(1, kFoldedColumns / inner));
    rows = n / fold;
    rest = n % fold * inner;
    columns = fold * inner;
    if (fold == 1) {
      int64_t fits = buffer_bytes == 0 ? 0 : Multiple(kBufferBytes / buffer_bytes / n);
      if (fits == 0) fits = Max(kMinColumns, Multiple(kTileBytes / bytes / n));
      columns = Min(inner, Min(kMaxColumns, fits));
    }
    tiles = CeilDiv(fold * inner, columns);
    chunk_rows = 0;
    chunks = 1;
  }

  static int64_t Multiple(int64_t fits) { return fits / kMinColumns * kMinColumns; }

  void Chunks(int64_t rows_of_chunk) {
    chunk_rows = Max(1, Min(rows, rows_of_chunk));
    chunks = CeilDiv(rows, chunk_rows);
  }
};

// The location of some rows of a tile.
struct Place {
  int64_t outer, column;  // column: the first one of the tile
  int64_t row, rows;      // folded rows
  int64_t columns;
  int64_t element;  // index of the first element
};

// Calls body(place) for the rows of a chunk. The last chunk also has the rest.
template <typename Body>
void OverParts(const Cut& cut, int64_t outer, int64_t tile, int64_t chunk, const Body& body) {
  Place place;
  place.outer = outer;
  place.column = tile * cut.columns;
  place.row = chunk * cut.chunk_rows;
  place.rows = Min(cut.chunk_rows, cut.rows - place.row);
  place.columns = Min(cut.columns, cut.fold * cut.inner - place.column);
  place.element = (outer * cut.n + place.row * cut.fold) * cut.inner + place.column;
  body(place);
  if (chunk == cut.chunks - 1 && cut.rest > 0) {
    place.row += place.rows;
    place.element += place.rows * cut.fold * cut.inner;
    place.rows = 1;
    place.columns = cut.rest;
    body(place);
  }
}

// The buffers that a thread reuses for each of its tiles.
template <typename Scalar>
struct Workspace {
  std::unique_ptr<char[]> memory;
  Scalar *buffer = nullptr, *maxima, *shift, *factor;
  uint8_t* bytes = nullptr;
  std::vector<int64_t> offsets;

  Workspace(int64_t buffer_size, int64_t width, int64_t byte_size) {
    constexpr int64_t kLine = 64;
    const int64_t scalar = static_cast<int64_t>(sizeof(Scalar));
    const int64_t sizes[] = {RoundUp(Max(1, buffer_size * scalar), kLine),
                             RoundUp(width * scalar, kLine)};
    const int64_t bytes_at = sizes[0] + 3 * sizes[1];
    memory.reset(new char[static_cast<size_t>(bytes_at + byte_size + kLine)]);
    char* p = memory.get();
    p += (kLine - static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) % kLine)) % kLine;
    buffer = reinterpret_cast<Scalar*>(p);
    maxima = reinterpret_cast<Scalar*>(p + sizes[0]);
    shift = reinterpret_cast<Scalar*>(p + sizes[0] + sizes[1]);
    factor = reinterpret_cast<Scalar*>(p + sizes[0] + 2 * sizes[1]);
    bytes = reinterpret_cast<uint8_t*>(p + bytes_at);
  }
};

// Whether the mask of a tile has the layout of x.
bool InPlace(const SoftmaxMask& mask, const Cut& cut) {
  return mask.data == nullptr || (mask.inner.rank == 1 && mask.inner.stride[0] == 1 &&
                                  (cut.fold == 1 || mask.stride == cut.inner));
}

// Sets the mask of a tile's rows. Gathers it into `bytes` if it is not in place.
template <typename Scalar>
void SetMask(const SoftmaxMask& mask, const Cut& cut, const Place& place,
             Workspace<Scalar>& workspace, uint8_t* bytes, SoftmaxTile* tile) {
  tile->mask = nullptr;
  tile->mask_stride = 0;
  if (mask.data == nullptr) return;
  const int64_t row_stride = cut.fold * mask.stride;
  const uint8_t* first = mask.data + MaskOffset(mask.outer, place.outer) + place.row * row_stride;
  if (InPlace(mask, cut)) {
    tile->mask = first + place.column;
    tile->mask_stride = row_stride;
    return;
  }
  const size_t columns = static_cast<size_t>(place.columns);
  std::vector<int64_t>& offsets = workspace.offsets;
  const bool uniform = mask.inner.rank == 0 && cut.fold == 1;
  if (!uniform) {
    offsets.resize(columns);
    for (int64_t i = 0; i < place.columns; ++i) {
      const int64_t at = place.column + i;
      offsets[static_cast<size_t>(i)] =
          at / cut.inner * mask.stride + MaskOffset(mask.inner, at % cut.inner);
    }
  }
  tile->mask = bytes;
  tile->mask_stride = row_stride == 0 ? 0 : place.columns;
  const int64_t rows = row_stride == 0 ? 1 : place.rows;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* row = first + r * row_stride;
    if (uniform) {
      std::memset(bytes, *row, columns);
    } else {
      for (size_t i = 0; i < columns; ++i) bytes[i] = row[offsets[i]];
    }
    bytes += columns;
  }
}

// Calls body(outer, tile, executor, state) for each tile, a group of chunks. Threads share the
// tiles, or the chunks of one tile if there are fewer tiles than threads.
template <typename State, typename Body>
void OverGroups(const SoftmaxShape& shape, const Cut& cut, int64_t itemsize, Executor& executor,
                const State& make, const Body& body) {
  const int64_t groups = shape.outer * cut.tiles;
  const double bytes =
      static_cast<double>(shape.n * cut.inner * itemsize) / static_cast<double>(cut.tiles);
  if (cut.chunks > 1 && groups < executor.threads() && bytes >= 2.0 * kParallelBytes) {
    for (int64_t group = 0; group < groups; ++group) {
      auto state = make();
      body(group / cut.tiles, group % cut.tiles, executor, state);
    }
    return;
  }
  ParallelFor(executor, groups, 1, bytes, [&](int64_t begin, int64_t end) {
    InlineExecutor here;
    auto state = make();
    for (int64_t group = begin; group < end; ++group) {
      body(group / cut.tiles, group % cut.tiles, here, state);
    }
  });
}

template <typename Scalar>
class ForwardColumns {
 public:
  ForwardColumns(const SoftmaxShape& shape, const SoftmaxMask& mask, DType dtype,
                 const SoftmaxCall& call, const char* x, char* y)
      : shape_(shape),
        mask_(mask),
        call_(call),
        x_(x),
        y_(y),
        type_(static_cast<int>(dtype)),
        itemsize_(static_cast<int64_t>(DTypeSize(dtype))),
        cut_(shape, static_cast<int64_t>(sizeof(Scalar)), itemsize_) {
    width_ = RoundUp(cut_.columns, Kernels().block[type_]);
    const int64_t row_bytes = width_ * static_cast<int64_t>(sizeof(Scalar));
    const int64_t buffer_rows = cut_.rows + (cut_.rest > 0 ? 1 : 0);
    cut_.Chunks(buffer_rows * row_bytes <= kBufferBytes ? cut_.rows : kChunkBytes / row_bytes);
  }

  void Run(Executor& executor) {
    if (cut_.chunks == 1) {
      const auto make = [&] { return MakeWorkspace(); };
      OverGroups(shape_, cut_, 2 * itemsize_, executor, make,
                 [&](int64_t outer, int64_t tile, Executor&, Workspace<Scalar>& workspace) {
                   OneChunk(outer, tile, workspace);
                 });
      return;
    }
    // The maxima and the sums of every chunk, then those of the tile.
    const auto make = [&] {
      return std::vector<Scalar>(static_cast<size_t>(2 * width_ * (cut_.chunks + 1)));
    };
    OverGroups(shape_, cut_, 2 * itemsize_, executor, make,
               [&](int64_t outer, int64_t tile, Executor& inner, std::vector<Scalar>& stats) {
                 ManyChunks(outer, tile, inner, stats.data());
               });
  }

 private:
  static constexpr Scalar kInfinity = std::numeric_limits<Scalar>::infinity();

  Workspace<Scalar> MakeWorkspace() const {
    const int64_t rows = cut_.chunk_rows + 1;
    return Workspace<Scalar>(rows * width_, width_, InPlace(mask_, cut_) ? 0 : rows * width_);
  }

  SoftmaxTile TileAt(const Place& place) const {
    return {place.rows, place.columns, cut_.fold * cut_.inner, nullptr, 0, width_};
  }

  static Scalar Shift(Scalar maximum) { return maximum == -kInfinity ? 0 : maximum; }

  // The row of the buffer at which a part begins. The rest follows the other rows.
  int64_t BufferRow(int64_t chunk, const Place& place) const {
    return place.row - chunk * cut_.chunk_rows;
  }

  void FillChunk(int64_t outer, int64_t tile, int64_t chunk, Workspace<Scalar>& workspace,
                 Scalar* maxima) {
    for (int64_t i = 0; i < width_; ++i) maxima[i] = -kInfinity;
    OverParts(cut_, outer, tile, chunk, [&](const Place& place) {
      SoftmaxTile part = TileAt(place);
      const int64_t at = BufferRow(chunk, place) * width_;
      SetMask(mask_, cut_, place, workspace, workspace.bytes + at, &part);
      Kernels().tile_max[type_](call_, part, x_ + place.element * itemsize_, workspace.buffer + at,
                                maxima);
    });
  }

  void SumChunk(int64_t outer, int64_t tile, int64_t chunk, Workspace<Scalar>& workspace,
                const Scalar* shift, Scalar* sums, bool store) {
    for (int64_t i = 0; i < width_; ++i) sums[i] = 0;
    OverParts(cut_, outer, tile, chunk, [&](const Place& place) {
      Kernels().tile_sum[type_](TileAt(place), workspace.buffer + BufferRow(chunk, place) * width_,
                                shift, sums, store);
    });
  }

  void OneChunk(int64_t outer, int64_t tile, Workspace<Scalar>& workspace) {
    Scalar* maxima = workspace.maxima;
    FillChunk(outer, tile, 0, workspace, maxima);
    const int64_t own = cut_.columns / cut_.fold;  // columns before folding
    for (int64_t j = 0; j < own && cut_.fold > 1; ++j) {
      for (int64_t f = 1; f < cut_.fold; ++f) {
        if (maxima[f * own + j] > maxima[j]) maxima[j] = maxima[f * own + j];
      }
      for (int64_t f = 1; f < cut_.fold; ++f) maxima[f * own + j] = maxima[j];
    }
    for (int64_t i = 0; i < width_; ++i) workspace.shift[i] = Shift(maxima[i]);
    SumChunk(outer, tile, 0, workspace, workspace.shift, workspace.factor, !call_.log);
    for (int64_t j = 0; j < own && cut_.fold > 1; ++j) {
      double sum = 0;
      for (int64_t f = 0; f < cut_.fold; ++f) {
        sum += static_cast<double>(workspace.factor[f * own + j]);
      }
      for (int64_t f = 0; f < cut_.fold; ++f) {
        workspace.factor[f * own + j] = static_cast<Scalar>(sum);
      }
    }
    const int64_t columns = Min(cut_.columns, cut_.fold * cut_.inner - tile * cut_.columns);
    const bool proper = Kernels().tile_factors[type_](call_, columns, maxima, workspace.factor);
    OverParts(cut_, outer, tile, 0, [&](const Place& place) {
      SoftmaxTile part = TileAt(place);
      const int64_t at = BufferRow(0, place) * width_;
      // Masked elements are already 0 or -inf, except in columns that are NaN.
      if (!proper) SetMask(mask_, cut_, place, workspace, workspace.bytes + at, &part);
      Kernels().tile_finish[type_](call_, part, workspace.buffer + at, workspace.shift,
                                   workspace.factor, y_ + place.element * itemsize_);
    });
  }

  void ManyChunks(int64_t outer, int64_t tile, Executor& executor, Scalar* stats) {
    const double chunk_bytes = static_cast<double>(cut_.chunk_rows * cut_.columns * itemsize_);
    ParallelFor(executor, cut_.chunks, 1, chunk_bytes, [&](int64_t begin, int64_t end) {
      Workspace<Scalar> workspace = MakeWorkspace();
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        Scalar* maxima = stats + 2 * width_ * chunk;
        FillChunk(outer, tile, chunk, workspace, maxima);
        for (int64_t i = 0; i < width_; ++i) workspace.shift[i] = Shift(maxima[i]);
        SumChunk(outer, tile, chunk, workspace, workspace.shift, maxima + width_, false);
      }
    });
    Scalar* shift = stats + 2 * width_ * cut_.chunks;
    Scalar* factor = shift + width_;
    const int64_t columns = Min(cut_.columns, cut_.fold * cut_.inner - tile * cut_.columns);
    auto* combine = Kernels().tile_combine[type_];
    combine(stats, stats + width_, cut_.chunks, 2 * width_, columns, shift, factor);
    if (cut_.fold > 1) {
      const int64_t own = columns / cut_.fold;
      combine(shift, factor, cut_.fold, own, own, shift, factor);
      for (int64_t i = own; i < columns; ++i) {
        shift[i] = shift[i - own];
        factor[i] = factor[i - own];
      }
    }
    Kernels().tile_factors[type_](call_, columns, shift, factor);
    ParallelFor(executor, cut_.chunks, 1, 2 * chunk_bytes, [&](int64_t begin, int64_t end) {
      const int64_t rows = cut_.chunk_rows + 1;
      Workspace<Scalar> workspace(0, 0, InPlace(mask_, cut_) ? 0 : rows * width_);
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        OverParts(cut_, outer, tile, chunk, [&](const Place& place) {
          SoftmaxTile part = TileAt(place);
          SetMask(mask_, cut_, place, workspace, workspace.bytes, &part);
          Kernels().tile_redo[type_](call_, part, x_ + place.element * itemsize_, shift, factor,
                                     y_ + place.element * itemsize_);
        });
      }
    });
  }

  const SoftmaxShape& shape_;
  const SoftmaxMask& mask_;
  const SoftmaxCall& call_;
  const char* x_;
  char* y_;
  int type_;
  int64_t itemsize_;
  Cut cut_;
  int64_t width_;
};

template <typename Scalar>
void BackwardColumns(const SoftmaxShape& shape, const SoftmaxMask& mask, DType dtype,
                     const SoftmaxCall& call, const char* y, const char* dy, char* dx,
                     Executor& executor) {
  const int type = static_cast<int>(dtype);
  const int64_t itemsize = static_cast<int64_t>(DTypeSize(dtype));
  Cut cut(shape, 0, 2 * itemsize);
  cut.Chunks(kSumRows);
  const int64_t width = RoundUp(cut.columns, Kernels().block[type]);
  const double chunk_bytes = static_cast<double>(cut.chunk_rows * cut.columns * itemsize);
  const int64_t mask_bytes = InPlace(mask, cut) ? 0 : cut.chunk_rows * width;
  const auto tile_at = [&](const Place& place) -> SoftmaxTile {
    return {place.rows, place.columns, cut.fold * cut.inner, nullptr, 0, width};
  };
  // The sums of every chunk, then those of the columns.
  const auto make = [&] {
    return std::vector<Scalar>(static_cast<size_t>(width * (cut.chunks + 1)));
  };
  OverGroups(shape, cut, 3 * itemsize, executor, make,
             [&](int64_t outer, int64_t tile, Executor& inner, std::vector<Scalar>& stats) {
               ParallelFor(inner, cut.chunks, 1, 2 * chunk_bytes, [&](int64_t begin, int64_t end) {
                 Workspace<Scalar> workspace(0, 0, mask_bytes);
                 for (int64_t chunk = begin; chunk < end; ++chunk) {
                   Scalar* sums = stats.data() + width * chunk;
                   for (int64_t i = 0; i < width; ++i) sums[i] = 0;
                   OverParts(cut, outer, tile, chunk, [&](const Place& place) {
                     SoftmaxTile part = tile_at(place);
                     SetMask(mask, cut, place, workspace, workspace.bytes, &part);
                     const int64_t at = place.element * itemsize;
                     Kernels().tile_backward_sum[type](call, part, y + at, dy + at, sums);
                   });
                 }
               });
               Scalar* all = stats.data() + width * cut.chunks;
               const int64_t columns = Min(cut.columns, cut.fold * cut.inner - tile * cut.columns);
               const int64_t own = columns / cut.fold;
               for (int64_t j = 0; j < own; ++j) {
                 double sum = 0;
                 for (int64_t chunk = 0; chunk < cut.chunks; ++chunk) {
                   for (int64_t i = j; i < columns; i += own) {
                     sum += static_cast<double>(stats[static_cast<size_t>(width * chunk + i)]);
                   }
                 }
                 for (int64_t i = j; i < columns; i += own) all[i] = static_cast<Scalar>(sum);
               }
               ParallelFor(inner, cut.chunks, 1, 3 * chunk_bytes, [&](int64_t begin, int64_t end) {
                 Workspace<Scalar> workspace(0, 0, mask_bytes);
                 for (int64_t chunk = begin; chunk < end; ++chunk) {
                   OverParts(cut, outer, tile, chunk, [&](const Place& place) {
                     SoftmaxTile part = tile_at(place);
                     SetMask(mask, cut, place, workspace, workspace.bytes, &part);
                     const int64_t at = place.element * itemsize;
                     Kernels().tile_backward_finish[type](call, part, y + at, dy + at, all,
                                                          dx + at);
                   });
                 }
               });
             });
}

}  // namespace

void SoftmaxForward(const SoftmaxShape& shape, const SoftmaxMask& mask, DType dtype, bool log,
                    double scale, const void* x_data, void* y_data, void* /*workspace*/,
                    Executor& executor) {
  if (shape.rows() == 0 || shape.n == 0) return;
  const char* x = static_cast<const char*>(x_data);
  char* y = static_cast<char*>(y_data);
  const int64_t bytes = shape.rows() * shape.n * static_cast<int64_t>(DTypeSize(dtype));
  const SoftmaxCall call = {scale, log, mask.data != nullptr, ShouldStream(bytes)};
  if (shape.inner == 1) {
    ForwardRows(shape, mask, dtype, call, x, y, executor);
  } else if (dtype == DType::kF64) {
    ForwardColumns<double>(shape, mask, dtype, call, x, y).Run(executor);
  } else {
    ForwardColumns<float>(shape, mask, dtype, call, x, y).Run(executor);
  }
}

void SoftmaxBackward(const SoftmaxShape& shape, bool masked, const SoftmaxMask& mask, DType dtype,
                     bool log, double scale, const void* y_data, const void* dy_data, void* dx_data,
                     void* /*workspace*/, Executor& executor) {
  if (shape.rows() == 0 || shape.n == 0) return;
  const char* y = static_cast<const char*>(y_data);
  const char* dy = static_cast<const char*>(dy_data);
  char* dx = static_cast<char*>(dx_data);
  const int64_t bytes = shape.rows() * shape.n * static_cast<int64_t>(DTypeSize(dtype));
  // In the backward of softmax, y is 0 where elements are masked. Log-softmax needs the mask.
  const SoftmaxMask used = log ? mask : SoftmaxMask();
  const SoftmaxCall call = {scale, log, log ? mask.data != nullptr : masked, ShouldStream(bytes)};
  if (shape.inner == 1) {
    BackwardRows(shape, used, dtype, call, y, dy, dx, executor);
  } else if (dtype == DType::kF64) {
    BackwardColumns<double>(shape, used, dtype, call, y, dy, dx, executor);
  } else {
    BackwardColumns<float>(shape, used, dtype, call, y, dy, dx, executor);
  }
}

}  // namespace jax_fastops::cpu

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

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "core/cpu/buffer.h"
#include "core/cpu/dtype.h"
#include "core/cpu/stream.h"
#include "core/integer.h"
#include "core/philox.h"
#include "dropout/dropout_simd.h"
#include "softmax/softmax_simd.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(KernelsOf, softmax_kernels)
FASTOPS_DEFINE_KERNELS(DropperOf, dropout_kernels)

// A call, with the mask that its kernels read.
struct Job {
  const SoftmaxShape& shape;
  SoftmaxMask mask;
  SoftmaxCall call;
  int64_t itemsize;
  const SoftmaxKernels& kernels;
  Executor& executor;

  Job(const SoftmaxArguments& args, const SoftmaxMask& mask, bool masked, Executor& executor)
      : shape(args.shape),
        mask(mask),
        call{args.scale, args.log, masked, false},
        itemsize(ItemSize(args.dtype)),
        kernels(KernelsOf(args.dtype)),
        executor(executor) {
    call.stream = ShouldStream(shape.rows() * shape.n * itemsize);
  }
};

// ---- Rows ---------------------------------------------------------------------------------------

// The mask of elements [begin, begin + count) of a row as contiguous bytes: in place, or gathered
// into `bytes`.
const uint8_t* RowMask(const SoftmaxMask& mask, int64_t row, int64_t begin, int64_t count,
                       uint8_t* bytes) {
  if (mask.data == nullptr) return nullptr;
  const uint8_t* first = mask.data + mask.outer.Offset(row) + begin * mask.stride;
  if (mask.stride == 1) return first;
  if (mask.stride == 0) {
    std::memset(bytes, *first, static_cast<size_t>(count));
  } else {
    for (int64_t i = 0; i < count; ++i) bytes[i] = first[i * mask.stride];
  }
  return bytes;
}

// Calls body(row, rows, at, mask, stride) for runs of rows whose masks have a constant distance,
// where `at` is the offset of the first byte. `arrays` arrays are moved.
template <typename Body>
void OverShortRows(const Job& job, int arrays, const Body& body) {
  const SoftmaxMask& mask = job.mask;
  const int64_t row_bytes = job.shape.n * job.itemsize;
  ParallelFor(job.executor, job.shape.outer, 1, static_cast<double>(arrays * row_bytes),
              [&](int64_t begin, int64_t end) {
                uint8_t bytes[kSoftmaxPiece];
                for (int64_t row = begin; row < end;) {
                  int64_t rows = 1, stride = 0;
                  if (mask.data == nullptr || (mask.stride == 1 && mask.outer.rank == 0)) {
                    rows = end - row;
                  } else if (mask.stride == 1) {
                    const int64_t size = mask.outer.size[mask.outer.rank - 1];
                    rows = std::min<int64_t>(end - row, size - row % size);
                    stride = mask.outer.stride[mask.outer.rank - 1];
                  }
                  body(row, rows, row * row_bytes, RowMask(mask, row, 0, job.shape.n, bytes),
                       stride);
                  row += rows;
                }
              });
}

// For rows of more than one piece: calls first(n, at, mask, &state) for each piece of a row, then
// second(n, at, mask, all) with all = combine(states). Both get the number of elements of the piece
// and the offset of its first byte. The costs are in arrays that are read and written.
template <typename State, typename First, typename Combine, typename Second>
void OverLongRows(const Job& job, double first_cost, double second_cost, const First& first,
                  const Combine& combine, const Second& second) {
  const int64_t n = job.shape.n, pieces = CeilDiv(n, kSoftmaxPiece), itemsize = job.itemsize;
  const int64_t row_bytes = static_cast<int64_t>(second_cost) * n * itemsize;
  const auto row = [&](int64_t row, Executor& inner, std::vector<State>& states) {
    const auto over_pieces = [&](double cost, const auto& body) {
      ParallelFor(inner, pieces, 1, cost * static_cast<double>(itemsize * kSoftmaxPiece),
                  [&](int64_t begin, int64_t end) {
                    uint8_t bytes[kSoftmaxPiece];
                    for (int64_t piece = begin; piece < end; ++piece) {
                      const int64_t from = piece * kSoftmaxPiece;
                      const int64_t count = std::min<int64_t>(kSoftmaxPiece, n - from);
                      body(count, (row * n + from) * itemsize,
                           RowMask(job.mask, row, from, count, bytes),
                           &states[static_cast<size_t>(piece)]);
                    }
                  });
    };
    over_pieces(first_cost, first);
    const State all = combine(states);
    over_pieces(second_cost, [&](int64_t count, int64_t at, const uint8_t* piece_mask, State*) {
      second(count, at, piece_mask, all);
    });
  };
  // The threads share the pieces of one row after another, or divide the rows.
  const int64_t rows = job.shape.outer, threads = job.executor.threads();
  if (threads > 1 && row_bytes >= 2 * kParallelBytes &&
      (rows < threads || (rows < 4 * threads && row_bytes >= int64_t{4} << 20))) {
    std::vector<State> states(static_cast<size_t>(pieces));
    for (int64_t r = 0; r < rows; ++r) row(r, job.executor, states);
    return;
  }
  ParallelFor(job.executor, rows, 1, static_cast<double>(row_bytes),
              [&](int64_t begin, int64_t end) {
                std::vector<State> states(static_cast<size_t>(pieces));
                InlineExecutor here;
                for (int64_t r = begin; r < end; ++r) row(r, here, states);
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

void ForwardRows(const Job& job, const char* x, char* y) {
  const SoftmaxKernels& kernels = job.kernels;
  const SoftmaxCall& call = job.call;
  if (job.shape.n > kSoftmaxPiece) {
    return OverLongRows<Stats>(
        job, 1, 2,
        [&](int64_t n, int64_t at, const uint8_t* mask, Stats* stats) {
          kernels.stats(call, x + at, mask, n, &stats->maximum, &stats->sum);
        },
        Combine,
        [&](int64_t n, int64_t at, const uint8_t* mask, const Stats& all) {
          kernels.finish(call, x + at, mask, y + at, n, all.maximum, all.sum);
        });
  }
  OverShortRows(job, 2, [&](int64_t, int64_t rows, int64_t at, const uint8_t* mask, int64_t step) {
    kernels.rows(call, x + at, mask, step, y + at, rows, job.shape.n);
  });
}

void BackwardRows(const Job& job, const char* y, const char* dy, char* dx) {
  const SoftmaxKernels& kernels = job.kernels;
  const SoftmaxCall& call = job.call;
  if (job.shape.n > kSoftmaxPiece) {
    return OverLongRows<double>(
        job, 2, 3,
        [&](int64_t n, int64_t at, const uint8_t* mask, double* sum) {
          *sum = kernels.backward_sum(call, y + at, dy + at, mask, n);
        },
        [](const std::vector<double>& sums) {
          return std::accumulate(sums.begin(), sums.end(), 0.0);
        },
        [&](int64_t n, int64_t at, const uint8_t* mask, double sum) {
          kernels.backward_finish(call, y + at, dy + at, mask, dx + at, n, sum);
        });
  }
  OverShortRows(job, 3, [&](int64_t, int64_t rows, int64_t at, const uint8_t* mask, int64_t step) {
    kernels.backward_rows(call, y + at, dy + at, mask, step, dx + at, rows, job.shape.n);
  });
}

// The forward, or with dy the backward. The rows of a run go through a buffer one by one.
void RowsWithDropout(Job job, const SoftmaxArguments& args) {
  static_assert(kSoftmaxDropoutRow <= kSoftmaxPiece && kSoftmaxDropoutRow <= kDropoutPiece);
  const char *x = static_cast<const char*>(args.x), *dy = static_cast<const char*>(args.dy);
  char* const out = static_cast<char*>(args.out);
  const DropoutKernel dropper = DropperOf(args.dtype);
  const int64_t n = job.shape.n;
  job.call.stream = false;
  OverShortRows(job, dy == nullptr ? 2 : 3,
                [&](int64_t row, int64_t rows, int64_t at, const uint8_t* mask, int64_t step) {
                  char p[kSoftmaxDropoutRow * sizeof(double)], dp[sizeof(p)];
                  for (int64_t end = row + rows; row < end; ++row, at += n * job.itemsize) {
                    const auto drop = [&](const char* from, char* to) {
                      DropoutPiece piece = {};
                      piece.seed = args.dropout.seeds.At(row);
                      piece.n = n;
                      piece.x = from;
                      piece.y = to;
                      dropper(piece, args.dropout.largest, args.dropout.scale);
                    };
                    job.kernels.rows(job.call, x + at, mask, 0, p, 1, n);
                    if (mask != nullptr) mask += step;
                    if (dy == nullptr) {
                      drop(p, out + at);
                    } else {
                      drop(dy + at, dp);
                      job.kernels.backward_rows(job.call, p, dp, nullptr, 0, out + at, 1, n);
                    }
                  }
                });
}

// ---- Columns ------------------------------------------------------------------------------------

// The maximum size of the buffer for a whole tile, which makes it possible to read x only once.
// Larger buffers were slower than chunks, although they fit the L2 cache.
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

// How [n, inner] is divided: into `rows` folded rows of `width` = `fold` * inner elements, and a
// last one of `rest` elements, if not 0. The folded rows are divided into tiles of `columns`
// columns and chunks of `chunk_rows` rows.
struct Cut {
  int64_t fold, width, rows, rest;
  int64_t columns, tiles;
  int64_t chunk_rows = 0, chunks = 1;

  // `buffer_bytes` is the size of an element in a buffer, or 0 without a buffer, and `bytes` its
  // size in the arrays.
  Cut(const SoftmaxShape& shape, int64_t buffer_bytes, int64_t bytes) {
    const int64_t n = shape.n, inner = shape.inner;
    fold = inner >= kMinColumns
               ? 1
               : std::min<int64_t>(n, std::max<int64_t>(1, kFoldedColumns / inner));
    width = fold * inner;
    rows = n / fold;
    rest = n % fold * inner;
    columns = width;
    if (fold == 1) {
      int64_t fits = buffer_bytes == 0 ? 0 : Multiple(kBufferBytes / buffer_bytes / n);
      if (fits == 0) fits = std::max<int64_t>(kMinColumns, Multiple(kTileBytes / bytes / n));
      columns = std::min<int64_t>(inner, std::min<int64_t>(kMaxColumns, fits));
    }
    tiles = CeilDiv(width, columns);
  }

  static int64_t Multiple(int64_t fits) { return fits / kMinColumns * kMinColumns; }

  void Chunks(int64_t rows_of_chunk) {
    chunk_rows = std::max<int64_t>(1, std::min<int64_t>(rows, rows_of_chunk));
    chunks = CeilDiv(rows, chunk_rows);
  }
};

// The buffers that a thread reuses for each of its tiles.
template <typename Scalar>
struct Workspace {
  Buffer<Scalar> buffer, maxima, shift, factor;
  Buffer<uint8_t> bytes;
  std::vector<int64_t> offsets;

  Workspace(int64_t buffer_size, int64_t width, int64_t byte_size)
      : buffer(buffer_size), maxima(width), shift(width), factor(width), bytes(byte_size) {}
};

// A softmax along an axis that is not the last one, or its gradient.
template <typename Scalar>
struct Columns : Job {
  Cut cut;
  int64_t width;  // of the rows of buffers

  static constexpr Scalar kInfinity = std::numeric_limits<Scalar>::infinity();

  Columns(const Job& job, const Cut& how)
      : Job(job), cut(how), width(RoundUp(cut.columns, kernels.block)) {}

  // Whether the mask of a tile has the layout of x.
  bool MaskIsInPlace() const {
    return mask.data == nullptr || (mask.inner.rank == 1 && mask.inner.stride[0] == 1 &&
                                    (cut.fold == 1 || mask.stride == shape.inner));
  }

  // A thread's memory, with or without a buffer for the rows of a chunk.
  Workspace<Scalar> MakeWorkspace(bool buffer) const {
    const int64_t size = (cut.chunk_rows + 1) * width;
    return Workspace<Scalar>(buffer ? size : 0, buffer ? width : 0, MaskIsInPlace() ? 0 : size);
  }

  int64_t ColumnsOf(int64_t tile) const {
    return std::min<int64_t>(cut.columns, cut.width - tile * cut.columns);
  }

  // Sets the mask of a tile's rows, which begin with folded row `row` and with column `column`.
  // Gathers it into the bytes of the workspace, from `place` on, if it is not in place.
  void SetMask(int64_t outer, int64_t column, int64_t row, Workspace<Scalar>& workspace,
               int64_t place, SoftmaxTile* tile) const {
    if (mask.data == nullptr) return;
    const int64_t row_stride = cut.fold * mask.stride;
    const uint8_t* first = mask.data + mask.outer.Offset(outer) + row * row_stride;
    if (MaskIsInPlace()) {
      tile->mask = first + column;
      tile->mask_stride = row_stride;
      return;
    }
    std::vector<int64_t>& offsets = workspace.offsets;
    uint8_t* bytes = workspace.bytes.begin() + place;
    const size_t columns = static_cast<size_t>(tile->columns);
    const bool uniform = mask.inner.rank == 0 && cut.fold == 1;
    if (!uniform) {
      offsets.resize(columns);
      for (size_t i = 0; i < columns; ++i) {
        const int64_t at = column + static_cast<int64_t>(i);
        offsets[i] = at / shape.inner * mask.stride + mask.inner.Offset(at % shape.inner);
      }
    }
    tile->mask = bytes;
    tile->mask_stride = row_stride == 0 ? 0 : tile->columns;
    const int64_t rows = row_stride == 0 ? 1 : tile->rows;
    for (int64_t r = 0; r < rows; ++r, bytes += columns, first += row_stride) {
      if (uniform) {
        std::memset(bytes, *first, columns);
      } else {
        for (size_t i = 0; i < columns; ++i) bytes[i] = first[offsets[i]];
      }
    }
  }

  // Calls body(part, at, row) for the rows of a chunk, and for the rest in the last chunk: the tile
  // with its mask, unless `masked` is false; the offset of its first byte in the arrays; and its
  // first row in the buffer, where the rest follows the other rows.
  template <typename Body>
  void OverChunk(int64_t outer, int64_t tile, int64_t chunk, Workspace<Scalar>& workspace,
                 bool masked, const Body& body) const {
    const int64_t column = tile * cut.columns, first = chunk * cut.chunk_rows;
    const auto over = [&](int64_t row, int64_t rows, int64_t columns) {
      SoftmaxTile part = {rows, columns, cut.width, nullptr, 0, width};
      if (masked) SetMask(outer, column, row, workspace, (row - first) * width, &part);
      const int64_t element = outer * shape.n * shape.inner + row * cut.width + column;
      body(part, element * itemsize, row - first);
    };
    const int64_t rows = std::min<int64_t>(cut.chunk_rows, cut.rows - first);
    over(first, rows, ColumnsOf(tile));
    if (chunk == cut.chunks - 1 && cut.rest > 0) over(first + rows, 1, cut.rest);
  }

  // Calls body(chunk, workspace) for the chunks of a tile, of which `arrays` arrays are moved.
  template <typename Body>
  void OverChunks(int arrays, bool buffer, Executor& inner, const Body& body) const {
    const double bytes = static_cast<double>(arrays * cut.chunk_rows * cut.columns * itemsize);
    ParallelFor(inner, cut.chunks, 1, bytes, [&](int64_t begin, int64_t end) {
      Workspace<Scalar> workspace = MakeWorkspace(buffer);
      for (int64_t chunk = begin; chunk < end; ++chunk) body(chunk, workspace);
    });
  }

  // Calls body(outer, tile, executor, state) for each tile, a group of chunks. Threads share the
  // tiles, or the chunks of one tile if there are fewer tiles than threads.
  template <typename State, typename Body>
  void OverTiles(int arrays, const State& make, const Body& body) const {
    const int64_t all = shape.outer * cut.tiles;
    const double bytes = static_cast<double>(shape.n * shape.inner * arrays * itemsize) /
                         static_cast<double>(cut.tiles);
    const bool share = cut.chunks > 1 && all < executor.threads() && bytes >= 2.0 * kParallelBytes;
    InlineExecutor here;
    const auto run = [&](int64_t begin, int64_t end) {
      auto state = make();
      for (int64_t i = begin; i < end; ++i) {
        body(i / cut.tiles, i % cut.tiles, share ? executor : here, state);
      }
    };
    if (share) return run(0, all);
    ParallelFor(executor, all, 1, bytes, run);
  }

  // ---- Forward ----

  // Fills the buffer with a chunk. The shift is 0 in place of a maximum of -inf.
  void FillChunk(int64_t outer, int64_t tile, int64_t chunk, Workspace<Scalar>& workspace,
                 const char* x, Scalar* maxima) const {
    std::fill_n(maxima, width, -kInfinity);
    OverChunk(
        outer, tile, chunk, workspace, true, [&](const SoftmaxTile& part, int64_t at, int64_t row) {
          kernels.tile_max(call, part, x + at, workspace.buffer.begin() + row * width, maxima);
        });
  }

  void SumChunk(int64_t outer, int64_t tile, int64_t chunk, Workspace<Scalar>& workspace,
                const Scalar* maxima, Scalar* sums, bool store) const {
    Scalar* const shift = workspace.shift.begin();
    for (int64_t i = 0; i < width; ++i) shift[i] = maxima[i] == -kInfinity ? 0 : maxima[i];
    std::fill_n(sums, width, Scalar{0});
    OverChunk(outer, tile, chunk, workspace, false,
              [&](const SoftmaxTile& part, int64_t, int64_t row) {
                kernels.tile_sum(part, workspace.buffer.begin() + row * width, shift, sums, store);
              });
  }

  void OneChunk(int64_t outer, int64_t tile, Workspace<Scalar>& workspace, const char* x,
                char* y) const {
    Scalar* const maxima = workspace.maxima.begin();
    Scalar* const factor = workspace.factor.begin();
    FillChunk(outer, tile, 0, workspace, x, maxima);
    const int64_t own = cut.columns / cut.fold;  // columns before folding
    for (int64_t j = 0; j < own && cut.fold > 1; ++j) {
      for (int64_t f = 1; f < cut.fold; ++f) {
        if (maxima[f * own + j] > maxima[j]) maxima[j] = maxima[f * own + j];
      }
      for (int64_t f = 1; f < cut.fold; ++f) maxima[f * own + j] = maxima[j];
    }
    SumChunk(outer, tile, 0, workspace, maxima, factor, !call.log);
    for (int64_t j = 0; j < own && cut.fold > 1; ++j) {
      double sum = 0;
      for (int64_t f = 0; f < cut.fold; ++f) sum += static_cast<double>(factor[f * own + j]);
      for (int64_t f = 0; f < cut.fold; ++f) factor[f * own + j] = static_cast<Scalar>(sum);
    }
    const bool proper = kernels.tile_factors(call, ColumnsOf(tile), maxima, factor);
    // Masked elements are already 0 or -inf, except in columns that are NaN.
    OverChunk(outer, tile, 0, workspace, !proper,
              [&](const SoftmaxTile& part, int64_t at, int64_t row) {
                kernels.tile_finish(call, part, workspace.buffer.begin() + row * width,
                                    workspace.shift.begin(), factor, y + at);
              });
  }

  void ManyChunks(int64_t outer, int64_t tile, Executor& inner, Scalar* stats, const char* x,
                  char* y) const {
    OverChunks(1, true, inner, [&](int64_t chunk, Workspace<Scalar>& workspace) {
      Scalar* const maxima = stats + 2 * width * chunk;
      FillChunk(outer, tile, chunk, workspace, x, maxima);
      SumChunk(outer, tile, chunk, workspace, maxima, maxima + width, false);
    });
    Scalar* const shift = stats + 2 * width * cut.chunks;
    Scalar* const factor = shift + width;
    const int64_t columns = ColumnsOf(tile);
    auto* combine = kernels.tile_combine;
    combine(stats, stats + width, cut.chunks, 2 * width, columns, shift, factor);
    if (cut.fold > 1) {
      const int64_t own = columns / cut.fold;
      combine(shift, factor, cut.fold, own, own, shift, factor);
      for (int64_t i = own; i < columns; ++i) {
        shift[i] = shift[i - own];
        factor[i] = factor[i - own];
      }
    }
    kernels.tile_factors(call, columns, shift, factor);
    OverChunks(2, false, inner, [&](int64_t chunk, Workspace<Scalar>& workspace) {
      OverChunk(outer, tile, chunk, workspace, true,
                [&](const SoftmaxTile& part, int64_t at, int64_t) {
                  kernels.tile_redo(call, part, x + at, shift, factor, y + at);
                });
    });
  }

  void Forward(const char* x, char* y) {
    const int64_t row_bytes = width * static_cast<int64_t>(sizeof(Scalar));
    const int64_t buffer_rows = cut.rows + (cut.rest > 0 ? 1 : 0);
    cut.Chunks(buffer_rows * row_bytes <= kBufferBytes ? cut.rows : kChunkBytes / row_bytes);
    if (cut.chunks == 1) {
      return OverTiles(
          2, [&] { return MakeWorkspace(true); },
          [&](int64_t outer, int64_t tile, Executor&, Workspace<Scalar>& workspace) {
            OneChunk(outer, tile, workspace, x, y);
          });
    }
    // The maxima and the sums of every chunk, then those of the tile.
    const auto make = [&] { return Buffer<Scalar>(2 * width * (cut.chunks + 1)); };
    OverTiles(2, make, [&](int64_t outer, int64_t tile, Executor& inner, Buffer<Scalar>& stats) {
      ManyChunks(outer, tile, inner, stats.begin(), x, y);
    });
  }

  // ---- Backward ----

  void BackwardTile(int64_t outer, int64_t tile, Executor& inner, Scalar* stats, const char* y,
                    const char* dy, char* dx) const {
    OverChunks(2, false, inner, [&](int64_t chunk, Workspace<Scalar>& workspace) {
      Scalar* const sums = stats + width * chunk;
      std::fill_n(sums, width, Scalar{0});
      OverChunk(outer, tile, chunk, workspace, true,
                [&](const SoftmaxTile& part, int64_t at, int64_t) {
                  kernels.tile_backward_sum(call, part, y + at, dy + at, sums);
                });
    });
    Scalar* const all = stats + width * cut.chunks;
    const int64_t columns = ColumnsOf(tile), own = columns / cut.fold;
    for (int64_t j = 0; j < own; ++j) {
      double sum = 0;
      for (int64_t chunk = 0; chunk < cut.chunks; ++chunk) {
        for (int64_t i = j; i < columns; i += own) {
          sum += static_cast<double>(stats[width * chunk + i]);
        }
      }
      for (int64_t i = j; i < columns; i += own) all[i] = static_cast<Scalar>(sum);
    }
    OverChunks(3, false, inner, [&](int64_t chunk, Workspace<Scalar>& workspace) {
      OverChunk(outer, tile, chunk, workspace, true,
                [&](const SoftmaxTile& part, int64_t at, int64_t) {
                  kernels.tile_backward_finish(call, part, y + at, dy + at, all, dx + at);
                });
    });
  }

  void Backward(const char* y, const char* dy, char* dx) {
    cut.Chunks(kSumRows);
    // The sums of every chunk, then those of the columns.
    const auto make = [&] { return Buffer<Scalar>(width * (cut.chunks + 1)); };
    OverTiles(3, make, [&](int64_t outer, int64_t tile, Executor& inner, Buffer<Scalar>& stats) {
      BackwardTile(outer, tile, inner, stats.begin(), y, dy, dx);
    });
  }
};

}  // namespace

void SoftmaxForward(const SoftmaxArguments& args, Executor& executor) {
  if (args.shape.rows() == 0 || args.shape.n == 0) return;
  const char* x = static_cast<const char*>(args.x);
  char* y = static_cast<char*>(args.out);
  const Job job(args, args.mask, args.mask.data != nullptr, executor);
  if (args.dropout.drops()) return RowsWithDropout(job, args);
  if (args.shape.inner == 1) return ForwardRows(job, x, y);
  WithAccumulator(args.dtype, [&]<typename Scalar>() {
    Columns<Scalar>(job, Cut(args.shape, sizeof(Scalar), job.itemsize)).Forward(x, y);
  });
}

void SoftmaxBackward(const SoftmaxArguments& args, Executor& executor) {
  if (args.shape.rows() == 0 || args.shape.n == 0) return;
  const char *y = static_cast<const char*>(args.y), *dy = static_cast<const char*>(args.dy);
  char* dx = static_cast<char*>(args.out);
  if (args.dropout.drops()) {
    return RowsWithDropout(Job(args, args.mask, args.masked, executor), args);
  }
  // In the backward of softmax, y is 0 where elements are masked. Log-softmax needs the mask.
  const Job job(args, args.log ? args.mask : SoftmaxMask(),
                args.log ? args.mask.data != nullptr : args.masked, executor);
  if (args.shape.inner == 1) return BackwardRows(job, y, dy, dx);
  WithAccumulator(args.dtype, [&]<typename Scalar>() {
    Columns<Scalar>(job, Cut(args.shape, 0, 2 * job.itemsize)).Backward(y, dy, dx);
  });
}

}  // namespace jax_fastops::cpu

// The inner loops of transpose.h: Matrix, with rows that are contiguous in the input and columns
// that are contiguous in the output, Dense, and Rows.
//
// A tile is square: it has as many rows as a register has units, of one register each. So every
// load and every store is a whole register, which is a whole cache line with AVX-512. A register
// consists of lanes of 16 bytes, in which shuffles are cheap, and a lane consists of N units.
// First, rows are transposed N at a time within each lane, in log2 N rounds of interleaving. Then
// the lanes are transposed, as elements of a small square matrix. For units of 1 and 2 bytes a tile
// has more registers than the machine, and the compiler spills the results of the first step to the
// stack, which stays in the L1 cache.
//
// Edges: the rest of a long side is covered by one more tile, moved back so that it overlaps the
// previous one. So few tiles are partial. Sides shorter than a tile are common, such as images of 3
// channels:
// - With up to N columns, each lane loads one row, so the loads already do the second step.
// - With up to N rows, a column is at most one lane, and each lane is stored separately. If the
//   columns are adjacent in the output (Dense), each lane is stored as a whole into a buffer, and
//   the next one overwrites its excess. The buffer is written in whole cache lines, so stores can
//   bypass the caches.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about the intentionally undefined registers in its own AVX-512 headers.
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "transpose/transpose_simd.h"

#include "core/cpu/simd.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

// ---- Registers: of kLanes lanes of 16 bytes -----------------------------------------------------
//
// The types are those of x86's intrinsics.

typedef long long Lane __attribute__((vector_size(16)));
typedef long long Reg __attribute__((vector_size(kVectorBytes)));
constexpr int kLanes = sizeof(Reg) / sizeof(Lane);

template <int... kInts>
struct Ints {};
template <int n, int... kInts>
constexpr auto IntsBelow() {
  if constexpr (n == 0) {
    return Ints<kInts...>();
  } else {
    return IntsBelow<n - 1, n - 1, kInts...>();
  }
}

// Alternates the units of the lower (kHalf = 0) or of the upper halves of the lanes of a and b.
template <typename Unit, int kHalf>
FASTOPS_INLINE Reg Interleave(Reg a, Reg b) {
  typedef Unit Units __attribute__((vector_size(kVectorBytes)));
  constexpr int N = 16 / sizeof(Unit), kAll = N * kLanes;
  return [&]<int... i>(Ints<i...>) FASTOPS_LAMBDA {
    return (Reg)__builtin_shufflevector((Units)a, (Units)b,
                                        (i / N * N + kHalf * N / 2 + i % N / 2 + i % 2 * kAll)...);
  }(IntsBelow<kAll>());
}

// Loads and stores of the first 0 to 16 bytes of a lane. They do not access other bytes.
#if FASTOPS_ISA_LEVEL == 2
FASTOPS_INLINE __mmask16 FirstBytes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
FASTOPS_INLINE Lane LoadPart(const char* p, int64_t n) {
  return _mm_maskz_loadu_epi8(FirstBytes(n), p);
}
FASTOPS_INLINE void StorePart(char* p, Lane v, int64_t n) {
  _mm_mask_storeu_epi8(p, FirstBytes(n), v);
}
#else
template <int kPiece>
FASTOPS_INLINE int64_t CopyPiece(char* to, const char* from, int64_t at, int64_t n) {
  if ((n & kPiece) == 0) return at;
  memcpy(to + at, from + at, kPiece);
  return at + kPiece;
}
FASTOPS_INLINE void CopyPart(char* to, const char* from, int64_t n) {
  int64_t at = CopyPiece<8>(to, from, 0, n);
  at = CopyPiece<4>(to, from, at, n);
  at = CopyPiece<2>(to, from, at, n);
  CopyPiece<1>(to, from, at, n);
}
FASTOPS_INLINE Lane LoadPart(const char* p, int64_t n) {
  if (n == 16) return LoadVector<Lane>(p);
  char block[16] = {};
  CopyPart(block, p, n);
  return LoadVector<Lane>(block);
}
FASTOPS_INLINE void StorePart(char* p, Lane v, int64_t n) {
  if (n == 16) return StoreVector(p, v);
  char block[16];
  StoreVector(block, v);
  CopyPart(p, block, n);
}
#endif

#if FASTOPS_ISA_LEVEL == 2
template <int kIndex>
FASTOPS_INLINE Lane GetLane(Reg v) {
  return _mm512_extracti32x4_epi32(v, kIndex);
}
FASTOPS_INLINE Reg FromLanes(const Lane (&l)[4]) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(l[1], l[0])),
                            _mm256_set_m128i(l[3], l[2]), 1);
}
// Transposes the square matrix whose rows are the registers and whose elements are their lanes.
FASTOPS_INLINE void TransposeLanes(Reg (&r)[4]) {
  const Reg a = _mm512_shuffle_i64x2(r[0], r[1], 0x44), b = _mm512_shuffle_i64x2(r[2], r[3], 0x44);
  const Reg c = _mm512_shuffle_i64x2(r[0], r[1], 0xEE), d = _mm512_shuffle_i64x2(r[2], r[3], 0xEE);
  r[0] = _mm512_shuffle_i64x2(a, b, 0x88);
  r[1] = _mm512_shuffle_i64x2(a, b, 0xDD);
  r[2] = _mm512_shuffle_i64x2(c, d, 0x88);
  r[3] = _mm512_shuffle_i64x2(c, d, 0xDD);
}
#elif FASTOPS_ISA_LEVEL == 1
template <int kIndex>
FASTOPS_INLINE Lane GetLane(Reg v) {
  return _mm256_extracti128_si256(v, kIndex);
}
FASTOPS_INLINE Reg FromLanes(const Lane (&l)[2]) { return _mm256_set_m128i(l[1], l[0]); }
FASTOPS_INLINE void TransposeLanes(Reg (&r)[2]) {
  const Reg a = _mm256_permute2x128_si256(r[0], r[1], 0x20);
  r[1] = _mm256_permute2x128_si256(r[0], r[1], 0x31);
  r[0] = a;
}
#else
template <int kIndex>
FASTOPS_INLINE Lane GetLane(Reg v) {
  return v;
}
FASTOPS_INLINE Reg FromLanes(const Lane (&l)[1]) { return l[0]; }
FASTOPS_INLINE void TransposeLanes(Reg (&)[1]) {}
#endif

constexpr int64_t kBytes = sizeof(Reg);
constexpr int64_t kLine = 64;

FASTOPS_INLINE Reg Load(const void* p) { return LoadVector<Reg>(p); }
FASTOPS_INLINE void Store(void* p, Reg v) { StoreVector(p, v); }
FASTOPS_INLINE void Stream(void* p, Reg v) { StreamVector(p, (I16)v); }

// Loads and stores of the first 0 to kBytes bytes of a register.
FASTOPS_INLINE Reg LoadRegPart(const char* p, int64_t n) {
  if (n == kBytes) return Load(p);
#if FASTOPS_ISA_LEVEL == 2
  // Masked loads take two to three times as long as plain ones if the data is not in the cache.
  if (n == 32) return _mm512_zextsi256_si512(LoadVector<__m256i>(p));
  if (n == 16) return _mm512_zextsi128_si512(LoadVector<Lane>(p));
  return _mm512_maskz_loadu_epi8(_bzhi_u64(~uint64_t{0}, static_cast<unsigned>(n)), p);
#else
  Lane lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const int64_t left = n - 16 * i;
    lanes[i] = left <= 0 ? Lane{} : LoadPart(p + 16 * i, left < 16 ? left : 16);
  }
  return FromLanes(lanes);
#endif
}

template <int kIndex = 0>
FASTOPS_INLINE void StoreLanes(char* p, Reg v, int64_t n) {
  if constexpr (kIndex < kLanes) {
    if (n <= 16 * kIndex) return;
    const int64_t left = n - 16 * kIndex;
    StorePart(p + 16 * kIndex, GetLane<kIndex>(v), left < 16 ? left : 16);
    StoreLanes<kIndex + 1>(p, v, n);
  }
}
FASTOPS_INLINE void StoreRegPart(char* p, Reg v, int64_t n) {
#if FASTOPS_ISA_LEVEL == 2
  _mm512_mask_storeu_epi8(p, _bzhi_u64(~uint64_t{0}, static_cast<unsigned>(n)), v);
#else
  if (n == kBytes) return Store(p, v);
  StoreLanes(p, v, n);
#endif
}

// Calls body(in, out) for each iteration of the outer `rank` loops of a nest.
template <typename Body>
FASTOPS_INLINE void Loop(const LoopNest& nest, int rank, const char* in, char* out,
                         const Body& body) {
  int64_t index[LoopNest::kMaxRank];
  for (int d = 0; d < rank; ++d) index[d] = 0;
  for (;;) {
    body(in, out);
    int d = rank - 1;
    for (; d >= 0; --d) {
      in += nest.in_step[d];
      out += nest.out_step[d];
      if (++index[d] < nest.size[d]) break;
      in -= nest.in_step[d] * nest.size[d];
      out -= nest.out_step[d] * nest.size[d];
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

// ---- Tiles --------------------------------------------------------------------------------------

// The location of a matrix, as in TransposeKernels::matrix.
struct Place {
  const char* in;
  const int64_t* row;
  char* out;
  const int64_t* column;
};

template <typename Unit>
struct Transpose {
  static constexpr int kUnit = sizeof(Unit);
  static constexpr int N = 16 / kUnit;          // units per lane
  static constexpr int64_t kTile = N * kLanes;  // units per register

  // Transposes each lane: r holds N rows before, and N columns after.
  static FASTOPS_INLINE void InLanes(Reg (&r)[N]) {
#pragma GCC unroll 4
    for (int step = 1; step < N; step *= 2) {
      Reg next[N];
#pragma GCC unroll 8
      for (int i = 0; i < N / 2; ++i) {
        next[2 * i] = Interleave<Unit, 0>(r[i], r[i + N / 2]);
        next[2 * i + 1] = Interleave<Unit, 1>(r[i], r[i + N / 2]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) r[i] = next[i];
    }
  }

  // At most kTile rows and columns; exactly as many if kWhole.
  template <bool kWhole, bool kStream>
  static FASTOPS_INLINE void Tile(const Place& m, int64_t rows, int64_t columns) {
    Reg part[kLanes][N];
#pragma GCC unroll 4
    for (int g = 0; g < kLanes; ++g) {
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) {
        const int64_t r = g * N + i;
        if constexpr (kWhole) {
          part[g][i] = Load(m.in + m.row[r]);
        } else {
          part[g][i] = r < rows ? LoadRegPart(m.in + m.row[r], columns * kUnit) : Reg{};
        }
      }
      if (kWhole || g * N < rows) InLanes(part[g]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      Reg column[kLanes];
#pragma GCC unroll 4
      for (int g = 0; g < kLanes; ++g) column[g] = part[g][i];
      TransposeLanes(column);
#pragma GCC unroll 4
      for (int l = 0; l < kLanes; ++l) {
        const int64_t c = l * N + i;
        if constexpr (kStream) {
          Stream(m.out + m.column[c], column[l]);
        } else if constexpr (kWhole) {
          Store(m.out + m.column[c], column[l]);
        } else if (c < columns) {
          StoreRegPart(m.out + m.column[c], column[l], rows * kUnit);
        }
      }
    }
  }

  template <bool kStream>
  static FASTOPS_INLINE void Whole(const Place& m) {
    Tile<true, kStream>(m, kTile, kTile);
  }
  static __attribute__((noinline)) void Part(const Place& m, int64_t rows, int64_t columns) {
    Tile<false, false>(m, rows, columns);
  }

  // Any number of rows, and up to N columns.
  static __attribute__((noinline)) void FewColumns(const Place& m, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r += kTile) {
      const int64_t left = rows - r;
      Reg column[N];
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) {
        Lane row[kLanes];
#pragma GCC unroll 4
        for (int g = 0; g < kLanes; ++g) {
          const int64_t at = g * N + i;
          row[g] = at < left ? LoadPart(m.in + m.row[r + at], columns * kUnit) : Lane{};
        }
        column[i] = FromLanes(row);
      }
      InLanes(column);
      const int64_t bytes = (left < kTile ? left : kTile) * kUnit;
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) {
        if (i < columns) StoreRegPart(m.out + m.column[i] + r * kUnit, column[i], bytes);
      }
    }
  }

  template <int kLane = 0>
  static FASTOPS_INLINE void StoreColumns(const Reg (&value)[N], char* out, const int64_t* column,
                                          int64_t columns, int64_t bytes) {
    if constexpr (kLane < kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) {
        const int64_t c = kLane * N + i;
        if (c < columns) StorePart(out + column[c], GetLane<kLane>(value[i]), bytes);
      }
      StoreColumns<kLane + 1>(value, out, column, columns, bytes);
    }
  }

  // Loads `columns` <= kTile columns of up to N rows, and transposes each lane.
  static FASTOPS_INLINE void LoadFewRows(const char* in, const int64_t* row, int64_t rows,
                                         int64_t columns, Reg (&part)[N]) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      part[i] = i < rows ? LoadRegPart(in + row[i], columns * kUnit) : Reg{};
    }
    InLanes(part);
  }

  // Up to N rows, and any number of columns.
  static __attribute__((noinline)) void FewRows(const Place& m, int64_t rows, int64_t columns) {
    for (int64_t c = 0; c < columns; c += kTile) {
      const int64_t left = columns - c < kTile ? columns - c : kTile;
      Reg part[N];
      LoadFewRows(m.in + c * kUnit, m.row, rows, left, part);
      StoreColumns(part, m.out, m.column + c, left, rows * kUnit);
    }
  }

  template <int kLane = 0>
  static FASTOPS_INLINE void StoreOverlapping(const Reg (&value)[N], char* out, int64_t step,
                                              int64_t columns) {
    if constexpr (kLane < kLanes) {
      if (kLane * N >= columns) return;
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) {
        StoreVector(out + (kLane * N + i) * step, GetLane<kLane>(value[i]));
      }
      StoreOverlapping<kLane + 1>(value, out, step, columns);
    }
  }

  // See TransposeKernels::dense.
  static void Dense(const LoopNest& nest, const char* in, const int64_t* row, char* out,
                    int64_t rows, int64_t columns, bool stream) {
    // The buffer holds the next bytes of the output, and begins at the start of a cache line.
    constexpr int64_t kFull = 4096;
    alignas(64) char buffer[kFull + N * kBytes + 2 * kLine];
    int64_t begin = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) % kLine);
    int64_t end = begin;
    const int64_t step = rows * kUnit;
    Loop(nest, nest.rank, in, out, [&](const char* from, char*) {
      for (int64_t c = 0; c < columns; c += kTile) {
        const int64_t left = columns - c < kTile ? columns - c : kTile;
        Reg part[N];
        LoadFewRows(from + c * kUnit, row, rows, left, part);
        StoreOverlapping(part, buffer + end, step, left);
        end += left * step;
        if (end < kFull) continue;
        const int64_t lines = end / kLine * kLine;
        out = WriteLines(out, buffer, begin, lines, stream);
        begin = 0;
        end -= lines;
        memcpy(buffer, buffer + lines, kLine);
      }
    });
    memcpy(out, buffer + begin, static_cast<size_t>(end - begin));
    if (stream) StreamFence();
  }

  // Writes bytes [begin, end) of the buffer. `end` must be the end of a cache line. Returns the
  // position in the output after the written bytes.
  static FASTOPS_INLINE char* WriteLines(char* out, const char* buffer, int64_t begin, int64_t end,
                                         bool stream) {
    if (begin > 0) {
      memcpy(out, buffer + begin, static_cast<size_t>(kLine - begin));
      out += kLine - begin;
      begin = kLine;
    }
    if (stream) {
      for (int64_t i = begin; i < end; i += kBytes, out += kBytes) Stream(out, Load(buffer + i));
    } else {
      for (int64_t i = begin; i < end; i += kBytes, out += kBytes) Store(out, Load(buffer + i));
    }
    return out;
  }

  static FASTOPS_INLINE Place At(const Place& m, int64_t row, int64_t column) {
    return {m.in + column * kUnit, m.row + row, m.out + row * kUnit, m.column + column};
  }

  // Consecutive tiles are adjacent along the output's rows, so a cache line that two tiles share is
  // completed while it is in the L1 cache.
  template <bool kStream>
  static FASTOPS_INLINE void Tiles(const Place& m, int64_t rows, int64_t columns) {
    if (columns <= N) return FewColumns(m, rows, columns);
    if (rows <= N) return FewRows(m, rows, columns);
    if (rows < kTile || columns < kTile) {
      for (int64_t c = 0; c < columns; c += kTile) {
        for (int64_t r = 0; r < rows; r += kTile) {
          Part(At(m, r, c), rows - r < kTile ? rows - r : kTile,
               columns - c < kTile ? columns - c : kTile);
        }
      }
      return;
    }
    for (int64_t c = 0; c < columns; c += kTile) {
      if (columns - c <= N && columns % kTile != 0) {
        FewColumns(At(m, 0, c), rows, columns - c);
        break;
      }
      if (c + kTile > columns) c = columns - kTile;
      int64_t r = 0;
      for (; r + kTile <= rows; r += kTile) Whole<kStream>(At(m, r, c));
      if (r == rows) continue;
      if (rows - r <= N) {
        FewRows(At(m, r, c), rows - r, kTile);
      } else {
        Whole<false>(At(m, rows - kTile, c));
      }
    }
  }

  static void Run(const LoopNest& nest, const char* in, const int64_t* row, char* out,
                  const int64_t* column, int64_t rows, int64_t columns, bool stream) {
    if (stream && kBytes == 64) {  // otherwise a line would be streamed in pieces
      Loop(nest, nest.rank, in, out,
           [&](const char* i, char* o) { Tiles<true>({i, row, o, column}, rows, columns); });
      StreamFence();
    } else {
      Loop(nest, nest.rank, in, out,
           [&](const char* i, char* o) { Tiles<false>({i, row, o, column}, rows, columns); });
    }
  }
};

// ---- Rows ---------------------------------------------------------------------------------------

template <int64_t kRow>
FASTOPS_INLINE void CopyFixed(char* to, const char* from) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < kRow; i += kBytes) Store(to + i, Load(from + i));
}

// Copies more than kBytes bytes. The last register overlaps the one before.
constexpr auto CopyLong = [](char* to, const char* from, int64_t n) FASTOPS_LAMBDA {
  const Reg last = Load(from + n - kBytes);
#pragma GCC unroll 4
  for (int64_t i = 0; i < n - kBytes; i += kBytes) Store(to + i, Load(from + i));
  Store(to + n - kBytes, last);
};

constexpr auto CopyShort = [](char* to, const char* from, int64_t n)
                               FASTOPS_LAMBDA { StoreRegPart(to, LoadRegPart(from, n), n); };

// For rows of at least this size, the C library's copy is faster.
constexpr int64_t kLibraryRow = 4096;

// The hardware prefetcher sees no pattern in short rows that lie far apart. So this prefetches the
// row that comes kAhead rows later, in the input and the output. After the end of a nest, that row
// often belongs to the next block; otherwise the prefetch has no effect.
constexpr int64_t kAhead = 8;
constexpr int64_t kAheadBytes = 512;
constexpr int64_t kFarRows = 1024;

template <typename Copy>
FASTOPS_INLINE void LoopRows(const LoopNest& nest, const char* in, char* out, int64_t bytes,
                             const Copy& copy) {
  if (nest.rank == 0) return copy(out, in);
  const int last = nest.rank - 1;
  const int64_t n = nest.size[last];
  const int64_t in_step = nest.in_step[last], out_step = nest.out_step[last];
  const bool far = in_step >= kFarRows || out_step >= kFarRows;
  if (far && bytes >= kLine && bytes <= kAheadBytes) {
    Loop(nest, last, in, out, [&](const char* i, char* o) {
      for (int64_t k = 0; k < n; ++k) {
        FetchRowAhead(i + k * in_step, kAhead * in_step, bytes);
        FetchRowAhead<true>(o + k * out_step, kAhead * out_step, bytes);
        copy(o + k * out_step, i + k * in_step);
      }
    });
    return;
  }
  Loop(nest, last, in, out, [&](const char* i, char* o) {
#pragma GCC unroll 2
    for (int64_t k = 0; k < n; ++k) copy(o + k * out_step, i + k * in_step);
  });
}

void Rows(const LoopNest& nest, const char* in, char* out, int64_t bytes) {
  const auto copy_fixed = [&]<int64_t kRow>() {
    LoopRows(nest, in, out, kRow, [](char* o, const char* i) { CopyFixed<kRow>(o, i); });
  };
  const auto copy = [&](const auto& one) {
    LoopRows(nest, in, out, bytes, [&](char* o, const char* i) { one(o, i, bytes); });
  };
  if (bytes == 64) return copy_fixed.template operator()<64>();
  if (bytes == 128) return copy_fixed.template operator()<128>();
  if (bytes == 256) return copy_fixed.template operator()<256>();
  if (bytes == 512) return copy_fixed.template operator()<512>();
  if (bytes <= kBytes) return copy(CopyShort);
  if (bytes < kLibraryRow) return copy(CopyLong);
  copy([](char* o, const char* i, int64_t n) { memcpy(o, i, static_cast<size_t>(n)); });
}

}  // namespace

const TransposeKernels transpose_kernels = {
    {Transpose<uint8_t>::Run, Transpose<uint16_t>::Run, Transpose<uint32_t>::Run,
     Transpose<uint64_t>::Run, Transpose<__int128>::Run},
    {Transpose<uint8_t>::Dense, Transpose<uint16_t>::Dense, Transpose<uint32_t>::Dense,
     Transpose<uint64_t>::Dense, Transpose<__int128>::Dense},
    Rows};

}  // namespace jax_fastops::cpu::FASTOPS_ISA

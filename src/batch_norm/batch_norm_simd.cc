// The inner loops of batch_norm.cc.
//
// Sums over columns are kept for every position of a strip, in the L1 cache, and a few rows are
// added at a time. Sums over runs stay in registers along each run. In both cases float sums are
// short, and are then added to sums in double.
//
// Moments are computed from deviations from a nearby value, the mean of a few elements of the
// chunk. So a variance is never the difference of two large sums. Chunks are merged by Chan's
// formula, in a form in which an infinite mean stays infinite, like the sum of the elements would.
//
// Element-wise passes process flat blocks of a group, independent of where rows begin, so that the
// mask bits of a block are whole bytes. A block may contain the end of one run and the beginning of
// the next. It then has the coefficients of both.
//
// The next block is prefetched where several rows are read at a time, or short runs: the hardware
// does not follow these, and stops at the end of a page.
#include "batch_norm/batch_norm_simd.h"

#include "core/cpu/block_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

// The number of rows of a strip, or of blocks of runs, whose sums are in float.
constexpr int64_t kChunk = 128;

// The number of rows whose mean is subtracted from all rows of a chunk. If it were a single row, an
// outlier in that row could cost the chunk's variance up to seven bits.
constexpr int64_t kSample = 8;

// The number of rows that are processed together.
constexpr int kRows = 4;

FASTOPS_INLINE const char* Bytes(const void* p, int64_t offset) {
  return static_cast<const char*>(p) + offset;
}
FASTOPS_INLINE char* Bytes(void* p, int64_t offset) { return static_cast<char*>(p) + offset; }

template <typename Scalar>
FASTOPS_INLINE const Scalar* Values(const void* p) {
  return static_cast<const Scalar*>(p);
}

// ---- Parts --------------------------------------------------------------------------------------

// result[c] = the sum of value(part, index in the part, c) over all indices of channel c.
template <typename F>
FASTOPS_INLINE void OverParts(int64_t parts, int64_t channels, int64_t inner,
                              double* __restrict result, const F& value) {
  for (int64_t c = 0; c < channels; ++c) result[c] = 0;
  for (int64_t part = 0; part < parts; ++part) {
    if (inner == 1) {
      for (int64_t c = 0; c < channels; ++c) result[c] += value(part, c, c);
      continue;
    }
    for (int64_t c = 0; c < channels; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < inner; ++i) sum += value(part, c * inner + i, c);
      result[c] += sum;
    }
  }
}

void MergeSums(const double* sums, int64_t parts, int64_t stride, int64_t channels, int64_t inner,
               double* result) {
  OverParts(parts, channels, inner, result, [&](int64_t part, int64_t i, int64_t) FASTOPS_LAMBDA {
    return sums[part * stride + i];
  });
}

void MergeMoments(const double* mean, const double* squares, const double* counts, int64_t parts,
                  int64_t stride, int64_t channels, int64_t inner, double* __restrict mean_result,
                  double* __restrict squares_result) {
  double total = 0;
  for (int64_t part = 0; part < parts; ++part) total += counts[part] * static_cast<double>(inner);
  OverParts(parts, channels, inner, mean_result,
            [&](int64_t part, int64_t i, int64_t)
                FASTOPS_LAMBDA { return counts[part] * mean[part * stride + i]; });
  for (int64_t c = 0; c < channels; ++c) mean_result[c] /= total;
  OverParts(parts, channels, inner, squares_result,
            [&](int64_t part, int64_t i, int64_t c) FASTOPS_LAMBDA {
              const double d = mean[part * stride + i] - mean_result[c];
              return squares[part * stride + i] + counts[part] * (d * d);
            });
}

// ---- One dtype ----------------------------------------------------------------------------------

template <typename E>
struct BatchNorm {
  using A = typename E::A;
  using Scalar = typename A::Scalar;
  using Vectors = Pair<A>;
  static constexpr int64_t kBlock = E::kBlock;
  static_assert(kBlock <= kBatchNormRun && kBatchNormSlack % kBlock == 0);

  static int64_t Padded(int64_t n) { return (n + kBlock - 1) / kBlock * kBlock; }

  // Sets the lanes after the end of a part to 0.
  template <typename Extent>
  static FASTOPS_INLINE Vectors Cleared(Extent, Vectors v, int64_t count) {
    if constexpr (Extent::kWhole) return v;
    return Select(FirstOfPair<A>(count), v, SetPair<A>(0));
  }

  // ---- Moments ----

  static FASTOPS_INLINE Vectors OrZero(Vectors v) { return Select(Finite(v), v, SetPair<A>(0)); }

  // Merges n elements into (mean, squares). The elements are given by the sums of their deviations
  // from `shift` and of the squares of these.
  struct Join {
    double inverse, weight, product;
    bool first;

    Join(int64_t before, int64_t n)
        : inverse(1 / static_cast<double>(n)),
          weight(static_cast<double>(n) / static_cast<double>(before + n)),
          product(static_cast<double>(before) * weight),
          first(before == 0) {}

    FASTOPS_INLINE void operator()(double shift, double sum, double sum_of_squares, double* mean,
                                   double* squares) const {
      const double own = shift + sum * inverse, rest = sum_of_squares - sum * sum * inverse;
      const double own_squares = rest < 0 ? 0 : rest;  // may be negative by rounding
      const double old = first ? own : *mean, old_squares = first ? 0 : *squares;
      const double delta = own - old;
      const double near = old + delta * weight, far = old + own;
      *mean = first ? own : delta - delta == 0 ? near : far;
      *squares = old_squares + (own_squares + delta * delta * product);
    }
  };

  template <int kCount>
  static FASTOPS_INLINE void AddMoments(const char* x, int64_t row_bytes, int64_t width,
                                        const Scalar* shift, Scalar* sums, Scalar* squares) {
    OverBlocks<kBlock>(0, width, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Vectors k = LoadPair<A>(shift + i);
      Vectors sum = LoadPair<A>(sums + i), square = LoadPair<A>(squares + i);
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        const char* p = x + r * row_bytes + i * E::kBytes;
        FetchBlock<E>(p, kCount * row_bytes);
        const Vectors d = Sub(LoadElements<E>(extent, p, count), k);
        sum = Add(sum, d);
        square = MulAdd(d, d, square);
      }
      StorePair<A>(sums + i, sum);
      StorePair<A>(squares + i, square);
    });
  }

  static void SampleOfColumns(const char* x, int64_t row_bytes, int64_t rows, int64_t width,
                              Scalar* shift, Scalar* sums, Scalar* squares) {
    const Vectors inverse = SetPair<A>(1 / static_cast<Scalar>(rows));
    OverBlocks<kBlock>(0, width, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      Vectors sum = SetPair<A>(0);
      for (int64_t r = 0; r < rows; ++r) {
        sum = Add(sum, LoadElements<E>(extent, x + r * row_bytes + i * E::kBytes, count));
      }
      StorePair<A>(shift + i, OrZero(Mul(sum, inverse)));
      StorePair<A>(sums + i, SetPair<A>(0));
      StorePair<A>(squares + i, SetPair<A>(0));
    });
  }

  static void JoinColumns(const Join& join, int64_t width, const Scalar* __restrict shift,
                          const Scalar* __restrict sums, const Scalar* __restrict sums_of_squares,
                          double* __restrict mean, double* __restrict squares) {
    for (int64_t i = 0; i < width; ++i) {
      join(static_cast<double>(shift[i]), static_cast<double>(sums[i]),
           static_cast<double>(sums_of_squares[i]), mean + i, squares + i);
    }
  }

  // Takes the rows of a strip in chunks: calls begin(at, rows, width), add.operator()<k>(at, width)
  // for k rows at a time, and end(before, rows, width), where `before` rows came before the chunk.
  template <typename Begin, typename AddRows, typename End>
  static FASTOPS_INLINE void OverStrip(const BatchNormStrip& strip, const Begin& begin,
                                       const AddRows& add, const End& end) {
    int64_t at = strip.first;
    for (int64_t row = 0; row < strip.rows + (strip.tail > 0 ? 1 : 0);) {
      const bool tail = row == strip.rows;
      const int64_t rows = tail ? 1 : Min(strip.rows - row, kChunk);
      const int64_t width = tail ? strip.tail : strip.width;
      begin(at, rows, width);
      int64_t r = 0;
      for (; r + kRows <= rows; r += kRows, at += kRows * strip.stride) {
        add.template operator()<kRows>(at, width);
      }
      for (; r < rows; ++r, at += strip.stride) add.template operator()<1>(at, width);
      end(row, rows, width);
      row += rows;
    }
  }

  static void MomentsOfColumns(const void* x, const BatchNormStrip& strip, void* buffer,
                               double* mean, double* squares) {
    const int64_t padded = Padded(strip.width), row_bytes = strip.stride * E::kBytes;
    Scalar* const shift = static_cast<Scalar*>(buffer);
    Scalar* const sums = shift + padded;
    Scalar* const sums_of_squares = sums + padded;
    OverStrip(
        strip,
        [&](int64_t at, int64_t rows, int64_t width) {
          SampleOfColumns(Bytes(x, at * E::kBytes), row_bytes, Min(rows, kSample), width, shift,
                          sums, sums_of_squares);
        },
        [&]<int kCount>(int64_t at, int64_t width) {
          AddMoments<kCount>(Bytes(x, at * E::kBytes), row_bytes, width, shift, sums,
                             sums_of_squares);
        },
        [&](int64_t before, int64_t rows, int64_t width) {
          JoinColumns(Join(before, rows), width, shift, sums, sums_of_squares, mean, squares);
        });
  }

  // `ahead` is the distance to the next piece, in bytes.
  struct Piece {
    int64_t at, count;  // of the first channel
    int64_t ahead;
    bool is_short;  // the hardware prefetcher follows long runs of one array
    Piece(const BatchNormRuns& runs, int64_t q) {
      const int64_t begin = q % runs.segments * runs.segment;
      at = runs.first + q / runs.segments * runs.stride + begin;
      count = Min(runs.segment, runs.inner - begin);
      is_short = count * E::kBytes < 512;
      const bool last = begin + count == runs.inner;
      ahead = (last ? runs.stride - begin : runs.segment) * E::kBytes;
    }
  };

  // Adds up two values of the elements of runs, chunk by chunk. block_of(channel, at, piece, first)
  // returns a function of a block, (extent, at, count, &sum, &sum_too), for the piece of the
  // channel that begins with element `at`. Then end(channel, before, elements, sum, sum_too) takes
  // the sums of a chunk; `before` elements came before it.
  template <typename BlockOf, typename End>
  static FASTOPS_INLINE void OverRuns(const BatchNormRuns& runs, Scalar* sums,
                                      const BlockOf& block_of, const End& end) {
    const int64_t blocks = (runs.segment + kBlock - 1) / kBlock;
    const int64_t pieces = blocks >= kChunk ? 1 : kChunk / blocks;
    int64_t before = 0;
    for (int64_t begin = runs.begin; begin < runs.end; begin += pieces) {
      int64_t n = 0;
      for (int64_t q = begin; q < Min(runs.end, begin + pieces); ++q) {
        const Piece piece(runs, q);
        for (int64_t c = 0; c < runs.channels; ++c) {
          const int64_t at = piece.at + c * runs.inner;
          Scalar* const own = sums + 2 * kBlock * c;
          Vectors sum = SetPair<A>(0), sum_too = SetPair<A>(0);
          if (q != begin) {
            sum = LoadPair<A>(own);
            sum_too = LoadPair<A>(own + kBlock);
          }
          const auto block = block_of(c, at, piece, q == begin);
          OverBlocks<kBlock>(0, piece.count,
                             [&](auto extent, int64_t i, int64_t count)
                                 FASTOPS_LAMBDA { block(extent, at + i, count, &sum, &sum_too); });
          StorePair<A>(own, sum);
          StorePair<A>(own + kBlock, sum_too);
        }
        n += piece.count;
      }
      for (int64_t c = 0; c < runs.channels; ++c) {
        const Scalar* const own = sums + 2 * kBlock * c;
        end(c, before, n, static_cast<double>(SumOf(LoadPair<A>(own))),
            static_cast<double>(SumOf(LoadPair<A>(own + kBlock))));
      }
      before += n;
    }
  }

  static void MomentsOfRuns(const void* x, const BatchNormRuns& runs, void* buffer, double* mean,
                            double* squares) {
    Scalar* const sums = static_cast<Scalar*>(buffer);
    Scalar* const shift = sums + 2 * kBlock * runs.channels;
    OverRuns(
        runs, sums,
        [&](int64_t c, int64_t at, const Piece& piece, bool first) FASTOPS_LAMBDA {
          if (first) {
            const int64_t sample = Min(piece.count, kBlock);
            const Scalar near = SumOf(LoadElements<E>(Part(), Bytes(x, at * E::kBytes), sample)) /
                                static_cast<Scalar>(sample);
            shift[c] = near - near == 0 ? near : 0;
          }
          return [x, k = SetPair<A>(shift[c]), fetch = piece.is_short, ahead = piece.ahead](
                     auto extent, int64_t i, int64_t count, Vectors* sum, Vectors* square)
                     FASTOPS_LAMBDA {
                       const char* const p = Bytes(x, i * E::kBytes);
                       if (fetch) FetchBlock<E>(p, ahead);
                       const Vectors v = LoadElements<E>(extent, p, count);
                       const Vectors d = Cleared(extent, Sub(v, k), count);
                       *sum = Add(*sum, d);
                       *square = MulAdd(d, d, *square);
                     };
        },
        [&](int64_t c, int64_t before, int64_t n, double sum, double sum_of_squares)
            FASTOPS_LAMBDA {
              Join(before, n)(static_cast<double>(shift[c]), sum, sum_of_squares, mean + c,
                              squares + c);
            });
  }

  // ---- Sums ----

  // The bits of the elements that begin with `at`, at any position in a byte. Does not read after
  // the end of the mask.
  static FASTOPS_INLINE PairMask<A> BitsAt(const uint8_t* mask, int64_t bytes, int64_t at) {
    const int64_t byte = at / 8;
    uint64_t bits = 0;
    if (byte + 8 <= bytes) {
      memcpy(&bits, mask + byte, 8);
    } else {
      memcpy(&bits, mask + byte, static_cast<size_t>(bytes - byte));
    }
    bits >>= at % 8;
    return PairOfBits<A>(static_cast<uint32_t>(bits));
  }

  // The inputs of the sums, and the outputs that are stored in the same pass.
  struct Gradient {
    BatchNormArrays of;
    int64_t mask_bytes;

    FASTOPS_INLINE void Fetch(int64_t i, int64_t ahead) const {
      FetchBlock<E>(Bytes(of.x, i * E::kBytes), ahead);
      FetchBlock<E>(Bytes(of.dy, i * E::kBytes), ahead);
      if (of.dy2 != nullptr) FetchBlock<E>(Bytes(of.dy2, i * E::kBytes), ahead);
    }

    template <typename Extent, typename Factor>
    FASTOPS_INLINE void operator()(Extent extent, int64_t i, int64_t count, Vectors mean,
                                   const Factor& factor, Vectors* sum, Vectors* product) const {
      const int64_t at = i * E::kBytes;
      Vectors g = LoadElements<E>(extent, Bytes(of.dy, at), count);
      if (of.dy2 != nullptr) {
        g = E::Widen(E::Narrow(Add(g, LoadElements<E>(extent, Bytes(of.dy2, at), count))));
      }
      if (of.mask != nullptr) {
        const auto* const mask = static_cast<const uint8_t*>(of.mask);
        g = Select(BitsAt(mask, mask_bytes, i), Loaded<A>(g), SetPair<A>(0));
      }
      const Vectors v = LoadElements<E>(extent, Bytes(of.x, at), count);
      const Vectors d = Cleared(extent, Sub(v, mean), count);
      *sum = Add(*sum, g);
      *product = MulAdd(g, d, *product);
      if (of.dx != nullptr) {
        StoreElements<E, false>(extent, Bytes(of.dx, at), E::Narrow(Mul(g, factor())), count);
      }
      if (of.dresidual != nullptr) {
        StoreElements<E, false>(extent, Bytes(of.dresidual, at), E::Narrow(g), count);
      }
    }
  };

  template <int kCount>
  static FASTOPS_INLINE void AddSums(const Gradient& gradient, int64_t at, int64_t stride,
                                     int64_t width, const Scalar* mean, const Scalar* factor,
                                     Scalar* sums, Scalar* products) {
    OverBlocks<kBlock>(0, width, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Vectors m = LoadPair<A>(mean + i);
      Vectors sum = LoadPair<A>(sums + i), product = LoadPair<A>(products + i);
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) {
        gradient.Fetch(at + r * stride + i, kCount * stride * E::kBytes);
        gradient(
            extent, at + r * stride + i, count, m,
            [&]() FASTOPS_LAMBDA { return LoadPair<A>(factor + i); }, &sum, &product);
      }
      StorePair<A>(sums + i, sum);
      StorePair<A>(products + i, product);
    });
  }

  static void Move(Scalar* __restrict from, double* __restrict to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      to[i] += static_cast<double>(from[i]);
      from[i] = 0;
    }
  }

  static void SumsOfColumns(const BatchNormArrays& arrays, const BatchNormStrip& strip,
                            int64_t mask_bytes, const void* const* coefficients, void* buffer,
                            double* sums, double* products) {
    const Gradient gradient = {arrays, mask_bytes};
    const Scalar* const mean = Values<Scalar>(coefficients[0]);
    const Scalar* const factor = Values<Scalar>(coefficients[1]);
    Scalar* const s = static_cast<Scalar*>(buffer);
    Scalar* const p = s + Padded(strip.width);
    for (int64_t i = 0; i < 2 * Padded(strip.width); ++i) s[i] = 0;
    for (int64_t i = 0; i < strip.width; ++i) sums[i] = products[i] = 0;
    OverStrip(
        strip, [](int64_t, int64_t, int64_t) {},
        [&]<int kCount>(int64_t at, int64_t width) {
          AddSums<kCount>(gradient, at, strip.stride, width, mean, factor, s, p);
        },
        [&](int64_t, int64_t, int64_t width) {
          Move(s, sums, width);
          Move(p, products, width);
        });
  }

  static void SumsOfRuns(const BatchNormArrays& arrays, const BatchNormRuns& runs,
                         int64_t mask_bytes, const void* const* coefficients, void* buffer,
                         double* sums, double* products) {
    const Gradient gradient = {arrays, mask_bytes};
    const Scalar* const means = Values<Scalar>(coefficients[0]);
    const Scalar* const factors = Values<Scalar>(coefficients[1]);
    for (int64_t c = 0; c < runs.channels; ++c) sums[c] = products[c] = 0;
    OverRuns(
        runs, static_cast<Scalar*>(buffer),
        [&](int64_t c, int64_t, const Piece& piece, bool) FASTOPS_LAMBDA {
          return [&gradient, mean = SetPair<A>(means[c]), ahead = piece.ahead,
                  factor = SetPair<A>(factors == nullptr ? 0 : factors[c])](
                     auto extent, int64_t i, int64_t count, Vectors* sum,
                     Vectors* product) FASTOPS_LAMBDA {
            gradient.Fetch(i, ahead);
            gradient(extent, i, count, mean, [&]() FASTOPS_LAMBDA { return factor; }, sum, product);
          };
        },
        [&](int64_t c, int64_t, int64_t, double sum, double product) FASTOPS_LAMBDA {
          sums[c] += sum;
          products[c] += product;
        });
  }

  // ---- Element-wise passes ----

  using Elements = BatchNormKernels::Elements;

  // Processes the blocks of kTogether rows of columns, and loads the coefficients once for all
  // rows.
  template <int kCount, int kTogether, typename F>
  static FASTOPS_INLINE void OverRows(const Elements& elements, int64_t row, const F& f) {
    const Scalar* from[kCount];
    for (int k = 0; k < kCount; ++k) from[k] = Values<Scalar>(elements.coefficients[k]);
    const int64_t first = elements.begin + row * elements.stride;
    OverBlocks<kBlock>(0, elements.end - elements.begin,
                       [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
                         Vectors own[kCount];
                         for (int k = 0; k < kCount; ++k) own[k] = LoadPair<A>(from[k] + i);
#pragma GCC unroll 4
                         for (int r = 0; r < kTogether; ++r) {
                           f(extent, first + r * elements.stride + i, count, own);
                         }
                       });
  }

  // Calls f(extent, i, count, coefficients) for the blocks from `begin` to `end`. For columns, it
  // does so for all rows.
  template <int kCount, typename F>
  static FASTOPS_INLINE void OverElements(const Elements& elements, const F& f) {
    if (elements.inner == 0) {
      int64_t row = 0;
      for (; row + kRows <= elements.rows; row += kRows) {
        OverRows<kCount, kRows>(elements, row, f);
      }
      for (; row < elements.rows; ++row) OverRows<kCount, 1>(elements, row, f);
      return;
    }
    const int64_t begin = elements.begin, end = elements.end;
    const Scalar* from[kCount];
    for (int k = 0; k < kCount; ++k) from[k] = Values<Scalar>(elements.coefficients[k]);
    Vectors own[kCount];
    int64_t channel = begin / elements.inner % elements.channels;
    int64_t left = elements.inner - begin % elements.inner;
    for (int64_t i = begin; i < end;) {
      for (int k = 0; k < kCount; ++k) own[k] = SetPair<A>(from[k][channel]);
      const int64_t whole = i + Min(left, end - i) / kBlock * kBlock;
      left -= whole - i;
      for (; i < whole; i += kBlock) f(Whole(), i, kBlock, own);
      channel = channel + 1 == elements.channels ? 0 : channel + 1;
      if (left > 0 && i < end) {
        const PairMask<A> first = FirstOfPair<A>(left);
        for (int k = 0; k < kCount; ++k) {
          own[k] = Select(first, own[k], SetPair<A>(from[k][channel]));
        }
        const int64_t count = Min(kBlock, end - i);
        if (count == kBlock) {
          f(Whole(), i, kBlock, own);
        } else {
          f(Part(), i, count, own);
        }
        i += kBlock;
        left -= kBlock;
      }
      left += elements.inner;
    }
  }

  template <bool kStream>
  static FASTOPS_INLINE void ApplyTo(const BatchNormArrays& arrays, bool relu,
                                     const Elements& elements) {
    const char* const x = static_cast<const char*>(arrays.x);
    const char* const residual = static_cast<const char*>(arrays.residual);
    char* const y = static_cast<char*>(arrays.y);
    BlockArray mask;
    mask.data = static_cast<char*>(arrays.mask);
    const Vectors zero = SetPair<A>(0);
    OverElements<3>(
        elements, [&](auto extent, int64_t i, int64_t count, const Vectors* own) FASTOPS_LAMBDA {
          const int64_t at = i * E::kBytes;
          Vectors z = MulAdd(Sub(LoadElements<E>(extent, x + at, count), own[0]), own[1], own[2]);
          if (residual != nullptr) z = Add(z, LoadElements<E>(extent, residual + at, count));
          if (mask.data != nullptr) {
            StoreBits<E>(extent, mask, i, count, Less(zero, z));
          }
          if (relu) {
            z = Select(AtLeast(zero, z), zero, z);
          }
          StoreElements<E, kStream>(extent, y + at, E::Narrow(z), count);
        });
  }

  static void Apply(const BatchNormArrays& arrays, bool relu, const Elements& elements) {
    WithFlags([&]<bool kStream>() { ApplyTo<kStream>(arrays, relu, elements); },
              kStreams && elements.stream);
  }

  template <bool kStream>
  static FASTOPS_INLINE void BackwardTo(const BatchNormArrays& arrays, const Elements& elements) {
    const char* const x = static_cast<const char*>(arrays.x);
    const char* const dy = static_cast<const char*>(arrays.dy);
    char* const dx = static_cast<char*>(arrays.dx);
    BlockArray mask;
    mask.data = static_cast<char*>(const_cast<void*>(arrays.mask));
    OverElements<5>(
        elements, [&](auto extent, int64_t i, int64_t count, const Vectors* own) FASTOPS_LAMBDA {
          const int64_t at = i * E::kBytes;
          Vectors g = LoadElements<E>(extent, dy + at, count);
          if (mask.data != nullptr) {
            g = Select(LoadBits<E>(extent, mask, i, count), Loaded<A>(g), SetPair<A>(0));
          }
          const Vectors d = Sub(LoadElements<E>(extent, x + at, count), own[0]);
          // The average is subtracted before the multiplication. So the term is exactly 0 if g
          // equals its average.
          const Vectors v = MulAdd(own[1], Sub(g, own[3]), MulAdd(own[2], d, own[4]));
          StoreElements<E, kStream>(extent, dx + at, E::Narrow(v), count);
        });
  }

  static void Backward(const BatchNormArrays& arrays, const Elements& elements) {
    WithFlags([&]<bool kStream>() { BackwardTo<kStream>(arrays, elements); },
              kStreams && elements.stream);
  }

  static constexpr BatchNormKernels kKernels = {MomentsOfColumns, MomentsOfRuns, SumsOfColumns,
                                                SumsOfRuns,       Apply,         Backward,
                                                MergeMoments,     MergeSums,     StreamFence};
};

}  // namespace

const BatchNormKernels batch_norm_kernels[] = FASTOPS_EACH_DTYPE(BatchNorm, kKernels);

}  // namespace jax_fastops::cpu::FASTOPS_ISA

// Batch norm on the CPU: divides groups for the threads and the caches.
//
// A group is a flat array of outer * channels * inner elements. If inner is small, a row of
// channels * inner elements, or a few short rows combined into one, is processed as columns. There
// is one sum and one coefficient for each position of the row, so the same kernels work for every
// layout. The sums of the positions of one channel are merged at the end. If inner is large, each
// run of one channel is processed with its coefficients in registers.
//
// Sums are computed for parts that depend only on the shape, so results do not depend on the number
// of threads. Between kernels they are kept in double, in separate memory, because the workspace
// has the accumulator type.
#include "batch_norm/batch_norm.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "batch_norm/batch_norm_simd.h"
#include "core/cpu/buffer.h"
#include "core/cpu/dtype.h"
#include "core/cpu/pointers.h"
#include "core/cpu/stream.h"
#include "core/integer.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(Kernels, batch_norm_kernels)

// The width of a strip, in columns. Short rows are combined until they have at least `least`
// columns, and rows of more than `most` columns are divided. For moments, the sums and the rows
// that are processed together fit the L1 cache. The other values are measured.
struct Width {
  int64_t least, most;
};
constexpr Width kOfMoments = {512, 1024}, kOfSums = {512, 2048};
// For element-wise passes. In a large group, the cost of the coefficients is small, so strips may
// be wider.
constexpr Width kOfElements = {2048, 4096}, kOfFewElements = {512, 4096};
constexpr int64_t kFewElements = 16 * kOfElements.least;  // per group

constexpr int64_t kSegment = 4096;      // maximum elements in a piece of a run
constexpr int64_t kRunElements = 8192;  // adjacent runs that are processed together, in elements
constexpr int64_t kMostRuns = 64;
constexpr int64_t kPartBytes = 256 << 10;  // bytes of an array per part of its sums
constexpr int64_t kPartElements = 256;     // per channel and part; keeps its overhead small
constexpr int64_t kMostParts = 64;
constexpr int64_t kFlat = 4096;  // elements of runs per thread

// How the groups are divided: rows into strips of `channels` channels, or of their runs.
struct Cut {
  bool runs;
  int64_t repeat;    // short rows that are combined
  int64_t channels;  // per strip
  int64_t strips;
  int64_t segment, segments;  // per run

  Cut(const BatchNormShape& shape, Width of) {
    runs = shape.inner >= kBatchNormRun;
    repeat = segments = 1;
    segment = shape.inner;
    const int64_t row = shape.channels * shape.inner;
    if (runs) {
      channels = std::clamp<int64_t>(kRunElements / shape.inner, 1, kMostRuns);
      strips = CeilDiv(shape.channels, channels);
      channels = CeilDiv(shape.channels, strips);
      segment = RoundUp(CeilDiv(shape.inner, CeilDiv(shape.inner, kSegment)), kBatchNormSlack);
      segments = CeilDiv(shape.inner, segment);
    } else if (row > of.most) {
      strips = CeilDiv(row, of.most);
      channels = RoundUp(CeilDiv(shape.channels, strips), kBatchNormSlack);
      strips = CeilDiv(shape.channels, channels);
    } else {
      // Combined rows are whole blocks, if that does not need too many rows. Then no row ends
      // within a block.
      channels = shape.channels;
      strips = 1;
      const int64_t unit = kBatchNormSlack / std::gcd(row, kBatchNormSlack);
      repeat = std::max<int64_t>(1, of.least / row);
      if (RoundUp(repeat, unit) * row <= of.most) repeat = RoundUp(repeat, unit);
      repeat = std::min(repeat, shape.outer);
    }
  }
};

// Writes a value for each position of a strip that begins with channel `channel`: the values of the
// channels, repeated. If `values` is null, all are `otherwise`. May write up to kBatchNormSlack
// values after the end of `to`.
template <typename Scalar>
void LayOut(const Scalar* values, Scalar otherwise, const BatchNormShape& shape, int64_t channel,
            int64_t width, Scalar* to) {
  if (values == nullptr) {
    std::fill(to, to + width, otherwise);
    return;
  }
  const int64_t inner = shape.inner;
  for (int64_t i = 0; i < width;) {
    if (inner == 1) {
      const int64_t count = std::min(shape.channels - channel, width - i);
      std::copy(values + channel, values + channel + count, to + i);
      i += count;
      channel = 0;
    } else {
      for (int64_t k = 0; k < inner; k += 8) std::fill_n(to + i + k, 8, values[channel]);
      i += inner;
      channel = channel + 1 == shape.channels ? 0 : channel + 1;
    }
  }
}

// ---- Sums ---------------------------------------------------------------------------------------

// One part of the sums of a strip.
struct Task {
  int64_t group, part, channel, channels;
  int64_t begin, end;  // rows of columns, or pieces of runs
};

// Divides rows or pieces into parts. Part p has those in [begin(p), begin(p + 1)).
struct Parts {
  const BatchNormShape& shape;
  const Cut& cut;
  int64_t items;  // combined rows, or pieces
  int64_t parts;

  Parts(const BatchNormShape& s, const Cut& c, int64_t itemsize) : shape(s), cut(c) {
    items = cut.runs ? shape.outer * cut.segments : shape.outer / cut.repeat;
    const int64_t strip_bytes = shape.outer * cut.channels * shape.inner * itemsize;
    parts = std::min(
        {strip_bytes / kPartBytes, shape.outer * shape.inner / kPartElements, kMostParts, items});
    parts = std::max<int64_t>(1, parts);
  }

  int64_t begin(int64_t part) const { return items / parts * part + items % parts * part / parts; }

  // The number of elements per channel in a part.
  double elements(int64_t part) const {
    const int64_t from = begin(part), to = begin(part + 1);
    if (cut.runs) return static_cast<double>(Elements(to) - Elements(from));
    const int64_t rows =
        part + 1 == parts ? shape.outer - from * cut.repeat : (to - from) * cut.repeat;
    return static_cast<double>(rows * shape.inner);
  }

  // Calls body(task) for each part of each strip.
  template <typename Body>
  void Over(Executor& executor, double bytes_per_element, const Body& body) const {
    const double bytes = bytes_per_element * static_cast<double>(shape.outer * shape.inner) *
                         static_cast<double>(cut.channels) / static_cast<double>(parts);
    ParallelFor(executor, shape.groups * cut.strips * parts, 1, bytes,
                [&](int64_t first, int64_t last) {
                  for (int64_t i = first; i < last; ++i) {
                    Task task;
                    task.channel = i % cut.strips * cut.channels;
                    task.channels = std::min(cut.channels, shape.channels - task.channel);
                    task.part = i / cut.strips % parts;
                    task.group = i / cut.strips / parts;
                    task.begin = begin(task.part);
                    task.end = begin(task.part + 1);
                    body(task);
                  }
                });
  }

  BatchNormStrip Strip(const Task& task) const {
    const int64_t row = shape.channels * shape.inner, stride = cut.repeat * row;
    return {.first = task.begin * stride + task.channel * shape.inner,
            .stride = stride,
            .width = cut.repeat * task.channels * shape.inner,
            .rows = task.end - task.begin,
            .tail = task.part + 1 == parts ? shape.outer % cut.repeat * row : 0};
  }

  BatchNormRuns Runs(const Task& task) const {
    return {.first = task.channel * shape.inner,
            .stride = shape.channels * shape.inner,
            .channels = task.channels,
            .inner = shape.inner,
            .segment = cut.segment,
            .segments = cut.segments,
            .begin = task.begin,
            .end = task.end};
  }

  // The size of a kernel's buffer for a strip.
  int64_t buffer() const {
    if (cut.runs) return (4 * kBatchNormSlack + 1) * cut.channels;
    return 3 * (cut.repeat * cut.channels * shape.inner + kBatchNormSlack);
  }
  // The number of means or sums in a strip.
  int64_t width() const {
    return cut.runs ? cut.channels : cut.repeat * cut.channels * shape.inner;
  }

 private:
  // The number of elements of a channel before a piece.
  int64_t Elements(int64_t piece) const {
    return piece / cut.segments * shape.inner + piece % cut.segments * cut.segment;
  }
};

template <typename Scalar>
void Statistics(const BatchNormCall& call, Executor& executor) {
  const BatchNormShape& shape = call.shape;
  const BatchNormKernels& kernels = Kernels(call.dtype);
  const int64_t itemsize = ItemSize(call.dtype);
  Scalar* const mean = static_cast<Scalar*>(call.mean);
  Scalar* const var = static_cast<Scalar*>(call.var);
  const int64_t channels = shape.channels;
  if (shape.outer * shape.inner == 0) {
    std::fill(mean, mean + shape.groups * channels, std::numeric_limits<Scalar>::quiet_NaN());
    std::fill(var, var + shape.groups * channels, std::numeric_limits<Scalar>::quiet_NaN());
    return;
  }
  const Cut cut(shape, kOfMoments);
  const Parts parts(shape, cut, itemsize);
  // [group, part, mean or squares, channel]
  Buffer<double> moments(shape.groups * parts.parts * 2 * channels);
  parts.Over(executor, static_cast<double>(itemsize), [&](const Task& task) {
    const int64_t width = parts.width();
    Buffer<Scalar> buffer(parts.buffer());
    double* const means =
        moments.begin() + (task.group * parts.parts + task.part) * 2 * channels + task.channel;
    double* const squares = means + channels;
    const void* x = Offset(call.x, task.group * shape.group_size() * itemsize);
    if (cut.runs) {
      kernels.moments_of_runs(x, parts.Runs(task), buffer.begin(), means, squares);
      return;
    }
    Buffer<double> own(2 * width);
    const BatchNormStrip strip = parts.Strip(task);
    kernels.moments_of_columns(x, strip, buffer.begin(), own.begin(), own.begin() + width);
    const int64_t row = channels * shape.inner;
    std::vector<double> counts(static_cast<size_t>(cut.repeat));
    for (int64_t i = 0; i < cut.repeat; ++i) {
      counts[static_cast<size_t>(i)] =
          static_cast<double>(strip.rows + (i * row < strip.tail ? 1 : 0));
    }
    kernels.merge_moments(own.begin(), own.begin() + width, counts.data(), cut.repeat, row,
                          task.channels, shape.inner, means, squares);
  });
  std::vector<double> counts;
  for (int64_t part = 0; part < parts.parts; ++part) counts.push_back(parts.elements(part));
  const double inverse = 1 / static_cast<double>(shape.outer * shape.inner);
  Buffer<double> merged(2 * channels);
  double* const squares = merged.begin() + channels;
  for (int64_t g = 0; g < shape.groups; ++g) {
    const double* const from = moments.begin() + g * parts.parts * 2 * channels;
    kernels.merge_moments(from, from + channels, counts.data(), parts.parts, 2 * channels, channels,
                          1, merged.begin(), squares);
    for (int64_t c = 0; c < channels; ++c) {
      mean[g * channels + c] = static_cast<Scalar>(merged.begin()[c]);
      var[g * channels + c] = static_cast<Scalar>(squares[c] * inverse);
    }
  }
}

// Calls f(i, 1 / sqrt(var + eps), scale / sqrt(var + eps)) for channel i of all groups.
template <typename Scalar, typename F>
void OverFactors(const BatchNormCall& call, Executor& executor, const F& f) {
  const Scalar* const var = static_cast<const Scalar*>(call.var);
  const Scalar* const scale = static_cast<const Scalar*>(call.scale);
  const int64_t channels = call.shape.groups * call.shape.channels;
  ParallelFor(executor, channels, 64, 64.0, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double rsqrt = 1 / std::sqrt(static_cast<double>(var[i]) + call.eps);
      f(i, rsqrt, scale == nullptr ? rsqrt : rsqrt * static_cast<double>(scale[i]));
    }
  });
}

template <typename Scalar>
void Factors(const BatchNormCall& call, Scalar* factors, Executor& executor) {
  OverFactors<Scalar>(call, executor, [&](int64_t i, double, double factor) {
    factors[i] = static_cast<Scalar>(factor);
  });
}

// The elements of a group, and its mask.
BatchNormArrays OfGroup(const BatchNormCall& call, int64_t group) {
  BatchNormArrays from = call;
  const int64_t at = group * call.shape.group_size() * ItemSize(call.dtype);
  for (const void** p : {&from.x, &from.residual, &from.dy, &from.dy2}) *p = Offset(*p, at);
  for (void** p : {&from.y, &from.dx, &from.dresidual}) *p = Offset(*p, at);
  from.mask = Offset(call.mask, group * call.shape.mask_bytes());
  return from;
}

template <typename Scalar>
void Sums(const BatchNormCall& call, Executor& executor) {
  const BatchNormShape& shape = call.shape;
  const BatchNormKernels& kernels = Kernels(call.dtype);
  const int64_t itemsize = ItemSize(call.dtype);
  Scalar* const sums = static_cast<Scalar*>(call.sums);
  const int64_t channels = shape.channels;
  if (shape.outer * shape.inner == 0) {
    std::fill(sums, sums + shape.groups * 2 * channels, Scalar{0});
    return;
  }
  const Cut cut(shape, kOfSums);
  const Parts parts(shape, cut, itemsize);
  const Scalar* const mean = static_cast<const Scalar*>(call.mean);
  const bool has_dx = call.dx != nullptr;
  Buffer<Scalar> factor(has_dx ? shape.groups * channels : 0);
  if (has_dx) Factors<Scalar>(call, factor.begin(), executor);
  // [group, part, sum or product, channel]
  Buffer<double> all(shape.groups * parts.parts * 2 * channels);
  const int moved = 2 + Count(call.dy2, call.dx, call.dresidual);
  parts.Over(executor, static_cast<double>(moved * itemsize), [&](const Task& task) {
    const int64_t width = parts.width();
    Buffer<Scalar> buffer(parts.buffer());
    double* const first =
        all.begin() + (task.group * parts.parts + task.part) * 2 * channels + task.channel;
    const BatchNormArrays from = OfGroup(call, task.group);
    const Scalar* const group_mean = mean + task.group * channels;
    const Scalar* const group_factor = factor.begin() + task.group * channels;
    if (cut.runs) {
      const void* coefficients[] = {group_mean + task.channel,
                                    has_dx ? group_factor + task.channel : nullptr};
      kernels.sums_of_runs(from, parts.Runs(task), shape.mask_bytes(), coefficients, buffer.begin(),
                           first, first + channels);
      return;
    }
    const int64_t padded = RoundUp(width, kBatchNormSlack);
    Buffer<Scalar> table(2 * padded + kBatchNormSlack);
    LayOut<Scalar>(group_mean, 0, shape, task.channel, padded, table.begin());
    if (has_dx) {
      LayOut<Scalar>(group_factor, 0, shape, task.channel, padded, table.begin() + padded);
    }
    const void* coefficients[] = {table.begin(), table.begin() + padded};
    Buffer<double> own(2 * width);
    kernels.sums_of_columns(from, parts.Strip(task), shape.mask_bytes(), coefficients,
                            buffer.begin(), own.begin(), own.begin() + width);
    for (int64_t i = 0; i < 2; ++i) {
      kernels.merge_sums(own.begin() + i * width, cut.repeat, channels * shape.inner, task.channels,
                         shape.inner, first + i * channels);
    }
  });
  const double inverse = 1 / static_cast<double>(shape.outer * shape.inner);
  Buffer<double> merged(2 * channels);
  for (int64_t g = 0; g < shape.groups; ++g) {
    kernels.merge_sums(all.begin() + g * parts.parts * 2 * channels, parts.parts, 2 * channels,
                       2 * channels, 1, merged.begin());
    for (int64_t c = 0; c < 2 * channels; ++c) {
      sums[g * 2 * channels + c] = static_cast<Scalar>(merged.begin()[c] * inverse);
    }
  }
}

// ---- Element-wise passes ------------------------------------------------------------------------

// Calls kernel(group, elements) on pieces of the groups, of which `moved` arrays are moved.
// `values` are the coefficients, [groups, channels]. Null stands for -0.0, the neutral element of
// addition.
template <typename Scalar, int kCount, typename Kernel>
void OverElements(const BatchNormCall& call, int moved, const Scalar* const (&values)[kCount],
                  const void* output, Executor& executor, const Kernel& kernel) {
  const BatchNormShape& shape = call.shape;
  const int64_t size = shape.group_size(), channels = shape.channels;
  const int64_t itemsize = ItemSize(call.dtype), group_bytes = size * itemsize;
  const double bytes_per_element = static_cast<double>(moved * itemsize);
  const bool stream = ShouldStream(shape.groups * group_bytes) &&
                      IsWholeLines(output, shape.groups == 1 ? 0 : group_bytes);
  const auto fence = [&] {
    if (stream) Kernels(call.dtype).fence();
  };
  const Cut cut(shape, size < kFewElements ? kOfFewElements : kOfElements);
  BatchNormKernels::Elements all = {};
  all.stream = stream;
  all.rows = 1;
  if (cut.runs) {
    std::vector<Scalar> none;
    for (const Scalar* v : values) {
      if (v == nullptr) none.assign(static_cast<size_t>(channels), -Scalar{0});
    }
    all.channels = channels;
    all.inner = shape.inner;
    const int64_t pieces = CeilDiv(size, kFlat);
    ParallelFor(executor, shape.groups * pieces, 1, bytes_per_element * static_cast<double>(kFlat),
                [&](int64_t begin, int64_t end) {
                  while (begin < end) {
                    const int64_t group = begin / pieces, first = begin % pieces;
                    const int64_t last = std::min(pieces, first + end - begin);
                    BatchNormKernels::Elements some = all;
                    some.begin = first * kFlat;
                    some.end = std::min(size, last * kFlat);
                    for (int k = 0; k < kCount; ++k) {
                      some.coefficients[k] =
                          values[k] == nullptr ? none.data() : values[k] + group * channels;
                    }
                    kernel(group, some);
                    begin += last - first;
                  }
                  fence();
                });
    return;
  }
  // The rows of a strip are extended to whole blocks of the group, so tables have up to two more
  // blocks.
  const int64_t row = cut.repeat * channels * shape.inner;
  const int64_t width = cut.repeat * cut.channels * shape.inner;
  const int64_t table_size = RoundUp(width, kBatchNormSlack) + 2 * kBatchNormSlack;
  const int64_t rows = CeilDiv(shape.outer, cut.repeat);
  all.stride = row;
  ParallelFor(
      executor, shape.groups * cut.strips * rows, 1, bytes_per_element * static_cast<double>(width),
      [&](int64_t begin, int64_t end) {
        Buffer<Scalar> tables(kCount * table_size + kBatchNormSlack);
        while (begin < end) {
          const int64_t strip = begin / rows % cut.strips, group = begin / rows / cut.strips;
          const int64_t first = begin % rows, last = std::min(rows, first + end - begin);
          const int64_t channel = strip * cut.channels, from = channel * shape.inner;
          const int64_t to = std::min(row, from + cut.repeat * cut.channels * shape.inner);
          for (int k = 0; k < kCount; ++k) {
            LayOut<Scalar>(values[k] == nullptr ? nullptr : values[k] + group * channels,
                           -Scalar{0}, shape, channel, table_size, tables.begin() + k * table_size);
          }
          // If rows are whole blocks, they are processed together, except the last row if the end
          // of the group cuts it off.
          const int64_t whole = row % kBatchNormSlack == 0 ? (size - to) / row + 1 : 0;
          for (int64_t r = first; r < last;) {
            BatchNormKernels::Elements some = all;
            some.begin = std::min(size, RoundUp(r * row + from, kBatchNormSlack));
            some.end = std::min(size, RoundUp(r * row + to, kBatchNormSlack));
            some.rows = std::max<int64_t>(1, std::min(last, whole) - r);
            for (int k = 0; k < kCount; ++k) {
              some.coefficients[k] =
                  tables.begin() + k * table_size + (some.begin - (r * row + from));
            }
            if (some.begin < some.end) kernel(group, some);
            r += some.rows;
          }
          begin += last - first;
        }
        fence();
      });
}

template <typename Scalar>
void Apply(const BatchNormCall& call, Executor& executor) {
  const BatchNormKernels& kernels = Kernels(call.dtype);
  Buffer<Scalar> factor(call.shape.groups * call.shape.channels);
  Factors<Scalar>(call, factor.begin(), executor);
  const Scalar* const values[] = {static_cast<const Scalar*>(call.mean), factor.begin(),
                                  static_cast<const Scalar*>(call.bias)};
  OverElements(call, 2 + Count(call.residual), values, call.y, executor,
               [&](int64_t group, const BatchNormKernels::Elements& elements) {
                 kernels.apply(OfGroup(call, group), call.relu, elements);
               });
}

template <typename Scalar>
void Backward(const BatchNormCall& call, Executor& executor) {
  const BatchNormKernels& kernels = Kernels(call.dtype);
  const int64_t channels = call.shape.channels, all = call.shape.groups * channels;
  Buffer<Scalar> coefficients(3 * all);
  Scalar* const factor = coefficients.begin();
  const Scalar* const sums = static_cast<const Scalar*>(call.sums);
  const Scalar* const dvar = static_cast<const Scalar*>(call.dvar);
  OverFactors<Scalar>(call, executor, [&](int64_t i, double rsqrt, double a) {
    const Scalar* const own = sums + i / channels * 2 * channels + i % channels;
    const double product = static_cast<double>(own[channels]);
    factor[i] = static_cast<Scalar>(a);
    factor[all + i] =
        static_cast<Scalar>(2 * static_cast<double>(dvar[i]) - a * product * rsqrt * rsqrt);
    factor[2 * all + i] = own[0];
  });
  const Scalar* const values[] = {static_cast<const Scalar*>(call.mean), factor, factor + all,
                                  factor + 2 * all, static_cast<const Scalar*>(call.dmean)};
  OverElements(call, 3, values, call.dx, executor,
               [&](int64_t group, const BatchNormKernels::Elements& elements) {
                 kernels.backward(OfGroup(call, group), elements);
               });
}

}  // namespace

void BatchNormStatistics(const BatchNormCall& call, Executor& executor) {
  if (call.shape.groups * call.shape.channels == 0) return;
  WithAccumulator(call.dtype, [&]<typename Scalar>() { Statistics<Scalar>(call, executor); });
}

void BatchNormApply(const BatchNormCall& call, Executor& executor) {
  if (call.shape.groups * call.shape.group_size() == 0) return;
  WithAccumulator(call.dtype, [&]<typename Scalar>() { Apply<Scalar>(call, executor); });
}

void BatchNormSums(const BatchNormCall& call, Executor& executor) {
  if (call.shape.groups * call.shape.channels == 0) return;
  WithAccumulator(call.dtype, [&]<typename Scalar>() { Sums<Scalar>(call, executor); });
}

void BatchNormBackward(const BatchNormCall& call, Executor& executor) {
  if (call.shape.groups * call.shape.group_size() == 0) return;
  WithAccumulator(call.dtype, [&]<typename Scalar>() { Backward<Scalar>(call, executor); });
}

void BatchNormForward(const BatchNormCall& call, Executor& executor) {
  BatchNormStatistics(call, executor);
  BatchNormApply(call, executor);
}

void BatchNormGradient(const BatchNormCall& call, Executor& executor) {
  BatchNormCall of_sums = call;
  of_sums.dx = nullptr;
  BatchNormSums(of_sums, executor);
  BatchNormBackward(call, executor);
}

}  // namespace jax_fastops::cpu

// Group norm on the CPU. A thread has a set of groups of a sample: it sums the elements, and then
// reads them again, from a cache if the set is small. What is done once for a channel is computed
// in float64.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/cpu/buffer.h"
#include "core/cpu/dtype.h"
#include "core/cpu/parallel.h"
#include "core/cpu/pointers.h"
#include "group_norm/group_norm.h"
#include "group_norm/group_norm_simd.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(Kernels, group_norm_kernels)
FASTOPS_DEFINE_TABLE(Active, group_norm_active)

// A row of a set has at least so many channels if these are last, and there are as many.
constexpr int64_t kSetChannels = 64;

// The parameters of a call in the accumulator's type; ones and zeros where they are absent.
template <typename Scalar>
class Parameters {
 public:
  explicit Parameters(const GroupNormCall& call)
      : scale_(call.all_channels()), bias_(call.all_channels()) {
    Fill(call, call.scale, 1, scale_.begin());
    Fill(call, call.bias, 0, bias_.begin());
  }
  double scale(int64_t channel) const { return static_cast<double>(scale_.begin()[channel]); }
  double bias(int64_t channel) const { return static_cast<double>(bias_.begin()[channel]); }

 private:
  static void Fill(const GroupNormCall& call, const GroupNormParameter& from, Scalar otherwise,
                   Scalar* to) {
    const int64_t n = call.all_channels();
    if (from.data == nullptr) {
      std::fill(to, to + n, otherwise);
    } else if (from.wide) {
      std::memcpy(to, from.data, static_cast<size_t>(n) * sizeof(Scalar));
    } else {
      Kernels(call.dtype).widen(from.data, n, to);
    }
  }

  Buffer<Scalar> scale_, bias_;
};

// The mean and the reciprocal standard deviation of a group.
struct Statistics {
  double mean, rstd;
};

template <typename Scalar>
Statistics StatisticsOf(const GroupNormSet& set, int64_t group, double eps) {
  double total[2] = {};
  for (int64_t i = group * set.group_channels; i < (group + 1) * set.group_channels; ++i) {
    total[0] += set.sums[2 * i];
    total[1] += set.sums[2 * i + 1];
  }
  const double n = static_cast<double>(set.group_channels) * static_cast<double>(set.positions);
  const double mean = total[0] / n, square = mean * mean, average = total[1] / n;
  // Finite numbers may have squares that overflow: the variance is infinite, as in the reference.
  const bool huge = std::isinf(square) && std::isfinite(mean);
  double variance = huge ? average : average - square;
  if (std::isinf(static_cast<Scalar>(variance))) variance = std::numeric_limits<double>::infinity();
  return {set.bases[group] + mean, 1 / std::sqrt((variance < 0 ? 0 : variance) + eps)};
}

// A set of a call, and its place.
template <typename Scalar>
struct Work {
  GroupNormSet set;
  int64_t sample, first_group, first_channel;
  int64_t at;  // the first element
  Buffer<Scalar> coefficients;
  Buffer<double> sums, bases;

  Work(const GroupNormCall& call, int64_t sample, int64_t first_group, int64_t groups)
      : sample(sample),
        first_group(first_group),
        first_channel(first_group * call.channels),
        coefficients(kGroupNormRows * groups * call.channels),
        sums(2 * groups * call.channels),
        bases(groups) {
    const bool last = call.inner == 1;
    at = sample * call.sample_size() + first_channel * (last ? 1 : call.inner);
    set = {.groups = groups,
           .group_channels = call.channels,
           .positions = call.positions(),
           .channel_step = last ? 1 : call.inner,
           .position_step = last ? call.all_channels() : 1,
           .coefficients = coefficients.begin(),
           .sums = sums.begin(),
           .bases = bases.begin()};
    std::fill(sums.begin(), sums.begin() + 2 * set.channels(), 0.0);
  }

  void Set(GroupNormRow row, int64_t channel, double value) {
    coefficients.begin()[row * set.channels() + channel] = static_cast<Scalar>(value);
  }
};

// Calls body(work) for each set of each sample.
template <typename Scalar, typename Body>
void OverSets(const GroupNormCall& call, int arrays, Executor& executor, const Body& body) {
  const int64_t wanted = call.inner == 1 ? (kSetChannels + call.channels - 1) / call.channels : 1;
  const int64_t groups = std::min(wanted, call.groups);
  const int64_t sets = (call.groups + groups - 1) / groups;
  const double bytes = static_cast<double>(arrays * ItemSize(call.dtype)) *
                       static_cast<double>(call.sample_size()) / static_cast<double>(sets);
  ParallelFor(executor, call.samples * sets, 1, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % sets * groups;
      Work<Scalar> work(call, i / sets, first, std::min(groups, call.groups - first));
      body(work);
    }
  });
}

// The kernels of the call's activation.
const GroupNormPasses& PassesOf(const GroupNormCall& call) {
  if (!call.active) return Kernels(call.dtype).plain;
  return Active()[static_cast<int>(call.activation)][static_cast<int>(call.dtype)];
}

}  // namespace

void GroupNormForward(const GroupNormForwardCall& call, Executor& executor) {
  const int64_t item = ItemSize(call.dtype);
  const GroupNormKernel kernel = PassesOf(call).forward, sum = Kernels(call.dtype).deviations;
  WithAccumulator(call.dtype, [&]<typename Scalar>() {
    const Parameters<Scalar> parameters(call);
    OverSets<Scalar>(call, 2, executor, [&](Work<Scalar>& work) {
      GroupNormSet& set = work.set;
      set.x = Offset(call.x, work.at * item);
      set.residual = Offset(call.residual, work.at * item);
      set.y = Offset(call.y, work.at * item);
      set.sum = Offset(call.sum, work.at * item);
      sum(set);
      for (int64_t group = 0; group < set.groups; ++group) {
        const Statistics found = StatisticsOf<Scalar>(set, group, call.eps);
        const Scalar rstd = static_cast<Scalar>(found.rstd);
        for (int64_t i = group * set.group_channels; i < (group + 1) * set.group_channels; ++i) {
          const int64_t channel = work.first_channel + i;
          work.Set(kMean, i, found.mean);
          work.Set(kFactor, i, static_cast<double>(rstd) * parameters.scale(channel));
          work.Set(kBias, i, parameters.bias(channel));
        }
        const int64_t at = work.sample * call.groups + work.first_group + group;
        if (call.mean != nullptr)
          static_cast<Scalar*>(call.mean)[at] = static_cast<Scalar>(found.mean);
        if (call.rstd != nullptr) static_cast<Scalar*>(call.rstd)[at] = rstd;
      }
      kernel(set);
    });
  });
}

void GroupNormBackward(const GroupNormBackwardCall& call, Executor& executor) {
  const int64_t item = ItemSize(call.dtype);
  const GroupNormKernel kernel = PassesOf(call).backward;
  WithAccumulator(call.dtype, [&]<typename Scalar>() {
    const Parameters<Scalar> parameters(call);
    const Scalar* const means = static_cast<const Scalar*>(call.mean);
    const Scalar* const rstds = static_cast<const Scalar*>(call.rstd);
    OverSets<Scalar>(call, 3, executor, [&](Work<Scalar>& work) {
      GroupNormSet& set = work.set;
      set.x = Offset(call.s, work.at * item);
      set.dy = Offset(call.dy, work.at * item);
      const int64_t statistic = work.sample * call.groups + work.first_group;
      for (int64_t i = 0; i < set.channels(); ++i) {
        const int64_t at = statistic + i / set.group_channels;
        work.Set(kMean, i, static_cast<double>(means[at]));
        work.Set(kRstd, i, static_cast<double>(rstds[at]));
        work.Set(kFactor, i, parameters.scale(work.first_channel + i));
        work.Set(kBias, i, parameters.bias(work.first_channel + i));
      }
      kernel(set);
      const double n = static_cast<double>(set.group_channels) * static_cast<double>(set.positions);
      for (int64_t group = 0; group < set.groups; ++group) {
        const int64_t begin = group * set.group_channels, end = begin + set.group_channels;
        double total[2] = {};
        for (int64_t i = begin; i < end; ++i) {
          const double scale = parameters.scale(work.first_channel + i);
          for (int k = 0; k < 2; ++k) total[k] += scale * set.sums[2 * i + k];
        }
        const double rstd = static_cast<double>(rstds[statistic + group]);
        for (int64_t i = begin; i < end; ++i) {
          work.Set(kByG, i, rstd * parameters.scale(work.first_channel + i));
          work.Set(kByX, i, -rstd * (total[1] / n) * rstd);
          work.Set(kConstant, i, -rstd * (total[0] / n));
        }
      }
      const int64_t first = work.sample * call.all_channels() + work.first_channel;
      for (int64_t i = 0; i < set.channels(); ++i) {
        const Scalar sums[] = {static_cast<Scalar>(set.sums[2 * i]),
                               static_cast<Scalar>(set.sums[2 * i + 1])};
        if (call.dbias != nullptr) static_cast<Scalar*>(call.dbias)[first + i] = sums[0];
        if (call.dscale != nullptr) static_cast<Scalar*>(call.dscale)[first + i] = sums[1];
      }
      set.dx = Offset(call.dx, work.at * item);
      kernel(set);
    });
  });
}

}  // namespace jax_fastops::cpu

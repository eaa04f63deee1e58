// Group norm, forward and backward: a kernel for each, of jobs in two phases (core/cuda/jobs.cuh).
// A job is a set of groups of a sample (group_norm/plan.h). The first phase sums the elements of
// its parts, and the second one, which finds the elements in the L2 cache, writes the results.
// Until a result is known, its place has what the second phase reads: x + residual, or g.
//
// Statistics. The sum of squares minus the square of the sum cancels if the mean is large. So each
// thread sums deviations from the first value that it has of a channel. Because that value is one
// of those that are summed, the squares of n deviations are at most n + 1 times those from the
// mean: no outlier makes them cancel more than that. The threads' means and squares are then added
// up in double, relative to an element of the group.
//
// Backward, with g = dy * activation'(z) and the sums s1 = sum(g), s2 = sum(g * xhat) of each
// channel: dbias = s1, dscale = s2, and with the averages c1, c2 of scale * s1, scale * s2 over the
// elements of the group, dx = rstd * (g * scale - c1 - xhat * c2).
#include "group_norm/group_norm.h"

#include <cstdint>

#include "core/alignment.h"
#include "core/cuda/dependent.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/jobs.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/math.cuh"
#include "core/cuda/partial_sums.cuh"
#include "core/cuda/vec.cuh"
#include "group_norm/plan.h"
#include "group_norm/tile.cuh"

namespace jax_fastops::cuda {

struct GroupNormFamily;

namespace {

using namespace group_norm;  // NOLINT: this file is a part of it

template <typename Call>
struct Params {
  Call call;
  Plan plan;
  SharedLayout shared;
  Jobs jobs;
};

// What a block has in shared memory.
template <typename Tile, typename Sums>
struct Shared {
  using A = typename Tile::A;

  Sums* sums;     // two of each group, or of each channel
  A* statistics;  // two of each group
  A *base, *table;

  __device__ __forceinline__ explicit Shared(const SharedLayout& at) {
    extern __shared__ __align__(16) char memory[];
    sums = reinterpret_cast<Sums*>(memory + at.sums);
    statistics = reinterpret_cast<A*>(memory + at.statistics);
    base = reinterpret_cast<A*>(memory + at.base);
    table = reinterpret_cast<A*>(memory + at.table);
  }
};

template <typename V>
using Scratch = V[2][kThreads / kWarpSize];

// A sample's workspace: two sums of each group and, in the backward, of each channel in each part;
// a counter of each set; and, in that of the first sample, one of all jobs.
template <typename V, typename A>
struct Workspace {
  A* begin;
  const Plan& plan;
  int row;  // sums of a part

  __device__ __forceinline__ Workspace(const GroupNormCall& call, const Plan& plan, int results,
                                       int64_t sample)
      : begin(static_cast<A*>(call.workspace) + sample * call.workspace_size),
        plan(plan),
        row(2 * results) {}

  __device__ __forceinline__ V* OfGroup(int part, int group) const {
    return reinterpret_cast<V*>(begin) + int64_t{part} * row + 2 * group;
  }
  __device__ __forceinline__ V* OfChannel(int part, int channel) const {
    return OfGroup(part, plan.groups + channel);
  }
  __device__ __forceinline__ uint32_t* CounterOf(int set) const {
    return reinterpret_cast<uint32_t*>(OfGroup(plan.parts, 0)) + set;
  }
};

// Adds up the sums of all parts; sums_of(result, part) is their place. Calls write(result, sums).
template <typename V, typename SumsOf, typename Write>
__device__ __forceinline__ void TotalParts(int results, int parts, Scratch<V>& scratch,
                                           const SumsOf& sums_of, const Write& write) {
  SumTerms<kThreads>(
      results, parts, scratch,
      [&](int result, int part, V(&values)[2]) {
        const V* const sums = sums_of(result, part);
        values[0] = __ldcg(sums), values[1] = __ldcg(sums + 1);
      },
      write);
}

// Runs the jobs of a launch. workspace_of(sample) is their workspace.
template <typename Call, typename WorkspaceOf, typename First, typename Second>
__device__ __forceinline__ void RunAll(const Params<Call>& p, const WorkspaceOf& workspace_of,
                                       const First& first, const Second& second) {
  LetDependentsStart();
  AwaitPredecessors();
  const int sets = p.plan.sets;
  const auto counter_of = [&](uint32_t job) {
    const uint32_t sample = job / sets;
    return workspace_of(sample).CounterOf(static_cast<int>(job - sample * sets));
  };
  RunJobs(p.jobs, workspace_of(0).CounterOf(sets), counter_of, first, second);
}

// -------------------------------------------------------------------------------------------------
// Forward

// squares - a * b, where finite numbers have squares that overflow: then the squares are infinite.
template <typename A>
__device__ __forceinline__ A Without(A squares, A a, A b) {
  const A square = a * b;
  return isinf(square) && isfinite(a) ? squares : squares - square;
}

// The sums of the deviations of each group from its base, and of their squares. take(loaded,
// element) returns the elements of a unit.
template <int kBatch, typename Tile, typename Load, typename Take>
__device__ __forceinline__ void SumDeviations(const Tile& tile, const Shared<Tile, double>& shared,
                                              Scratch<double>& scratch, const Load& load,
                                              const Take& take) {
  using A = typename Tile::A;
  constexpr int kSize = Tile::kSize, kChannels = Tile::kChannels;
  const Plan& plan = tile.plan;
  A shift[kChannels] = {}, s1[kSize] = {}, s2[kSize] = {};
  int count = 0;
  for (int pass = 0; pass < plan.passes; ++pass) {
    const int begin = pass * plan.width;
    tile.template Sweep<kBatch>(begin + tile.slot, load, [&](const auto& loaded, int64_t at) {
      A values[kSize];
      take(loaded, at).Unpack(values);
      if (count++ == 0) {
#pragma unroll
        for (int i = 0; i < kChannels; ++i) shift[i] = values[i];
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const A d = values[i] - shift[kChannels == 1 ? 0 : i];
        s1[i] += d;
        s2[i] = fma(d, d, s2[i]);
      }
    });
    // Channels first, a thread has one group, in all passes together.
    if (!Tile::kIsLast && pass + 1 < plan.passes) continue;
    if constexpr (kChannels == 1) {
#pragma unroll
      for (int i = 1; i < kSize; ++i) s1[0] += s1[i], s2[0] += s2[i];
    }
    const A inverse = count > 0 ? A(1) / static_cast<A>(count * (kSize / kChannels)) : A(0);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      A* const entry = shared.table + 2 * (i * kThreads + static_cast<int>(threadIdx.x));
      entry[0] = shift[i] + s1[i] * inverse;
      entry[1] = Without(s2[i], s1[i], s1[i] * inverse);
    }
    // With several passes there is one group.
    const int first = Tile::kIsLast ? begin : 0;
    const int present = min(tile.channels - first * kChannels, plan.width * kChannels);
    const int columns = tile.groups == 1 ? present : plan.group_channels;
    SumTerms<kThreads>(
        tile.groups, plan.lanes * columns, scratch,
        [&](int group, int term, double (&values)[2]) {
          const int lane = term / columns, column = group * columns + term - lane * columns;
          const int slot = column / kChannels;
          const A* const entry =
              shared.table + 2 * (column % kChannels * kThreads + tile.ThreadOf(lane, slot));
          const int slots = Tile::kIsLast ? 1 : (tile.slots - slot - 1) / plan.width + 1;
          const double n = static_cast<double>(tile.UnitsOf(lane)) * (slots * (kSize / kChannels));
          const double mean =
              static_cast<double>(entry[0]) - static_cast<double>(shared.base[group]);
          values[0] = n == 0 ? 0 : n * mean;
          values[1] = n == 0 ? 0 : static_cast<double>(entry[1]) + n * mean * mean;
        },
        [&](int group, const double (&found)[2]) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            double* const sum = shared.sums + 2 * group + i;
            *sum = first == 0 ? found[i] : *sum + found[i];
          }
        });
    count = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) s1[i] = s2[i] = 0;
  }
}

// Sets the mean and the reciprocal deviation of each group.
template <typename Tile>
__device__ __forceinline__ void FindStatistics(const GroupNormForwardCall& call, const Tile& tile,
                                               const Shared<Tile, double>& shared,
                                               const Workspace<double, typename Tile::A>& workspace,
                                               Scratch<double>& scratch) {
  using T = typename Tile::Element;
  using A = typename Tile::A;
  const Plan& plan = tile.plan;
  TotalParts(
      tile.groups, plan.parts, scratch,
      [&](int group, int part) { return workspace.OfGroup(part, tile.first_group + group); },
      [&](int group, const double (&total)[2]) {
        const double n =
            static_cast<double>(plan.group_channels) * static_cast<double>(plan.positions);
        const double mean = total[0] / n;
        double variance = Without(total[1] / n, mean, mean);
        if (isinf(static_cast<A>(variance))) variance = INFINITY;  // as in the reference
        const A rstd = static_cast<A>(1 / sqrt((variance < 0 ? 0 : variance) + call.eps));
        const A base = BaseOf<T>(call, tile, group);
        const A shifted = static_cast<A>(static_cast<double>(base) + mean);
        shared.statistics[2 * group] = shifted;
        shared.statistics[2 * group + 1] = rstd;
        const int64_t at = tile.sample * plan.groups + tile.first_group + group;
        if (tile.part != 0) return;
        if (call.mean != nullptr) static_cast<A*>(call.mean)[at] = shifted;
        if (call.rstd != nullptr) static_cast<A*>(call.rstd)[at] = rstd;
      });
}

template <typename T, int kBytes, bool kLast>
__global__ void __launch_bounds__(kThreads, kResident)
    ForwardKernel(const __grid_constant__ Params<GroupNormForwardCall> p) {
  using Tile = group_norm::Tile<T, kBytes, kLast>;
  using A = typename Tile::A;
  using V = typename Tile::V;
  constexpr int kSize = Tile::kSize, kChannels = Tile::kChannels;
  __shared__ Scratch<double> scratch;

  const GroupNormForwardCall& call = p.call;
  const Plan& plan = p.plan;
  const Shared<Tile, double> shared(p.shared);
  const T *const x = static_cast<const T*>(call.x), *const r = static_cast<const T*>(call.residual);
  T* const y = static_cast<T*>(call.y);
  // Where x + residual is for the second phase.
  T* const sum = call.sum == nullptr ? y : static_cast<T*>(call.sum);

  const auto workspace_of = [&](int64_t sample) {
    return Workspace<double, A>(call, plan, plan.groups, sample);
  };
  const auto sum_part = [&](uint32_t job, uint32_t part) {
    const Tile tile(plan, job, part);
    for (int group = static_cast<int>(threadIdx.x); group < tile.groups; group += kThreads) {
      shared.base[group] = BaseOf<T>(call, tile, group);
    }
    if (r == nullptr) {
      SumDeviations<4>(
          tile, shared, scratch, [&](int64_t at) { return LoadUnit<T, kBytes>(x + at); },
          [](const V& loaded, int64_t) { return loaded; });
    } else {
      struct Both {
        V x, residual;
      };
      SumDeviations<2>(
          tile, shared, scratch,
          [&](int64_t at) {
            return Both{LoadUnit<T, kBytes>(x + at), LoadUnit<T, kBytes>(r + at)};
          },
          [&](const Both& loaded, int64_t at) {
            A values[kSize], others[kSize];
            loaded.x.Unpack(values);
            loaded.residual.Unpack(others);
#pragma unroll
            for (int i = 0; i < kSize; ++i) values[i] += others[i];
            const V s = V::Packed(values);
            StoreUnit(s, sum + at);
            return s;
          });
    }
    double* const to = workspace_of(tile.sample).OfGroup(tile.part, tile.first_group);
    for (int i = static_cast<int>(threadIdx.x); i < 2 * tile.groups; i += kThreads) {
      to[i] = shared.sums[i];
    }
  };
  const T* const from = r == nullptr ? x : sum;
  const auto write_part = [&](uint32_t job, uint32_t part) {
    const Tile tile(plan, job, part);
    FindStatistics(call, tile, shared, workspace_of(tile.sample), scratch);
    for (int pass = 0; pass < plan.passes; ++pass) {
      const int slot = pass * plan.width + tile.slot;
      A mean[kChannels] = {}, factor[kChannels] = {}, bias[kChannels] = {};
      tile.ForChannels(slot, [&](int i, int channel, int group) {
        mean[i] = shared.statistics[2 * group];
        factor[i] = shared.statistics[2 * group + 1] *
                    ReadParameter<T>(call.scale, tile.first_channel + channel, 1);
        bias[i] = ReadParameter<T>(call.bias, tile.first_channel + channel, 0);
      });
      ForFormula<T>(call, [&](auto formula) {
        const auto load = [&](int64_t at) { return LoadUnit<T, kBytes>(from + at); };
        tile.template Sweep<4>(slot, load, [&](const V& loaded, int64_t at) {
          A z[kSize];
          loaded.Unpack(z);
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            const int c = kChannels == 1 ? 0 : i;
            z[i] = formula.Value(fma(z[i] - mean[c], factor[c], bias[c]));
          }
          StoreUnit(V::Packed(z), y + at);
        });
      });
    }
  };
  RunAll(p, workspace_of, sum_part, write_part);
}

// -------------------------------------------------------------------------------------------------
// Backward

// What the units of a slot need: z = (x - mean) * factor + bias, where factor is rstd * scale.
template <typename Tile>
struct Coefficients {
  using T = typename Tile::Element;
  using A = typename Tile::A;
  static constexpr int kSize = Tile::kSize, kChannels = Tile::kChannels;
  A mean[kChannels] = {}, factor[kChannels] = {}, bias[kChannels] = {};

  __device__ __forceinline__ Coefficients(const GroupNormBackwardCall& call, const Tile& tile,
                                          int slot) {
    const int64_t first = tile.sample * tile.plan.groups + tile.first_group;
    tile.ForChannels(slot, [&](int i, int channel, int group) {
      mean[i] = static_cast<const A*>(call.mean)[first + group];
      factor[i] = static_cast<const A*>(call.rstd)[first + group] *
                  ReadParameter<T>(call.scale, tile.first_channel + channel, 1);
      bias[i] = ReadParameter<T>(call.bias, tile.first_channel + channel, 0);
    });
  }

  // Replaces x by x - mean, and dy by g.
  template <typename Formula>
  __device__ __forceinline__ void Differentiate(Formula, A (&x)[kSize], A (&dy)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int c = kChannels == 1 ? 0 : i;
      x[i] -= mean[c];
      dy[i] = Pull<ActivationMath<T>, Formula>(fma(x[i], factor[c], bias[c]), dy[i]);
    }
  }
};

// The sums of g and of g * (x - mean) of each channel of the set. keep(element, g) may store g.
template <int kBatch, typename Tile, typename Load, typename Keep>
__device__ __forceinline__ void SumGradients(const GroupNormBackwardCall& call, const Tile& tile,
                                             const Shared<Tile, typename Tile::A>& shared,
                                             Scratch<typename Tile::A>& scratch, const Load& load,
                                             const Keep& keep) {
  using A = typename Tile::A;
  constexpr int kSize = Tile::kSize;
  const Plan& plan = tile.plan;
  const auto sum_entries = [&](int first, int results, int terms, const auto& entry_of) {
    SumTerms<kThreads>(
        results, terms, scratch,
        [&](int result, int term, A(&values)[2]) {
          const A* const entry = shared.table + 2 * entry_of(result, term);
          values[0] = entry[0], values[1] = entry[1];
        },
        [&](int result, const A(&found)[2]) {
          A* const sum = shared.sums + 2 * (first + result);
          sum[0] = found[0], sum[1] = found[1];
        });
  };
  for (int pass = 0; pass < plan.passes; ++pass) {
    const int begin = pass * plan.width, slot = begin + tile.slot;
    const Coefficients<Tile> c(call, tile, slot);
    A s1[kSize] = {}, s2[kSize] = {};
    ForFormula<typename Tile::Element>(call, [&](auto formula) {
      tile.template Sweep<kBatch>(slot, load, [&](const auto& loaded, int64_t at) {
        A x[kSize], g[kSize];
        loaded.x.Unpack(x);
        loaded.dy.Unpack(g);
        c.Differentiate(formula, x, g);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          s1[i] += g[i];
          s2[i] = fma(g[i], x[i], s2[i]);
        }
        keep(at, g);
      });
    });
    if constexpr (Tile::kIsLast) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        A* const entry = shared.table + 2 * (i * kThreads + static_cast<int>(threadIdx.x));
        entry[0] = s1[i], entry[1] = s2[i];
      }
      const int first = begin * kSize;
      sum_entries(first, min(tile.channels - first, plan.width * kSize), plan.lanes,
                  [&](int column, int lane) {
                    return column % kSize * kThreads + tile.ThreadOf(lane, column / kSize);
                  });
    } else {
      A values[2] = {};
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[0] += s1[i], values[1] += s2[i];
      Butterfly(Sum(), values, min(plan.lanes, kWarpSize));
      if (tile.lane % kWarpSize == 0 && slot < tile.slots) {
        A* const entry = shared.table + 2 * (tile.lane / kWarpSize * tile.slots + slot);
        entry[0] = values[0], entry[1] = values[1];
      }
    }
  }
  if constexpr (!Tile::kIsLast) {
    sum_entries(0, tile.slots, max(plan.lanes / kWarpSize, 1),
                [&](int slot, int warp) { return warp * tile.slots + slot; });
  }
}

// Stores the sums of the channels of a part, and those of scale * g and scale * g * (x - mean) of
// its groups.
template <typename Tile>
__device__ __forceinline__ void StoreSums(
    const GroupNormBackwardCall& call, const Tile& tile,
    const Shared<Tile, typename Tile::A>& shared,
    const Workspace<typename Tile::A, typename Tile::A>& workspace,
    Scratch<typename Tile::A>& scratch) {
  using A = typename Tile::A;
  const int size = tile.plan.group_channels;
  SumTerms<kThreads>(
      tile.groups, size, scratch,
      [&](int group, int of, A(&values)[2]) {
        const int channel = group * size + of;
        const A scale =
            ReadParameter<typename Tile::Element>(call.scale, tile.first_channel + channel, 1);
        values[0] = scale * shared.sums[2 * channel];
        values[1] = scale * shared.sums[2 * channel + 1];
      },
      [&](int group, const A(&found)[2]) {
        A* const to = workspace.OfGroup(tile.part, tile.first_group + group);
        to[0] = found[0], to[1] = found[1];
      });
  A* const to = workspace.OfChannel(tile.part, tile.first_channel);
  for (int i = static_cast<int>(threadIdx.x); i < 2 * tile.channels; i += kThreads) {
    to[i] = shared.sums[i];
  }
}

// Writes the gradients of a part of the parameters.
template <typename Tile>
__device__ __forceinline__ void WriteGradients(
    const GroupNormBackwardCall& call, const Tile& tile,
    const Workspace<typename Tile::A, typename Tile::A>& workspace,
    Scratch<typename Tile::A>& scratch) {
  using A = typename Tile::A;
  if (call.dscale == nullptr && call.dbias == nullptr) return;
  const Plan& plan = tile.plan;
  const int share = (tile.channels - 1) / plan.parts + 1;
  const int first = min(tile.part * share, tile.channels);
  const A* const rstd =
      static_cast<const A*>(call.rstd) + tile.sample * plan.groups + tile.first_group;
  TotalParts(
      min(share, tile.channels - first), plan.parts, scratch,
      [&](int of, int part) { return workspace.OfChannel(part, tile.first_channel + first + of); },
      [&](int of, const A(&total)[2]) {
        const int channel = first + of;
        const int64_t at = tile.sample * plan.channels + tile.first_channel + channel;
        if (call.dbias != nullptr) static_cast<A*>(call.dbias)[at] = total[0];
        if (call.dscale != nullptr) {
          static_cast<A*>(call.dscale)[at] = total[1] * rstd[channel / plan.group_channels];
        }
      });
}

template <typename T, int kBytes, bool kLast>
__global__ void __launch_bounds__(kThreads, kResident)
    BackwardKernel(const __grid_constant__ Params<GroupNormBackwardCall> p) {
  using Tile = group_norm::Tile<T, kBytes, kLast>;
  using A = typename Tile::A;
  using V = typename Tile::V;
  constexpr int kSize = Tile::kSize, kChannels = Tile::kChannels;
  __shared__ Scratch<A> scratch;

  const GroupNormBackwardCall& call = p.call;
  const Plan& plan = p.plan;
  const int results = plan.groups + static_cast<int>(plan.channels);
  const Shared<Tile, A> shared(p.shared);
  const T *const x = static_cast<const T*>(call.s), *const dy = static_cast<const T*>(call.dy);
  T* const dx = static_cast<T*>(call.dx);
  struct Loaded {
    V x, dy;
  };
  const auto load = [x](const T* dy) {
    return [=](int64_t at) {
      return Loaded{LoadUnit<T, kBytes>(x + at), LoadUnit<T, kBytes>(dy + at)};
    };
  };

  const auto workspace_of = [&](int64_t sample) {
    return Workspace<A, A>(call, plan, results, sample);
  };
  const auto sum_part = [&](uint32_t job, uint32_t part) {
    const Tile tile(plan, job, part);
    SumGradients<2>(call, tile, shared, scratch, load(dy), [&](int64_t at, const A(&g)[kSize]) {
      if (call.active) StoreUnit(V::Packed(g), dx + at);
    });
    StoreSums(call, tile, shared, workspace_of(tile.sample), scratch);
  };
  const auto write_part = [&](uint32_t job, uint32_t part) {
    const Tile tile(plan, job, part);
    const auto workspace = workspace_of(tile.sample);
    const int64_t first = tile.sample * plan.groups + tile.first_group;
    const A *const means = static_cast<const A*>(call.mean) + first, *const rstds =
                                                                         static_cast<const A*>(
                                                                             call.rstd) +
                                                                         first;
    // The averages rstd * c1, and rstd * rstd * c2.
    TotalParts(
        tile.groups, plan.parts, scratch,
        [&](int group, int part) { return workspace.OfGroup(part, tile.first_group + group); },
        [&](int group, const A(&total)[2]) {
          const A rstd = rstds[group];
          const A n = static_cast<A>(plan.group_channels) * static_cast<A>(plan.positions);
          shared.statistics[2 * group] = rstd * (total[0] / n);
          shared.statistics[2 * group + 1] = rstd * (rstd * (rstd * total[1] / n));
        });
    for (int pass = 0; pass < plan.passes; ++pass) {
      const int slot = pass * plan.width + tile.slot;
      // dx = g * factor - (x - mean) * by_x - less
      A mean[kChannels] = {}, factor[kChannels] = {}, by_x[kChannels] = {}, less[kChannels] = {};
      tile.ForChannels(slot, [&](int i, int channel, int group) {
        mean[i] = means[group];
        factor[i] = rstds[group] * ReadParameter<T>(call.scale, tile.first_channel + channel, 1);
        less[i] = shared.statistics[2 * group];
        by_x[i] = shared.statistics[2 * group + 1];
      });
      const T* const g = call.active ? dx : dy;
      tile.template Sweep<2>(slot, load(g), [&](const Loaded& loaded, int64_t at) {
        A d[kSize], g[kSize];
        loaded.x.Unpack(d);
        loaded.dy.Unpack(g);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const int c = kChannels == 1 ? 0 : i;
          d[i] = fma(g[i], factor[c], -fma(d[i] - mean[c], by_x[c], less[c]));
        }
        StoreUnit(V::Packed(d), dx + at);
      });
    }
    WriteGradients(call, tile, workspace, scratch);
  };
  RunAll(p, workspace_of, sum_part, write_part);
}

// -------------------------------------------------------------------------------------------------
// Launches

template <typename Call, typename T, int kBytes, bool kLast>
cudaError_t LaunchAll(Params<Call> params, int processors, cudaStream_t stream) {
  void (*kernel)(Params<Call>);
  if constexpr (std::is_same_v<Call, GroupNormForwardCall>) {
    kernel = KernelOf<GroupNormFamily, ForwardKernel<T, kBytes, kLast>>();
  } else {
    kernel = KernelOf<GroupNormFamily, BackwardKernel<T, kBytes, kLast>>();
  }
  const Jobs& jobs = params.jobs;
  LaunchConfig config = {.block = dim3(kThreads),
                         .shared = static_cast<size_t>(params.shared.bytes),
                         .cooperative = true};
  cudaError_t error = cudaErrorCooperativeLaunchTooLarge;
  // Any number of blocks will do, if the device is shared and has less room than it says.
  for (uint32_t blocks = std::min<uint32_t>(kResident * processors, jobs.items());
       error == cudaErrorCooperativeLaunchTooLarge && blocks > 0; blocks /= 2) {
    config.grid = dim3(blocks);
    params.jobs.lead = static_cast<uint32_t>(
        std::min<int64_t>(CeilDiv(blocks + blocks / 4, jobs.parts), jobs.count));
    error = Launch(kernel, config, stream, params);
  }
  return error;
}

template <typename Call>
cudaError_t Run(const Call& call, Shape shape, int64_t max_parts, int alignment,
                cudaStream_t stream) {
  if (call.samples == 0) return cudaSuccess;
  Device device;
  const cudaError_t error = CurrentDevice(&device);
  if (error != cudaSuccess) return error;
  const Plan plan = MakePlan(shape, alignment, max_parts, device.processors);
  const int64_t jobs = shape.samples * plan.sets;
  if (jobs * plan.parts > INT32_MAX) return cudaErrorInvalidConfiguration;
  const Params<Call> params = {call,
                               plan,
                               LayoutOf(plan, shape),
                               {static_cast<uint32_t>(jobs), static_cast<uint32_t>(plan.parts), 0}};
  return ForDType(call.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const auto launch = [&](auto unit) {
      constexpr int kBytes = decltype(unit)::value;
      return plan.last ? LaunchAll<Call, T, kBytes, true>(params, device.processors, stream)
                       : LaunchAll<Call, T, kBytes, false>(params, device.processors, stream);
    };
    constexpr int kItem = static_cast<int>(sizeof(T));
    if constexpr (kItem < 8) {
      if (plan.unit > 1) return launch(std::integral_constant<int, kUnitBytes>());
    }
    return launch(std::integral_constant<int, kItem>());
  });
}

// The parts for whose sums the workspace of a sample has room; jax_fastops/group_norm.py makes it.
int64_t MaxParts(const GroupNormCall& call, int64_t values) {
  return std::max<int64_t>(call.workspace_size / values - 3, 1);
}

Shape ShapeOf(const GroupNormCall& call, bool backward) {
  const int item = static_cast<int>(DTypeSize(call.dtype));
  return {call.samples,    call.groups, call.channels,     call.positions(),
          call.inner == 1, item,        item == 8 ? 8 : 4, backward};
}

}  // namespace

cudaError_t GroupNormForward(const GroupNormForwardCall& call, cudaStream_t stream) {
  // A part's sums are two doubles of each group.
  return Run(call, ShapeOf(call, false), MaxParts(call, call.groups * 4),
             CommonAlignment({call.x, call.residual, call.y, call.sum}), stream);
}

cudaError_t GroupNormBackward(const GroupNormBackwardCall& call, cudaStream_t stream) {
  return Run(call, ShapeOf(call, true), MaxParts(call, (call.all_channels() + call.groups) * 2),
             CommonAlignment({call.dy, call.s, call.dx}), stream);
}

cudaError_t LoadGroupNormKernels() { return LoadKernels<GroupNormFamily>(); }

}  // namespace jax_fastops::cuda

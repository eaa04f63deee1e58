// Group norm, forward and backward: a kernel for each, which has two halves. The first half sums
// the elements, the second one writes the results. group_norm/plan.h says how blocks divide an
// array, and whether the elements are in shared memory (kKeeps), or are read again by a launch for
// the second half. Asynchronous copies fill the shared memory, so that all loads of a block are
// under way at once.
//
// Statistics. The sum of squares minus the square of the sum cancels if the mean is large. So each
// thread sums deviations from the first value that it has of a channel. Because that value is one
// of those that are summed, the squares of n deviations are at most n + 1 times those from the
// mean: no outlier makes them cancel more than that. The threads' means and squares are then added
// up in double, relative to an element of the group.
//
// Backward, with g = dy * activation'(z) and the sums s1 = sum(g), s2 = sum(g * xhat) of each
// channel: dbias = s1, dscale = s2, and with the averages c1, c2 of scale * s1, scale * s2 over the
// elements of the group, dx = rstd * (g * scale - c1 - xhat * c2). What is kept is g rounded to the
// type of x, because computing it again would take longer than memory does.
#include "group_norm/group_norm.h"

#include <cstdint>

#include "core/alignment.h"
#include "core/cuda/dependent.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/group.cuh"
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

// What a launch does. With kKeeps, it does both.
enum class Half { kSums, kResults };

template <typename Call>
struct Params {
  Call call;
  Plan plan;
  SharedLayout shared;
  Half half;
};

// What a block has in shared memory.
template <typename Tile, typename Sums>
struct Shared {
  using A = typename Tile::A;

  Sums *sums, *group_sums;  // two of each group, or, in the backward, of each channel and group
  A *statistics, *base, *table;
  char* kept;  // of this thread

  __device__ __forceinline__ explicit Shared(const SharedLayout& at) {
    extern __shared__ __align__(16) char memory[];
    sums = reinterpret_cast<Sums*>(memory + at.sums);
    group_sums = reinterpret_cast<Sums*>(memory + at.group_sums);
    statistics = reinterpret_cast<A*>(memory + at.statistics);
    base = reinterpret_cast<A*>(memory + at.base);
    table = reinterpret_cast<A*>(memory + at.table);
    kept = memory + at.kept + threadIdx.x * (Tile::kStride / kThreads);
  }
};

template <typename V>
using Scratch = V[2][kThreads / kWarpSize];

// The sums of the first part in the workspace. The next part has its sums 2 * `all` numbers later.
template <typename V, typename A>
__device__ __forceinline__ V* StoredSums(const GroupNormCall& call, int64_t sample, int first) {
  return reinterpret_cast<V*>(static_cast<A*>(call.workspace) + sample * call.workspace_size) +
         2 * first;
}

// Stores the sums of a part.
template <typename V>
__device__ __forceinline__ void StoreSums(const V* sums, int results, V* to) {
  for (int i = static_cast<int>(threadIdx.x); i < 2 * results; i += kThreads) to[i] = sums[i];
}

// Adds up the sums of the parts: of the blocks of the cluster, or those in the workspace, `stride`
// apart. Calls write(result, sums). With kKeeps, it is called between barriers of the cluster.
template <bool kKeeps, typename V, typename Write>
__device__ __forceinline__ void TotalParts(int results, int parts, const V* sums, const V* stored,
                                           int64_t stride, Scratch<V>& scratch,
                                           const Write& write) {
  SumTerms<kThreads>(
      results, parts, scratch,
      [&](int result, int part, V(&values)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 2 * result + i;
          values[i] = kKeeps ? FromBlock(sums + at, part) : __ldcg(stored + part * stride + at);
        }
      },
      write);
}

// What a block has in shared memory is there for the others, until they have arrived again.
template <bool kKeeps>
__device__ __forceinline__ void ShowCluster() {
  if constexpr (!kKeeps) return;
  ArriveAtCluster();
  AwaitCluster();
}
template <bool kKeeps>
__device__ __forceinline__ void LeaveCluster() {
  if constexpr (kKeeps) ArriveAtCluster();  // AwaitCluster must follow
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
    const float each = 1 / static_cast<float>(columns);
    SumTerms<kThreads>(
        tile.groups, plan.lanes * columns, scratch,
        [&](int group, int term, double (&values)[2]) {
          // term / columns: lanes are so few that the quotient is exact.
          const int lane = static_cast<int>((static_cast<float>(term) + 0.5f) * each);
          const int column = group * columns + term - lane * columns;
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
template <bool kKeeps, typename Tile>
__device__ __forceinline__ void FindStatistics(const GroupNormForwardCall& call, const Tile& tile,
                                               const Shared<Tile, double>& shared,
                                               const double* stored, Scratch<double>& scratch) {
  using A = typename Tile::A;
  const Plan& plan = tile.plan;
  TotalParts<kKeeps>(
      tile.groups, plan.parts, shared.sums, stored, int64_t{2} * plan.groups, scratch,
      [&](int group, const double (&total)[2]) {
        const double n =
            static_cast<double>(plan.group_channels) * static_cast<double>(plan.positions);
        const double mean = total[0] / n;
        double variance = Without(total[1] / n, mean, mean);
        if (isinf(static_cast<A>(variance))) variance = INFINITY;  // as in the reference
        const A rstd = static_cast<A>(1 / sqrt((variance < 0 ? 0 : variance) + call.eps));
        const A shifted = static_cast<A>(static_cast<double>(shared.base[group]) + mean);
        shared.statistics[2 * group] = shifted;
        shared.statistics[2 * group + 1] = rstd;
        const int64_t at = tile.sample * plan.groups + tile.first_group + group;
        if (tile.part != 0) return;
        if (call.mean != nullptr) static_cast<A*>(call.mean)[at] = shifted;
        if (call.rstd != nullptr) static_cast<A*>(call.rstd)[at] = rstd;
      });
}

template <typename T, int kBytes, bool kLast, bool kKeeps>
__global__ void __launch_bounds__(kThreads, kKeeps ? kForwardBlocks : kBackwardBlocks)
    ForwardKernel(const __grid_constant__ Params<GroupNormForwardCall> p) {
  using Tile = group_norm::Tile<T, kBytes, kLast>;
  using A = typename Tile::A;
  using V = typename Tile::V;
  constexpr int kSize = Tile::kSize, kChannels = Tile::kChannels, kStride = Tile::kStride;
  constexpr int kBatch = kKeeps ? 2 : kBytes == 16 ? 4 : 8;
  __shared__ Scratch<double> scratch;

  LetDependentsStart();
  AwaitPredecessors();
  const GroupNormForwardCall& call = p.call;
  const Plan& plan = p.plan;
  const bool both = kKeeps, results = p.half == Half::kResults;
  // The second launch begins with what the first one read last.
  const Tile tile(plan, !both && results ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const Shared<Tile, double> shared(p.shared);
  const T *const x = static_cast<const T*>(call.x), *const r = static_cast<const T*>(call.residual);
  T *const sum = static_cast<T*>(call.sum), *const y = static_cast<T*>(call.y);
  const int step = r == nullptr ? kStride : 2 * kStride;
  char* next = shared.kept;

  if constexpr (kKeeps) {
    if (r == nullptr) {
      tile.Keep({x}, next);
    } else {
      tile.Keep({x, r}, next);
    }
  }
  for (int group = static_cast<int>(threadIdx.x); group < tile.groups; group += kThreads) {
    const int64_t at = tile.BaseOf(group);
    const A first = ToCompute(x[at]) + (r == nullptr ? A(0) : ToCompute(r[at]));
    shared.base[group] = first - first == A(0) ? first : A(0);
  }

  struct Loaded {
    V x, residual;
    char* place;
  };
  const auto load_x = [&](int64_t at) {
    if constexpr (!kKeeps) return V::Load(x + at);
    const char* const place = next;
    next += step;
    return V::Load(place);
  };
  const auto load_both = [&](int64_t at) {
    if constexpr (!kKeeps) return Loaded{V::Load(x + at), V::Load(r + at), nullptr};
    char* const place = next;
    next += step;
    return Loaded{V::Load(place), V::Load(place + kStride), place};
  };
  const auto added = [&](const Loaded& loaded) {
    A values[kSize], others[kSize];
    loaded.x.Unpack(values);
    loaded.residual.Unpack(others);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] += others[i];
    return V::Packed(values);
  };

  double* const stored =
      kKeeps ? nullptr : StoredSums<double, A>(call, tile.sample, tile.first_group);
  if (both || !results) {
    if (r == nullptr) {
      SumDeviations<kBatch>(tile, shared, scratch, load_x,
                            [](const V& loaded, int64_t) { return loaded; });
    } else {
      SumDeviations<kBatch / 2>(tile, shared, scratch, load_both,
                                [&](const Loaded& loaded, int64_t at) {
                                  const V s = added(loaded);
                                  if (sum != nullptr) StoreUnit(s, sum + at);
                                  if constexpr (kKeeps) s.Store(loaded.place);
                                  return s;
                                });
    }
    if (!both) {
      return StoreSums(shared.sums, tile.groups, stored + int64_t{2} * plan.groups * tile.part);
    }
  }
  ShowCluster<kKeeps>();
  FindStatistics<kKeeps>(call, tile, shared, stored, scratch);
  LeaveCluster<kKeeps>();

  next = shared.kept;
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
      const auto write = [&](const V& s, int64_t at) {
        A z[kSize];
        s.Unpack(z);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const int c = kChannels == 1 ? 0 : i;
          z[i] = formula.Value(fma(z[i] - mean[c], factor[c], bias[c]));
        }
        StoreUnit(V::Packed(z), y + at);
      };
      if (kKeeps || r == nullptr) {
        tile.template Sweep<kKeeps ? 2 : 4>(slot, load_x, write);
      } else {
        tile.template Sweep<2>(slot, load_both,
                               [&](const Loaded& loaded, int64_t at) { write(added(loaded), at); });
      }
    });
  }
  if constexpr (kKeeps) AwaitCluster();
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

// The sums of g and of g * (x - mean) of each channel of the set. keep(loaded, g) may store g.
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
      tile.template Sweep<kBatch>(slot, load, [&](const auto& loaded, int64_t) {
        A x[kSize], g[kSize];
        loaded.x.Unpack(x);
        loaded.dy.Unpack(g);
        c.Differentiate(formula, x, g);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          s1[i] += g[i];
          s2[i] = fma(g[i], x[i], s2[i]);
        }
        keep(loaded, g);
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

// Sets the sums of scale * g and of scale * g * (x - mean) of each group, from those of its
// channels.
template <typename Tile>
__device__ __forceinline__ void SumGroups(const GroupNormBackwardCall& call, const Tile& tile,
                                          const Shared<Tile, typename Tile::A>& shared,
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
        shared.group_sums[2 * group] = found[0];
        shared.group_sums[2 * group + 1] = found[1];
      });
}

// Sets the averages rstd * c1 and rstd * rstd * c2 of each group, and writes the gradients of a
// part of the parameters. The sums of groups are stored before those of channels.
template <bool kKeeps, typename Tile>
__device__ __forceinline__ void FindAverages(const GroupNormBackwardCall& call, const Tile& tile,
                                             const Shared<Tile, typename Tile::A>& shared,
                                             const typename Tile::A* stored, int64_t stride,
                                             Scratch<typename Tile::A>& scratch) {
  using A = typename Tile::A;
  const Plan& plan = tile.plan;
  const A* const rstds =
      static_cast<const A*>(call.rstd) + tile.sample * plan.groups + tile.first_group;
  TotalParts<kKeeps>(tile.groups, plan.parts, shared.group_sums, stored + 2 * tile.first_group,
                     stride, scratch, [&](int group, const A(&total)[2]) {
                       const A rstd = rstds[group];
                       const A n =
                           static_cast<A>(plan.group_channels) * static_cast<A>(plan.positions);
                       shared.statistics[2 * group] = rstd * (total[0] / n);
                       shared.statistics[2 * group + 1] = rstd * (rstd * (rstd * total[1] / n));
                     });
  if (call.dscale == nullptr && call.dbias == nullptr) return;
  const int share = (tile.channels - 1) / plan.parts + 1;
  const int first = min(tile.part * share, tile.channels);
  TotalParts<kKeeps>(
      min(share, tile.channels - first), plan.parts, shared.sums + 2 * first,
      stored + 2 * (plan.groups + tile.first_channel + first), stride, scratch,
      [&](int of, const A(&total)[2]) {
        const int channel = first + of;
        const int64_t at = tile.sample * plan.channels + tile.first_channel + channel;
        if (call.dbias != nullptr) static_cast<A*>(call.dbias)[at] = total[0];
        if (call.dscale != nullptr) {
          static_cast<A*>(call.dscale)[at] = total[1] * rstds[channel / plan.group_channels];
        }
      });
}

template <typename T, int kBytes, bool kLast, bool kKeeps>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks)
    BackwardKernel(const __grid_constant__ Params<GroupNormBackwardCall> p) {
  using Tile = group_norm::Tile<T, kBytes, kLast>;
  using A = typename Tile::A;
  using V = typename Tile::V;
  constexpr int kSize = Tile::kSize, kChannels = Tile::kChannels, kStride = Tile::kStride;
  constexpr int kBatch = kKeeps ? 2 : kBytes == 16 ? 2 : 4;
  __shared__ Scratch<A> scratch;

  LetDependentsStart();
  AwaitPredecessors();
  const GroupNormBackwardCall& call = p.call;
  const Plan& plan = p.plan;
  const bool both = kKeeps, results = p.half == Half::kResults;
  const Tile tile(plan, !both && results ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  const Shared<Tile, A> shared(p.shared);
  const T *const x = static_cast<const T*>(call.s), *const dy = static_cast<const T*>(call.dy);
  T* const dx = static_cast<T*>(call.dx);
  char* next = shared.kept;
  if constexpr (kKeeps) tile.Keep({x, dy}, next);

  struct Loaded {
    V x, dy;
    char* place;
  };
  const auto load = [&](int64_t at) {
    Loaded loaded;
    if constexpr (kKeeps) {
      loaded.place = next + kStride;
      loaded.x = V::Load(next);
      loaded.dy = V::Load(next + kStride);
      next += 2 * kStride;
    } else {
      loaded.x = V::Load(x + at);
      loaded.dy = V::Load(dy + at);
    }
    return loaded;
  };

  A* const stored = kKeeps ? nullptr : StoredSums<A, A>(call, tile.sample, 0);
  const int64_t stride = 2 * (plan.groups + plan.channels);
  if (both || !results) {
    SumGradients<kBatch>(call, tile, shared, scratch, load,
                         [&](const Loaded& loaded, const A(&g)[kSize]) {
                           if (kKeeps && call.active) V::Packed(g).Store(loaded.place);
                         });
    SumGroups(call, tile, shared, scratch);
    if (!both) {
      A* const to = stored + stride * tile.part;
      StoreSums(shared.group_sums, tile.groups, to + 2 * tile.first_group);
      return StoreSums(shared.sums, tile.channels, to + 2 * (plan.groups + tile.first_channel));
    }
  }
  ShowCluster<kKeeps>();
  FindAverages<kKeeps>(call, tile, shared, stored, stride, scratch);
  LeaveCluster<kKeeps>();

  next = shared.kept;
  for (int pass = 0; pass < plan.passes; ++pass) {
    const int slot = pass * plan.width + tile.slot;
    const Coefficients<Tile> c(call, tile, slot);
    // dx = g * factor - (x - mean) * by_x - less
    A by_x[kChannels] = {}, less[kChannels] = {};
    tile.ForChannels(slot, [&](int i, int, int group) {
      less[i] = shared.statistics[2 * group];
      by_x[i] = shared.statistics[2 * group + 1];
    });
    const auto write = [&](const Loaded& loaded, int64_t at, const auto& differentiate) {
      A d[kSize], g[kSize];
      loaded.x.Unpack(d);
      loaded.dy.Unpack(g);
      differentiate(d, g);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int of = kChannels == 1 ? 0 : i;
        d[i] = fma(g[i], c.factor[of], -fma(d[i], by_x[of], less[of]));
      }
      StoreUnit(V::Packed(d), dx + at);
    };
    if constexpr (kKeeps) {  // what is kept is g
      tile.template Sweep<kBatch>(slot, load, [&](const Loaded& loaded, int64_t at) {
        write(loaded, at,
              [&](A(&d)[kSize], A(&g)[kSize]) { c.Differentiate(Identity<T>(), d, g); });
      });
    } else {
      ForFormula<T>(call, [&](auto formula) {
        tile.template Sweep<kBatch>(slot, load, [&](const Loaded& loaded, int64_t at) {
          write(loaded, at, [&](A(&d)[kSize], A(&g)[kSize]) { c.Differentiate(formula, d, g); });
        });
      });
    }
  }
  if constexpr (kKeeps) AwaitCluster();
}

// -------------------------------------------------------------------------------------------------
// Launches

cudaError_t GetLimits(Limits* limits) {
  static PerDevice<Limits> known;
  return known.Get(limits, [](Limits* found) {
    Device device;
    cudaError_t error = CurrentDevice(&device);
    if (error == cudaSuccess) error = LoadKernels<GroupNormFamily>();
    if (error != cudaSuccess) return error;
    found->processors = device.processors;
    found->shared_per_block = device.shared_per_block - 1024;  // some is not dynamic
    found->shared_per_processor = device.shared_per_processor;
    const auto kernel = reinterpret_cast<const void*>(
        KernelOf<GroupNormFamily, BackwardKernel<float, 4 * kUnit, true, true>>());
    // Two blocks on a processor, the fewest that a plan has.
    const LaunchConfig config = {.block = dim3(kThreads),
                                 .shared = static_cast<size_t>(found->shared_per_block / 2)};
    found->max_cluster = LargestCluster(kernel, config, kMaxCluster);
    return cudaSuccess;
  });
}

template <typename Call, typename T, int kBytes, bool kLast, bool kKeeps>
cudaError_t LaunchHalf(Params<Call> params, Half half, int64_t blocks, cudaStream_t stream) {
  params.half = half;
  void (*kernel)(Params<Call>);
  if constexpr (std::is_same_v<Call, GroupNormForwardCall>) {
    kernel = KernelOf<GroupNormFamily, ForwardKernel<T, kBytes, kLast, kKeeps>>();
  } else {
    kernel = KernelOf<GroupNormFamily, BackwardKernel<T, kBytes, kLast, kKeeps>>();
  }
  const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(blocks)),
                               .block = dim3(kThreads),
                               .shared = static_cast<size_t>(params.shared.bytes),
                               .cluster = kKeeps ? params.plan.parts : 1,
                               .dependent = true};
  return Launch(kernel, config, stream, params);
}

template <typename Call>
cudaError_t Run(const Call& call, Shape shape, int64_t max_parts, int alignment,
                cudaStream_t stream) {
  if (call.samples == 0) return cudaSuccess;
  Limits limits;
  const cudaError_t error = GetLimits(&limits);
  if (error != cudaSuccess) return error;
  const Plan plan = MakePlan(shape, alignment, max_parts, limits);
  const int64_t blocks = shape.samples * plan.sets * plan.parts;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const Params<Call> params = {call, plan, LayoutOf(plan, shape), {}};
  return ForDType(call.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const auto launch = [&](auto unit, auto last) {
      constexpr int kBytes = decltype(unit)::value;
      constexpr bool kLast = decltype(last)::value;
      if (plan.kept_units > 0) {
        return LaunchHalf<Call, T, kBytes, kLast, true>(params, Half::kSums, blocks, stream);
      }
      const cudaError_t error =
          LaunchHalf<Call, T, kBytes, kLast, false>(params, Half::kSums, blocks, stream);
      if (error != cudaSuccess) return error;
      return LaunchHalf<Call, T, kBytes, kLast, false>(params, Half::kResults, blocks, stream);
    };
    const auto by_layout = [&](auto unit) {
      return plan.last ? launch(unit, std::true_type()) : launch(unit, std::false_type());
    };
    constexpr int kItem = static_cast<int>(sizeof(T));
    if constexpr (kItem < 8) {
      if (plan.unit > 1) return by_layout(std::integral_constant<int, kUnit * kItem>());
    }
    return by_layout(std::integral_constant<int, kItem>());
  });
}

Shape ShapeOf(const GroupNormCall& call, int arrays, bool backward) {
  const int item = static_cast<int>(DTypeSize(call.dtype));
  return {call.samples, call.groups,       call.channels, call.positions(), call.inner == 1,
          item,         item == 8 ? 8 : 4, arrays,        backward};
}

}  // namespace

cudaError_t GroupNormForward(const GroupNormForwardCall& call, cudaStream_t stream) {
  // A part's sums are two doubles of each group.
  return Run(call, ShapeOf(call, call.residual == nullptr ? 1 : 2, false),
             call.workspace_size / (call.groups * 4),
             CommonAlignment({call.x, call.residual, call.y, call.sum}), stream);
}

cudaError_t GroupNormBackward(const GroupNormBackwardCall& call, cudaStream_t stream) {
  return Run(call, ShapeOf(call, 2, true),
             call.workspace_size / ((call.groups + call.all_channels()) * 2),
             CommonAlignment({call.dy, call.s, call.dx}), stream);
}

cudaError_t LoadGroupNormKernels() {
  Limits limits;
  return GetLimits(&limits);
}

}  // namespace jax_fastops::cuda

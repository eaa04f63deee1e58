// Group norm, forward and backward: one kernel each, which has two halves. The first half reads the
// elements and sums, the second one writes the results. group_norm/plan.h says how blocks divide an
// array, and whether the second half has the elements in shared memory or reads them again, in a
// launch of its own.
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

// What a launch does.
enum class Half { kBoth, kSums, kResults };

template <typename Call>
struct Params {
  Call call;
  Plan plan;
  SharedLayout shared;
  Half half;
};

template <typename U>
__device__ __forceinline__ U* SharedAt(uint4* memory, int bytes) {
  return reinterpret_cast<U*>(reinterpret_cast<char*>(memory) + bytes);
}

// The workspace of a part: `size` pairs for each group, or for each channel.
template <typename V, typename A>
__device__ __forceinline__ V* PartSums(void* workspace, int64_t size, int64_t sample, int part,
                                       int64_t all, int first) {
  return reinterpret_cast<V*>(static_cast<A*>(workspace) + sample * size) +
         (part * all + first) * 2;
}

// Adds up the sums of the parts: of the blocks of the cluster, or those in the workspace, where
// part 0 begins at `stored` and the others are `stride` apart. Calls write(result, sums).
template <typename V, typename Write>
__device__ __forceinline__ void TotalParts(int results, int parts, const V* own, const V* stored,
                                           int64_t stride, V (&scratch)[2][kThreads / kWarpSize],
                                           const Write& write) {
  if (stored == nullptr) {
    ArriveAtCluster();
    AwaitCluster();
  }
  SumTerms<kThreads>(
      results, parts, scratch,
      [&](int result, int part, V(&values)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 2 * result + i;
          values[i] =
              stored == nullptr ? FromBlock(own + at, part) : __ldcg(stored + part * stride + at);
        }
      },
      write);
  if (stored == nullptr) ArriveAtCluster();  // each block waits for it before it exits
}

// -------------------------------------------------------------------------------------------------
// Forward

// squares - a * b, where finite numbers have squares that overflow: then the squares are infinite.
template <typename A>
__device__ __forceinline__ A Without(A squares, A a, A b) {
  const A square = a * b;
  return isinf(square) && isfinite(a) ? squares : squares - square;
}

// The first half: sums of the deviations of each group from `base`, and of their squares.
// take(loaded, element) returns the elements of a unit.
template <typename Tile, typename Load, typename Take>
__device__ __forceinline__ void SumDeviations(const Tile& tile, const typename Tile::A* base,
                                              typename Tile::A* table, double* sums,
                                              const Load& load, const Take& take) {
  using A = typename Tile::A;
  constexpr int kSize = Tile::kSize, kChannels = Tile::kChannels;
  __shared__ double scratch[2][kThreads / kWarpSize];
  const Plan& plan = tile.plan;
  A shift[kChannels] = {}, s1[kSize] = {}, s2[kSize] = {};
  int count = 0;
  for (int pass = 0; pass < plan.passes; ++pass) {
    const int begin = pass * plan.width;
    tile.template Sweep<4>(begin + tile.slot, load, [&](const auto& loaded, int64_t at) {
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
      A* const entry = table + 2 * (i * kThreads + static_cast<int>(threadIdx.x));
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
              table + 2 * (column % kChannels * kThreads + tile.ThreadOf(lane, slot));
          const int slots = Tile::kIsLast ? 1 : (tile.slots - slot - 1) / plan.width + 1;
          const int64_t n = int64_t{tile.UnitsOf(lane)} * slots * (kSize / kChannels);
          const double mean = static_cast<double>(entry[0]) - static_cast<double>(base[group]);
          values[0] = n == 0 ? 0 : static_cast<double>(n) * mean;
          values[1] =
              n == 0 ? 0 : static_cast<double>(entry[1]) + static_cast<double>(n) * mean * mean;
        },
        [&](int group, const double (&found)[2]) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            double* const sum = sums + 2 * group + i;
            *sum = first == 0 ? found[i] : *sum + found[i];
          }
        });
    count = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) s1[i] = s2[i] = 0;
  }
}

template <typename T, int kBytes, bool kLast>
__global__ void __launch_bounds__(kThreads, 2)
    ForwardKernel(const __grid_constant__ Params<GroupNormForwardCall> p) {
  using Tile = group_norm::Tile<T, kBytes, kLast>;
  using A = typename Tile::A;
  using V = typename Tile::V;
  constexpr int kSize = Tile::kSize, kChannels = Tile::kChannels;
  extern __shared__ uint4 memory[];
  __shared__ double scratch[2][kThreads / kWarpSize];

  LetDependentsStart();
  AwaitPredecessors();
  const GroupNormForwardCall& call = p.call;
  const Plan& plan = p.plan;
  // The second launch begins with what the first one read last.
  const Tile tile(plan, p.half == Half::kResults ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  double* const sums = SharedAt<double>(memory, p.shared.sums);
  A* const statistics = SharedAt<A>(memory, p.shared.statistics);
  A* const base = SharedAt<A>(memory, p.shared.base);
  char* const kept = SharedAt<char>(memory, p.shared.kept) + threadIdx.x * kBytes;
  const bool keeps = p.half == Half::kBoth;
  const T *const x = static_cast<const T*>(call.x), *const r = static_cast<const T*>(call.residual);
  T *const sum = static_cast<T*>(call.sum), *const y = static_cast<T*>(call.y);

  for (int group = static_cast<int>(threadIdx.x); group < tile.groups; group += kThreads) {
    const int64_t at = tile.BaseOf(group);
    const A first = ToCompute(x[at]) + (r == nullptr ? A(0) : ToCompute(r[at]));
    base[group] = first - first == A(0) ? first : A(0);
  }

  struct Loaded {
    V x, residual;
  };
  const auto load = [&](int64_t at) {
    Loaded loaded;
    loaded.x = V::Load(x + at);
    if (r != nullptr) loaded.residual = V::Load(r + at);
    return loaded;
  };
  const auto added = [&](const Loaded& loaded) {
    if (r == nullptr) return loaded.x;
    A values[kSize], others[kSize];
    loaded.x.Unpack(values);
    loaded.residual.Unpack(others);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] += others[i];
    return V::Packed(values);
  };

  double* stored = nullptr;
  if (!keeps) {
    stored = PartSums<double, A>(call.workspace, call.workspace_size, tile.sample, 0, plan.groups,
                                 tile.first_group);
  }
  const int64_t stride = int64_t{2} * plan.groups;
  int units = 0;
  if (p.half != Half::kResults) {
    SumDeviations(tile, base, SharedAt<A>(memory, p.shared.table), sums, load,
                  [&](const Loaded& loaded, int64_t at) {
                    const V s = added(loaded);
                    if (sum != nullptr) StoreUnit(s, sum + at);
                    if (keeps) s.Store(kept + units++ * (kThreads * kBytes));
                    return s;
                  });
    if (!keeps) {
      for (int i = static_cast<int>(threadIdx.x); i < 2 * tile.groups; i += kThreads) {
        stored[tile.part * stride + i] = sums[i];
      }
      return;
    }
  }

  TotalParts(tile.groups, plan.parts, sums, stored, stride, scratch,
             [&](int group, const double (&total)[2]) {
               const double n =
                   static_cast<double>(plan.group_channels) * static_cast<double>(plan.positions);
               const double mean = total[0] / n, variance = Without(total[1] / n, mean, mean);
               const A rstd = static_cast<A>(1 / sqrt((variance < 0 ? 0 : variance) + call.eps));
               const A shifted = static_cast<A>(static_cast<double>(base[group]) + mean);
               statistics[2 * group] = shifted;
               statistics[2 * group + 1] = rstd;
               const int64_t at = tile.sample * plan.groups + tile.first_group + group;
               if (tile.part != 0) return;
               if (call.mean != nullptr) static_cast<A*>(call.mean)[at] = shifted;
               if (call.rstd != nullptr) static_cast<A*>(call.rstd)[at] = rstd;
             });

  units = 0;
  for (int pass = 0; pass < plan.passes; ++pass) {
    const int slot = pass * plan.width + tile.slot;
    A mean[kChannels] = {}, factor[kChannels] = {}, bias[kChannels] = {};
    tile.ForChannels(slot, [&](int i, int channel, int group) {
      mean[i] = statistics[2 * group];
      factor[i] =
          statistics[2 * group + 1] * ReadParameter<T>(call.scale, tile.first_channel + channel, 1);
      bias[i] = ReadParameter<T>(call.bias, tile.first_channel + channel, 0);
    });
    const auto use = [&](const V& s, int64_t at) {
      A z[kSize];
      s.Unpack(z);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int c = kChannels == 1 ? 0 : i;
        z[i] = fma(z[i] - mean[c], factor[c], bias[c]);
      }
      if (call.active) Activate<T>(call.activation, z);
      StoreUnit(V::Packed(z), y + at);
    };
    if (keeps) {
      tile.template Sweep<2>(
          slot, [&](int64_t) { return V::Load(kept + units++ * (kThreads * kBytes)); }, use);
    } else {
      tile.template Sweep<4>(slot, load,
                             [&](const Loaded& loaded, int64_t at) { use(added(loaded), at); });
    }
  }
  if (keeps) AwaitCluster();
}

// -------------------------------------------------------------------------------------------------
// Backward

template <typename T, int kBytes, bool kLast>
__global__ void __launch_bounds__(kThreads, 2)
    BackwardKernel(const __grid_constant__ Params<GroupNormBackwardCall> p) {
  using Tile = group_norm::Tile<T, kBytes, kLast>;
  using A = typename Tile::A;
  using V = typename Tile::V;
  constexpr int kSize = Tile::kSize, kChannels = Tile::kChannels;
  extern __shared__ uint4 memory[];
  __shared__ A scratch[2][kThreads / kWarpSize];

  LetDependentsStart();
  AwaitPredecessors();
  const GroupNormBackwardCall& call = p.call;
  const Plan& plan = p.plan;
  const Tile tile(plan, p.half == Half::kResults ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  A* const sums = SharedAt<A>(memory, p.shared.sums);
  A* const totals = SharedAt<A>(memory, p.shared.totals);
  A* const averages = SharedAt<A>(memory, p.shared.statistics);
  A* const table = SharedAt<A>(memory, p.shared.table);
  char* const kept = SharedAt<char>(memory, p.shared.kept) + threadIdx.x * kBytes;
  const bool keeps = p.half == Half::kBoth;
  const T *const x = static_cast<const T*>(call.s), *const dy = static_cast<const T*>(call.dy);
  T* const dx = static_cast<T*>(call.dx);
  const int64_t first_statistic = tile.sample * plan.groups + tile.first_group;
  const A* const mean_of = static_cast<const A*>(call.mean) + first_statistic;
  const A* const rstd_of = static_cast<const A*>(call.rstd) + first_statistic;

  struct Loaded {
    V x, g;
  };
  const auto load = [&](int64_t at) { return Loaded{V::Load(x + at), V::Load(dy + at)}; };
  // What the units of a slot need.
  struct Coefficients {
    A mean[kChannels], rstd[kChannels], scale[kChannels], bias[kChannels];
  };
  const auto coefficients_of = [&](int slot) {
    Coefficients c = {};
    tile.ForChannels(slot, [&](int i, int channel, int group) {
      c.mean[i] = mean_of[group];
      c.rstd[i] = rstd_of[group];
      c.scale[i] = ReadParameter<T>(call.scale, tile.first_channel + channel, 1);
      c.bias[i] = ReadParameter<T>(call.bias, tile.first_channel + channel, 0);
    });
    return c;
  };
  // Sets xhat and g.
  const auto differentiate = [&](const Coefficients& c, const Loaded& loaded, A(&xhat)[kSize],
                                 A(&g)[kSize]) {
    loaded.x.Unpack(xhat);
    loaded.g.Unpack(g);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int at = kChannels == 1 ? 0 : i;
      xhat[i] = (xhat[i] - c.mean[at]) * c.rstd[at];
    }
    if (!call.active) return;
    A z[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int at = kChannels == 1 ? 0 : i;
      z[i] = fma(xhat[i], c.scale[at], c.bias[at]);
    }
    PullBack<T>(call.activation, z, g);
  };

  A* stored = nullptr;
  if (!keeps) {
    stored = PartSums<A, A>(call.workspace, call.workspace_size, tile.sample, 0, plan.channels,
                            tile.first_channel);
  }
  const int64_t stride = 2 * plan.channels;
  int units = 0;
  if (p.half != Half::kResults) {
    for (int pass = 0; pass < plan.passes; ++pass) {
      const int begin = pass * plan.width, slot = begin + tile.slot;
      const Coefficients c = coefficients_of(slot);
      A s1[kSize] = {}, s2[kSize] = {};
      tile.template Sweep<2>(slot, load, [&](const Loaded& loaded, int64_t) {
        A xhat[kSize], g[kSize];
        differentiate(c, loaded, xhat, g);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          s1[i] += g[i];
          s2[i] = fma(g[i], xhat[i], s2[i]);
        }
        if (!keeps) return;
        char* const own = kept + units++ * (2 * kThreads * kBytes);
        loaded.x.Store(own);
        (call.active ? V::Packed(g) : loaded.g).Store(own + kThreads * kBytes);
      });
      if constexpr (kLast) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          A* const entry = table + 2 * (i * kThreads + static_cast<int>(threadIdx.x));
          entry[0] = s1[i], entry[1] = s2[i];
        }
        const int first = begin * kSize;
        SumTerms<kThreads>(
            min(tile.channels - first, plan.width * kSize), plan.lanes, scratch,
            [&](int column, int lane, A(&values)[2]) {
              const int thread = tile.ThreadOf(lane, column / kSize);
              const A* const entry = table + 2 * (column % kSize * kThreads + thread);
              values[0] = entry[0], values[1] = entry[1];
            },
            [&](int column, const A(&found)[2]) {
              sums[2 * (first + column)] = found[0];
              sums[2 * (first + column) + 1] = found[1];
            });
      } else {
        A values[2] = {};
#pragma unroll
        for (int i = 0; i < kSize; ++i) values[0] += s1[i], values[1] += s2[i];
        Butterfly(Sum(), values, min(plan.lanes, kWarpSize));
        if (tile.lane % kWarpSize == 0 && slot < tile.slots) {
          A* const entry = table + 2 * (tile.lane / kWarpSize * tile.slots + slot);
          entry[0] = values[0], entry[1] = values[1];
        }
      }
    }
    if constexpr (!kLast) {
      SumTerms<kThreads>(
          tile.slots, max(plan.lanes / kWarpSize, 1), scratch,
          [&](int slot, int warp, A(&values)[2]) {
            const A* const entry = table + 2 * (warp * tile.slots + slot);
            values[0] = entry[0], values[1] = entry[1];
          },
          [&](int slot, const A(&found)[2]) {
            sums[2 * slot] = found[0];
            sums[2 * slot + 1] = found[1];
          });
    }
    if (!keeps) {
      for (int i = static_cast<int>(threadIdx.x); i < 2 * tile.channels; i += kThreads) {
        stored[tile.part * stride + i] = sums[i];
      }
      return;
    }
  }

  TotalParts(tile.channels, plan.parts, sums, stored, stride, scratch,
             [&](int channel, const A(&total)[2]) {
               totals[2 * channel] = total[0];
               totals[2 * channel + 1] = total[1];
               const int64_t at = tile.sample * plan.channels + tile.first_channel + channel;
               if (tile.part != 0) return;
               if (call.dbias != nullptr) static_cast<A*>(call.dbias)[at] = total[0];
               if (call.dscale != nullptr) static_cast<A*>(call.dscale)[at] = total[1];
             });
  SumTerms<kThreads>(
      tile.groups, plan.group_channels, scratch,
      [&](int group, int of, A(&values)[2]) {
        const int channel = group * plan.group_channels + of;
        const A scale = ReadParameter<T>(call.scale, tile.first_channel + channel, 1);
        values[0] = scale * totals[2 * channel];
        values[1] = scale * totals[2 * channel + 1];
      },
      [&](int group, const A(&found)[2]) {
        const A n = static_cast<A>(plan.group_channels) * static_cast<A>(plan.positions);
        averages[2 * group] = found[0] / n;
        averages[2 * group + 1] = found[1] / n;
      });

  units = 0;
  for (int pass = 0; pass < plan.passes; ++pass) {
    const int slot = pass * plan.width + tile.slot;
    const Coefficients c = coefficients_of(slot);
    // dx = g * by_g + (x - mean) * by_x + constant
    A by_g[kChannels] = {}, by_x[kChannels] = {}, constant[kChannels] = {};
    tile.ForChannels(slot, [&](int i, int, int group) {
      by_g[i] = c.rstd[i] * c.scale[i];
      by_x[i] = -c.rstd[i] * averages[2 * group + 1] * c.rstd[i];
      constant[i] = -c.rstd[i] * averages[2 * group];
    });
    const auto use = [&](const Loaded& loaded, int64_t at) {
      A d[kSize], g[kSize];
      if (keeps || !call.active) {
        loaded.g.Unpack(g);
      } else {
        differentiate(c, loaded, d, g);
      }
      loaded.x.Unpack(d);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int of = kChannels == 1 ? 0 : i;
        d[i] = fma(g[i], by_g[of], fma(d[i] - c.mean[of], by_x[of], constant[of]));
      }
      StoreUnit(V::Packed(d), dx + at);
    };
    if (keeps) {
      tile.template Sweep<2>(
          slot,
          [&](int64_t) {
            const char* const own = kept + units++ * (2 * kThreads * kBytes);
            return Loaded{V::Load(own), V::Load(own + kThreads * kBytes)};
          },
          use);
    } else {
      tile.template Sweep<2>(slot, load, use);
    }
  }
  if (keeps) AwaitCluster();
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
    const auto kernel =
        reinterpret_cast<const void*>(KernelOf<GroupNormFamily, BackwardKernel<float, 16, true>>());
    const LaunchConfig config = {.block = dim3(kThreads),
                                 .shared = static_cast<size_t>(found->shared_per_block)};
    found->max_cluster = LargestCluster(kernel, config, kMaxCluster);
    return cudaSuccess;
  });
}

template <typename Call>
cudaError_t Run(const Call& call, int arrays, int64_t max_parts, bool whole, cudaStream_t stream) {
  if (call.samples == 0) return cudaSuccess;
  Limits limits;
  const cudaError_t error = GetLimits(&limits);
  if (error != cudaSuccess) return error;
  const int item = static_cast<int>(DTypeSize(call.dtype));
  const Shape shape = {call.samples,    call.groups, call.channels,    call.positions(),
                       call.inner == 1, item,        item == 8 ? 8 : 4};
  const Plan plan = MakePlan(shape, arrays, whole, max_parts, limits);
  const int64_t blocks = shape.samples * plan.sets * plan.parts;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const SharedLayout shared =
      LayoutOf(plan, shape.accumulator, plan.unit * item * arrays, arrays == 2);
  return ForDType(call.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const auto launch = [&](auto unit, auto last) {
      constexpr int kBytes = decltype(unit)::value;
      constexpr bool kLast = decltype(last)::value;
      void (*kernel)(Params<Call>);
      if constexpr (std::is_same_v<Call, GroupNormForwardCall>) {
        kernel = KernelOf<GroupNormFamily, ForwardKernel<T, kBytes, kLast>>();
      } else {
        kernel = KernelOf<GroupNormFamily, BackwardKernel<T, kBytes, kLast>>();
      }
      const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(blocks)),
                                   .block = dim3(kThreads),
                                   .shared = static_cast<size_t>(shared.bytes),
                                   .cluster = plan.kept_units > 0 ? plan.parts : 1,
                                   .dependent = true};
      if (plan.kept_units > 0) {
        return Launch(kernel, config, stream, Params<Call>{call, plan, shared, Half::kBoth});
      }
      const cudaError_t error =
          Launch(kernel, config, stream, Params<Call>{call, plan, shared, Half::kSums});
      if (error != cudaSuccess) return error;
      return Launch(kernel, config, stream, Params<Call>{call, plan, shared, Half::kResults});
    };
    const auto by_layout = [&](auto unit) {
      return plan.last ? launch(unit, std::true_type()) : launch(unit, std::false_type());
    };
    if constexpr (sizeof(T) < 8) {
      if (plan.unit > 1) return by_layout(std::integral_constant<int, 16>());
    }
    return by_layout(std::integral_constant<int, static_cast<int>(sizeof(T))>());
  });
}

template <typename... Pointers>
bool AreWhole(const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace

cudaError_t GroupNormForward(const GroupNormForwardCall& call, cudaStream_t stream) {
  const bool whole = AreWhole(call.x, call.residual, call.y, call.sum);
  // A part's sums are two doubles of each group.
  return Run(call, 1, call.workspace_size / (call.groups * 4), whole, stream);
}

cudaError_t GroupNormBackward(const GroupNormBackwardCall& call, cudaStream_t stream) {
  const bool whole = AreWhole(call.dy, call.s, call.dx);
  return Run(call, 2, call.workspace_size / (call.all_channels() * 2), whole, stream);
}

cudaError_t LoadGroupNormKernels() {
  Limits limits;
  return GetLimits(&limits);
}

}  // namespace jax_fastops::cuda

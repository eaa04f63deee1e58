// Group norm, backward. The kernel has the two halves of the forward's (group_norm/forward.cu).
//
// With g = dy * activation'(z) and the sums s1 = sum(g), s2 = sum(g * xhat) of each channel:
// dbias = s1, dscale = s2, and with the averages c1, c2 of scale * s1, scale * s2 over the elements
// of the group, dx = rstd * (g * scale - c1 - xhat * c2). What is kept is g rounded to the type of
// x, because computing it again would take longer than memory does.
//
// Long because its halves share the registers and the shared memory of a tile.

#include <cstdint>

#include "core/alignment.h"
#include "core/cuda/dependent.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/vec.cuh"
#include "group_norm/block.cuh"
#include "group_norm/group_norm.h"
#include "group_norm/plan.h"
#include "group_norm/tile.cuh"

namespace jax_fastops::cuda {
namespace {

using namespace group_norm;  // NOLINT: this file is a part of it

// What the units of a slot need: z = (x - mean) * factor + bias, where factor is rstd * scale.
template <typename Tile>
struct Coefficients {
  using T = typename Tile::Element;
  using A = typename Tile::A;
  static constexpr int kChannels = Tile::kChannels;
  A mean[kChannels], factor[kChannels], bias[kChannels];

  // Sets those of all channels of the set, in shared memory. A barrier must follow.
  static __device__ __forceinline__ void Prepare(const GroupNormBackwardCall& call,
                                                 const Tile& tile, A* to) {
    for (int i = static_cast<int>(threadIdx.x); i < tile.channels; i += kThreads) {
      const A scale = ReadParameter<T>(call.scale, tile.first_channel + i, 1);
      const int64_t group = tile.sample * tile.plan.groups + tile.first_group +
                            i / static_cast<uint32_t>(tile.plan.group_channels);
      const int stride = tile.plan.table_channels;
      to[i] = static_cast<const A*>(call.mean)[group];
      to[stride + i] = static_cast<const A*>(call.rstd)[group] * scale;
      to[2 * stride + i] = ReadParameter<T>(call.bias, tile.first_channel + i, 0);
      to[3 * stride + i] = scale;
    }
  }
  __device__ __forceinline__ void Read(const Tile& tile, const A* from, int slot) {
    if (slot >= tile.slots) return;
    const int stride = tile.plan.table_channels;
    LoadParameter<T, A>(from, slot * kChannels, mean);
    LoadParameter<T, A>(from + stride, slot * kChannels, factor);
    LoadParameter<T, A>(from + 2 * stride, slot * kChannels, bias);
  }
};

// The gradient of z, of an element whose deviation from the mean is d. `factor` and `bias` have the
// formula's scale.
template <typename T, typename Formula, typename A>
__device__ __forceinline__ A PullOf(Formula, A d, A factor, A bias, A dy) {
  if constexpr (std::is_same_v<Formula, Identity<T>>) return dy;
  return Pull<ActivationMath<T>, Formula>(fma(d, factor, bias), dy);
}

// The sums of g and of g * (x - mean) of each channel of the set. keep(loaded, g) may store g.
template <int kBatch, typename Tile, typename Load, typename Keep>
__device__ __forceinline__ void SumGradients(const GroupNormBackwardCall& call, const Tile& tile,
                                             const Shared<Tile, typename Tile::A>& shared,
                                             Scratch<typename Tile::A>& scratch,
                                             Coefficients<Tile>& c,
                                             const typename Tile::A* prepared, const Load& load,
                                             const Keep& keep) {
  using A = typename Tile::A;
  using T = typename Tile::Element;
  constexpr int kSize = Tile::kSize, kChannels = Tile::kChannels;
  const Plan& plan = tile.plan;
  const auto sum_entries = [&](int first, int results, int terms, const auto& entry_of) {
    SumTerms<kThreads>(
        results, terms, scratch,
        [&](int result, int term, A(&values)[2]) { GetEntry(entry_of(result, term), values); },
        [&](int result, const A(&found)[2]) {
          SetEntry(shared.sums + 2 * (first + result), found[0], found[1]);
        });
  };
  for (int pass = 0; pass < plan.passes; ++pass) {
    const int begin = pass * plan.width, slot = tile.SlotOf(pass);
    if (pass > 0) c.Read(tile, prepared, slot);
    A s1[kSize] = {}, s2[kSize] = {};
    ForFormula<T>(call, [&](auto formula) {
      A a[kChannels], b[kChannels];
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        a[i] = c.factor[i] * ScaleOf<decltype(formula)>();
        b[i] = c.bias[i] * ScaleOf<decltype(formula)>();
      }
      tile.template Sweep<kBatch>(pass, load, [&](const auto& loaded, int64_t) {
        A x[kSize], g[kSize];
        loaded.x.Unpack(x);
        loaded.dy.Unpack(g);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const int of = kChannels == 1 ? 0 : i;
          const A d = x[i] - c.mean[of];
          g[i] = PullOf<T>(formula, d, a[of], b[of], g[i]);
          s1[i] += g[i];
          s2[i] = fma(g[i], d, s2[i]);
        }
        keep(loaded, g);
      });
    });
    if constexpr (Tile::kIsLast) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        SetEntry(shared.Entry(static_cast<int>(threadIdx.x), i), s1[i], s2[i]);
      }
      const int first = begin * kSize;
      sum_entries(first, min(tile.channels - first, plan.width * kSize), plan.lanes,
                  [&](int column, int lane) {
                    return shared.Entry(tile.ThreadOf(lane, column / kSize), column % kSize);
                  });
    } else {
      A values[2] = {};
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[0] += s1[i], values[1] += s2[i];
      Butterfly(Sum(), values, min(plan.lanes, kWarpSize));
      if (tile.lane % kWarpSize == 0 && slot < tile.slots) {
        SetEntry(shared.Entry(tile.lane / kWarpSize * tile.slots + slot), values[0], values[1]);
      }
    }
  }
  if constexpr (!Tile::kIsLast) {
    sum_entries(0, tile.slots, max(plan.lanes / kWarpSize, 1),
                [&](int slot, int warp) { return shared.Entry(warp * tile.slots + slot); });
  }
}

// Sets the sums of scale * g and of scale * g * (x - mean) of each group, from those of its
// channels.
template <typename Tile>
__device__ __forceinline__ void SumGroups(const Tile& tile,
                                          const Shared<Tile, typename Tile::A>& shared,
                                          const typename Tile::A* scales,
                                          Scratch<typename Tile::A>& scratch) {
  using A = typename Tile::A;
  const int size = tile.plan.group_channels;
  SumTerms<kThreads>(
      tile.groups, size, scratch,
      [&](int group, int of, A(&values)[2]) {
        const int channel = group * size + of;
        GetEntry(shared.sums + 2 * channel, values);
        const A scale = scales[channel];
        values[0] *= scale, values[1] *= scale;
      },
      [&](int group, const A(&found)[2]) {
        SetEntry(shared.group_sums + 2 * group, found[0], found[1]);
      });
}

// Sets the averages rstd * c1 and rstd * rstd * c2 of each group.
template <bool kKeeps, typename Tile>
__device__ __forceinline__ void FindAverages(const Tile& tile,
                                             const Shared<Tile, typename Tile::A>& shared,
                                             const typename Tile::A* from, int64_t stride,
                                             Scratch<typename Tile::A>& scratch) {
  using A = typename Tile::A;
  const Plan& plan = tile.plan;
  TotalParts<kKeeps>(tile.groups, plan.parts, from, stride, scratch,
                     [&](int group, const A(&total)[2]) {
                       const A rstd = shared.base[group];
                       const A inverse = static_cast<A>(plan.inverse_size);
                       SetEntry(shared.statistics + 2 * group, rstd * (total[0] * inverse),
                                rstd * (rstd * (rstd * (total[1] * inverse))));
                     });
}

// Writes the gradients of the parameters of a channel of the set.
template <typename Tile, typename A>
__device__ __forceinline__ void WriteGradients(const GroupNormBackwardCall& call, const Tile& tile,
                                               int channel, const A (&total)[2]) {
  const Plan& plan = tile.plan;
  const int64_t at = tile.sample * plan.channels + tile.first_channel + channel;
  if (call.dbias != nullptr) static_cast<A*>(call.dbias)[at] = total[0];
  if (call.dscale != nullptr) {
    const A rstd = static_cast<const A*>(
        call.rstd)[tile.sample * plan.groups + tile.first_group + channel / plan.group_channels];
    static_cast<A*>(call.dscale)[at] = total[1] * rstd;
  }
}

template <typename T, int kBytes, bool kLast, bool kKeeps>
__global__ void __launch_bounds__(kThreads, kBlocks)
    BackwardKernel(const __grid_constant__ Params<GroupNormBackwardCall> p) {
  using Tile = group_norm::Tile<T, kBytes, kLast>;
  using A = typename Tile::A;
  using V = typename Tile::V;
  constexpr int kSize = Tile::kSize, kChannels = Tile::kChannels, kStride = Tile::kStride;
  constexpr bool kFolds = sizeof(T) == 2;
  __shared__ Scratch<A> scratch;
  __shared__ ClusterInbox inbox;

  LetDependentsStart();
  if constexpr (kKeeps) inbox.Begin();
  AwaitPredecessors();
  const GroupNormBackwardCall& call = p.call;
  const Plan& plan = p.plan;
  const bool results = p.half == Half::kResults;
  const Shared<Tile, A> shared(p.shared);
  const T *const x = static_cast<const T*>(call.s), *const dy = static_cast<const T*>(call.dy);
  T* const dx = static_cast<T*>(call.dx);

  const uint32_t block = !kKeeps && results ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t clusters = kKeeps ? plan.clusters : plan.tiles, begin = block / plan.parts;
  const int part = static_cast<int>(block - begin * plan.parts);
  Tile tile(plan, part);
  const uint32_t tiles = plan.tiles;
  if constexpr (kKeeps) Stagger(plan, begin);
  bool filled = false;

  const bool differentiates = call.dscale != nullptr || call.dbias != nullptr;
  const int log_parts = 31 - __clz(plan.parts);
  int turn = 0;
  for (uint32_t index = begin; index < tiles; index += clusters, ++turn) {
    tile.Move(index);
    if constexpr (kKeeps) {
      if (!filled) tile.Keep({x, dy}, shared.Kept());
    }
    char* next = shared.Kept();
    Coefficients<Tile> c;
    A* const prepared = shared.coefficients + (turn & 1) * 4 * plan.table_channels;
    c.Prepare(call, tile, prepared);
    for (int i = static_cast<int>(threadIdx.x); i < tile.groups; i += kThreads) {
      shared.base[i] =
          static_cast<const A*>(call.rstd)[tile.sample * plan.groups + tile.first_group + i];
    }
    AwaitBlock<kKeeps>();
    c.Read(tile, prepared, tile.slot);

    struct Loaded {
      V x, dy;
      char* place;
    };
    const auto load = [&](int64_t at) {
      Loaded loaded;
      if constexpr (kKeeps) {
        loaded.place = next;
        loaded.x = V::Load(next);
        loaded.dy = V::Load(next + kStride);
        next += 2 * kStride;
      } else {
        loaded.x = V::Load(x + at);
        loaded.dy = V::Load(dy + at);
      }
      return loaded;
    };

    const A* groups_from = nullptr;
    const A* channels_from = nullptr;
    int64_t stride = 2 * (plan.groups + plan.channels);
    if (kKeeps || !results) {
      SumGradients<2>(call, tile, shared, scratch, c, prepared, load,
                      [&](const Loaded& loaded, const A(&g)[kSize]) {
                        if (kKeeps && call.active) V::Packed(g).Store(loaded.place + kStride);
                      });
      SumGroups(tile, shared, prepared + 3 * plan.table_channels, scratch);
    }
    if constexpr (kKeeps) {
      if (turn == 0) inbox.Open();
      A* const to = shared.Inbox(turn);
      A* const channels_to = to + 2 * plan.parts * plan.set_groups;
      SendToAll(inbox, shared.group_sums, tile.groups, plan, tile.part, to, turn);
      // Block b adds up the sums of every parts-th channel from b.
      int own = 0;
      if (differentiates) {
        own = ((tile.channels - 1 - tile.part) >> log_parts) + 1;
        for (int i = static_cast<int>(threadIdx.x); i < 2 * tile.channels; i += kThreads) {
          const int channel = i >> 1;
          inbox.Send(channels_to + 2 * ((channel >> log_parts) * plan.parts + tile.part) + (i & 1),
                     shared.sums[i], channel & (plan.parts - 1), turn);
        }
      }
      inbox.Await((tile.groups + own) * plan.parts * 2 * static_cast<int>(sizeof(A)), turn);
      groups_from = to;
      channels_from = channels_to;
      stride = 2 * plan.set_groups;
      FindAverages<true>(tile, shared, groups_from, stride, scratch);
      for (int i = static_cast<int>(threadIdx.x); i < own; i += kThreads) {
        A total[2] = {};
        for (int of = 0; of < plan.parts; ++of) {
          A term[2];
          GetEntry(channels_from + 2 * (i * plan.parts + of), term);
          total[0] += term[0], total[1] += term[1];
        }
        WriteGradients(call, tile, (i << log_parts) + tile.part, total);
      }
    } else {
      A* const stored = StoredSums<A, A>(call, tile.sample, 0);
      if (!results) {
        A* const to = stored + stride * tile.part;
        StoreSums(shared.group_sums, tile.groups, to + 2 * tile.first_group);
        return StoreSums(shared.sums, tile.channels, to + 2 * (plan.groups + tile.first_channel));
      }
      FindAverages<false>(tile, shared, stored + 2 * tile.first_group, stride, scratch);
      if (differentiates) {
        const int share = (tile.channels - 1) / plan.parts + 1;
        const int first = min(tile.part * share, tile.channels);
        TotalParts<false>(
            min(share, tile.channels - first), plan.parts,
            stored + 2 * (plan.groups + tile.first_channel + first), stride, scratch,
            [&](int of, const A(&total)[2]) { WriteGradients(call, tile, first + of, total); });
      }
    }

    const T *next_x = x, *next_dy = dy;
    if constexpr (kKeeps && kBytes >= 4) {
      Tile other = tile;
      other.Move(index + clusters);
      filled = index + clusters < tiles && other.slots == tile.slots;
      next_x += other.origin - tile.origin;
      next_dy += other.origin - tile.origin;
    }
    next = shared.Kept();
    for (int pass = 0; pass < plan.passes; ++pass) {
      if (plan.passes > 1) c.Read(tile, prepared, tile.SlotOf(pass));
      // dx = g * factor - (x - mean) * by_x - less
      A by_x[kChannels], less[kChannels];
      tile.ForGroups(pass, [&](int i, int group) {
        A found[2];
        GetEntry(shared.statistics + 2 * group, found);
        less[i] = found[0];
        by_x[i] = found[1];
        if constexpr (kFolds && kKeeps) less[i] = fma(-c.mean[i], by_x[i], less[i]);
      });
      const auto write = [&](const Loaded& loaded, int64_t at, const auto& differentiate) {
        A d[kSize], g[kSize];
        loaded.x.Unpack(d);
        loaded.dy.Unpack(g);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const int of = kChannels == 1 ? 0 : i;
          if constexpr (!kFolds || !kKeeps) d[i] -= c.mean[of];
          g[i] = differentiate(of, d[i], g[i]);
          d[i] = fma(g[i], c.factor[of], -fma(d[i], by_x[of], less[of]));
        }
        StoreUnit(V::Packed(d), dx + at);
      };
      if constexpr (kKeeps) {  // what is kept is g
        tile.template Sweep<2>(pass, load, [&](const Loaded& loaded, int64_t at) {
          write(loaded, at, [](int, A, A g) { return g; });
          if constexpr (kBytes >= 4) {
            if (filled) {
              CopyAsync<kBytes, kBytes == 16>(loaded.place, next_x + at);
              CopyAsync<kBytes, kBytes == 16>(loaded.place + kStride, next_dy + at);
            }
          }
        });
      } else {
        ForFormula<T>(call, [&](auto formula) {
          constexpr float kScale = ScaleOf<decltype(formula)>();
          tile.template Sweep<2>(pass, load, [&](const Loaded& loaded, int64_t at) {
            write(loaded, at, [&](int of, A d, A g) {
              return PullOf<T>(formula, d, c.factor[of] * kScale, c.bias[of] * kScale, g);
            });
          });
        });
      }
    }
    if constexpr (!kKeeps) return;
  }
}

struct Kernels {
  template <typename T, int kBytes, bool kLast, bool kKeeps>
  static auto Of() {
    return KernelOf<GroupNormFamily, BackwardKernel<T, kBytes, kLast, kKeeps>>();
  }
};

}  // namespace

cudaError_t GroupNormBackward(const GroupNormBackwardCall& call, cudaStream_t stream) {
  Limits limits;
  const cudaError_t error = GetLimits<BackwardKernel<float, kUnitBytes, true, true>>(&limits);
  if (error != cudaSuccess) return error;
  return Run<Kernels>(call, limits, 2, true,
                      call.workspace_size / ((call.groups + call.all_channels()) * 2),
                      CommonAlignment({call.dy, call.s, call.dx}), stream);
}

}  // namespace jax_fastops::cuda

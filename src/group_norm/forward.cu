// Group norm, forward. A kernel has two halves: the first one sums the elements, the second one
// writes the results. group_norm/plan.h says how blocks divide an array, and whether the elements
// are in shared memory (kKeeps), or are read again by a launch for the second half. Asynchronous
// copies fill the shared memory, so that all loads of a block are under way at once. A block that
// keeps elements has several tiles, one after the other: when it has read a unit for the last time,
// it starts the copy of the same unit of its next tile to the same place.
//
// Statistics. The sum of squares minus the square of the sum cancels if the mean is large. So each
// thread sums deviations from the first value that it has of a group. Because that value is one of
// those that are summed, the squares of n deviations are at most n + 1 times those from the mean:
// no outlier makes them cancel more than that. The threads' means and squares are then added up in
// double, relative to an element of the group.
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

// squares - a * b, where finite numbers have squares that overflow: then the squares are infinite.
template <typename A>
__device__ __forceinline__ A Without(A squares, A a, A b) {
  const A square = a * b;
  return isinf(square) && isfinite(a) ? squares : squares - square;
}

// The sums of the deviations of each group from its base, and of their squares. peek(element)
// returns the elements of a unit, and so does take(loaded, element) of a unit that is loaded.
template <int kBatch, typename Tile, typename Peek, typename Load, typename Take>
__device__ __forceinline__ void SumDeviations(const Tile& tile, const Shared<Tile, double>& shared,
                                              Scratch<double>& scratch, const Peek& peek,
                                              const Load& load, const Take& take) {
  using A = typename Tile::A;
  constexpr int kSize = Tile::kSize, kChannels = Tile::kChannels;
  const Plan& plan = tile.plan;
  A shift[kChannels] = {}, s1[kSize] = {}, s2[kSize] = {};
  const int thread = static_cast<int>(threadIdx.x);
  for (int pass = 0; pass < plan.passes; ++pass) {
    const int begin = pass * plan.width, slot = tile.SlotOf(pass);
    // Channels of a group have one shift. Channels first, a thread has one group, in all passes.
    const uint32_t starts = tile.Starts(pass);
    if (slot < tile.slots && tile.UnitsOf(tile.lane) > 0 && (Tile::kIsLast || pass == 0)) {
      A values[kSize];
      peek(tile.FirstOf(pass)).Unpack(values);
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        shift[i] = i == 0 || (starts >> i & 1) ? values[i] : shift[i == 0 ? 0 : i - 1];
      }
    }
    tile.template Sweep<kBatch>(pass, load, [&](const auto& loaded, int64_t at) {
      A values[kSize];
      take(loaded, at).Unpack(values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const A d = values[i] - shift[kChannels == 1 ? 0 : i];
        s1[i] += d;
        s2[i] = fma(d, d, s2[i]);
      }
    });
    if (!Tile::kIsLast && pass + 1 < plan.passes) continue;
    if (Tile::kIsLast || pass + 1 == plan.passes) {
      // An entry for the channels of a group, which is that of the last one of them.
      const int first = Tile::kIsLast ? slot : tile.slot;
      const int several = Tile::kIsLast ? 1 : kSize * ((tile.slots - first - 1) / plan.width + 1);
      const int units = first < tile.slots ? several * tile.UnitsOf(tile.lane) : 0;
      int count = 0;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const bool ends = kChannels == 1 ? i + 1 == kSize : starts >> (i + 1) & 1;
        ++count;
        if (ends) {
          const A n = static_cast<A>(Tile::kIsLast ? units * count : units);
          A inverse;
          if constexpr (sizeof(A) == 4) {
            inverse = Reciprocal(n);
          } else {
            inverse = 1 / n;
          }
          if (units == 0) inverse = 0;
          SetEntry(shared.Entry(thread, kChannels == 1 ? 0 : i),
                   fma(s1[i], inverse, shift[kChannels == 1 ? 0 : i]),
                   Without(s2[i], s1[i], s1[i] * inverse));
          count = 0;
        } else if (i + 1 < kSize) {
          s1[i + 1] += s1[i], s2[i + 1] += s2[i];
        }
      }
    }
    // With several passes there is one group.
    const bool single = tile.groups == 1;
    const int present = min(tile.slots - (Tile::kIsLast ? begin : 0), plan.width);
    const int slots = single ? present : plan.group_slots;
    const float each = 1 / static_cast<float>(slots);
    SumTerms<kThreads>(
        tile.groups, plan.lanes * slots, scratch,
        [&](int group, int term, double (&values)[2]) {
          // term / slots: lanes are so few that the quotient is exact.
          const int lane = static_cast<int>((static_cast<float>(term) + 0.5f) * each);
          const int first = group * plan.group_channels, last = first + plan.group_channels;
          const int slot =
              (single && Tile::kIsLast ? begin : first / kChannels) + term - lane * slots;
          const int from = max(first, slot * kChannels), to = min(last, (slot + 1) * kChannels);
          A entry[2];
          GetEntry(shared.Entry(tile.ThreadOf(lane, slot - (Tile::kIsLast ? begin : 0)),
                                max(to - 1 - slot * kChannels, 0)),
                   entry);
          const int several =
              Tile::kIsLast ? to - from : kSize * ((tile.slots - slot - 1) / plan.width + 1);
          const double n = static_cast<double>(tile.UnitsOf(lane)) * several;
          const double mean =
              static_cast<double>(entry[0]) - static_cast<double>(shared.base[group]);
          const bool counts = n > 0 && to > from;
          values[0] = counts ? n * mean : 0;
          values[1] = counts ? fma(n * mean, mean, static_cast<double>(entry[1])) : 0;
        },
        [&](int group, const double (&found)[2]) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            double* const sum = shared.sums + 2 * group + i;
            *sum = !Tile::kIsLast || begin == 0 ? found[i] : *sum + found[i];
          }
        });
#pragma unroll
    for (int i = 0; i < kSize; ++i) s1[i] = s2[i] = 0;
  }
}

// Sets the mean and the reciprocal deviation of each group.
template <bool kKeeps, typename Tile>
__device__ __forceinline__ void FindStatistics(const GroupNormForwardCall& call, const Tile& tile,
                                               const Shared<Tile, double>& shared,
                                               const double* from, int64_t stride,
                                               Scratch<double>& scratch) {
  using A = typename Tile::A;
  const Plan& plan = tile.plan;
  TotalParts<kKeeps>(
      tile.groups, plan.parts, from, stride, scratch, [&](int group, const double (&total)[2]) {
        const double mean = total[0] * plan.inverse_size;
        double variance = Without(total[1] * plan.inverse_size, mean, mean);
        if (isinf(static_cast<A>(variance))) variance = INFINITY;  // as in the reference
        const double shown = (variance < 0 ? 0 : variance) + call.eps;
        const A rstd =
            sizeof(A) == 8 ? static_cast<A>(1 / sqrt(shown)) : static_cast<A>(rsqrt(shown));
        const A shifted = static_cast<A>(static_cast<double>(shared.base[group]) + mean);
        SetEntry(shared.statistics + 2 * group, shifted, rstd);
        const int64_t at = tile.sample * plan.groups + tile.first_group + group;
        if (tile.part != 0) return;
        if (call.mean != nullptr) static_cast<A*>(call.mean)[at] = shifted;
        if (call.rstd != nullptr) static_cast<A*>(call.rstd)[at] = rstd;
      });
}

template <typename T, int kBytes, bool kLast, bool kKeeps>
__global__ void __launch_bounds__(kThreads, kBlocks)
    ForwardKernel(const __grid_constant__ Params<GroupNormForwardCall> p) {
  using Tile = group_norm::Tile<T, kBytes, kLast>;
  using A = typename Tile::A;
  using V = typename Tile::V;
  constexpr int kSize = Tile::kSize, kChannels = Tile::kChannels, kStride = Tile::kStride;
  // The map of an element of 16 bits is one multiplication and addition: what that loses is less
  // than the rounding of the element.
  constexpr bool kFolds = sizeof(T) == 2;
  __shared__ Scratch<double> scratch;
  __shared__ ClusterInbox inbox;

  LetDependentsStart();
  if constexpr (kKeeps) inbox.Begin();
  AwaitPredecessors();
  const GroupNormForwardCall& call = p.call;
  const Plan& plan = p.plan;
  const bool results = p.half == Half::kResults;
  const Shared<Tile, double> shared(p.shared);
  const T *x = static_cast<const T*>(call.x), *r = static_cast<const T*>(call.residual);
  T *const sum = static_cast<T*>(call.sum), *const y = static_cast<T*>(call.y);
  const int step = r == nullptr ? kStride : 2 * kStride;
  const auto added = [](const V& a, const V& b) {
    A values[kSize], others[kSize];
    a.Unpack(values);
    b.Unpack(others);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] += others[i];
    return V::Packed(values);
  };

  // The second launch begins with what the first one read last.
  const uint32_t block = !kKeeps && results ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t clusters = kKeeps ? plan.clusters : plan.tiles, first = block / plan.parts;
  Tile tile(plan, static_cast<int>(block - first * plan.parts));
  const uint32_t tiles = plan.tiles;
  if constexpr (kKeeps) Stagger(plan, first);
  bool filled = false;
  int turn = 0;
  for (uint32_t index = first; index < tiles; index += clusters, ++turn) {
    tile.Move(index);
    if constexpr (kKeeps) {
      if (r != nullptr) {
        tile.Keep({x, r}, shared.Kept());
      } else if (!filled) {
        tile.Keep({x}, shared.Kept());
      }
    }
    A* const prepared = shared.coefficients + (turn & 1) * 2 * plan.table_channels;
    for (int i = static_cast<int>(threadIdx.x); i < tile.channels; i += kThreads) {
      prepared[i] = ReadParameter<T>(call.scale, tile.first_channel + i, 1);
      prepared[plan.table_channels + i] = ReadParameter<T>(call.bias, tile.first_channel + i, 0);
    }
    // The base of a group is one of its elements. Doubles add up types of 16 bits without one.
    for (int group = static_cast<int>(threadIdx.x); group < tile.groups; group += kThreads) {
      A base = 0;
      if constexpr (sizeof(T) > 2) {
        const int64_t at = tile.BaseOf(group);
        base = ToCompute(x[at]) + (r == nullptr ? A(0) : ToCompute(r[at]));
      }
      shared.base[group] = base - base == A(0) ? base : A(0);
    }
    if constexpr (kKeeps) AwaitAllCopies();

    struct Loaded {
      V x, residual;
      char* place;
    };
    char* next = shared.Kept();
    const T* from = x;
    const T* other = r;
    if (!kKeeps && results && sum != nullptr) from = sum, other = nullptr;
    const auto load = [&](int64_t at) {
      Loaded loaded;
      if constexpr (kKeeps) {
        loaded.place = next;
        loaded.x = V::Load(next);
        next += step;
      } else {
        loaded.x = V::Load(from + at);
        if (other != nullptr) loaded.residual = V::Load(other + at);
      }
      return loaded;
    };
    const auto take = [&](const Loaded& loaded) {
      return kKeeps || other == nullptr ? loaded.x : added(loaded.x, loaded.residual);
    };
    if constexpr (kKeeps) {
      if (r != nullptr) {
        for (int pass = 0; pass < plan.passes; ++pass) {
          tile.template Sweep<2>(pass, load, [&](const Loaded& loaded, int64_t at) {
            const V s = added(loaded.x, V::Load(loaded.place + kStride));
            s.Store(loaded.place);
            if (sum != nullptr) StoreUnit(s, sum + at);
          });
        }
        next = shared.Kept();
      }
    }

    double* stored = kKeeps ? nullptr : StoredSums<double, A>(call, tile.sample, tile.first_group);
    int64_t stride = int64_t{2} * plan.groups;
    if (kKeeps || !results) {
      SumDeviations<kKeeps ? 2 : 4>(
          tile, shared, scratch,
          [&](int64_t at) {
            char* const before = next;
            const V s = take(load(at));
            next = before;
            return s;
          },
          load,
          [&](const Loaded& loaded, int64_t at) {
            const V s = take(loaded);
            if (!kKeeps && other != nullptr && sum != nullptr) StoreUnit(s, sum + at);
            return s;
          });
      if constexpr (!kKeeps) {
        return StoreSums(shared.sums, tile.groups, stored + stride * tile.part);
      }
    }
    if constexpr (kKeeps) {
      if (turn == 0) inbox.Open();
      stored = shared.Inbox(turn);
      stride = 2 * plan.set_groups;
      SendToAll(inbox, shared.sums, tile.groups, plan, tile.part, stored, turn);
      inbox.Await(plan.parts * tile.groups * 2 * static_cast<int>(sizeof(double)), turn);
    }
    A mean[kChannels], factor[kChannels], bias[kChannels];
    FindStatistics<kKeeps>(call, tile, shared, stored, stride, scratch);

    // The copies for the next tile start where the units have been read for the last time.
    const T* next_x = x;
    if constexpr (kKeeps && kBytes >= 4) {
      Tile other = tile;
      other.Move(index + clusters);
      filled = r == nullptr && index + clusters < tiles && other.slots == tile.slots;
      next_x += other.origin - tile.origin;
    }
    next = shared.Kept();
    for (int pass = 0; pass < plan.passes; ++pass) {
      if (const int slot = tile.SlotOf(pass); slot < tile.slots) {
        LoadParameter<T, A>(prepared, slot * kChannels, factor);
        LoadParameter<T, A>(prepared + plan.table_channels, slot * kChannels, bias);
      }
      tile.ForGroups(pass, [&](int i, int group) {
        A found[2];
        GetEntry(shared.statistics + 2 * group, found);
        mean[i] = found[0];
        factor[i] *= found[1];
        if constexpr (kFolds) bias[i] = fma(-mean[i], factor[i], bias[i]);
      });
      ForFormula<T>(call, [&](auto formula) {
        A a[kChannels], b[kChannels];
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
          a[i] = factor[i] * ScaleOf<decltype(formula)>();
          b[i] = bias[i] * ScaleOf<decltype(formula)>();
        }
        const auto write = [&](const V& s, int64_t at) {
          A z[kSize];
          s.Unpack(z);
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            const int c = kChannels == 1 ? 0 : i;
            z[i] = formula.Value(fma(kFolds ? z[i] : z[i] - mean[c], a[c], b[c]));
          }
          StoreUnit(V::Packed(z), y + at);
        };
        tile.template Sweep<kKeeps ? 2 : 4>(pass, load, [&](const Loaded& loaded, int64_t at) {
          write(take(loaded), at);
          if constexpr (kKeeps && kBytes >= 4) {
            if (filled) CopyAsync<kBytes, kBytes == 16>(loaded.place, next_x + at);
          }
        });
      });
    }
    if constexpr (!kKeeps) return;
  }
}

struct Kernels {
  template <typename T, int kBytes, bool kLast, bool kKeeps>
  static auto Of() {
    return KernelOf<GroupNormFamily, ForwardKernel<T, kBytes, kLast, kKeeps>>();
  }
};

}  // namespace

cudaError_t GroupNormForward(const GroupNormForwardCall& call, cudaStream_t stream) {
  Limits limits;
  const cudaError_t error = GetLimits<ForwardKernel<float, kUnitBytes, true, true>>(&limits);
  if (error != cudaSuccess) return error;
  // A part's sums are two doubles of each group.
  return Run<Kernels>(call, limits, call.residual == nullptr ? 1 : 2, false,
                      call.workspace_size / (call.groups * 4),
                      CommonAlignment({call.x, call.residual, call.y, call.sum}), stream);
}

cudaError_t LoadGroupNormKernels() {
  Limits limits;
  return GetLimits<ForwardKernel<float, kUnitBytes, true, true>>(&limits);
}

}  // namespace jax_fastops::cuda

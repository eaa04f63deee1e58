// The elements of a thread of group norm (group_norm/plan.h), and the parameters of its channels.
#ifndef JAX_FASTOPS_GROUP_NORM_TILE_CUH_
#define JAX_FASTOPS_GROUP_NORM_TILE_CUH_

#include <cstdint>
#include <type_traits>

#include "core/cuda/activation.cuh"
#include "core/cuda/async_copy.cuh"
#include "core/cuda/vec.cuh"
#include "group_norm/group_norm.h"
#include "group_norm/plan.h"

namespace jax_fastops::cuda::group_norm {

using namespace jax_fastops::group_norm;  // NOLINT: this file is a part of it

template <typename T, int kBytes, bool kLast>
struct Tile {
  using Element = T;
  using A = ComputeType<T>;
  using V = Vec<T, kBytes>;
  static constexpr int kSize = V::kSize;
  static constexpr bool kIsLast = kLast;
  static constexpr int kChannels = kLast ? kSize : 1;  // of a unit

  const Plan& plan;
  int64_t sample;
  int set, part;
  int groups, channels, slots;  // of the set, the last of which may have fewer
  int first_group, first_channel;
  int slot, lane;   // this thread's slot in the first pass
  int64_t begin;    // the first unit of the part
  int units;        // of the part
  int least, more;  // each lane has so many of them, and the first ones have one more
  int64_t origin;   // the first element of the set

  __device__ __forceinline__ Tile(const Plan& plan, uint32_t block) : plan(plan) {
    const uint32_t parts = plan.parts, sets = plan.sets;
    const uint32_t rest = block / parts;
    part = static_cast<int>(block - rest * parts);
    sample = rest / sets;
    set = static_cast<int>(rest - static_cast<uint32_t>(sample) * sets);
    first_group = set * plan.set_groups;
    groups = min(plan.set_groups, plan.groups - first_group);
    first_channel = first_group * plan.group_channels;
    channels = groups * plan.group_channels;
    slots = (channels + kChannels - 1) / kChannels;
    const int thread = static_cast<int>(threadIdx.x);
    slot = kLast ? thread % plan.width : thread / plan.lanes;
    lane = kLast ? thread / plan.width : thread % plan.lanes;
    begin = part * plan.part_units;
    units = static_cast<int>(min(plan.part_units, plan.units - begin));
    least = static_cast<uint32_t>(units) / static_cast<uint32_t>(plan.lanes);
    more = units - least * plan.lanes;
    if (lane >= plan.lanes) slot = 1 << 24;  // of no pass
    origin = sample * plan.channels * plan.positions +
             first_channel * (kLast ? int64_t{1} : plan.positions);
  }

  // Where the thread of a lane and a slot of a pass is in the table.
  __device__ __forceinline__ int ThreadOf(int lane, int slot) const {
    return kLast ? lane * plan.width + slot : slot * plan.lanes + lane;
  }
  // The units that a lane has of a slot.
  __device__ __forceinline__ int UnitsOf(int lane) const { return least + (lane < more ? 1 : 0); }
  // An element of the set's group.
  __device__ __forceinline__ int64_t BaseOf(int group) const {
    return origin + int64_t{group} * plan.group_channels * (kLast ? int64_t{1} : plan.positions);
  }

  // Calls load(element) and then use(loaded, element) for the units that this thread has of a slot,
  // with kBatch loads under way.
  template <int kBatch, typename Load, typename Use>
  __device__ __forceinline__ void Sweep(int of, const Load& load, const Use& use) const {
    if (of >= slots) return;
    const int64_t step = plan.lanes * plan.unit_step;
    int64_t at = origin + of * plan.slot_step + (begin + lane) * plan.unit_step;
    std::remove_cvref_t<decltype(load(at))> loaded[kBatch];
    int left = UnitsOf(lane);
    for (; left >= kBatch; left -= kBatch) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k) loaded[k] = load(at + k * step);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) use(loaded[k], at + k * step);
      at += kBatch * step;
    }
    if constexpr (kBatch > 1) {
#pragma unroll
      for (int k = 0; k + 1 < kBatch; ++k) {
        if (k < left) loaded[k] = load(at + k * step);
      }
#pragma unroll
      for (int k = 0; k + 1 < kBatch; ++k) {
        if (k < left) use(loaded[k], at + k * step);
      }
    }
  }

  // Copies the units of `kArrays` arrays to this thread's places in shared memory, which begin at
  // `kept` and follow each other by kArrays * kStride bytes. Only this thread may read them.
  static constexpr int kStride = kThreads * kBytes;
  template <int kArrays>
  __device__ __forceinline__ void Keep(const T* const (&from)[kArrays], char* kept) const {
    for (int pass = 0; pass < plan.passes; ++pass) {
      const int of = pass * plan.width + slot;
      if constexpr (kBytes >= 4) {
        Sweep<1>(
            of, [](int64_t at) { return at; },
            [&](int64_t, int64_t at) {
#pragma unroll
              for (int i = 0; i < kArrays; ++i, kept += kStride) {
                CopyAsync<kBytes, kBytes == 16>(kept, from[i] + at);
              }
            });
      } else {
        struct Loaded {
          V units[kArrays];
        };
        Sweep<8>(
            of,
            [&](int64_t at) {
              Loaded loaded;
#pragma unroll
              for (int i = 0; i < kArrays; ++i) loaded.units[i] = V::Load(from[i] + at);
              return loaded;
            },
            [&](const Loaded& loaded, int64_t) {
#pragma unroll
              for (int i = 0; i < kArrays; ++i, kept += kStride) loaded.units[i].Store(kept);
            });
      }
    }
    AwaitAllCopies();
  }

  // Calls set(i, channel, group) for the channels of a slot's units; both are numbered in the set.
  template <typename Set>
  __device__ __forceinline__ void ForChannels(int of, const Set& set) const {
    const int first = of * kChannels;
    int group = first / plan.group_channels, within = first - group * plan.group_channels;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      if (first + i < channels) set(i, first + i, group);
      if (++within == plan.group_channels) within = 0, ++group;
    }
  }
};

// Stores a unit to global memory, by one instruction.
template <typename T, int kBytes>
__device__ __forceinline__ void StoreUnit(const Vec<T, kBytes>& unit, T* to) {
  if constexpr (kBytes == 16) {
    unit.StoreWord(to);
  } else {
    unit.Store(to);
  }
}

// A parameter of type T or of its accumulator, or `otherwise` if it is absent.
template <typename T>
__device__ __forceinline__ ComputeType<T> ReadParameter(const GroupNormParameter& parameter,
                                                        int channel, double otherwise) {
  using A = ComputeType<T>;
  if (parameter.data == nullptr) return static_cast<A>(otherwise);
  if (parameter.wide) return static_cast<const A*>(parameter.data)[channel];
  return ToCompute(static_cast<const T*>(parameter.data)[channel]);
}

// What stands for an activation where there is none.
template <typename T>
struct Identity {
  using A = ComputeType<T>;
  static __device__ __forceinline__ A Value(A z) { return z; }
  static __device__ __forceinline__ A Pull(A, A g) { return g; }
};

// Calls visit with the formula of the call's activation. Around a loop, so that each loop has one:
// a choice for each unit takes two instructions for each element.
template <typename T, typename Visit>
__device__ __forceinline__ void ForFormula(const GroupNormCall& call, const Visit& visit) {
  if (!call.active) return visit(Identity<T>());
  ForActivation(call.activation, [&](auto constant) {
    visit(FormulaOf<decltype(constant)::value, ActivationMath<T>>());
  });
}

}  // namespace jax_fastops::cuda::group_norm

#endif  // JAX_FASTOPS_GROUP_NORM_TILE_CUH_

// What the kernels of group norm share: a block's elements, coefficients and sums, and activations.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/cuda/activation.cuh"
#include "core/cuda/async_copy.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/math.cuh"
#include "core/cuda/partial_sums.cuh"
#include "core/cuda/vec.cuh"
#include "group_norm/group_norm.h"
#include "group_norm/plan.h"

namespace jax_fastops::cuda::group_norm {

using namespace jax_fastops::group_norm;  // NOLINT: this file is a part of it

template <typename Call>
struct Params {
  Call call;
  Plan plan;
};

template <typename T, int kBytes, bool kLast>
struct Block {
  using A = ComputeType<T>;
  using V = Vec<T, kBytes>;
  static constexpr int kSize = V::kSize;
  static constexpr int kChannels = kLast ? kSize : 1;  // of a unit
  // An element of 16 bits is mapped by one multiplication and addition: what that loses is less
  // than the rounding of the element.
  static constexpr bool kFolds = sizeof(T) == 2;
  using Scratch = A[2][kThreads / kWarpSize];

  const Plan& plan;
  Scratch& scratch;
  int part;
  int64_t sample, origin;       // of the tile: its first element
  int groups, channels, slots;  // the last set may have fewer
  int first_group, first_channel;

  template <typename Call>
  __device__ __forceinline__ Block(const Params<Call>& p, Scratch& scratch)
      : plan(p.plan), scratch(scratch) {
    const uint32_t tile = Divide(blockIdx.x, plan.by_parts);
    part = static_cast<int>(blockIdx.x - tile * plan.parts);

    const uint32_t of_sample = Divide(tile, plan.by_sets);
    sample = of_sample;
    first_group = static_cast<int>(tile - of_sample * plan.sets) * plan.set_groups;
    groups = min(plan.set_groups, plan.groups - first_group);
    first_channel = first_group * plan.group_channels;
    channels = groups * plan.group_channels;
    slots = (channels + kChannels - 1) / kChannels;
    origin = sample * plan.channels * plan.positions + first_channel * channel_step();
  }

  // From a channel to the next one.
  __device__ __forceinline__ int64_t channel_step() const { return kLast ? 1 : plan.positions; }
  __device__ __forceinline__ int64_t position_step() const { return kLast ? plan.channels : 1; }

  // Shared memory (group_norm/plan.h).
  static __device__ __forceinline__ A* Memory() {
    extern __shared__ __align__(16) char memory[];
    return reinterpret_cast<A*>(memory);
  }
  __device__ __forceinline__ A* ChannelSums() const { return Memory() + kCoefficients * plan.row; }
  __device__ __forceinline__ A* GroupSums() const { return Memory() + GroupSumsAt(plan); }
  // Four numbers of a group.
  __device__ __forceinline__ A* Group(int group) const {
    return Memory() + GroupsAt(plan) + 4 * group;
  }
  __device__ __forceinline__ A* Entry(int at) const { return Memory() + TableAt(plan) + 2 * at; }

  // The units that this thread has in shared memory: `arrays` of them begin at Kept(unit).
  __device__ __forceinline__ char* Kept(int unit, int arrays) const {
    return reinterpret_cast<char*>(Memory()) + plan.kept_at +
           (unit * arrays * kThreads + static_cast<int>(threadIdx.x)) * kBytes;
  }
  // The place of the next array.
  static constexpr int kKeptStride = kThreads * kBytes;

  // What this thread has: a slot in the first pass, and some units of each of its slots.
  struct Own {
    int slot, lane, units;
  };
  __device__ __forceinline__ Own Find() const {
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));  // computed again in each phase: registers are scarce
    const uint32_t outer = Divide(thread, plan.by_inner);
    const uint32_t rest = thread - outer * plan.by_inner.divisor;
    const int slot = static_cast<int>(kLast ? rest : outer);
    const int lane = static_cast<int>(kLast ? outer : rest);
    const int all = static_cast<int>(min(plan.part_units, plan.units - part * plan.part_units));
    const bool idle = lane >= min(plan.lanes, all) || slot >= plan.width;
    return {slot, lane, idle ? 0 : static_cast<int>(Divide(all - lane - 1, plan.by_lanes)) + 1};
  }

  // `count` of the units of a pass, from `unit`, which is at element `at`, to the next ones, or, if
  // kNext is -1, to the ones before. Units are numbered in all passes.
  template <int kNext>
  struct Range {
    int64_t at, step;  // to the next one
    int unit, count;
  };
  template <int kNext>
  __device__ __forceinline__ Range<kNext> From(const Own& own, int pass, int first,
                                               int count) const {
    const int slot = own.slot + pass * plan.width;
    const int64_t step = plan.lanes * plan.unit_step;
    return {origin + slot * plan.slot_step + (part * plan.part_units + own.lane) * plan.unit_step +
                first * step,
            kNext * step, pass * own.units + first, slot < slots ? count : 0};
  }
  // Starts the first loads of a sweep: loaded[k] = load(element, unit).
  template <int kNext, int kBatch, typename Load, typename Loaded>
  static __device__ __forceinline__ void Start(const Range<kNext>& range, const Load& load,
                                               Loaded (&loaded)[kBatch]) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (k < range.count) loaded[k] = load(range.at + k * range.step, range.unit + k * kNext);
    }
  }
  // After Start, calls use(loaded, element, unit) for the units. kBatch loads are under way at all
  // times.
  template <int kNext, int kBatch, typename Load, typename Loaded, typename Use>
  static __device__ __forceinline__ void Sweep(const Range<kNext>& range, const Load& load,
                                               Loaded (&loaded)[kBatch], const Use& use) {
    auto [at, step, unit, count] = range;
    int64_t lead = kBatch * step;
    asm("" : "+l"(step), "+l"(lead));  // registers, else each use multiplies
    for (; count >= 2 * kBatch; count -= kBatch) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k, at += step, unit += kNext) {
        use(loaded[k], at, unit);
        loaded[k] = load(at + lead, unit + kBatch * kNext);
      }
    }
    for (; count > 0; count -= kBatch) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k, at += step, unit += kNext) {
        if (k < count) use(loaded[k], at, unit);
        if (k + kBatch < count) loaded[k] = load(at + lead, unit + kBatch * kNext);
      }
    }
  }
  // Both, with kBatch loads.
  template <int kBatch, int kNext, typename Load, typename Use>
  static __device__ __forceinline__ void Sweep(const Range<kNext>& range, const Load& load,
                                               const Use& use) {
    std::remove_cvref_t<decltype(load(range.at, range.unit))> loaded[kBatch];
    Start(range, load, loaded);
    Sweep(range, load, loaded, use);
  }

  // How many units of a pass are in shared memory.
  __device__ __forceinline__ int KeptOf(const Own& own, int pass) const {
    return max(0, min(plan.kept - pass * own.units, own.units));
  }

  // Starts to load the first units of a range, while the thread waits for other things.
  template <int kUnits, int kNext, typename... P>
  static __device__ __forceinline__ void Prefetch(const Range<kNext>& range, const P*... from) {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (k >= range.count) continue;
      (..., PrefetchToL2(from + range.at + k * range.step));
    }
  }

  // Calls use(channel, group, coefficients, fetch(channel, group)) for all channels, numbered in
  // the set. A thread has the same channels in each call. between() is called once, after the first
  // fetch, whose loads should be the first ones: all of the block waits for them. A barrier must
  // follow.
  template <typename Fetch, typename Between, typename Use>
  __device__ __forceinline__ void ForChannels(const Fetch& fetch, const Between& between,
                                              const Use& use) const {
    int i = static_cast<int>(threadIdx.x);
#pragma unroll 1
    do {
      const int group = GroupOf(i);
      decltype(fetch(i, group)) fetched;
      if (i < channels) fetched = fetch(i, group);
      if (i < kThreads) between();
      if (i < channels) use(i, group, Memory() + i, fetched);
      i += kThreads;
    } while (i < channels);
  }
  __device__ __forceinline__ int GroupOf(int channel) const {
    return static_cast<int>(Divide(channel, plan.by_group_channels));
  }
  // Whether it is the first one of the group.
  __device__ __forceinline__ bool IsFirst(int channel, int group) const {
    return channel == group * plan.group_channels;
  }
  // Reads the coefficients of this thread's channels in a pass.
  template <int kFirst = 0, int kRows>
  __device__ __forceinline__ void Read(const Own& own, int pass,
                                       A (&rows)[kRows][kChannels]) const {
    const int at = own.slot + pass * plan.width;
    if (at >= slots) return;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      LoadParameter<A, A>(Memory() + (kFirst + k) * plan.row, at * kChannels, rows[k]);
    }
  }

  // Sets the two sums of each channel, from those that sweep(pass, first, second) adds up in this
  // thread, and those of each group, where a channel has the weight weight(channel). Waits for the
  // sums of other parts, if there are any. Other clusters give theirs through the workspace: the
  // sums of groups and, with kStores, of channels.
  template <bool kStores, typename Sweep, typename Weight>
  __device__ __forceinline__ void Sums(A* to, const Sweep& sweep, const Weight& weight) const {
    const int width = plan.width, lanes = plan.lanes;
    for (int pass = 0; pass < plan.passes; ++pass) {
      A s[2][kSize] = {};
      sweep(pass, s[0], s[1]);
      if constexpr (!kLast) {
#pragma unroll
        for (int i = 1; i < kSize; ++i) s[0][0] += s[0][i], s[1][0] += s[1][i];
      }
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        Set(Entry(i * kTableStride + static_cast<int>(threadIdx.x)), {s[0][i], s[1][i]});
      }
      const int first = pass * width * kChannels;
      SumTerms<kThreads>(
          min(channels - first, width * kChannels), lanes, scratch,
          [&](int channel, int lane, A(&values)[2]) {
            Get(Entry(kLast
                          ? channel % kChannels * kTableStride + lane * width + channel / kChannels
                          : channel * lanes + lane),
                values);
          },
          [&](int channel, const A(&found)[2]) {
            Set(ChannelSums() + 2 * (first + channel), found);
          });
    }
    SumTerms<kThreads>(
        groups, plan.group_channels, scratch,
        [&](int group, int of, A(&values)[2]) {
          const int channel = group * plan.group_channels + of;
          Get(ChannelSums() + 2 * channel, values);
          const A own = weight(channel);
          values[0] *= own, values[1] *= own;
        },
        [&](int group, const A(&found)[2]) { Set(GroupSums() + 2 * group, found); });
    if (plan.parts == 1) return;
    if (plan.clusters) return AwaitCluster();
    to += part * PartSize(kStores);
    for (int i = static_cast<int>(threadIdx.x); i < 2 * groups; i += kThreads) {
      to[2 * first_group + i] = GroupSums()[i];
    }
    if constexpr (kStores) {
      to += 2 * (plan.groups + first_channel);
      for (int i = static_cast<int>(threadIdx.x); i < 2 * channels; i += kThreads) {
        to[i] = ChannelSums()[i];
      }
    }
    AwaitGrid();
  }
  // The sums of a part in the workspace.
  __device__ __forceinline__ int64_t PartSize(bool stores) const {
    return 2 * (plan.groups + (stores ? plan.channels : 0));
  }

  // Adds up sums of all parts in double: those of groups, and then of `more` channels from
  // `channel`. Calls write(result, sums).
  template <bool kStores, typename Write>
  __device__ __forceinline__ void TotalParts(const A* stored, int channel, int more,
                                             double (&doubles)[2][kThreads / kWarpSize],
                                             const Write& write) const {
    const int64_t stride = PartSize(kStores);
    const A *of_groups = GroupSums(), *of_channels = ChannelSums() + 2 * channel;
    if (plan.parts > 1 && !plan.clusters) {
      of_groups = stored + 2 * first_group;
      of_channels = stored + 2 * (plan.groups + first_channel + channel);
    }
    SumTerms<kThreads>(
        groups + more, plan.parts, doubles,
        [&](int result, int part, double (&values)[2]) {
          const A* at =
              result < groups ? of_groups + 2 * result : of_channels + 2 * (result - groups);
          at = plan.clusters ? InBlock(at, part) : at + part * stride;
#pragma unroll
          for (int i = 0; i < 2; ++i) values[i] = at[i];
        },
        write);
    if (plan.clusters) EndClusterReads();
  }
  // All threads call it before they exit.
  __device__ __forceinline__ void End() const {
    if (plan.clusters) AwaitClusterReads();
  }

  static __device__ __forceinline__ void Set(A* entry, const A (&values)[2]) {
    if constexpr (sizeof(A) == 4) {
      Unit<A, 8>{{values[0], values[1]}}.Store(entry);
    } else {
      entry[0] = values[0], entry[1] = values[1];
    }
  }
  static __device__ __forceinline__ void Get(const A* entry, A (&values)[2]) {
    if constexpr (sizeof(A) == 4) {
      const auto both = Unit<A, 8>::Load(entry);
      values[0] = both[0], values[1] = both[1];
    } else {
      values[0] = entry[0], values[1] = entry[1];
    }
  }
};

// Stores a unit by one instruction.
template <CacheHint kHint = CacheHint::kDefault, typename T, int kBytes>
__device__ __forceinline__ void StoreUnit(const Vec<T, kBytes>& unit, T* to) {
  if constexpr (kBytes == 16) {
    StoreWord<kHint>(to, unit.Get());
  } else {
    unit.Store(to);
  }
}

// A parameter of type T or of its accumulator, as it is loaded: nothing waits for it.
template <typename T>
struct Fetched {
  using A = ComputeType<T>;
  A wide;
  T narrow;

  __device__ __forceinline__ void Load(const GroupNormParameter& parameter, int channel) {
    if (parameter.data == nullptr) return;
    if (parameter.wide) {
      wide = static_cast<const A*>(parameter.data)[channel];
    } else {
      narrow = static_cast<const T*>(parameter.data)[channel];
    }
  }
  // `otherwise` if it is absent.
  __device__ __forceinline__ A Value(const GroupNormParameter& parameter, double otherwise) const {
    if (parameter.data == nullptr) return static_cast<A>(otherwise);
    return parameter.wide ? wide : ToCompute(narrow);
  }
};

// -------------------------------------------------------------------------------------------------
// Activations

// What stands for an activation where there is none.
template <typename T>
struct Identity {
  using A = ComputeType<T>;
  static __device__ __forceinline__ A Value(A z) { return z; }
  static __device__ __forceinline__ A Pull(A, A g) { return g; }
};

// z sigmoid(kLinear z) for types of 16 bits, from s = kScale z: the affine map before it has the
// factor in its coefficients. 1 / sigmoid(v) = 1 + exp(-v) gets it too, so that far down the
// negative tail, where exp(-v) is larger than any float, the result has all of its bits. Nothing is
// selected or limited: 6 instructions for a value, 9 for a gradient. With u = 1 - sigmoid(v), the
// derivative is sigmoid(v) (1 + v u); u is exactly 0 where v is so large that 1 + v would lose
// the 1.
template <typename T, typename F>
struct ScaledLogistic {
  static_assert(sizeof(T) == 2);
  static constexpr float kScale = 5.9604644775390625e-8f;  // 2^-24

  static __device__ __forceinline__ float Value(float s) { return s * Sigmoid(s); }
  static __device__ __forceinline__ float Pull(float s, float g) {
    const float sigmoid = Sigmoid(s);
    const float u = fmaf(sigmoid, -kScale, 1.0f);
    constexpr float linear = F::kLinear;
    return sigmoid * fmaf(linear == 1.0f ? s : s * linear, u, kScale) * g;
  }

 private:
  // sigmoid(v) / kScale.
  static __device__ __forceinline__ float Sigmoid(float s) {
    constexpr auto slope = static_cast<float>(-F::kLinear * activation::kLog2E * 16777216.0);
    return Reciprocal(Exp2(fmaf(s, slope, -24.0f)) + kScale);
  }
};

template <typename T, Activation kActivation>
struct BestFormula {
  using M = ActivationMath<T>;
  using F = FormulaOf<kActivation, M>;
  static constexpr bool kIsScaled =
      sizeof(T) == 2 && (kActivation == Activation::kSilu || kActivation == Activation::kQuickGelu);
  using Type = typename std::conditional_t<kIsScaled, std::type_identity<ScaledLogistic<T, F>>,
                                           std::type_identity<F>>::type;
};

// The factor of the argument that a formula gets.
template <typename Formula>
constexpr float ScaleOf() {
  if constexpr (requires { Formula::kScale; }) return Formula::kScale;
  return 1.0f;
}

// Gives the coefficients of an affine map the formula's factor.
template <typename Formula, typename A, int kSize>
__device__ __forceinline__ void Scaled(A (&factor)[kSize], A (&bias)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) factor[i] *= ScaleOf<Formula>(), bias[i] *= ScaleOf<Formula>();
}

// The gradient of z from that of the activation, where s is z times the formula's factor.
template <typename T, typename Formula, typename A>
__device__ __forceinline__ A PullOf(Formula, A s, A g) {
  if constexpr (std::is_same_v<Formula, Identity<T>>) return g;
  return Pull<ActivationMath<T>, Formula>(s, g);
}

// Calls visit with the formula of the call's activation. Around a loop, so that each loop has one:
// a choice for each unit takes two instructions for each element.
template <typename T, typename Visit>
__device__ __forceinline__ void ForFormula(const GroupNormCall& call, const Visit& visit) {
  if (!call.active) return visit(Identity<T>());
  ForActivation(call.activation, [&](auto constant) {
    visit(typename BestFormula<T, decltype(constant)::value>::Type());
  });
}

}  // namespace jax_fastops::cuda::group_norm

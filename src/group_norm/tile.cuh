// The elements of a thread of group norm (group_norm/plan.h), the parameters of their channels, and
// what is computed from an element.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/cuda/activation.cuh"
#include "core/cuda/async_copy.cuh"
#include "core/cuda/math.cuh"
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
  int part;
  int slot, lane;           // this thread's slot in the first pass
  int slot_group, within;   // the group of the slot's first channel, and its place there
  int units;                // of the part
  int least, more;          // each lane has so many of them, and the first ones have one more
  int64_t own;              // this thread's first element, from the first one of the set
  int64_t step, pass_step;  // to its next unit, and to its next slot
  // Of the set.
  int64_t sample, origin;       // the first element
  int groups, channels, slots;  // the last set may have fewer
  int first_group, first_channel;

  __device__ __forceinline__ Tile(const Plan& plan, int part) : plan(plan), part(part) {
    const uint32_t thread = threadIdx.x;
    const uint32_t inner = kLast ? plan.width : plan.lanes, outer = thread / inner;
    slot = static_cast<int>(kLast ? thread - outer * inner : outer);
    lane = static_cast<int>(kLast ? outer : thread - outer * inner);
    const int64_t begin = part * plan.part_units;
    units = static_cast<int>(min(plan.part_units, plan.units - begin));
    least = static_cast<uint32_t>(units) / static_cast<uint32_t>(plan.lanes);
    more = units - least * plan.lanes;
    own = slot * plan.slot_step + (begin + lane) * plan.unit_step;
    step = plan.lanes * plan.unit_step;
    pass_step = plan.width * plan.slot_step;
    slot_group = slot * kChannels / plan.group_channels;
    within = slot * kChannels - slot_group * plan.group_channels;
    if (lane >= plan.lanes) slot = 1 << 24;  // of no pass
  }

  // Makes it the tile of a set, which is numbered in all samples.
  __device__ __forceinline__ void Move(uint32_t index) {
    const uint32_t sets = plan.sets;
    sample = index / sets;
    first_group = static_cast<int>(index - static_cast<uint32_t>(sample) * sets) * plan.set_groups;
    groups = min(plan.set_groups, plan.groups - first_group);
    first_channel = first_group * plan.group_channels;
    channels = groups * plan.group_channels;
    slots = (channels + kChannels - 1) / kChannels;
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

  __device__ __forceinline__ int SlotOf(int pass) const { return slot + pass * plan.width; }
  // The first unit that this thread has of its slot of a pass.
  __device__ __forceinline__ int64_t FirstOf(int pass) const {
    return origin + own + pass * pass_step;
  }
  // The channels of a unit of the pass that are the first ones of a group, as bits, and bit
  // kChannels.
  __device__ __forceinline__ uint32_t Starts(int pass) const {
    uint32_t starts = 1u << kChannels;
    if constexpr (kChannels > 1) {
      const int size = plan.group_channels;
      const int before = pass == 0 ? within : SlotOf(pass) * kChannels % size;
      for (int at = size - before; at < kChannels; at += size) starts |= 1u << at;
    }
    return starts;
  }

  // Calls load(element) and then use(loaded, element) for the units that this thread has of a slot,
  // with kBatch loads under way.
  template <int kBatch, typename Load, typename Use>
  __device__ __forceinline__ void Sweep(int pass, const Load& load, const Use& use) const {
    if (SlotOf(pass) >= slots) return;
    int64_t step = this->step;
    asm("" : "+l"(step));  // a register, else each use multiplies
    int64_t at = FirstOf(pass);
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

  // Starts to copy the units of `kArrays` arrays to this thread's places in shared memory, which
  // begin at `kept` and follow each other by kArrays * kStride bytes. Only this thread may read
  // them.
  static constexpr int kStride = kThreads * kBytes;
  template <int kArrays>
  __device__ __forceinline__ void Keep(const T* const (&from)[kArrays], char* kept) const {
    for (int pass = 0; pass < plan.passes; ++pass) {
      if (SlotOf(pass) >= slots) return;
      if constexpr (kBytes >= 4) {
        const T* next[kArrays];
#pragma unroll
        for (int i = 0; i < kArrays; ++i) next[i] = from[i] + FirstOf(pass);
        int64_t step = this->step;
        asm("" : "+l"(step));
#pragma unroll 4
        for (int left = UnitsOf(lane); left > 0; --left) {
#pragma unroll
          for (int i = 0; i < kArrays; ++i, kept += kStride) {
            CopyAsync<kBytes, kBytes == 16>(kept, next[i]);
            next[i] += step;
          }
        }
      } else {
        struct Loaded {
          V units[kArrays];
        };
        Sweep<8>(
            pass,
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
  }

  // Calls set(i, group) for the channels of the units of a pass. The group is numbered in the set.
  template <typename Set>
  __device__ __forceinline__ void ForGroups(int pass, const Set& set) const {
    if (SlotOf(pass) >= slots) return;
    int group = slot_group, place = within;
    if (pass > 0) {
      const int first = SlotOf(pass) * kChannels;
      group = first / plan.group_channels, place = first - group * plan.group_channels;
    }
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      set(i, group);
      if (++place == plan.group_channels) place = 0, ++group;
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

// The backward of a batch norm in one cooperative kernel. It computes the sums and then dx, and
// between these two passes keeps x and dy on the chip. What does not fit is read again, from L2 if
// it is still there. grid.cuh describes the method.
//
// A slot of the ring holds a unit of x, a unit of dy, and the 4-byte word of the mask that contains
// their bits. Asynchronous copies of less than 4 bytes do not exist, so each thread that shares a
// word has its own copy of it.
//
// Long because its phases share what registers and shared memory keep. A version in functions, with
// one body for both directions, was 1.17 times slower (docs/dev/log/batch_norm.md).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "batch_norm/fold.cuh"
#include "batch_norm/geometry.cuh"
#include "batch_norm/grid.cuh"
#include "batch_norm/units.cuh"
#include "core/cuda/vec.cuh"

namespace jax_fastops::cuda::batch_norm {

struct GradientParams : GridParams {
  BatchNormCall call;
  const uint8_t* mask_end;
};

template <typename T>
using GradientRing = RingOf<T, 2, 4>;

// Copies the word of the mask that contains `byte`. If the mask ends, at `end`, inside that word,
// stores only the byte at its position in the word.
__device__ __forceinline__ void CopyBitsAsync(uint32_t* to, const uint8_t* byte,
                                              const uint8_t* end) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(byte) & 3;
  const uint8_t* const word = byte - at;
  if (end - word < 4) {
    *to = uint32_t{*byte} << 8 * at;
    return;
  }
  CopyAsync<4>(to, word);
}

template <typename T, bool kMask>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    GradientKernel(const __grid_constant__ GradientParams p) {
  using A = ComputeType<T>;
  using Ring = GradientRing<T>;
  constexpr int kAccesses = Ring::kAccesses, kStep = Ring::kStep, kKept = Ring::kKept;
  extern __shared__ uint4 shared[];

  const Geometry& g = p.geometry();
  const Place place = PlaceOf(g, blockIdx.x);
  const Share share = ShareOf(g, place, threadIdx.x);
  const int64_t group = place.group * g.group_size;
  const T* const x = static_cast<const T*>(p.call.x) + group;
  const T* const dy = static_cast<const T*>(p.call.dy) + group;
  T* const dx = static_cast<T*>(p.call.dx) + group;
  const uint8_t* const mask =
      kMask ? static_cast<const uint8_t*>(p.call.mask) + place.group * p.mask_bytes : nullptr;
  const UnitChannels channels(g, place, share, p.aligned_parameters);
  // Whether all lanes of the warp have the same number of units.
  const bool together = kAccesses == 2 && IsSameInWarp(share.count);

  FoldBuffer<A>& buffer = *reinterpret_cast<FoldBuffer<A>*>(shared);
  uint4* const first_slot = shared + kFoldBytes<A> / sizeof(uint4);
  uint4* const ring = first_slot + threadIdx.x;
  const int slots = p.slots;
  uint32_t* const ring_bits =
      reinterpret_cast<uint32_t*>(first_slot + slots * 2 * kAccesses * kThreads) + threadIdx.x;
  const int ringed = max(share.count - kKept, 0);  // units that go through the ring
  const int passing = max(ringed - slots, 0);      // those of them that do not stay in it
  const int64_t ring_first = share.first + kKept * share.stride;

  // Raw bits as in memory, before the mask is applied.
  struct Loaded {
    UnitVec<T> x;
    UnitVec<T> g;
    uint32_t bits;
  };
  const auto load = [&](int64_t element) {
    Loaded loaded;
    loaded.bits = MaskByte(mask, element);
    loaded.x = LoadUnit<T, true>(x + element);
    loaded.g = LoadUnit<T, true>(dy + element);
    return loaded;
  };
  const auto select = [&](const Loaded& loaded) {
    return kMask ? loaded.g.Select(loaded.bits) : loaded.g;
  };
  Loaded kept[kKept];
#pragma unroll
  for (int k = 0; k < kKept; ++k) {
    if (k < share.count) kept[k] = load(share.first + k * share.stride);
  }

  const auto ring_word = [&](int slot, int w) -> uint4& {
    return ring[(slot * 2 * kAccesses + w) * kThreads];
  };
  const CopyPolicies policies;
  int copied = 0, copy_slot = 0;
  int64_t from = ring_first;
  const auto copy = [&] {
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      if (copied < ringed) {
        const uint64_t policy = copied < passing ? policies.again : policies.once;
#pragma unroll
        for (int w = 0; w < kAccesses; ++w) {
          CopyAsync16<kAccesses == 1>(&ring_word(copy_slot, w),
                                      reinterpret_cast<const uint4*>(x + from) + w, policy);
          CopyAsync16<kAccesses == 1>(&ring_word(copy_slot, kAccesses + w),
                                      reinterpret_cast<const uint4*>(dy + from) + w, policy);
        }
        if constexpr (kMask) {
          CopyBitsAsync(&ring_bits[copy_slot * kThreads], mask + (from >> 3), p.mask_end);
        }
      }
      ++copied;
      from += share.stride;
      copy_slot = copy_slot + 1 == slots ? 0 : copy_slot + 1;
    }
    CommitCopies();
  };
  const auto take = [&](int slot, int64_t element) {
    Loaded loaded;
#pragma unroll
    for (int w = 0; w < kAccesses; ++w) {
      loaded.x.Set(w, Unit<T>::Load(&ring_word(slot, w)));
      loaded.g.Set(w, Unit<T>::Load(&ring_word(slot, kAccesses + w)));
    }
    loaded.bits = 0xff;
    if constexpr (kMask) {
      const auto byte = reinterpret_cast<uintptr_t>(mask + (element >> 3));
      loaded.bits = ring_bits[slot * kThreads] >> 8 * (byte & 3);
    }
    return loaded;
  };
#pragma unroll
  for (int k = 0; k < kRingAhead; ++k) copy();

  // First pass: the sums.
  A mean[kUnit];
  if (share.count > 0 || share.cut > 0) channels.Load(static_cast<const A*>(p.call.mean), mean);
  Pair<A> sums[kUnit];
  const auto add = [&](const UnitVec<T>& unit, const UnitVec<T>& selected, int size) {
    AddProducts(selected, unit, mean, size, sums);
  };
#pragma unroll
  for (int k = 0; k < kKept; ++k) {
    if (k < share.count) {
      if constexpr (kMask) kept[k].g = select(kept[k]);
      add(kept[k].x, kept[k].g, kUnit);
    }
  }
  int slot = 0;
  int64_t element = ring_first;
  for (int used = 0; used < ringed; used += kStep) {
    AwaitCopies<kRingAhead - 1>();
    Loaded units[kStep];
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      if (used + k < ringed) units[k] = take(slot, element);
      slot = slot + 1 == slots ? 0 : slot + 1;
      element += share.stride;
    }
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      if (used + k < ringed) add(units[k].x, select(units[k]), kUnit);
    }
    copy();
  }
  const int64_t cut = g.group_size - share.cut;
  const auto load_cut = [&] {
    Loaded loaded;
    loaded.bits = MaskByte(mask, cut);
    loaded.x = LoadCutUnit(x + cut, share.cut);
    loaded.g = LoadCutUnit(dy + cut, share.cut);
    return loaded;
  };
  if (share.cut > 0) {
    const Loaded last = load_cut();
    add(last.x, select(last), share.cut);
  }

  A* const workspace = static_cast<A*>(p.call.workspace) + place.group * p.call.workspace_size;
  // The counter follows the first group's sums in the workspace.
  uint32_t* const counter =
      reinterpret_cast<uint32_t*>(static_cast<A*>(p.call.workspace) + 2 * g.plane());
  if (blockIdx.x == 0 && threadIdx.x == 0) *counter = 0;
  if (p.plain) {
    FoldPlain(g, place, sums, buffer, workspace);
  } else {
    Fold(g, place, sums, buffer, workspace);
  }

  // Second pass: dx from the three factors of each channel, as in BackwardKernel.
  A a[kUnit], b[kUnit], c[kUnit];
  const auto factors = [&] {
    FinishGrid<A>(
        p.finish, p.finish_blocks, p.plain, buffer.value[0], counter,
        [&](int64_t at, const A(&total)[2]) {
          A* const out = static_cast<A*>(p.finish.out[0]) + at;
          out[0] = total[0] / static_cast<A>(p.finish.n);
          out[g.channels] = total[1] / static_cast<A>(p.finish.n);
        },
        [] {});
    if (share.count == 0 && share.cut == 0) return;
    // Load the parameters together with the sums, so that across the barrier the registers are free
    // for x and dy. `sums` has two values per channel; Load adds the other half of the group's
    // offset.
    const A* const total = static_cast<const A*>(p.call.sums) + place.group * g.channels;
    const A eps = static_cast<A>(p.call.eps);
    A var[kUnit], more[kUnit];
    channels.Load(total + g.channels, b);
    channels.Load(total, c);
    channels.Load(static_cast<const A*>(p.call.mean), mean);
    channels.Load(static_cast<const A*>(p.call.var), var);
    channels.LoadOr(static_cast<const A*>(p.call.scale), A(1), a);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      var[i] += eps;
      a[i] *= FastReciprocalRoot(var[i]);
    }
    channels.LoadOr(static_cast<const A*>(p.call.dvar), A(0), more);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) b[i] = fma(A(2), more[i], -(a[i] * b[i] / var[i]));
    channels.LoadOr(static_cast<const A*>(p.call.dmean), A(0), more);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) c[i] = fma(-a[i], c[i], more[i]);
  };
  const auto gradient = [&](const UnitVec<T>& unit, const UnitVec<T>& selected) {
    return GradientUnit(unit, selected, mean, a, b, c);
  };
  const auto put = [&](const UnitVec<T>& unit, const UnitVec<T>& selected, int64_t at) {
    const UnitVec<T> result = gradient(unit, selected);
    if (kAccesses == 2 && together) {
      StorePairs(dx + at, result);
    } else {
      StoreUnit<T, true>(dx + at, result);
    }
  };

  // Begin with the units that have passed through the ring, in reverse order, because the last ones
  // are the likeliest to be in L2. Their first loads do not need the sums, so they are issued
  // before the grid barrier.
  Sweep<kInFlight<T, 2>, Loaded>(
      passing, ring_first + (passing - 1) * share.stride, -share.stride, load,
      [&](const Loaded&) {
        factors();
#pragma unroll
        for (int k = 0; k < kKept; ++k) {
          if (k < share.count) put(kept[k].x, kept[k].g, share.first + k * share.stride);
        }
      },
      [&](const Loaded& loaded, int64_t at) { put(loaded.x, select(loaded), at); }, [] {});
  slot = slots == 0 ? 0 : passing % slots;
  element = ring_first + passing * share.stride;
  for (int used = passing; used < ringed; ++used) {
    const Loaded loaded = take(slot, element);
    put(loaded.x, select(loaded), element);
    slot = slot + 1 == slots ? 0 : slot + 1;
    element += share.stride;
  }
  if (share.cut > 0) {
    const Loaded last = load_cut();
    StoreCutUnit(dx + cut, gradient(last.x, select(last)), share.cut);
  }
}

// -------------------------------------------------------------------------------------------------
// Host

inline GradientParams MakeGradientParams(const BatchNormCall& call, const GridPlan& plan) {
  GradientParams p = {plan.params, call, nullptr};
  p.finish.x = p.finish.out[1] = nullptr;
  p.finish.out[0] = call.sums;
  p.finish.out_stride = 2 * call.shape.channels;
  p.aligned_parameters =
      AreAligned(call.mean, call.var, call.scale, call.sums, call.dmean, call.dvar);
  if (call.mask != nullptr) {
    p.mask_end = static_cast<const uint8_t*>(call.mask) + call.shape.groups * p.mask_bytes;
  }
  return p;
}

}  // namespace jax_fastops::cuda::batch_norm

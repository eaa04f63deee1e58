// The forward of a batch norm in one cooperative kernel. It computes the statistics and normalizes
// x, and between these two passes keeps x on the chip, in registers and shared memory. What does
// not fit is read again, from L2 if it is still there. grid.cuh describes the method.
//
// Long because its phases share what registers and shared memory keep. A version in functions, with
// one body for both directions, was 1.17 times slower (docs/dev/log/batch_norm.md).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "batch_norm/deviations.cuh"
#include "batch_norm/fold.cuh"
#include "batch_norm/geometry.cuh"
#include "batch_norm/grid.cuh"
#include "batch_norm/units.cuh"
#include "core/cuda/relu_of.cuh"
#include "core/cuda/vec.cuh"

namespace jax_fastops::cuda::batch_norm {

struct ResidentParams : GridParams {
  BatchNormCall call;
  double inverse_n;
};

// sum / n. All blocks wait for this result, and a division would take most of that time. One
// correction step makes the product as accurate.
__device__ __forceinline__ double Average(double sum, double n, double inverse_n) {
  const double quotient = sum * inverse_n;
  return isfinite(quotient) ? fma(fma(-quotient, n, sum), inverse_n, quotient) : quotient;
}

template <typename T, bool kResidual>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    ResidentKernel(const __grid_constant__ ResidentParams p) {
  using A = ComputeType<T>;
  using Ring = RingOf<T, 1>;
  constexpr int kAccesses = Ring::kAccesses, kStep = Ring::kStep, kKept = Ring::kKept;
  static_assert(kKept % kStep == 0);
  extern __shared__ uint4 shared[];

  const Geometry& g = p.geometry();
  const Place place = PlaceOf(g, blockIdx.x);
  const Share share = ShareOf(g, place, threadIdx.x);
  const int64_t group = place.group * g.group_size;
  const T* const x = static_cast<const T*>(p.call.x) + group;
  const T* const residual = static_cast<const T*>(p.call.residual) + group;
  T* const y = static_cast<T*>(p.call.y) + group;
  uint8_t* const mask = p.call.mask == nullptr
                            ? nullptr
                            : static_cast<uint8_t*>(p.call.mask) + place.group * p.mask_bytes;
  const UnitChannels channels(g, place, share, p.aligned_parameters);
  // Whether all lanes of the warp have the same number of units.
  const bool together = kAccesses == 2 && IsSameInWarp(share.count);

  // First pass: the sums.
  FoldBuffer<double>& buffer = *reinterpret_cast<FoldBuffer<double>*>(shared);
  uint4* const ring = shared + kFoldBytes<double> / sizeof(uint4) + threadIdx.x;
  const int slots = p.slots;
  const int ringed = max(share.count - kKept, 0);  // units that go through the ring
  const int passing = max(ringed - slots, 0);      // those of them that do not stay in it
  const int64_t ring_first = share.first + kKept * share.stride;
  UnitVec<T> kept[kKept];
#pragma unroll
  for (int k = 0; k < kKept; ++k) {
    if (k < share.count) kept[k] = LoadUnit<T, true>(x + share.first + k * share.stride);
  }
  const auto ring_words = [&](int slot, int w) -> uint4& {
    return ring[(slot * kAccesses + w) * kThreads];
  };
  const CopyPolicies policies;
  int copied = 0, copy_slot = 0;
  const T* from = x + ring_first;
  const auto copy = [&] {
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      if (copied < ringed) {
        const uint64_t policy = copied < passing ? policies.again : policies.once;
#pragma unroll
        for (int w = 0; w < kAccesses; ++w) {
          CopyAsync16<kAccesses == 1>(&ring_words(copy_slot, w),
                                      reinterpret_cast<const uint4*>(from) + w, policy);
        }
      }
      ++copied;
      from += share.stride;
      copy_slot = copy_slot + 1 == slots ? 0 : copy_slot + 1;
    }
    CommitCopies();
  };
#pragma unroll
  for (int k = 0; k < kRingAhead; ++k) copy();

  Deviations<A> deviations[kUnit];
  const auto add = [&](const UnitVec<T>& unit) {
    A values[kUnit];
    unit.Unpack(values);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) deviations[i].Add(values[i]);
  };
  const auto shift = [&](int added) {
    const A n = static_cast<A>(added), inverse_n = A(1) / n;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) deviations[i].Shift(n, inverse_n);
  };
  if (share.count > 0) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) deviations[i].Begin(ToCompute(kept[0][i]));
  }
#pragma unroll
  for (int k = 0; k < kKept; ++k) {
    if (k < share.count) add(kept[k]);
    if (k == 3 && share.count > 4) shift(4);
  }
  int slot = 0;
  for (int used = 0, shift_at = 16; used < ringed; used += kStep) {
    AwaitCopies<kRingAhead - 1>();
    if (used + kKept >= shift_at) {
      shift(used + kKept);
      shift_at = 4 * (used + kKept);
    }
    UnitVec<T> units[kStep];
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
#pragma unroll
      for (int w = 0; w < kAccesses; ++w) {
        if (used + k < ringed) units[k].Set(w, Unit<T>::Load(&ring_words(slot, w)));
      }
      slot = slot + 1 == slots ? 0 : slot + 1;
    }
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      if (used + k < ringed) add(units[k]);
    }
    copy();
  }
  AddCut(g, share, x, deviations);

  double* const workspace = reinterpret_cast<double*>(static_cast<A*>(p.call.workspace) +
                                                      place.group * p.call.workspace_size);
  // The counter follows the first group's sums in the workspace.
  uint32_t* const counter =
      reinterpret_cast<uint32_t*>(static_cast<double*>(p.call.workspace) + 2 * g.plane());
  if (blockIdx.x == 0 && threadIdx.x == 0) *counter = 0;
  {
    Pair<double> sums[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const int n = share.count + (i < share.cut);
      if (n > 0) sums[i] = deviations[i].Result(n, 0);
    }
    if (p.plain) {
      FoldPlain(g, place, sums, buffer, workspace);
    } else {
      Fold(g, place, sums, buffer, workspace);
    }
  }

  struct Loaded {
    UnitVec<T> x;
    UnitVec<T> residual;
  };
  A mean[kUnit], factor[kUnit], bias[kUnit];
  const auto load_residual = [&](int64_t element) {
    if constexpr (kResidual) {
      return LoadUnit<T, true>(residual + element);
    } else {
      return UnitVec<T>{};
    }
  };
  const auto apply = [&](const UnitVec<T>& unit, const UnitVec<T>& other, int64_t element,
                         int size) {
    return ApplyUnit(unit, kResidual, other, mean, factor, bias, p.call.relu, mask, element, size);
  };
  const auto put = [&](const UnitVec<T>& unit, const UnitVec<T>& other, int64_t element) {
    const UnitVec<T> result = apply(unit, other, element, kUnit);
    if (kAccesses == 2 && together) {
      StorePairs(y + element, result);
    } else {
      StoreUnit<T, true>(y + element, result);
    }
  };

  const auto statistics = [&] {
    A scale[kUnit];
    FinishGrid<A>(
        p.finish, p.finish_blocks, p.plain, buffer.value[0], counter,
        [&](int64_t at, const double (&sums)[2]) {
          const Finish& f = p.finish;
          const double average = Average(sums[0], f.n, p.inverse_n);
          const double var = Average(sums[1], f.n, p.inverse_n) - average * average;
          static_cast<A*>(f.out[0])[at] = static_cast<A>(average);
          static_cast<A*>(f.out[1])[at] = static_cast<A>(var < 0 ? 0 : var);
        },
        [&] {
          channels.LoadOr(static_cast<const A*>(p.call.scale), A(1), scale);
          channels.LoadOr(static_cast<const A*>(p.call.bias), A(0), bias);
        });
    if (share.count == 0 && share.cut == 0) return;
    channels.Load(static_cast<const A*>(p.call.mean), mean);
    channels.Load(static_cast<const A*>(p.call.var), factor);
    const A eps = static_cast<A>(p.call.eps);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) factor[i] = FastReciprocalRoot(factor[i] + eps) * scale[i];
  };
  const auto put_kept = [&] {
#pragma unroll
    for (int k = 0; k < kKept; k += kStep) {
      UnitVec<T> others[kStep];
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        if (k + i < share.count) {
          others[i] = load_residual(share.first + (k + i) * share.stride);
        }
      }
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        if (k + i < share.count) put(kept[k + i], others[i], share.first + (k + i) * share.stride);
      }
    }
  };

  // Second pass. It begins with the units that have passed through the ring, in reverse order,
  // because the last ones are the likeliest to be in L2. Their first loads do not need the
  // statistics, so they are issued before the grid barrier.
  constexpr int kRows = kInFlight < T, kResidual ? 2 : 1 > ;
  Sweep<kRows, Loaded>(
      passing, ring_first + (passing - 1) * share.stride, -share.stride,
      [&](int64_t element) {
        Loaded loaded;
        loaded.x = LoadUnit<T, true>(x + element);
        loaded.residual = load_residual(element);
        return loaded;
      },
      [&](const Loaded&) {
        statistics();
        put_kept();
      },
      [&](const Loaded& loaded, int64_t element) { put(loaded.x, loaded.residual, element); },
      [] {});
  const int stays = ringed - passing;
  slot = slots == 0 ? 0 : passing % slots;
  Sweep<kStep, UnitVec<T>>(
      stays, ring_first + passing * share.stride, share.stride, load_residual,
      [](const UnitVec<T>&) {},
      [&](const UnitVec<T>& other, int64_t element) {
        UnitVec<T> unit;
#pragma unroll
        for (int w = 0; w < kAccesses; ++w) unit.Set(w, Unit<T>::Load(&ring_words(slot, w)));
        slot = slot + 1 == slots ? 0 : slot + 1;
        put(unit, other, element);
      },
      [] {});
  if (share.cut > 0) {
    const int64_t element = g.group_size - share.cut;
    const UnitVec<T> unit = LoadCutUnit(x + element, share.cut);
    UnitVec<T> other;
    if constexpr (kResidual) other = LoadCutUnit(residual + element, share.cut);
    StoreCutUnit(y + element, apply(unit, other, element, share.cut), share.cut);
  }
}

// -------------------------------------------------------------------------------------------------
// Host

inline ResidentParams MakeResidentParams(const BatchNormCall& call, const GridPlan& plan) {
  ResidentParams p = {plan.params, call, 1 / plan.params.finish.n};
  p.finish.x = call.x;
  p.finish.out[0] = call.mean;
  p.finish.out[1] = call.var;
  p.finish.out_stride = call.shape.channels;
  p.aligned_parameters = AreAligned(call.mean, call.var, call.scale, call.bias);
  return p;
}

}  // namespace jax_fastops::cuda::batch_norm

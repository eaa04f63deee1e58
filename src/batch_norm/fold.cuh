// Reductions of batch norm. The sums of the threads are added to one entry per slot of the block,
// and a second kernel (core/cuda/partial_sums.cuh) adds these entries to channels. Each channel has
// a pair of sums of type `V`. The order of additions depends only on the shape and the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "batch_norm/geometry.cuh"
#include "batch_norm/units.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/partial_sums.cuh"

namespace jax_fastops::cuda::batch_norm {

// Two sums over some elements of one channel.
template <typename V>
struct Pair {
  V value[2] = {};
};

// Adds the first `size` elements of g, and their products with x - mean, to the sums of a unit. The
// elements after a cut are skipped: their g is 0, but their x is padding and their mean may be
// infinite, so the product could be NaN.
template <typename T>
__device__ __forceinline__ void AddProducts(const UnitVec<T>& g, const UnitVec<T>& x,
                                            const ComputeType<T> (&mean)[kUnit], int size,
                                            Pair<ComputeType<T>> (&sums)[kUnit]) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    if (i >= size) continue;
    const ComputeType<T> value = ToCompute(g[i]);
    sums[i].value[0] += value;
    sums[i].value[1] = fma(value, ToCompute(x[i]) - mean[i], sums[i].value[1]);
  }
}

// The pairs of all elements of a block, 8 per thread, in shared memory. The padding avoids bank
// conflicts between neighboring threads, between the elements of a unit, and between neighboring
// warps.
template <typename V>
struct FoldBuffer {
  static constexpr int kRow = kThreads + kWarpSize + 4;
  V value[2][kUnit * kRow];
  V warps[2][kThreads / kWarpSize];

  __device__ __forceinline__ static int IndexOf(uint32_t thread, uint32_t i) {
    return static_cast<int>(i * kRow + thread + thread / kWarpSize);
  }
  // Stores the pairs of this thread.
  __device__ __forceinline__ void Put(const Pair<V> (&pairs)[kUnit]) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) value[k][IndexOf(threadIdx.x, i)] = pairs[i].value[k];
    }
  }
};

// Adds the pairs of the block's threads for each slot and writes them to `workspace`, which is that
// of the group. All threads of the block must call it.
template <typename V>
__device__ __forceinline__ void Fold(const Geometry& g, const Place& place,
                                     const Pair<V> (&pairs)[kUnit], FoldBuffer<V>& buffer,
                                     V* workspace) {
  constexpr int kBatch = 4;
  buffer.Put(pairs);
  const TileRuns runs = RunsOf(g, place.tile);
  __syncthreads();

  const int share = 1 << g.log_share, in_share = threadIdx.x & (share - 1);
  // If a run is a single element (inner == 1), treat all runs of a slot as one run whose elements
  // are `gap` apart.
  const bool gaps = g.inner == 1;
  const int log_run = gaps ? g.log_share : g.log_run;
  const int first_run = (in_share >> log_run) * runs.period;
  const int run_step = gaps ? runs.runs : (share >> log_run) * runs.period;
  const uint32_t in_run = in_share & ((1 << log_run) - 1);
  const uint32_t gap = gaps ? runs.period : 1;
  const int log_lanes = g.log_lanes();
  const uint32_t lanes = 1u << log_lanes;
  const int64_t plane = g.plane();
  const int64_t block = (int64_t{place.part} * g.tiles + place.tile) * g.slots;
  for (int slot = threadIdx.x >> g.log_share;; slot += kThreads >> g.log_share) {
    V sums[2] = {};
    for (int run = slot + first_run; slot < runs.slots && run < runs.runs; run += run_step) {
      const Run elements = RunOf(runs, run);
      const uint32_t begin = elements.begin;
      const uint32_t size = gaps ? (runs.size - begin + gap - 1) / gap : elements.end - begin;
      const uint32_t end = size << log_lanes;
      for (uint32_t at = in_run; at < end; at += kBatch << log_run) {
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const uint32_t here = at + (k << log_run);
          if (here >= end) continue;
          const uint32_t lane = here & (lanes - 1), element = begin + (here >> log_lanes) * gap;
          const int index =
              buffer.IndexOf((lane << g.log_width) + element / kUnit, element % kUnit);
#pragma unroll
          for (int i = 0; i < 2; ++i) sums[i] += buffer.value[i][index];
        }
      }
    }
    ReduceNeighbors(Sum(), sums, share, buffer.warps);
    if (in_share == 0 && slot < runs.slots) {
#pragma unroll
      for (int i = 0; i < 2; ++i) workspace[i * plane + block + slot] = sums[i];
    }
    // If several threads share a slot, the block handles all slots at once.
    if (share > 1 || slot + kThreads - static_cast<int>(threadIdx.x) >= runs.slots) break;
  }
}

// What adds the entries of blocks to channels, in sets that are the groups. The entries of a
// channel enumerate its parts as if each of its runs touched `tiles` tiles; entries without a part
// are skipped.
struct Finish {
  Geometry geometry;
  const void* workspace;
  int64_t workspace_size;  // of a group, in accumulators
  const void* x;
  void* out[2];
  int64_t out_stride;  // distance between groups
  double n;            // elements of a channel
  uint32_t tiles;
  uint32_t entries;
};

// Locates the parts of a channel in a group's workspace. `A` is the accumulator type.
template <typename A, typename V>
class ChannelParts {
 public:
  __device__ __forceinline__ ChannelParts(const Finish& f, int64_t group, int64_t channel)
      : f_(f),
        workspace_(reinterpret_cast<const V*>(static_cast<const A*>(f.workspace) +
                                              group * f.workspace_size)),
        channel_(channel),
        plane_(f.geometry.plane()),
        stride_(f.geometry.tiles * f.geometry.slots) {
    first_ = IndexOf(0, 0);
  }

  // The index of an entry in a plane of the workspace, or -1 if it has no part.
  __device__ __forceinline__ int64_t At(uint32_t entry) const {
    if (f_.tiles == 1 && f_.geometry.repeats == 1) return first_ + entry * stride_;
    const Geometry& g = f_.geometry;
    const uint32_t parts = g.parts, of_run = entry / parts;
    const uint32_t repeat = g.repeats == 1 ? 0 : of_run / f_.tiles;
    const int64_t index = IndexOf(static_cast<int>(repeat), of_run - repeat * f_.tiles);
    return index < 0 ? index : index + (entry - of_run * parts) * stride_;
  }

  __device__ __forceinline__ void Load(int64_t index, V (&values)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) values[i] = __ldcg(workspace_ + i * plane_ + index);
  }

 private:
  // The index of the first part of a tile: the `nth` of the tiles of a repeat. All tiles of a run,
  // except the one in which it begins, begin inside the run, so it has slot 0 there.
  __device__ __forceinline__ int64_t IndexOf(int repeat, uint32_t nth) const {
    const Geometry& g = f_.geometry;
    const int log_size = g.log_width + 3;
    const int64_t run = channel_ + repeat * g.channels, before = run - g.channels;
    const int64_t done = repeat == 0 ? 0 : ((before * g.inner + g.inner - 1) >> log_size) + 1;
    const TileRange range = TilesOf(g, channel_, repeat, done);
    const int64_t tile = range.begin + nth;
    if (tile >= range.end) return -1;
    // The elements of the tile before the run. The slot is the number of runs that they belong to.
    const int64_t behind = run * g.inner - (tile << log_size);
    const uint32_t slot =
        behind <= 0 ? 0
        : g.inner < behind
            ? (static_cast<uint32_t>(behind) - 1) / static_cast<uint32_t>(g.inner) + 1
            : 1;
    return tile * g.slots + slot;
  }

  const Finish& f_;
  const V* workspace_;
  int64_t channel_, plane_, stride_, first_;
};

// The second kernel's sums (core/cuda/partial_sums.cuh). Subclasses write them.
template <typename A, typename V>
struct ChannelSums {
  using Value = V;
  static constexpr int kValues = 2;
  static constexpr int kPlans = 1;

  Finish f;

  __device__ __forceinline__ ChannelParts<A, V> TermsOf(int64_t group, int64_t channel) const {
    return {f, group, channel};
  }
};

// -------------------------------------------------------------------------------------------------
// Host

// Sets everything except x and the outputs.
inline void MakeFinish(const BatchNormCall& call, const Geometry& g, Finish* finish) {
  const BatchNormShape& shape = call.shape;
  finish->geometry = g;
  finish->workspace = call.workspace;
  finish->workspace_size = call.workspace_size;
  finish->n = static_cast<double>(shape.outer) * static_cast<double>(shape.inner);
  const int64_t tiles = g.inner > 1 ? std::min(g.tiles, g.inner / g.tile_size() + 2) : 1;
  const int64_t entries = g.repeats * tiles * g.parts;
  finish->tiles = static_cast<uint32_t>(tiles);
  finish->entries = static_cast<uint32_t>(entries);  // not many more than there are blocks
}

// Launches a kernel that writes partial sums to the workspace, of whose blocks an SM runs
// `resident` at once, and the one that finishes `sums`. The caller sets everything in `params`
// except the geometry, and x and the outputs in `sums`. The workspace has room for `pairs` pairs
// per group.
template <typename Params, typename Sums>
cudaError_t LaunchSums(const BatchNormCall& call, void (*sum)(Params), int resident, int64_t pairs,
                       Params* params, Sums sums, cudaStream_t stream) {
  const BatchNormShape& shape = call.shape;
  Device device;
  cudaError_t error = CurrentDevice(&device);
  if (error != cudaSuccess) return error;
  Geometry& geometry = params->geometry;
  if (!MakeGeometry(shape, {int64_t{device.processors} * resident, 3, pairs}, &geometry)) {
    return cudaErrorInvalidConfiguration;
  }
  MakeFinish(call, geometry, &sums.f);
  error = Launch(sum, Grid(BlocksOf(shape, geometry), kThreads), stream, *params);
  if (error != cudaSuccess) return error;
  return FinishSums<BatchNormKernels>(sums, shape.groups, {{shape.channels, sums.f.entries}},
                                      stream);
}

}  // namespace jax_fastops::cuda::batch_norm

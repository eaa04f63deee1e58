// How batch norm's reductions come together: threads to a block's slots, and these, by a second
// kernel, to channels. Every order is fixed by the shape and the device.
//
// A `Part` is what is known of some elements of one channel: kPlanes values of the accumulator's
// type, Value(plane), Set(plane, value), and Merge(other). The default is that of no elements.
#ifndef JAX_FASTOPS_CUDA_BATCH_NORM_FOLD_CUH_
#define JAX_FASTOPS_CUDA_BATCH_NORM_FOLD_CUH_

#include <algorithm>
#include <cstdint>

#include "cuda/batch_norm_geometry.cuh"
#include "cuda/batch_norm_units.cuh"
#include "cuda/bitmask.cuh"

namespace jax_fastops::cuda::batch_norm {

// How many, their mean, less what all parts of the channel leave off, and the sum of their squared
// deviations from it.
template <typename A>
struct Moments {
  using Value = A;
  static constexpr int kPlanes = 3;
  A value[kPlanes] = {};

  // Chan's formula. A mean that is not finite makes the other's infinite or NaN, as a sum over all
  // would be; the squared deviations are NaN then already.
  __device__ __forceinline__ void Merge(const Moments& other) {
    const A n = value[0] + other.value[0];
    const A delta = other.value[1] - value[1];
    const A share = FastQuotient(other.value[0], n);
    const bool has_both = value[0] > 0 && other.value[0] > 0;
    if (has_both) {
      value[1] = isfinite(delta) ? fma(delta, share, value[1])
                                 : value[1] * A(0.5) + other.value[1] * A(0.5);
      value[2] += other.value[2] + delta * delta * (value[0] * share);
    } else if (other.value[0] > 0) {
      value[1] = other.value[1];
      value[2] = other.value[2];
    }
    value[0] = n;
  }
};

// Two sums.
template <typename A>
struct Sums {
  using Value = A;
  static constexpr int kPlanes = 2;
  A value[kPlanes] = {};

  __device__ __forceinline__ void Merge(const Sums& other) {
#pragma unroll
    for (int i = 0; i < kPlanes; ++i) value[i] += other.value[i];
  }
};

// The parts of a block's elements, every thread's 8, in shared memory. A row's length is such that
// neither neighbouring threads nor the elements of a unit meet in a bank; for double there is no
// room for that.
template <typename Part>
struct FoldBuffer {
  using A = typename Part::Value;
  static constexpr int kRow = sizeof(A) == 4 ? kThreads + 4 : kThreads;
  A value[Part::kPlanes][kUnit * kRow];

  __device__ __forceinline__ Part Get(int index) const {
    Part part;
#pragma unroll
    for (int i = 0; i < Part::kPlanes; ++i) part.value[i] = value[i][index];
    return part;
  }
  __device__ __forceinline__ void Set(int index, const Part& part) {
#pragma unroll
    for (int i = 0; i < Part::kPlanes; ++i) value[i][index] = part.value[i];
  }
};

// Merges the threads' parts and writes a block's to `workspace`, that of its group. All threads
// call it.
template <typename Part>
__device__ __forceinline__ void Fold(const Geometry& g, const Place& place,
                                     const Part (&parts)[kUnit], FoldBuffer<Part>& buffer,
                                     typename Part::Value* workspace) {
  constexpr int kRow = FoldBuffer<Part>::kRow;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) buffer.Set(i * kRow + threadIdx.x, parts[i]);
  __syncthreads();

  const TileRuns runs = RunsOf(g, place.tile);
  const int share = 1 << g.log_share, in_share = threadIdx.x & (share - 1);
  const int in_run = in_share & ((1 << g.log_run) - 1), run_step = share >> g.log_run;
  const int64_t plane = g.plane();
  const int64_t block = (int64_t{place.part} * g.tiles + place.tile) * g.slots;
  for (int slot = threadIdx.x >> g.log_share;; slot += kThreads >> g.log_share) {
    Part part;
    if (slot < runs.slots) {
      for (int run = slot + (in_share >> g.log_run) * runs.period; run < runs.runs;
           run += run_step * runs.period) {
        const Run elements = RunOf(runs, run);
        const int end = elements.end << g.log_lanes();
        for (int at = (elements.begin << g.log_lanes()) + in_run; at < end; at += 1 << g.log_run) {
          const int lane = at & ((1 << g.log_lanes()) - 1), element = at >> g.log_lanes();
          part.Merge(buffer.Get(element % kUnit * kRow + (lane << g.log_width) + element / kUnit));
        }
      }
    }
    if (share > 1) {  // then there is one slot for each thread
      for (int step = min(share, kWarpSize) / 2; step > 0; step /= 2) {
        Part other;
#pragma unroll
        for (int i = 0; i < Part::kPlanes; ++i) {
          other.value[i] = __shfl_down_sync(kFullWarp, part.value[i], step);
        }
        part.Merge(other);
      }
      if (share > kWarpSize) {
        __syncthreads();
        if (in_share % kWarpSize == 0) buffer.Set(threadIdx.x / kWarpSize, part);
        __syncthreads();
        if (in_share == 0) {
          for (int warp = 1; warp < share / kWarpSize; ++warp) {
            part.Merge(buffer.Get(threadIdx.x / kWarpSize + warp));
          }
        }
      }
    }
    if (in_share == 0 && slot < runs.slots) {
#pragma unroll
      for (int i = 0; i < Part::kPlanes; ++i) workspace[i * plane + block + slot] = part.value[i];
    }
    if (share > 1 || slot + kThreads - static_cast<int>(threadIdx.x) >= runs.slots) break;
  }
}

// Of the second kernel a block has `kThreads >> log_share` channels, whose parts 1 << log_share
// threads each share.
struct Finish {
  Geometry geometry;
  const void* workspace;
  int64_t workspace_size;  // of a group
  const void* x;
  void* out[2];
  int64_t out_stride;  // from one group's to the next one's
  double n;            // elements of a channel
  int32_t log_share;
  uint32_t group_blocks;
};

// Calls write(group, channel, part) for every channel. It is bound by latency, so that loads go out
// together, and what is long to compute is avoided.
template <typename Part, typename Write>
__device__ __forceinline__ void FinishChannels(const Finish& f, const Write& write) {
  using A = typename Part::Value;
  constexpr int kBatch = 4;
  __shared__ A buffer[Part::kPlanes][kThreads];

  const Geometry& g = f.geometry;
  const int log_width = kMaxLogWidth - f.log_share, width = 1 << log_width;
  const int share = 1 << f.log_share, in_share = threadIdx.x >> log_width;
  const int64_t group = blockIdx.x / f.group_blocks;
  const int64_t channel =
      (int64_t{blockIdx.x % f.group_blocks} << log_width) | (threadIdx.x & (width - 1));
  const A* const workspace = static_cast<const A*>(f.workspace) + group * f.workspace_size;
  const int64_t plane = g.plane();

  Part part;
  if (channel < g.channels) {
    int64_t done = 0;
    for (int repeat = 0; repeat < g.repeats; ++repeat) {
      const TileRange range = TilesOf(g, channel, repeat, done);
      if (range.begin >= range.end) continue;
      done = range.end;
      const int64_t run = channel + repeat * g.channels;
      const auto index_of = [&](int64_t entry) {
        const int64_t tile = range.begin + DividePosition(g, entry, g.parts);
        const int64_t in_tile = entry - (tile - range.begin) * g.parts;
        const int64_t slot = run - DividePosition(g, tile << (g.log_width + 3), g.inner);
        return (in_tile * g.tiles + tile) * g.slots + slot;
      };
      const int64_t entries = (range.end - range.begin) * g.parts;
      for (int64_t entry = in_share; entry < entries; entry += kBatch * share) {
        Part batch[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (entry + k * share >= entries) continue;
          const int64_t index = index_of(entry + k * share);
#pragma unroll
          for (int i = 0; i < Part::kPlanes; ++i) batch[k].value[i] = workspace[i * plane + index];
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) part.Merge(batch[k]);
      }
    }
  }

  for (int step = share / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < Part::kPlanes; ++i) buffer[i][threadIdx.x] = part.value[i];
    __syncthreads();
    if (in_share < step) {
      Part other;
#pragma unroll
      for (int i = 0; i < Part::kPlanes; ++i) {
        other.value[i] = buffer[i][threadIdx.x + (step << log_width)];
      }
      part.Merge(other);
    }
    __syncthreads();
  }
  if (in_share == 0 && channel < g.channels) write(group, channel, part);
}

// -------------------------------------------------------------------------------------------------
// Host

// All but x and the outputs. False if there are too many blocks.
inline bool MakeFinish(const BatchNormShape& shape, const Geometry& g, const void* workspace,
                       int64_t workspace_size, Finish* finish, unsigned* blocks) {
  finish->geometry = g;
  finish->workspace = workspace;
  finish->workspace_size = workspace_size;
  finish->n = static_cast<double>(shape.outer) * static_cast<double>(shape.inner);
  // Two parts for each thread, but blocks of 8 channels, which are a sector of memory.
  const int64_t channel_tiles =
      std::min(g.tiles, g.repeats * (g.inner / g.tile_size() + (g.inner > 1 ? 2 : 1)));
  const int64_t parts = channel_tiles * g.parts;
  const int most = g.channels < kUnit || parts > 4096 ? kMaxLogWidth : 5;
  finish->log_share = 0;
  while (finish->log_share < most && int64_t{4} << finish->log_share <= parts) ++finish->log_share;
  const int64_t width = kThreads >> finish->log_share;
  const int64_t group_blocks = (shape.channels + width - 1) / width;
  finish->group_blocks = static_cast<uint32_t>(group_blocks);
  if (group_blocks * shape.groups > std::numeric_limits<int32_t>::max()) return false;
  *blocks = static_cast<unsigned>(group_blocks * shape.groups);
  return true;
}

}  // namespace jax_fastops::cuda::batch_norm

#endif  // JAX_FASTOPS_CUDA_BATCH_NORM_FOLD_CUH_

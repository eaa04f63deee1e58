// Reductions of batch norm. The sums of the threads are added to one entry per slot of the block
// (Fold), and then these entries are added to channels (FinishChannels, or OwnTotals). Each channel
// has a pair of sums of type `V`. The order of additions depends only on the shape and the device.
#ifndef JAX_FASTOPS_BATCH_NORM_REDUCE_CUH_
#define JAX_FASTOPS_BATCH_NORM_REDUCE_CUH_

#include <cstdint>

#include "batch_norm/plan.h"
#include "batch_norm/units.cuh"
#include "core/cuda/bitmask.cuh"
#include "core/cuda/dependent.cuh"
#include "core/cuda/packed.cuh"

namespace jax_fastops::cuda::batch_norm {

// Two sums over some elements of one channel.
template <typename V>
struct Pair {
  V value[2] = {};
};

// Sums of the deviations of one channel's values from a shift, which follows their mean.
// batch_norm/statistics.cu explains the method.
//
// If a value is not finite, the sum must become what it would be without a shift. The sum of
// squares is not finite in that case, which is how the code detects it.
template <typename A>
struct Deviations {
  A shift = 0;
  A sum = 0;
  A squares = 0;

  __device__ __forceinline__ void Begin(A value) { shift = isfinite(value) ? value : A(0); }

  __device__ __forceinline__ void Add(A value) {
    const A deviation = value - shift;
    sum += deviation;
    squares = fma(deviation, deviation, squares);
  }

  // Moves the shift to the mean of the `n` values so far, or close to it. The sums are converted
  // exactly, except for rounding, wherever the new shift lies.
  __device__ __forceinline__ void Shift(A n, A inverse_n) {
    const A moved = shift + sum * inverse_n;
    const A d = moved - shift;
    if (!isfinite(squares)) return;
    squares = max(fma(d, fma(n, d, A(-2) * sum), squares), A(0));
    sum = fma(-n, d, sum);
    shift = moved;
  }

  // The sum of the `n` values minus `base`, and the sum of their squares. If only the squares
  // overflow, the second sum is infinite.
  __device__ __forceinline__ Pair<double> Result(double n, double base) const {
    const double d = static_cast<double>(shift) - base;
    Pair<double> sums;
    sums.value[0] = fma(n, d, static_cast<double>(sum));
    sums.value[1] = fma(d, fma(n, d, 2 * static_cast<double>(sum)), static_cast<double>(squares));
    return sums;
  }
};

// The deviations of the channels of a thread's unit.
template <typename A>
struct UnitDeviations {
  Deviations<A> of[kUnit];

  template <typename T>
  __device__ __forceinline__ void Begin(const UnitBits<T>& unit) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) of[i].Begin(ToCompute(unit[i]));
  }
  template <typename T>
  __device__ __forceinline__ void Add(const UnitBits<T>& unit) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) of[i].Add(ToCompute(unit[i]));
  }
  __device__ __forceinline__ void Shift(int added) {
    const A n = static_cast<A>(added), inverse_n = A(1) / n;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) of[i].Shift(n, inverse_n);
  }
  // Adds the group's cut unit to the sums of the thread that has it. `x` points to the group.
  template <typename T>
  __device__ __forceinline__ void AddCut(const Geometry& g, const Share& share, const T* x) {
    if (share.cut == 0) return;
    const UnitBits<T> unit = LoadCutUnit(x + g.group_size - share.cut, share.cut);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (i >= share.cut) continue;
      if (share.count == 0) of[i].Begin(ToCompute(unit[i]));
      of[i].Add(ToCompute(unit[i]));
    }
  }
  __device__ __forceinline__ void Result(const Share& share, const double (&bases)[kUnit],
                                         Pair<double> (&sums)[kUnit]) const {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const int n = share.count + (i < share.cut);
      if (n > 0) sums[i] = of[i].Result(n, bases[i]);
    }
  }
};

// -------------------------------------------------------------------------------------------------
// From threads to the slots of a block

// The pairs of all elements of a block, 8 per thread, in shared memory. The padding avoids bank
// conflicts between neighboring threads, between the elements of a unit, and between neighboring
// warps.
template <typename V>
struct FoldBuffer {
  static constexpr int kRow = kFoldRow;
  V value[2][kUnit * kRow];
  V warps[2][kThreads / kWarpSize];

  __device__ __forceinline__ static int IndexOf(uint32_t thread, uint32_t i) {
    return static_cast<int>(i * kRow + thread + thread / kWarpSize);
  }
  __device__ __forceinline__ void Put(const Pair<V> (&pairs)[kUnit]) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) value[k][IndexOf(threadIdx.x, i)] = pairs[i].value[k];
    }
  }
};
static_assert(sizeof(FoldBuffer<double>) == FoldBytes(sizeof(double)));
static_assert(sizeof(FoldBuffer<float>) == FoldBytes(sizeof(float)));

// Adds both values over lanes whose distances are powers of two from `from` down to `to`.
template <typename V>
__device__ __forceinline__ void SumLanes(int from, int to, V (&values)[2]) {
  for (int step = from; step >= to; step /= 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) values[i] += __shfl_xor_sync(kFullWarp, values[i], step);
  }
}

// Adds `values` over the threads that share a slot. All of them get the sums. All threads of the
// block must call it.
template <typename V>
__device__ __forceinline__ void SumShare(int share, V (&values)[2],
                                         V (*warps)[kThreads / kWarpSize]) {
  SumLanes(min(share, kWarpSize) / 2, 1, values);
  if (share <= kWarpSize) return;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize, of_share = share / kWarpSize;
  if (threadIdx.x % kWarpSize == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) warps[i][warp] = values[i];
  }
  __syncthreads();
  const int other = (warp & ~(of_share - 1)) | (threadIdx.x & (of_share - 1));
#pragma unroll
  for (int i = 0; i < 2; ++i) values[i] = warps[i][other];
  SumLanes(of_share / 2, 1, values);
}

// Fold for tiles that are whole channels: they have one slot.
template <typename V>
__device__ __forceinline__ void FoldChannel(const Geometry& g, const Place& place,
                                            const Pair<V> (&pairs)[kUnit], FoldBuffer<V>& buffer,
                                            V* workspace) {
  V sums[2] = {};
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
#pragma unroll
    for (int k = 0; k < 2; ++k) sums[k] += pairs[i].value[k];
  }
  SumShare(kThreads, sums, buffer.warps);
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int k = 0; k < 2; ++k)
    workspace[k * g.plane() + place.part * g.tiles + place.tile] = sums[k];
}

// Fold for complete tiles of 256 elements with inner == 1, in which all slots have the same number
// of elements. A thread first sums one element of the tile over all lanes; then the elements of
// each slot are added.
template <typename V>
__device__ __forceinline__ void FoldPlain(const Geometry& g, const Place& place,
                                          const Pair<V> (&pairs)[kUnit], FoldBuffer<V>& buffer,
                                          V* workspace) {
  constexpr int kTileUnits = kThreads / kUnit;
  static_assert(kTileUnits == kWarpSize);
  buffer.Put(pairs);
  __syncthreads();
  const uint32_t element = threadIdx.x;
  V sums[2] = {};
#pragma unroll
  for (int lane = 0; lane < kThreads / kTileUnits; ++lane) {
    const int index = buffer.IndexOf(lane * kTileUnits + element / kUnit, element % kUnit);
#pragma unroll
    for (int k = 0; k < 2; ++k) sums[k] += buffer.value[k][index];
  }
  const uint32_t slots = g.slots;
  if (slots < kThreads) {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 2; ++k) buffer.value[k][element] = sums[k];
    __syncthreads();
    if (element >= slots) return;
    for (uint32_t other = element + slots; other < kThreads; other += slots) {
#pragma unroll
      for (int k = 0; k < 2; ++k) sums[k] += buffer.value[k][other];
    }
  }
  const int64_t at = (int64_t{place.part} * g.tiles + place.tile) * slots + element;
#pragma unroll
  for (int k = 0; k < 2; ++k) workspace[k * g.plane() + at] = sums[k];
}

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
    SumShare(share, sums, buffer.warps);
    if (in_share == 0 && slot < runs.slots) {
#pragma unroll
      for (int i = 0; i < 2; ++i) workspace[i * plane + block + slot] = sums[i];
    }
    // If several threads share a slot, the block handles all slots at once.
    if (share > 1 || slot + kThreads - static_cast<int>(threadIdx.x) >= runs.slots) break;
  }
}

// -------------------------------------------------------------------------------------------------
// From the blocks' slots to channels

// Locates the parts of a channel in a plane of the workspace.
class ChannelParts {
 public:
  __device__ __forceinline__ ChannelParts(const Finish& f, int64_t channel)
      : f_(f), channel_(channel), stride_(f.geometry.tiles * f.geometry.slots) {
    first_ = IndexOf(f.geometry, channel, 0, 0);
  }

  // Adds the pairs of entries `entry`, `entry` + `step` and so on to `sums`. The loads of a batch
  // are issued together. Usually a batch is all of a thread's loads.
  template <typename V>
  __device__ __forceinline__ void Add(const V* workspace, uint32_t entry, uint32_t step,
                                      V (&sums)[2]) const {
    constexpr int kBatch = 4;
    const int64_t plane = f_.geometry.plane();
    const bool direct = f_.tiles == 1 && f_.geometry.repeats == 1;
    for (; entry < f_.entries; entry += kBatch * step) {
      Pair<V> batch[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const uint32_t here = entry + k * step;
        if (here >= f_.entries) continue;
        const int64_t index = direct ? first_ + here * stride_ : Get(here);
        if (index < 0) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) batch[k].value[i] = __ldcg(workspace + i * plane + index);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[i] += batch[k].value[i];
      }
    }
  }

 private:
  // The index of an entry, or -1 if it has no part.
  __device__ __forceinline__ int64_t Get(uint32_t entry) const {
    const Geometry& g = f_.geometry;
    const uint32_t parts = g.parts, of_run = entry / parts;
    const uint32_t repeat = g.repeats == 1 ? 0 : of_run / f_.tiles;
    const int64_t index =
        IndexOf(g, channel_, static_cast<int>(repeat), of_run - repeat * f_.tiles);
    return index < 0 ? index : index + (entry - of_run * parts) * stride_;
  }

  const Finish& f_;
  int64_t channel_, stride_, first_;
};

template <typename V>
struct FinishBuffer {
  V warps[2][kMaxFinishThreads / kWarpSize * (kUnit + 1)];
};

// Adds `values` over the threads that share a channel. All threads of the block must call it.
// Returns the channel (within the block) whose sums this thread holds, or -1 if it holds none.
template <typename V>
__device__ __forceinline__ int SumChannels(const Finish& f, V (&values)[2],
                                           FinishBuffer<V>& buffer) {
  if (f.log_share == 0) return threadIdx.x;
  const int width = 1 << f.log_width, log_warps = f.log_width + f.log_share - 5;
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  SumLanes(kWarpSize / 2, width, values);
  if (lane < width) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      buffer.warps[i][thread / kWarpSize * (width + 1) + lane] = values[i];
    }
  }
  __syncthreads();
  // One thread for each warp's sum of each channel.
  const int channel = thread >> log_warps, warp = thread & ((1 << log_warps) - 1);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    values[i] = channel < width ? buffer.warps[i][warp * (width + 1) + channel] : V(0);
  }
  SumLanes((1 << log_warps) / 2, 1, values);
  return channel < width && warp == 0 ? channel : -1;
}

// The sums of a group in the workspace. `A` is the accumulator type.
template <typename A, typename V>
__device__ __forceinline__ V* GroupSums(const Finish& f, int64_t group) {
  return reinterpret_cast<V*>(const_cast<A*>(static_cast<const A*>(f.workspace)) +
                              group * f.workspace_size);
}

// Finishes the channels of this block, as `f` assigns them: convert(group, channel, sums, values)
// makes two values from the sums, which go to both outputs. `await` is called before the workspace
// is read. All threads of the block must call it.
template <typename A, typename V, typename Convert, typename Await>
__device__ __forceinline__ void FinishChannels(const Finish& f, FinishBuffer<V>& buffer,
                                               const Convert& convert, const Await& await) {
  const int64_t group = blockIdx.x / f.group_blocks;
  const int64_t first = int64_t{blockIdx.x % f.group_blocks} << f.log_width;
  const int64_t channel = first | (threadIdx.x & ((1u << f.log_width) - 1));
  const ChannelParts parts(f, channel);
  await();
  V sums[2] = {};
  if (channel < f.geometry.channels) {
    parts.Add(GroupSums<A, V>(f, group), threadIdx.x >> f.log_width, 1u << f.log_share, sums);
  }
  const int summed = SumChannels(f, sums, buffer);
  if (summed < 0 || first + summed >= f.geometry.channels) return;
  A values[2];
  convert(group, first + summed, sums, values);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    static_cast<A*>(f.out[i])[group * f.out_stride + first + summed] = values[i];
  }
}

// Finishes the channels of the block's tile. `totals` gets two values for each slot, in shared
// memory. The first block that has a channel writes its values to the outputs as well. All threads
// of the block must call it.
template <typename A, typename V, typename Convert>
__device__ __forceinline__ void OwnTotals(const Finish& f, const Place& place,
                                          V (*warps)[kThreads / kWarpSize], A* totals,
                                          const Convert& convert) {
  const Geometry& g = f.geometry;
  const TileRuns runs = RunsOf(g, place.tile);
  const int share = 1 << g.log_share, in_share = threadIdx.x & (share - 1);
  for (int slot = threadIdx.x >> g.log_share;; slot += kThreads >> g.log_share) {
    const int64_t run = runs.first + slot;
    const int64_t channel = run - DividePosition(g, run, g.channels) * g.channels;
    V sums[2] = {};
    if (slot < runs.slots) {
      const V* const workspace = GroupSums<A, V>(f, place.group);
      ChannelParts(f, channel).Add(workspace, in_share, share, sums);
    }
    SumShare(share, sums, warps);
    if (in_share == 0 && slot < runs.slots) {
      A values[2];
      convert(place.group, channel, sums, values);
      const bool first = place.part == 0 && TilesOf(g, channel, 0, 0).begin == place.tile;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        totals[i * g.slots + slot] = values[i];
        A* const out = static_cast<A*>(f.out[i]) + place.group * f.out_stride + channel;
        if (first) *out = values[i];
      }
    }
    if (share > 1 || slot + kThreads - static_cast<int>(threadIdx.x) >= runs.slots) break;
  }
}

// The kernel that finishes the channels after a kernel that wrote the workspace, and depends on it.
// It is latency-bound.
template <typename A, typename V, typename Convert>
__device__ __forceinline__ void FinishKernelBody(const Finish& f, const Convert& convert) {
  __shared__ FinishBuffer<V> buffer;
  LetDependentsStart();
  FinishChannels<A>(f, buffer, convert, [] { AwaitPredecessors(); });
}

// -------------------------------------------------------------------------------------------------
// Host

// Launches a kernel that writes partial sums to the workspace, of whose blocks an SM runs
// `resident` at once, and one that finishes them. The caller sets everything in `params` except the
// geometry, and x, the workspace and the outputs in `finish`. The workspace has room for `pairs`
// pairs per group.
template <typename Params>
cudaError_t LaunchSums(const BatchNormShape& shape, void (*sum)(Params), int resident,
                       void (*finish_kernel)(Finish), int64_t pairs, Params* params, Finish* finish,
                       cudaStream_t stream) {
  Device device;
  cudaError_t error = CurrentDevice(&device);
  if (error != cudaSuccess) return error;
  Geometry& geometry = params->geometry;
  unsigned blocks;
  if (!MakeGeometry(shape, {int64_t{device.processors} * resident, 3, pairs}, &geometry) ||
      !MakeFinish(shape, geometry, finish, &blocks)) {
    return cudaErrorInvalidConfiguration;
  }
  error = Launch(sum, {.grid = dim3(BlocksOf(shape, geometry)), .block = dim3(kThreads)}, stream,
                 *params);
  if (error != cudaSuccess) return error;
  const dim3 threads(static_cast<unsigned>(finish->threads()));
  return Launch(finish_kernel, {.grid = dim3(blocks), .block = threads, .dependent = true}, stream,
                *finish);
}

}  // namespace jax_fastops::cuda::batch_norm

#endif  // JAX_FASTOPS_BATCH_NORM_REDUCE_CUH_

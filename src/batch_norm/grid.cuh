// What batch norm's cooperative kernels share. These kernels keep arrays on the chip between two
// passes over them, with a grid-wide reduction in between. This file has the reduction through the
// workspace with a grid barrier and a counter, and, on the host, the launch plan.
//
// In memory order, a thread first has some units that it keeps in registers. The others go through
// its ring of slots in shared memory. They are copied asynchronously, so the number of loads in
// flight does not depend on the number of registers. The last units, as many as the ring holds,
// stay there for the second pass. The blocks write their partial sums to the workspace. After a
// grid barrier the first blocks finish the channels, and all blocks wait until a counter says that
// these are done. Threads exchange only sums, so the arrays need no barrier.
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "batch_norm/fold.cuh"
#include "batch_norm/geometry.cuh"
#include "batch_norm/units.cuh"
#include "core/cuda/async_copy.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/vec.cuh"

namespace jax_fastops::cuda::batch_norm {

// Blocks per SM, 16-byte words of the arrays that a thread keeps in registers, copy steps in
// flight, and log2 of the fewest channels that a block finishes (if there are that many).
inline constexpr int kResidentBlocks = 2, kKeptWords = 8, kRingAhead = 3, kLogFinish = 2;

// How the first blocks of the grid finish the channels. A block has 1 << log_width of a group.
struct FinishBlocks {
  int32_t log_width;
  uint32_t of_group;
  uint32_t all;
};

// Parameters of a cooperative kernel that do not depend on its direction.
struct GridParams {
  Finish finish;
  bool aligned_parameters;
  bool plain;          // FoldPlain applies
  int64_t mask_bytes;  // of a group
  int32_t slots;       // of a thread's ring
  FinishBlocks finish_blocks;

  __host__ __device__ const Geometry& geometry() const { return finish.geometry; }
};

// A thread's part of the ring, with a unit of each of kArrays arrays in a slot, and kMore bytes.
// Unit j is in slot j % slots. Corresponding words of consecutive threads are adjacent.
template <typename T, int kArrays, int kMore = 0>
struct RingOf {
  static constexpr int kAccesses = UnitVec<T>::kAccesses;  // of a unit of one array
  static constexpr int kSlotBytes = kThreads * (kArrays * kAccesses * 16 + kMore);
  // Units that are copied, and used, at a time; units in registers.
  static constexpr int kStep = 4 / kArrays / kAccesses, kKept = kKeptWords / kArrays / kAccesses;
};

// Bytes of shared memory for a Fold of `V`.
template <typename V>
inline constexpr int kFoldBytes = (static_cast<int>(sizeof(FoldBuffer<V>)) + 15) / 16 * 16;

// Data that stays on the chip is not read again, so L2 may evict it first.
struct CopyPolicies {
  uint64_t once, again;

  __device__ __forceinline__ CopyPolicies() {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(again));
  }
};

__device__ __forceinline__ void CountRelease(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(__cvta_generic_to_global(counter))
               : "memory");
}

__device__ __forceinline__ uint32_t ReadAcquire(const uint32_t* counter) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return value;
}

// Stores units of two words, which are adjacent between neighboring lanes. All lanes of the warp
// must call it. Each pair of lanes exchanges a word, so that each of the two store instructions
// fills the sectors that it touches.
template <typename T>
__device__ __forceinline__ void StorePairs(T* p, const UnitVec<T>& unit) {
  static_assert(sizeof(T) * kUnit == 32 || sizeof(T) == 2);
  if constexpr (UnitVec<T>::kAccesses == 2) {
    const bool odd = threadIdx.x & 1;
    const auto low = unit.Get(0), high = unit.Get(1);
    const auto mine = Choose(odd, high, low);
    const auto got = Exchange(Choose(odd, low, high), 1);
    T* const first = odd ? p - kUnit + kUnit / 2 : p;
    Choose(odd, got, mine).template Store<CacheHint::kStreaming>(first);
    Choose(odd, mine, got).template Store<CacheHint::kStreaming>(first + kUnit);
  }
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

// The parts of a channel that FoldPlain has written: each block has one, at the channel's index.
template <typename V>
struct PlainParts {
  const V* first;
  int64_t plane;
  int stride;

  __device__ __forceinline__ int At(uint32_t part) const { return static_cast<int>(part) * stride; }
  __device__ __forceinline__ void Load(int at, V (&values)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) values[i] = __ldcg(first + i * plane + at);
  }
};

// Finishes this block's channels. It calls write(index, sums) for each one, with its index in `out`
// and its pair of sums. All threads of the block must call it. `plain` says that FoldPlain wrote
// the sums. `A` is the accumulator type; `buffer` is in shared memory.
template <typename A, typename V, typename Write>
__device__ __forceinline__ void FinishResident(const Finish& f, const FinishBlocks& blocks,
                                               bool plain, V* buffer, const Write& write) {
  const Geometry& g = f.geometry;
  const int log_width = blocks.log_width, log_share = kMaxLogWidth - log_width;
  const uint32_t in_share = threadIdx.x >> log_width;
  const uint32_t group = blockIdx.x / blocks.of_group;
  const int64_t first = int64_t{blockIdx.x - group * blocks.of_group} << log_width;
  const int64_t channel = first + (threadIdx.x & ((1u << log_width) - 1));
  const uint32_t entries = channel < g.channels ? f.entries : 0;
  V sums[2] = {};
  if (plain) {
    const V* const workspace =
        reinterpret_cast<const V*>(static_cast<const A*>(f.workspace) + group * f.workspace_size);
    const PlainParts<V> parts = {workspace + channel, g.plane(),
                                 static_cast<int>(g.tiles) * g.slots};
    AddTerms<6>(parts, in_share, 1u << log_share, entries, sums);
  } else {
    AddTerms<4>(ChannelParts<A, V>(f, group, channel), in_share, 1u << log_share, entries, sums);
  }
  const SumsOwner owner = CombineShares(log_width, log_share, sums, buffer);
  if (owner.writer == 0 && owner.result >= 0 && first + owner.result < g.channels) {
    write(group * f.out_stride + first + owner.result, sums);
  }
}

// When all blocks' sums are in the workspace, the first blocks finish the channels, and then all
// blocks wait for them. `counter` must be set to 0 before the grid barrier. All threads of the grid
// must call it. `meanwhile()` is called before the wait.
template <typename A, typename V, typename Write, typename Meanwhile>
__device__ __forceinline__ void FinishGrid(const Finish& f, const FinishBlocks& blocks, bool plain,
                                           V* buffer, uint32_t* counter, const Write& write,
                                           const Meanwhile& meanwhile) {
  cooperative_groups::this_grid().sync();
  if (blockIdx.x < blocks.all) {
    FinishResident<A>(f, blocks, plain, buffer, write);
    __syncthreads();
    if (threadIdx.x == 0) CountRelease(counter);
  }
  meanwhile();
  if (threadIdx.x == 0) {
    while (ReadAcquire(counter) < blocks.all) {
    }
  }
  __syncthreads();
}

// -------------------------------------------------------------------------------------------------
// Host

// What a device offers to a cooperative kernel; 0 processors if it runs none.
struct ResidentDevice {
  int processors = 0;
  int shared_bytes = 0;  // per block
};

// Finds a geometry for a single wave of at most `blocks` blocks and at most `max_plane` pairs of
// workspace: the tile width with the fewest turns per block, and the narrowest such width. Returns
// false if there is none.
inline bool MakeResidentGeometry(const BatchNormShape& shape, int64_t blocks, int64_t max_plane,
                                 Geometry* geometry) {
  double best = 0;
  for (int log_width = kMinLogWidth; log_width <= kMaxLogWidth; ++log_width) {
    Geometry g;
    if (!MakeTiles(shape, log_width, &g)) continue;
    const int64_t turns = TurnsOf(g);
    const int64_t most = std::min({turns, max_plane / (g.tiles * g.slots),
                                   blocks / std::max<int64_t>(1, g.tiles * shape.groups)});
    if (most < 1) continue;
    const int64_t longest = CeilDiv(turns, most);
    // Channels that occur several times in a long row are slower to finish.
    const double speed = 1.0 / static_cast<double>(longest) / (g.repeats > 1 ? 1.1 : 1.0);
    if (speed <= best * 1.03) continue;
    best = speed;
    SetParts(CeilDiv(turns, longest), &g);
    *geometry = g;
  }
  return best > 0;
}

// How the blocks of a kernel divide a shape, and how much each of them keeps on the chip.
struct GridPlan {
  GridParams params;  // all but x, the outputs and aligned_parameters
  unsigned blocks;
  int shared_bytes;
  double kept;    // fraction of the arrays that stays on the chip
  double spread;  // fraction of the possible block time in which blocks have work
};

// Makes the plan for a kernel whose threads have such a ring, and whose sums are of type V. A
// group's workspace has room for `pairs` pairs of them, of which one must stay free for the
// counter. Returns false if there is no such plan.
template <typename Ring, typename V>
bool MakeGridPlan(const BatchNormCall& call, const ResidentDevice& device, int64_t pairs,
                  GridPlan* plan) {
  constexpr int64_t kMinSlots = kRingAhead * Ring::kStep, kKept = Ring::kKept;
  constexpr int kFold = kFoldBytes<V>;
  const BatchNormShape& shape = call.shape;
  const int64_t blocks = int64_t{device.processors} * kResidentBlocks;
  Geometry g;
  if (!MakeResidentGeometry(shape, blocks, pairs - 1, &g)) return false;
  GridParams& p = plan->params;
  MakeFinish(call, g, &p.finish);
  p.mask_bytes = shape.mask_bytes();
  plan->blocks = BlocksOf(shape, g);

  // Finish as few channels per block as the number of blocks allows, but at least 1 << kLogFinish
  // if there are that many, because neighboring channels share a memory sector.
  const auto group_blocks = [&](int log_width) {
    return (shape.channels + (int64_t{1} << log_width) - 1) >> log_width;
  };
  int log_width = 0;
  while (log_width < kLogFinish && shape.channels >> (log_width + 1) > 0) ++log_width;
  while (group_blocks(log_width) * shape.groups > plan->blocks) {
    if (++log_width > kMinLogWidth) return false;
  }
  p.finish_blocks = {log_width, static_cast<uint32_t>(group_blocks(log_width)),
                     static_cast<uint32_t>(group_blocks(log_width) * shape.groups)};

  const int64_t turns = TurnsOf(g), longest = CeilDiv(turns, g.parts);
  const int64_t most = (device.shared_bytes - kFold) / Ring::kSlotBytes;
  if (most < kMinSlots) return false;
  p.slots = static_cast<int32_t>(std::max(kMinSlots, std::min(most, longest - kKept)));
  plan->shared_bytes = kFold + p.slots * Ring::kSlotBytes;
  plan->kept = std::min(1.0, static_cast<double>(p.slots + kKept) / longest);
  plan->spread =
      static_cast<double>(turns * g.tiles * shape.groups) / static_cast<double>(longest * blocks);
  p.plain = g.inner == 1 && g.log_width == kMinLogWidth && g.length % kThreads == 0 &&
            kThreads % g.slots == 0;
  return true;
}

// The launch bounds of the kernels ensure that the registers suffice.
inline cudaError_t GetResidentDevice(ResidentDevice* offer) {
  constexpr int kReserved = 1024;  // bytes of shared memory that CUDA takes for each block
  Device device;
  const cudaError_t error = CurrentDevice(&device);
  if (error != cudaSuccess || !device.cooperative) return error;
  offer->processors = device.processors;
  const int share = device.shared_per_processor / kResidentBlocks - kReserved;
  offer->shared_bytes = std::min(device.shared_per_block, share) / 128 * 128;
  return cudaSuccess;
}

// Launches a cooperative kernel, whose params(plan) are made last, if it supports the shape and was
// measured to be faster than the separate kernels: pays(plan). Returns
// cudaErrorCooperativeLaunchTooLarge if the separate kernels must be used, also if the device is
// shared and has less room than its attributes say. `arrays` stay on the chip; MakeGridPlan
// explains Ring, V and `pairs`.
template <typename Ring, typename V, typename Params, typename Pays>
cudaError_t LaunchGrid(const BatchNormCall& call, int arrays, int64_t pairs, void (*kernel)(Params),
                       Params (*params)(const BatchNormCall&, const GridPlan&), const Pays& pays,
                       cudaStream_t stream) {
  constexpr int64_t kMinBytes = 4 << 20;  // for smaller arrays the barriers dominate the time
  const int64_t size = call.shape.groups * call.shape.group_size() * DTypeSize(call.dtype);
  ResidentDevice device;
  const cudaError_t error = GetResidentDevice(&device);
  if (error != cudaSuccess) return error;
  GridPlan plan;
  if (arrays * size < kMinBytes || device.processors == 0 ||
      !MakeGridPlan<Ring, V>(call, device, pairs, &plan) || !pays(plan)) {
    return cudaErrorCooperativeLaunchTooLarge;
  }
  LaunchConfig config = Grid(plan.blocks, kThreads, plan.shared_bytes);
  config.cooperative = true;
  return Launch(kernel, config, stream, params(call, plan));
}

}  // namespace jax_fastops::cuda::batch_norm

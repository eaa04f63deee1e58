// A batch norm's forward in one cooperative kernel that keeps x on the chip: in registers and in
// shared memory, between the sums and the normalisation. What does not fit is read again, from L2
// if it is still there.
//
// A thread's units are, in the order of memory: some that it keeps in registers; then those that go
// through its ring of slots in shared memory, into which they are copied asynchronously, so that
// many are on their way whatever the registers. The last ones that a ring holds stay there. The
// blocks' sums go to the workspace; behind a barrier of the grid the first blocks finish channels,
// and all blocks wait for a count of those that are done. Nothing but sums passes between threads,
// so that x needs no barrier.
#ifndef JAX_FASTOPS_CUDA_BATCH_NORM_RESIDENT_CUH_
#define JAX_FASTOPS_CUDA_BATCH_NORM_RESIDENT_CUH_

#include <cooperative_groups.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/batch_norm_deviations.cuh"
#include "cuda/batch_norm_fold.cuh"
#include "cuda/batch_norm_forward.h"
#include "cuda/batch_norm_geometry.cuh"
#include "cuda/batch_norm_units.cuh"
#include "cuda/packed.cuh"
#include "cuda/relu_of.cuh"

namespace jax_fastops::cuda::batch_norm {

// How the kernel is built: blocks of a processor, 16-byte words of x that a thread keeps in
// registers, and the fewest channels (their logarithm) that a block finishes, if there are as many.
template <int kBlocks_, int kWords_, int kLogFinish_>
struct ResidentConfig {
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kWords = kWords_;
  static constexpr int kLogFinish = kLogFinish_;
};

struct ResidentParams {
  Finish finish;
  BatchNormForwardArrays arrays;
  double eps;
  double inverse_n;
  bool relu;
  bool aligned_parameters;
  bool plain;          // FoldPlain will do
  int64_t mask_bytes;  // of a group
  int32_t slots;       // of a thread's ring
  uint32_t finish_blocks;

  __host__ __device__ const Geometry& geometry() const { return finish.geometry; }
};

// A thread's part of the ring: unit j is in slot j % slots. Consecutive threads' words are
// neighbours.
template <typename T>
struct RingOf {
  static constexpr int kWords = UnitBits<T>::kWords;
  static constexpr int kSlotBytes = kThreads * kWords * 16;
  static constexpr int kStep = 4 / kWords;  // units that are copied, and used, at a time
};

__device__ __forceinline__ void CopyAsync(void* to, const void* from, uint64_t policy,
                                          bool sectors) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  // Where a warp's accesses do not fill their sectors, the first leaves them in L1 for the other.
  if (sectors) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(address),
                 "l"(__cvta_generic_to_global(from)), "l"(policy)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(address),
                 "l"(__cvta_generic_to_global(from)), "l"(policy)
                 : "memory");
  }
}

__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;"); }

// Until all but the last `kGroups` groups are there, for the thread that copied them.
template <int kGroups>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

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

// Stores the units of a warp's neighbours, all of which call it, of two words each. A lane
// exchanges one with its neighbour, so that each of the two instructions fills the sectors that it
// touches.
template <typename T>
__device__ __forceinline__ void StorePairs(T* p, const UnitBits<T>& unit) {
  static_assert(sizeof(T) * kUnit == 32 || sizeof(T) == 2);
  if constexpr (UnitBits<T>::kWords == 2) {
    const bool odd = threadIdx.x & 1;
    const uint4 mine = odd ? unit.words[1] : unit.words[0];
    const uint4 given = odd ? unit.words[0] : unit.words[1];
    const auto exchange = [](uint32_t word) { return __shfl_xor_sync(kFullWarp, word, 1); };
    const uint4 got = {exchange(given.x), exchange(given.y), exchange(given.z), exchange(given.w)};
    uint4* const first = reinterpret_cast<uint4*>(odd ? p - kUnit : p) + odd;
    __stcs(first, odd ? got : mine);
    __stcs(first + 2, odd ? mine : got);
  }
}

// Fold for a tile of 256 elements, all there, whose neighbours differ in their channel, and each of
// whose slots has as many of them: a thread sums one element of the tile over all lanes, and then
// come the elements of a slot.
__device__ __forceinline__ void FoldPlain(const Geometry& g, const Place& place,
                                          const Pair<double> (&pairs)[kUnit],
                                          FoldBuffer<double>& buffer, double* workspace) {
  constexpr int kTileUnits = kThreads / kUnit;
  static_assert(kTileUnits == kWarpSize);
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      buffer.value[k][buffer.IndexOf(threadIdx.x, i)] = pairs[i].value[k];
    }
  }
  __syncthreads();
  const uint32_t element = threadIdx.x;
  double sums[2] = {};
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

// sum / n. A division would be the longest part of what all blocks wait for; this is as exact.
__device__ __forceinline__ double Average(double sum, double n, double inverse_n) {
  const double quotient = sum * inverse_n;
  return isfinite(quotient) ? fma(fma(-quotient, n, sum), inverse_n, quotient) : quotient;
}

// The statistics of this block's channels, of those that Finish shares out; all threads call it.
// With `plain` the sums are FoldPlain's.
template <typename A>
__device__ __forceinline__ void FinishResident(const Finish& f, bool plain, double inverse_n,
                                               double* buffer) {
  constexpr int kWarps = kThreads / kWarpSize;
  const Geometry& g = f.geometry;
  const uint32_t width = 1u << f.log_width;
  const uint32_t share = 1u << f.log_share, in_share = threadIdx.x >> f.log_width;
  const uint32_t group = blockIdx.x / f.group_blocks;
  const int64_t first = int64_t{blockIdx.x - group * f.group_blocks} << f.log_width;
  const int64_t channel = first + (threadIdx.x & (width - 1));
  const double* const workspace = reinterpret_cast<const double*>(
      static_cast<const A*>(f.workspace) + group * f.workspace_size);
  const int64_t plane = g.plane();
  const uint32_t entries = channel < g.channels ? f.entries : 0;
  double sums[2] = {};
  // The loads of a batch, in general all of a thread, go out together.
  const auto add = [&](auto batch_size, const auto& index) {
    constexpr int kBatch = decltype(batch_size)::value;
    Pair<double> batch[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const auto at = index(k);
      if (at < 0) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) batch[k].value[i] = __ldcg(workspace + i * plane + at);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) sums[i] += batch[k].value[i];
    }
  };
  if (plain) {  // a channel is in one tile, and in one slot of it
    constexpr int kBatch = 6;
    const uint32_t stride = static_cast<uint32_t>(g.tiles) * g.slots;
    const uint32_t in_part = static_cast<uint32_t>(channel);
    for (uint32_t entry = in_share; entry < entries; entry += kBatch * share) {
      add(std::integral_constant<int, kBatch>(), [&](int k) {
        const uint32_t here = entry + k * share;
        return here < entries ? static_cast<int>(here * stride + in_part) : -1;
      });
    }
  } else {
    constexpr int kBatch = 4;
    const ChannelParts parts(f, channel);
    for (uint32_t entry = in_share; entry < entries; entry += kBatch * share) {
      int64_t indices[kBatch];
      parts.Get(entry, share, entries, indices);
      add(std::integral_constant<int, kBatch>(), [&](int k) { return indices[k]; });
    }
  }
  for (uint32_t step = kWarpSize / 2; step >= width; step /= 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) sums[i] += __shfl_xor_sync(kFullWarp, sums[i], step);
  }
  const uint32_t lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  if (lane < width) {
#pragma unroll
    for (int i = 0; i < 2; ++i) buffer[(i * kWarps + warp) * kWarpSize + lane] = sums[i];
  }
  __syncthreads();
  if (threadIdx.x >= width || channel >= g.channels) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sums[i] = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sums[i] += buffer[(i * kWarps + w) * kWarpSize + lane];
  }
  const int64_t at = group * f.out_stride + channel;
  const double mean = Average(sums[0], f.n, inverse_n);
  const double var = Average(sums[1], f.n, inverse_n) - mean * mean;
  static_cast<A*>(f.out[0])[at] = static_cast<A>(mean);
  static_cast<A*>(f.out[1])[at] = static_cast<A>(var < 0 ? 0 : var);
}

template <typename T, bool kResidual, typename Config>
__global__ void __launch_bounds__(kThreads, Config::kBlocks)
    ResidentKernel(const __grid_constant__ ResidentParams p) {
  using A = ComputeType<T>;
  using Ring = RingOf<T>;
  constexpr int kWords = Ring::kWords, kStep = Ring::kStep;
  constexpr int kKept = Config::kWords / kWords;       // units in registers
  constexpr int kAhead = Config::kBlocks > 2 ? 2 : 3;  // steps that are on their way
  static_assert(kKept % kStep == 0);
  extern __shared__ uint4 shared[];

  const Geometry& g = p.geometry();
  const Place place = PlaceOf(g, blockIdx.x);
  const Share share = ShareOf(g, place, threadIdx.x);
  const int64_t group = place.group * g.group_size;
  const T* const x = static_cast<const T*>(p.arrays.x) + group;
  const T* const residual = static_cast<const T*>(p.arrays.residual) + group;
  T* const y = static_cast<T*>(p.arrays.y) + group;
  uint8_t* const mask = p.arrays.mask == nullptr
                            ? nullptr
                            : static_cast<uint8_t*>(p.arrays.mask) + place.group * p.mask_bytes;
  const UnitChannels channels(g, place, share, p.aligned_parameters);
  // Whether the lanes of the warp have as many units each.
  const bool together =
      kWords == 2 && __all_sync(kFullWarp, share.count == __shfl_sync(kFullWarp, share.count, 0));

  // The sums.
  FoldBuffer<double>& buffer = *reinterpret_cast<FoldBuffer<double>*>(shared);
  uint4* const ring =
      shared + (sizeof(FoldBuffer<double>) + sizeof(uint4) - 1) / sizeof(uint4) + threadIdx.x;
  const int slots = p.slots;
  const int ringed = max(share.count - kKept, 0);  // units that go through the ring
  const int passing = max(ringed - slots, 0);      // and those of them that do not stay
  const int64_t ring_first = share.first + kKept * share.stride;
  UnitBits<T> kept[kKept];
#pragma unroll
  for (int k = 0; k < kKept; ++k) {
    if (k < share.count) kept[k] = LoadUnit<T, true>(x + share.first + k * share.stride);
  }
  const auto ring_words = [&](int slot, int w) -> uint4& {
    return ring[(slot * kWords + w) * kThreads];
  };
  // What stays on the chip need not stay in L2.
  uint64_t once, again;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(again));
  int copied = 0, copy_slot = 0;
  const T* from = x + ring_first;
  const auto copy = [&] {
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      if (copied < ringed) {
        const uint64_t policy = copied < passing ? again : once;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          CopyAsync(&ring_words(copy_slot, w), reinterpret_cast<const uint4*>(from) + w, policy,
                    kWords == 1);
        }
      }
      ++copied;
      from += share.stride;
      copy_slot = copy_slot + 1 == slots ? 0 : copy_slot + 1;
    }
    CommitCopies();
  };
#pragma unroll
  for (int k = 0; k < kAhead; ++k) copy();

  Deviations<A> deviations[kUnit];
  const auto add = [&](const UnitBits<T>& unit) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) deviations[i].Add(ToCompute(unit[i]));
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
    WaitForCopies<kAhead - 1>();
    if (used + kKept >= shift_at) {
      shift(used + kKept);
      shift_at = 4 * (used + kKept);
    }
    UnitBits<T> units[kStep];
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (used + k < ringed) units[k].words[w] = ring_words(slot, w);
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

  double* const workspace = reinterpret_cast<double*>(static_cast<A*>(p.arrays.workspace) +
                                                      place.group * p.arrays.workspace_size);
  // Behind the pairs of the first group.
  uint32_t* const counter =
      reinterpret_cast<uint32_t*>(static_cast<double*>(p.arrays.workspace) + 2 * g.plane());
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
    UnitBits<T> x;
    UnitBits<T> residual;
  };
  A mean[kUnit], factor[kUnit], bias[kUnit];
  const auto load_residual = [&](int64_t element) {
    if constexpr (kResidual) {
      return LoadUnit<T, true>(residual + element);
    } else {
      return UnitBits<T>{};
    }
  };
  // The result's unit; its elements from `size` on have no bit in the mask.
  const auto apply = [&](const UnitBits<T>& unit, const UnitBits<T>& other, int64_t element,
                         int size) {
    A values[kUnit];
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      values[i] = fma(ToCompute(unit[i]) - mean[i], factor[i], bias[i]);
      if constexpr (kResidual) values[i] += ToCompute(other[i]);
      if (values[i] > 0) bits |= 1u << i;
    }
    if (mask != nullptr) mask[element >> 3] = static_cast<uint8_t>(bits & 0xffu >> (kUnit - size));
    if (p.relu) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) values[i] = ReluOf(values[i]);
    }
    return RoundUnit<T>(values);
  };
  const auto put = [&](const UnitBits<T>& unit, const UnitBits<T>& other, int64_t element) {
    const UnitBits<T> result = apply(unit, other, element, kUnit);
    if (kWords == 2 && together) {
      StorePairs(y + element, result);
    } else {
      StoreUnit<T, true>(y + element, result);
    }
  };

  const auto statistics = [&] {
    cooperative_groups::this_grid().sync();
    if (blockIdx.x < p.finish_blocks) {
      FinishResident<A>(p.finish, p.plain, p.inverse_n, buffer.value[0]);
      __syncthreads();
      if (threadIdx.x == 0) CountRelease(counter);
    }
    A scale[kUnit];
    channels.LoadOr(static_cast<const A*>(p.arrays.scale), A(1), scale);
    channels.LoadOr(static_cast<const A*>(p.arrays.bias), A(0), bias);
    if (threadIdx.x == 0) {
      while (ReadAcquire(counter) < p.finish_blocks) {
      }
    }
    __syncthreads();
    if (share.count == 0 && share.cut == 0) return;
    channels.Load(static_cast<const A*>(p.arrays.mean), mean);
    channels.Load(static_cast<const A*>(p.arrays.var), factor);
    const A eps = static_cast<A>(p.eps);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) factor[i] = InverseRoot(factor[i] + eps) * scale[i];
  };
  const auto put_kept = [&] {
#pragma unroll
    for (int k = 0; k < kKept; k += kStep) {
      UnitBits<T> others[kStep];
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

  // What has passed is the last that was read of what is still in L2, and its first loads need no
  // statistics.
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
  Sweep<kStep, UnitBits<T>>(
      stays, ring_first + passing * share.stride, share.stride, load_residual,
      [](const UnitBits<T>&) {},
      [&](const UnitBits<T>& other, int64_t element) {
        UnitBits<T> unit;
#pragma unroll
        for (int w = 0; w < kWords; ++w) unit.words[w] = ring_words(slot, w);
        slot = slot + 1 == slots ? 0 : slot + 1;
        put(unit, other, element);
      },
      [] {});
  if (share.cut > 0) {
    const int64_t element = g.group_size - share.cut;
    const UnitBits<T> unit = LoadCutUnit(x + element, share.cut);
    UnitBits<T> other;
    if constexpr (kResidual) other = LoadCutUnit(residual + element, share.cut);
    StoreCutUnit(y + element, apply(unit, other, element, share.cut), share.cut);
  }
}

// -------------------------------------------------------------------------------------------------
// Host

// A geometry for one wave of at most `blocks` blocks, and `max_plane` pairs of workspace: that of
// the tile with the shortest turns, the narrowest of these. False if there is none.
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
    // Several places of a channel in a tile's long row are slow to finish.
    const double speed = 1.0 / static_cast<double>(longest) / (g.repeats > 1 ? 1.1 : 1.0);
    if (speed <= best * 1.03) continue;
    best = speed;
    SetParts(CeilDiv(turns, longest), &g);
    *geometry = g;
  }
  return best > 0;
}

struct ResidentPlan {
  ResidentParams params;
  unsigned blocks;
  int shared_bytes;
  double kept;    // of the array
  double spread;  // of the time of all blocks that there could be, in which they read or write
};

// What a device offers a kernel of so many blocks for each processor.
struct ResidentDevice {
  int processors = 0;
  int shared_bytes = 0;  // of a block
};

// Without the arrays. False if the kernel cannot take the shape.
template <typename T, typename Config>
bool MakeResidentPlan(const BatchNormShape& shape, const ResidentDevice& device,
                      int64_t workspace_size, ResidentPlan* plan) {
  using Ring = RingOf<T>;
  static_assert(sizeof(T) < 8);
  constexpr int kAhead = Config::kBlocks > 2 ? 2 : 3;
  ResidentParams& p = plan->params;
  const int64_t pairs = workspace_size / (2 * sizeof(double) / sizeof(float));
  const int64_t blocks = int64_t{device.processors} * Config::kBlocks;
  Geometry g;
  unsigned ignored;
  if (!MakeResidentGeometry(shape, blocks, pairs - 1, &g) ||
      !MakeFinish(shape, g, nullptr, workspace_size, &p.finish, &ignored)) {
    return false;
  }
  plan->blocks = BlocksOf(shape, g);

  // As few channels for a block as there are blocks for, but what is a sector of memory.
  Finish& f = p.finish;
  const auto group_blocks = [&](int log_width) {
    return (shape.channels + (int64_t{1} << log_width) - 1) >> log_width;
  };
  f.log_width = 0;
  while (f.log_width < Config::kLogFinish && shape.channels >> (f.log_width + 1) > 0) ++f.log_width;
  while (group_blocks(f.log_width) * shape.groups > plan->blocks) {
    if (++f.log_width > kMinLogWidth) return false;
  }
  f.log_share = kMaxLogWidth - f.log_width;
  f.group_blocks = static_cast<uint32_t>(group_blocks(f.log_width));
  p.finish_blocks = static_cast<uint32_t>(f.group_blocks * shape.groups);

  const int64_t turns = TurnsOf(g), longest = CeilDiv(turns, g.parts);
  const int fold = static_cast<int>((sizeof(FoldBuffer<double>) + 15) / 16 * 16);
  const int64_t most = (device.shared_bytes - fold) / Ring::kSlotBytes;
  const int64_t least = kAhead * Ring::kStep;
  if (most < least) return false;
  const int64_t in_registers = Config::kWords / Ring::kWords;
  p.slots = static_cast<int32_t>(std::max(least, std::min(most, longest - in_registers)));
  plan->shared_bytes = fold + p.slots * Ring::kSlotBytes;
  plan->kept = std::min(1.0, static_cast<double>(p.slots + in_registers) / longest);
  plan->spread =
      static_cast<double>(turns * g.tiles * shape.groups) / static_cast<double>(longest * blocks);
  p.plain = g.inner == 1 && g.log_width == kMinLogWidth && g.length % kThreads == 0 &&
            kThreads % g.slots == 0;
  p.inverse_n = 1 / f.n;
  p.mask_bytes = shape.mask_bytes();
  f.out_stride = shape.channels;
  return true;
}

inline void SetArrays(const BatchNormForwardArrays& arrays, double eps, bool relu,
                      ResidentParams* p) {
  p->arrays = arrays;
  p->finish.workspace = arrays.workspace;
  p->finish.x = arrays.x;
  p->finish.out[0] = arrays.mean;
  p->finish.out[1] = arrays.var;
  p->eps = eps;
  p->relu = relu;
  p->aligned_parameters = IsAligned(arrays.mean) && IsAligned(arrays.var) &&
                          IsAligned(arrays.scale) && IsAligned(arrays.bias);
}

// Lets a kernel have all of the device's shared memory, and says how much of it is a block's.
inline cudaError_t PrepareResident(const void* kernel, int blocks, ResidentDevice* offer) {
  int device, total, optin, reserved, cooperative;
  cudaError_t error = cudaGetDevice(&device);
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  };
  get(&offer->processors, cudaDevAttrMultiProcessorCount);
  get(&total, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  get(&optin, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(&reserved, cudaDevAttrReservedSharedMemoryPerBlock);
  get(&cooperative, cudaDevAttrCooperativeLaunch);
  if (error != cudaSuccess) return error;
  if (!cooperative) return cudaErrorNotSupported;
  const int most = std::min(optin, total / blocks - reserved) / 128 * 128;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (error != cudaSuccess) return error;
  int resident;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, most);
  if (error != cudaSuccess) return error;
  if (resident < blocks) return cudaErrorNotSupported;
  offer->shared_bytes = most;
  return cudaSuccess;
}

inline cudaError_t LaunchResident(const void* kernel, const ResidentPlan& plan,
                                  cudaStream_t stream) {
  void* arguments[] = {const_cast<ResidentParams*>(&plan.params)};
  static_cast<void>(cudaLaunchCooperativeKernel(kernel, dim3(plan.blocks), dim3(kThreads),
                                                arguments, plan.shared_bytes, stream));
  return cudaGetLastError();  // which the next launch would else return again
}

}  // namespace jax_fastops::cuda::batch_norm

#endif  // JAX_FASTOPS_CUDA_BATCH_NORM_RESIDENT_CUH_

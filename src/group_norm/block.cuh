// What the kernels of group norm share: the shared memory of a block, the sums that blocks
// exchange, and launches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/cuda/dispatch.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/partial_sums.cuh"
#include "group_norm/group_norm.h"
#include "group_norm/plan.h"

namespace jax_fastops::cuda {

struct GroupNormFamily;

namespace group_norm {

using namespace jax_fastops::group_norm;  // NOLINT: this file is a part of it

// What a launch does. With kKeeps, it does both.
enum class Half { kSums, kResults };

template <typename Call>
struct Params {
  Call call;
  Plan plan;
  SharedLayout shared;
  Half half;
};

// What a block has in shared memory.
template <typename Tile, typename Sums>
struct Shared {
  using A = typename Tile::A;

  const SharedLayout& at;
  Sums *sums, *group_sums;  // two of each group, or, in the backward, of each channel and group
  A *coefficients, *statistics, *base, *table;

  __device__ __forceinline__ explicit Shared(const SharedLayout& at) : at(at) {
    sums = At<Sums>(0);
    group_sums = At<Sums>(at.group_sums);
    coefficients = At<A>(at.coefficients);
    statistics = At<A>(at.statistics);
    base = At<A>(at.base);
    table = At<A>(at.table);
  }
  // The kept units of this thread.
  __device__ __forceinline__ char* Kept() const {
    return At<char>(at.kept) + threadIdx.x * (Tile::kStride / kThreads);
  }
  // Sums that arrive in a turn.
  __device__ __forceinline__ Sums* Inbox(int turn) const {
    return At<Sums>(at.inbox + (turn & 1) * at.inbox_bytes);
  }
  // The two numbers of a thread and channel of a unit.
  __device__ __forceinline__ A* Entry(int thread, int channel = 0) const {
    return table + 2 * (channel * kTableStride + thread);
  }

 private:
  template <typename P>
  static __device__ __forceinline__ P* At(int offset) {
    extern __shared__ __align__(16) char memory[];
    return reinterpret_cast<P*>(memory + offset);
  }
};

template <typename V>
using Scratch = V[2][kThreads / kWarpSize];

template <typename A>
__device__ __forceinline__ void SetEntry(A* entry, A first, A second) {
  if constexpr (sizeof(A) == 4) {
    Unit<A, 2 * sizeof(A)>{{first, second}}.Store(entry);
  } else {
    entry[0] = first, entry[1] = second;
  }
}
template <typename A>
__device__ __forceinline__ void GetEntry(const A* entry, A (&values)[2]) {
  if constexpr (sizeof(A) == 4) {
    const auto both = Unit<A, 2 * sizeof(A)>::Load(entry);
    values[0] = both[0], values[1] = both[1];
  } else {
    values[0] = entry[0], values[1] = entry[1];
  }
}

// The sums of the first part in the workspace. The next part has its sums 2 * `all` numbers later.
template <typename V, typename A>
__device__ __forceinline__ V* StoredSums(const GroupNormCall& call, int64_t sample, int first) {
  return reinterpret_cast<V*>(static_cast<A*>(call.workspace) + sample * call.workspace_size) +
         2 * first;
}

// Stores the sums of a part.
template <typename V>
__device__ __forceinline__ void StoreSums(const V* sums, int results, V* to) {
  for (int i = static_cast<int>(threadIdx.x); i < 2 * results; i += kThreads) to[i] = sums[i];
}

// Lets the blocks of a processor start one after the other. If all of them loaded their tiles at
// the same time, all would compute when the last loads have arrived, and memory would rest.
// Clusters are placed on all processors before a processor gets its next block.
__device__ __forceinline__ void Stagger(const Plan& plan, uint32_t cluster) {
  const int64_t until = clock64() + int64_t{plan.delay} * (cluster * plan.resident / plan.clusters);
  while (plan.delay > 0 && clock64() < until) __nanosleep(50);
}

// Adds up the sums of the parts, which are `stride` apart: in the inbox, or in the workspace. Calls
// write(result, sums).
template <bool kKeeps, typename V, typename Write>
__device__ __forceinline__ void TotalParts(int results, int parts, const V* from, int64_t stride,
                                           Scratch<V>& scratch, const Write& write) {
  SumTerms<kThreads>(
      results, parts, scratch,
      [&](int result, int part, V(&values)[2]) {
        const V* const at = from + part * stride + 2 * result;
#pragma unroll
        for (int i = 0; i < 2; ++i) values[i] = kKeeps ? at[i] : __ldcg(at + i);
      },
      write);
}

// Sends the sums of groups to all blocks of the cluster, whose inbox has those of part after part.
template <typename V>
__device__ __forceinline__ void SendToAll(ClusterInbox& inbox, const V* sums, int results,
                                          const Plan& plan, int part, V* to, int turn) {
  const int log_parts = 31 - __clz(plan.parts);
  for (int i = static_cast<int>(threadIdx.x); i < 2 * results << log_parts; i += kThreads) {
    const int of = i >> log_parts;
    inbox.Send(to + part * 2 * plan.set_groups + of, sums[of], i & (plan.parts - 1), turn);
  }
}

// -------------------------------------------------------------------------------------------------
// Launches

// A kernel tells how many blocks are resident; those of both directions have the same bounds.
template <auto kKernel>
cudaError_t GetLimits(Limits* limits) {
  static PerDevice<Limits> known;
  return known.Get(limits, [](Limits* found) {
    Device device;
    cudaError_t error = CurrentDevice(&device);
    if (error == cudaSuccess) error = LoadKernels<GroupNormFamily>();
    if (error != cudaSuccess) return error;
    found->processors = device.processors;
    found->shared_per_block = device.shared_per_block - kStaticShared;
    found->shared_per_processor = device.shared_per_processor;
    const auto kernel = reinterpret_cast<const void*>(KernelOf<GroupNormFamily, kKernel>());
    LaunchConfig config = {.block = dim3(kThreads),
                           .shared = static_cast<size_t>(found->shared_per_block / 2)};
    found->max_cluster = LargestCluster(kernel, config, kMaxCluster);
    for (int log = 0; 1 << log <= found->max_cluster; ++log) {
      for (int resident = 1; resident <= kBlocks; ++resident) {
        config.cluster = 1 << log;
        config.grid = dim3(1 << log);
        config.shared = std::min(found->shared_per_block,
                                 found->shared_per_processor / resident - kBlockShared);
        int blocks = 0;
        error = ResidentBlocks(kernel, config, &blocks);
        if (error != cudaSuccess) return error;
        found->clusters[log][resident - 1] = blocks >> log;
      }
    }
    return cudaSuccess;
  });
}

template <typename Call>
cudaError_t LaunchHalf(void (*kernel)(Params<Call>), Params<Call> params, Half half,
                       cudaStream_t stream) {
  params.half = half;
  const Plan& plan = params.plan;
  // Blocks that stay, and fill the device, do not start while the kernel before ends: some might
  // then not find room until others have had all of their tiles.
  const bool fills = plan.kept_units > 0 && plan.resident > 1;
  const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(plan.clusters * plan.parts)),
                               .block = dim3(kThreads),
                               .shared = static_cast<size_t>(params.shared.bytes),
                               .cluster = plan.kept_units > 0 ? plan.parts : 1,
                               .dependent = !fills};
  return Launch(kernel, config, stream, params);
}

// Runs a direction, of which Kernels::Of<T, kBytes, kLast, kKeeps>() is a kernel.
template <typename Kernels, typename Call>
cudaError_t Run(const Call& call, const Limits& limits, int arrays, bool backward,
                int64_t max_parts, int alignment, cudaStream_t stream) {
  if (call.samples == 0) return cudaSuccess;
  const int item = static_cast<int>(DTypeSize(call.dtype));
  const Shape shape = {call.samples,      call.groups,     call.channels,
                       call.positions(),  call.inner == 1, item,
                       item == 8 ? 8 : 4, arrays,          backward};
  const Plan plan = MakePlan(shape, alignment, max_parts, limits);
  if (shape.samples * plan.sets * plan.parts > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const Params<Call> params = {call, plan, LayoutOf(plan, shape), {}};
  return ForDType(call.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const auto launch = [&](auto unit, auto last) {
      constexpr int kBytes = decltype(unit)::value;
      constexpr bool kLast = decltype(last)::value;
      if (plan.kept_units > 0) {
        return LaunchHalf(Kernels::template Of<T, kBytes, kLast, true>(), params, Half::kSums,
                          stream);
      }
      const auto kernel = Kernels::template Of<T, kBytes, kLast, false>();
      const cudaError_t error = LaunchHalf(kernel, params, Half::kSums, stream);
      return error == cudaSuccess ? LaunchHalf(kernel, params, Half::kResults, stream) : error;
    };
    const auto by_layout = [&](auto unit) {
      return plan.last ? launch(unit, std::true_type()) : launch(unit, std::false_type());
    };
    constexpr int kItem = static_cast<int>(sizeof(T));
    if constexpr (kItem < 8) {
      if (plan.unit * kItem == kUnitBytes)
        return by_layout(std::integral_constant<int, kUnitBytes>());
    }
    if constexpr (kItem == 2) {
      if (plan.unit > 1) return by_layout(std::integral_constant<int, 8>());
    }
    return by_layout(std::integral_constant<int, kItem>());
  });
}

}  // namespace group_norm
}  // namespace jax_fastops::cuda

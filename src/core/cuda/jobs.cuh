// Jobs of two phases, in one cooperative launch.
//
// A job has parts. A block computes something of each part of a job, such as sums. Then blocks
// write the results of each part, for which they need the sums of all parts. The results of a job
// follow its first phase by about as many parts as blocks run at once. So what the first phase has
// read is still in the L2 cache, and blocks seldom wait.
//
// Blocks take the parts in the order of their numbers, and one part only waits for others with
// smaller numbers, which other blocks have taken before. So no block waits for one that does not
// run.
#ifndef JAX_FASTOPS_CORE_CUDA_JOBS_CUH_
#define JAX_FASTOPS_CORE_CUDA_JOBS_CUH_

#include <cooperative_groups.h>

#include <cstdint>
#include <utility>

#include "core/cuda/counters.cuh"

namespace jax_fastops::cuda {

struct Jobs {
  uint32_t count, parts;
  uint32_t lead;  // jobs whose first phase comes before any second one, at most `count`

  __host__ __device__ uint32_t items() const { return 2 * count * parts; }
};

struct JobPart {
  uint32_t job, part;
  bool second;  // phase
};

__host__ __device__ __forceinline__ JobPart PartOf(const Jobs& jobs, uint32_t item) {
  const uint32_t before = jobs.lead * jobs.parts, both = 2 * (jobs.count * jobs.parts - before);
  bool second = false;
  if (item >= before) {
    item -= before;
    second = item >= both || item % 2 == 0;
    item = item >= both ? item - both / 2 : second ? item / 2 : item / 2 + before;
  }
  return {item / jobs.parts, item % jobs.parts, second};
}

// counter_of(job) is the place of a counter of a job, and `taken` that of one of all jobs; they
// have any value before. first(job, part) writes what the second phase of all parts of the job
// reads.
template <typename CounterOf, typename First, typename Second>
__device__ __forceinline__ void RunJobs(const Jobs& jobs, uint32_t* taken,
                                        const CounterOf& counter_of, const First& first,
                                        const Second& second) {
  __shared__ uint32_t next[2];
  const bool one = threadIdx.x == 0;

  const uint32_t threads = gridDim.x * blockDim.x;
  for (uint32_t job = blockIdx.x * blockDim.x + threadIdx.x; job < jobs.count; job += threads) {
    *counter_of(job) = 0;
  }
  if (blockIdx.x == 0 && one) *taken = 0;
  const auto grid = cooperative_groups::this_grid();
  auto arrival = grid.barrier_arrive();
  bool ready = false;  // all counters are 0

  int turn = 0;
  for (uint32_t item = blockIdx.x; item < jobs.items(); turn ^= 1) {
    const JobPart part = PartOf(jobs, item);
    uint32_t* const done = counter_of(part.job);
    if (!part.second) first(part.job, part.part);
    if (!ready) grid.barrier_wait(std::move(arrival));
    ready = true;
    __syncthreads();
    if (one) {
      if (!part.second) CountRelease(done);
      next[turn] = gridDim.x + atomicAdd(taken, 1);
      while (part.second && ReadAcquire(done) < jobs.parts) {
      }
    }
    __syncthreads();
    if (part.second) second(part.job, part.part);
    item = next[turn];
  }
}

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CORE_CUDA_JOBS_CUH_

// Launch plans of the kernel that adds up partial sums (core/cuda/partial_sums.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/integer.h"

namespace jax_fastops {

inline constexpr int kMaxLogSumsThreads = 10;
inline constexpr int kMaxSumsThreads = 1 << kMaxLogSumsThreads;  // of a block

// A block has 1 << log_width neighboring results, and 1 << log_share threads share the terms of a
// result. If several threads share them, the results fit into a warp.
struct SumsPlan {
  int64_t results = 0;
  uint32_t terms = 0;
  int log_width = 0;
  int log_share = 0;

  constexpr int log_threads() const { return log_width + log_share; }
  constexpr int64_t blocks() const { return CeilDiv(results, int64_t{1} << log_width); }
};

// Each thread has about two terms, as many loads as it has under way together, if the block can
// have that many threads and the device has room for them. 8 results of a block are one memory
// sector of floats, but a block has only one result if there are few with very many terms. It has
// at least two warps.
constexpr SumsPlan PlanSums(int64_t results, int64_t terms) {
  constexpr int64_t kManyThreads = 1 << 20;  // several times those that a device runs at once
  SumsPlan plan = {results, static_cast<uint32_t>(terms)};
  plan.log_width = terms > 4096 && results < 1024 ? 0 : 3;
  while (plan.log_width > 0 && results <= int64_t{1} << (plan.log_width - 1)) --plan.log_width;
  while (plan.log_threads() < kMaxLogSumsThreads && int64_t{2} << plan.log_share < terms &&
         results << (plan.log_share + 1) <= kManyThreads) {
    ++plan.log_share;
  }
  const int log_least = plan.log_share == 0 && results > 1 << 16 ? 8 : 6;
  plan.log_width = std::max(plan.log_width, log_least - plan.log_share);
  return plan;
}

// Widens a plan to blocks of 1 << log_threads threads.
constexpr void Widen(SumsPlan* plan, int log_threads) {
  if (plan->log_share == 0) {
    plan->log_width = log_threads;
  } else {
    plan->log_width = std::min(plan->log_width, 3);
    plan->log_share = log_threads - plan->log_width;
  }
}

}  // namespace jax_fastops

// Launch plans of the CUDA kernels of cross entropy: which kernel, and the threads of a row.
#ifndef JAX_FASTOPS_CROSS_ENTROPY_PLAN_H_
#define JAX_FASTOPS_CROSS_ENTROPY_PLAN_H_

#include <cstdint>

namespace jax_fastops {

inline constexpr int kCrossEntropyThreads = 256;  // of a block
inline constexpr int kCrossEntropyWide = 1024;    // of a block of kWide
inline constexpr int kCrossEntropyCluster = 8;    // most blocks of a cluster
inline constexpr int kCrossEntropyTogether = 4;   // words that a thread loads together
inline constexpr int kCrossEntropyTile = 8 * kCrossEntropyThreads;  // words, of a block of kTiles

enum class CrossEntropyKernel {
  kLanes,  // a row has a part of a warp
  kBlock,  // forward: a row has a block
  kWide,   // forward: a row has a large block, or a cluster of them
  kTiles,  // backward: a tile of a row has a block
};

struct CrossEntropyShape {
  int64_t rows, n;
  int itemsize;
  bool backward;
};

struct CrossEntropyPlan {
  CrossEntropyKernel kernel = CrossEntropyKernel::kLanes;
  int threads = kCrossEntropyThreads;
  int64_t blocks = 0;
  int log_lanes = 0;  // kLanes: threads of a row
  int64_t tiles = 1;  // kTiles: of a row
  int cluster = 1;    // kWide: blocks of a row
};

// `processors` is the number of SMs, and `most_blocks` that of the blocks of the largest cluster
// that the device runs: 1 without clusters, up to kCrossEntropyCluster.
CrossEntropyPlan PlanCrossEntropy(const CrossEntropyShape& shape, int processors, int most_blocks);

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_CROSS_ENTROPY_PLAN_H_

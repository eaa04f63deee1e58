// Cross entropy with integer labels: the forward reads each logit once, the backward reads it once
// and writes its gradient.
//
// - Each thread keeps a maximum and a sum of exponentials relative to it ("online softmax", Milakov
//   and Gimelshein), and takes several 16-byte words between two changes of the maximum, so the
//   change costs one exponential for many elements. The threads of a row combine at its end.
// - The gradient needs no reduction: the row's maximum and logarithm are residuals. Long rows are
//   cut into tiles, which are independent blocks, so a few long rows fill the device too.
// - A row of any length and alignment is a run of aligned words and at most 14 elements before and
//   after it, the edges, which are read and written by element. If dx has another alignment than x,
//   all elements are edges.
// - A row whose label is negative is not read.
//
// There are two kernels each way: one whose rows are parts of a warp, and one whose rows have
// blocks of their own (plan_cuda.cc). float64 takes the first one for every row.
#include "cross_entropy/cross_entropy.h"

#include <cooperative_groups.h>

#include "core/cuda/cluster_sum.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/packed.cuh"
#include "core/cuda/row_group.cuh"
#include "cross_entropy/plan.h"

namespace jax_fastops::cuda {

struct CrossEntropyFamily;

namespace {

// -------------------------------------------------------------------------------------------------
// Parts

constexpr int kThreads = kCrossEntropyThreads;
constexpr int kTogether = kCrossEntropyTogether;
constexpr int kWideThreads = kCrossEntropyWide;
constexpr int kTile = kCrossEntropyTile;

struct Params {
  int64_t rows, n;
  const void* x;
  const int32_t* labels;
  double smoothing, z_loss;
  void* loss;  // forward
  void* top;   // these two: written by the forward, unless null; read by the backward
  void* log_sum;
  const void* cotangent;  // backward
  void* dx;
  int log_lanes;        // threads of a row, in the kernels of short rows
  FastDivisor64 tiles;  // of a row, in the backward of long rows
  bool whole;           // words of dx are aligned where those of x are
};

__device__ __forceinline__ float Exp(float x) { return expf(x); }
__device__ __forceinline__ double Exp(double x) { return exp(x); }
__device__ __forceinline__ float Log(float x) { return logf(x); }
__device__ __forceinline__ double Log(double x) { return log(x); }

constexpr float kLog2E = 1.44269504f;

// 2^x; subnormal results become 0.
__device__ __forceinline__ float PowerOfTwo(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// exp(x - less). 16-bit elements are rounded so much that the errors of the products, up to 1e-6
// for the terms that matter, have no effect.
template <typename T>
__device__ __forceinline__ ComputeType<T> ExpFor(ComputeType<T> x, ComputeType<T> less = 0) {
  if constexpr (sizeof(T) == 2) {
    return PowerOfTwo(fmaf(x, kLog2E, -less * kLog2E));
  } else {
    return Exp(x - less);
  }
}

// A row: its aligned words, and its edges. n < 2^31, and so are all indices.
template <typename T>
struct Row {
  static constexpr int kSize = Packed128<T>::kSize;
  // Loaded words stay words until they are used. Elements would be unpacked right after each load.
  using Word = Packed128<uint32_t>;

  const T* x;
  int head;   // edges before the words
  int words;  // how many
  int edges;  // how many

  __device__ __forceinline__ Row(const Params& p, int64_t row)
      : x(static_cast<const T*>(p.x) + row * p.n) {
    const int n = static_cast<int>(p.n);
    const int past = static_cast<int>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
    head = p.whole ? min(n, (kSize - past) % kSize) : n;
    words = (n - head) / kSize;
    edges = n - words * kSize;
  }
  // The indices of the first element of a word, and of an edge.
  __device__ __forceinline__ int OfWord(int word) const { return head + word * kSize; }
  __device__ __forceinline__ int OfEdge(int edge) const {
    return edge < head ? edge : edge + words * kSize;
  }
  // Loads those of the words `word`, `word` + step, ... that are before `end`.
  __device__ __forceinline__ void Load(int word, int step, int end,
                                       Word (&loaded)[kTogether]) const {
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int at = word + k * step;
      if (at < end) {
        loaded[k] =
            LoadPacked<CacheHint::kNoAllocate>(reinterpret_cast<const uint32_t*>(x + OfWord(at)));
      }
    }
  }
};

// -------------------------------------------------------------------------------------------------
// Forward

// What a thread knows of its part of a row. Before there is an element above -inf, the sum is 0, or
// NaN if there was a NaN. With +inf, it is inf, as in jax.nn.logsumexp, or NaN.
template <typename T>
struct Statistics {
  using A = ComputeType<T>;

  A top = -A(INFINITY);
  A sum = 0;    // of exp(x - top), or of exp(x) if top is infinite
  A drift = 0;  // of x - anchor, with smoothing

  static __device__ __forceinline__ A Finite(A top) { return isinf(top) ? A(0) : top; }

  __device__ __forceinline__ void Raise(A most) {
    sum *= ExpFor<T>(top - Finite(most));  // 0 if there was nothing yet
    top = most;
  }

  // Adds what is known of another part of the row.
  __device__ __forceinline__ void Merge(A top_there, A sum_there, A drift_there) {
    Raise(Max()(top, top_there));
    sum += sum_there * ExpFor<T>(top_there - Finite(top));
    drift += drift_there;
  }

  // Adds every `lanes`-th word and edge of the row, from `lane` on.
  __device__ __forceinline__ void Add(const Row<T>& row, int lane, int lanes, bool smooth,
                                      A anchor) {
    for (int word = lane; word < row.words; word += kTogether * lanes) {
      AddWords(row, word, lanes, smooth, anchor);
    }
    for (int edge = lane; edge < row.edges; edge += lanes) {
      const A x = ToCompute(row.x[row.OfEdge(edge)]);
      Raise(Max()(top, x));
      sum += ExpFor<T>(x - Finite(top));
      if (smooth) drift += x - anchor;
    }
  }

 private:
  // Adds up to kTogether words: `word`, `word` + step, ...
  __device__ __forceinline__ void AddWords(const Row<T>& row, int word, int step, bool smooth,
                                           A anchor) {
    constexpr int kSize = Row<T>::kSize;
    typename Row<T>::Word loaded[kTogether];
    row.Load(word, step, row.words, loaded);
    A most = top;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (word + k * step >= row.words) break;
      const Packed128<T> x = Reinterpret<T>(loaded[k]);
#pragma unroll
      for (int i = 0; i < kSize; ++i) most = Max()(most, ToCompute(x[i]));
    }
    Raise(most);
    const A shift = Finite(most);
    A part[2] = {}, drifted = 0;  // few successive additions: the rounding error grows with them
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (word + k * step >= row.words) break;
      const Packed128<T> x = Reinterpret<T>(loaded[k]);
#pragma unroll
      for (int i = 0; i < kSize; ++i) part[i % 2] += ExpFor<T>(ToCompute(x[i]) - shift);
      if (!smooth) continue;
      A of_word = 0;
#pragma unroll
      for (int i = 0; i < kSize; ++i) of_word += ToCompute(x[i]) - anchor;
      drifted += of_word;
    }
    sum += part[0] + part[1];
    drift += drifted;
  }
};

// An element of the row: sums of differences from it are exact where the logits are far from 0.
template <typename T>
__device__ __forceinline__ ComputeType<T> AnchorOf(const Params& p, int64_t row) {
  using A = ComputeType<T>;
  const A first = ToCompute(static_cast<const T*>(p.x)[row * p.n]);
  return first - first == A(0) ? first : A(0);
}

// Writes the results of a row from its statistics. One thread of the row calls it.
template <typename T>
__device__ __forceinline__ void StoreLoss(const Params& p, int64_t row, int label,
                                          const Statistics<T>& row_of, ComputeType<T> anchor) {
  using A = ComputeType<T>;
  const A e = static_cast<A>(p.smoothing), z = static_cast<A>(p.z_loss), m = row_of.top;
  const A s = Log(row_of.sum);
  const A at_label =
      label < p.n ? ToCompute(static_cast<const T*>(p.x)[row * p.n + label]) : A(NAN);
  A loss = (1 - e) * (s + (m - at_label));
  if (e != 0) loss += e * (s + ((m - anchor) - row_of.drift / static_cast<A>(p.n)));
  if (z != 0) loss += z * (m + s) * (m + s);
  static_cast<A*>(p.loss)[row] = loss;
  if (p.top == nullptr) return;
  static_cast<A*>(p.top)[row] = m;
  static_cast<A*>(p.log_sum)[row] = s;
}

template <typename T>
__device__ __forceinline__ void StoreLeftOut(const Params& p, int64_t row) {
  using A = ComputeType<T>;
  static_cast<A*>(p.loss)[row] = A(0);
  if (p.top == nullptr) return;
  static_cast<A*>(p.top)[row] = A(0);
  static_cast<A*>(p.log_sum)[row] = A(0);
}

// The row of a thread in the kernels of short rows; rows or more after the last one.
__device__ __forceinline__ int64_t RowOfLanes(const Params& p) {
  return (int64_t{blockIdx.x} * kThreads + threadIdx.x) >> p.log_lanes;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2 : 4)
    ForwardShort(const __grid_constant__ Params p) {
  using A = ComputeType<T>;
  const int lanes = 1 << p.log_lanes, lane = threadIdx.x & (lanes - 1);
  const int64_t row = RowOfLanes(p);
  const int label = row < p.rows ? p.labels[row] : -1;
  const bool live = label >= 0, smooth = p.smoothing != 0;
  Statistics<T> mine;
  A anchor = 0;
  if (live) {
    if (smooth) anchor = AnchorOf<T>(p, row);
    mine.Add(Row<T>(p, row), lane, lanes, smooth, anchor);
  }
  // All lanes of the warp take part, whatever their rows.
  A most = mine.top;
  for (int step = lanes / 2; step > 0; step /= 2) {
    most = Max()(most, __shfl_xor_sync(0xffffffffu, most, step));
  }
  mine.Raise(most);
  for (int step = lanes / 2; step > 0; step /= 2) {
    mine.sum += __shfl_xor_sync(0xffffffffu, mine.sum, step);
    mine.drift += __shfl_xor_sync(0xffffffffu, mine.drift, step);
  }
  if (lane != 0 || row >= p.rows) return;
  if (live) {
    StoreLoss<T>(p, row, label, mine, anchor);
  } else {
    StoreLeftOut<T>(p, row);
  }
}

// A block of kBlock threads for each row, or a cluster of them.
template <typename T, int kBlock>
__global__ void __launch_bounds__(kBlock, 4 * kThreads / kBlock)
    ForwardLong(const __grid_constant__ Params p) {
  using A = ComputeType<T>;
  using Group = RowGroup<kBlock>;
  __shared__ typename Group::Scratch<A, 2> scratch;
  const int blocks = BlocksOfCluster();
  const int64_t row = blockIdx.x / blocks;
  const int label = p.labels[row];
  if (label < 0) {
    if (BlockOfCluster() == 0 && threadIdx.x == 0) StoreLeftOut<T>(p, row);
    return;
  }
  const bool smooth = p.smoothing != 0;
  const A anchor = smooth ? AnchorOf<T>(p, row) : A(0);
  Statistics<T> mine;
  mine.Add(Row<T>(p, row), BlockOfCluster() * kBlock + threadIdx.x, blocks * kBlock, smooth,
           anchor);
  int phase = 0;
  A most[1] = {mine.top};
  Group::AllReduce(Max(), most, scratch, phase);
  mine.Raise(most[0]);
  A sums[2] = {mine.sum, mine.drift};
  Group::AllReduce(Sum(), sums, scratch, phase);
  mine.sum = sums[0];
  mine.drift = sums[1];
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // clusters
  if constexpr (kBlock == kWideThreads) {
    __shared__ A of_block[3];
    const auto cluster = cooperative_groups::this_cluster();
    if (threadIdx.x == 0) {
      of_block[0] = mine.top;
      of_block[1] = mine.sum;
      of_block[2] = mine.drift;
    }
    cluster.sync();
    if (BlockOfCluster() == 0 && threadIdx.x == 0) {
      for (int i = 1; i < blocks; ++i) {
        const A* const there = cluster.map_shared_rank(of_block, i);
        mine.Merge(there[0], there[1], there[2]);
      }
    }
    cluster.sync();  // the other blocks end after their statistics were read
  }
#endif
  if (BlockOfCluster() == 0 && threadIdx.x == 0) StoreLoss<T>(p, row, label, mine, anchor);
}

// -------------------------------------------------------------------------------------------------
// Backward

// The gradient of a row: scale * exp(x - top - log_sum) - all, less label_too at the label, if it
// is a class.
template <typename T>
struct Gradient {
  using A = ComputeType<T>;
  static constexpr int kSize = Row<T>::kSize;

  A top, log_sum, scale, all, label_too;
  int label;
  bool left_out;

  __device__ __forceinline__ Gradient(const Params& p, int64_t row) {
    label = p.labels[row];
    left_out = label < 0;
    const A g = static_cast<const A*>(p.cotangent)[row];
    const A e = static_cast<A>(p.smoothing), z = static_cast<A>(p.z_loss);
    top = static_cast<const A*>(p.top)[row];
    log_sum = static_cast<const A*>(p.log_sum)[row];
    scale = z == 0 ? g : g * (1 + 2 * z * (top + log_sum));
    all = e == 0 ? A(0) : g * (e / static_cast<A>(p.n));
    label_too = g * (1 - e);
  }

  // Writes the words `first`, `first` + step, ... before `end`.
  __device__ __forceinline__ void StoreWords(const Row<T>& row, T* dx, int first, int step,
                                             int end) const {
    for (int word = first; word < end; word += kTogether * step) {
      typename Row<T>::Word loaded[kTogether];
      if (!left_out) row.Load(word, step, end, loaded);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int at = word + k * step;
        if (at >= end) break;
        Packed128<T> d = {};
        if (!left_out) d = Of(Reinterpret<T>(loaded[k]), label - row.OfWord(at));
        StorePacked(dx + row.OfWord(at), d);
      }
    }
  }
  // Writes the edges `first`, `first` + step, ...
  __device__ __forceinline__ void StoreEdges(const Row<T>& row, T* dx, int first, int step) const {
    for (int edge = first; edge < row.edges; edge += step) {
      const int at = row.OfEdge(edge);
      dx[at] = FromCompute<T>(left_out ? A(0) : Of(row.x[at], at == label));
    }
  }

 private:
  __device__ __forceinline__ A Of(T x, bool is_label) const {
    const A d = scale * ExpFor<T>(ToCompute(x) - top, log_sum) - all;
    return is_label ? d - label_too : d;
  }
  // `here` is the index of the label, if it is one of the elements.
  __device__ __forceinline__ Packed128<T> Of(const Packed128<T>& x, int here) const {
    Packed128<T> found;
#pragma unroll
    for (int i = 0; i < kSize; ++i) found[i] = FromCompute<T>(Of(x[i], false));
    if (here >= 0 && here < kSize) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (i == here) found[i] = FromCompute<T>(Of(x[i], true));
      }
    }
    return found;
  }
};

template <typename T>
__device__ __forceinline__ T* GradientOf(const Params& p, int64_t row) {
  return static_cast<T*>(p.dx) + row * p.n;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2 : 4)
    BackwardShort(const __grid_constant__ Params p) {
  const int64_t at = RowOfLanes(p);
  if (at >= p.rows) return;
  const int lanes = 1 << p.log_lanes, lane = threadIdx.x & (lanes - 1);
  const Row<T> row(p, at);
  const Gradient<T> gradient(p, at);
  gradient.StoreWords(row, GradientOf<T>(p, at), lane, lanes, row.words);
  gradient.StoreEdges(row, GradientOf<T>(p, at), lane, lanes);
}

// A block for each tile of a row.
template <typename T>
__global__ void __launch_bounds__(kThreads, 4) BackwardLong(const __grid_constant__ Params p) {
  const int64_t at = static_cast<int64_t>(Divide(uint64_t{blockIdx.x}, p.tiles));
  const int tiles = static_cast<int>(p.tiles.divisor);
  const int tile = static_cast<int>(blockIdx.x - at * tiles), begin = tile * kTile;
  const Row<T> row(p, at);
  const Gradient<T> gradient(p, at);
  gradient.StoreWords(row, GradientOf<T>(p, at), begin + threadIdx.x, kThreads,
                      min(begin + kTile, row.words));
  gradient.StoreEdges(row, GradientOf<T>(p, at), tile * kThreads + threadIdx.x, tiles * kThreads);
}

// -------------------------------------------------------------------------------------------------
// Launches

using Kernel = void (*)(Params);

template <typename T>
Kernel KernelFor(CrossEntropyKernel kernel, bool backward) {
  if constexpr (sizeof(T) < 8) {
    if (kernel == CrossEntropyKernel::kTiles) {
      return KernelOf<CrossEntropyFamily, BackwardLong<T>>();
    }
    if (kernel == CrossEntropyKernel::kWide) {
      return KernelOf<CrossEntropyFamily, ForwardLong<T, kWideThreads>>();
    }
    if (kernel == CrossEntropyKernel::kBlock) {
      return KernelOf<CrossEntropyFamily, ForwardLong<T, kThreads>>();
    }
  }
  if (backward) return KernelOf<CrossEntropyFamily, BackwardShort<T>>();
  return KernelOf<CrossEntropyFamily, ForwardShort<T>>();
}

struct Limits {
  int processors;
  int most_blocks;  // of a cluster
};

// Loads all kernels, and finds out what plans need to know of the current device.
cudaError_t GetLimits(Limits* limits) {
  static PerDevice<Limits> known;
  return known.Get(limits, [](Limits* found) {
    Device device;
    cudaError_t error = CurrentDevice(&device);
    if (error == cudaSuccess) error = LoadKernels<CrossEntropyFamily>();
    if (error != cudaSuccess) return error;
    const auto kernel = reinterpret_cast<const void*>(
        KernelFor<float>(CrossEntropyKernel::kWide, /*backward=*/false));
    found->processors = device.processors;
    found->most_blocks =
        LargestCluster(kernel, {.block = dim3(kWideThreads)}, kCrossEntropyCluster);
    return cudaSuccess;
  });
}

// `p` has the buffers of the results.
cudaError_t Run(const CrossEntropyCall& call, bool backward, Params p, cudaStream_t stream) {
  if (call.rows == 0 || (backward && call.n == 0)) return cudaSuccess;
  if (call.n > 0x7fffffff) return cudaErrorInvalidValue;
  p.rows = call.rows;
  p.n = call.n;
  p.x = call.logits;
  p.labels = call.labels;
  p.smoothing = call.smoothing;
  p.z_loss = call.z_loss;
  p.whole =
      !backward || (reinterpret_cast<uintptr_t>(p.dx) - reinterpret_cast<uintptr_t>(p.x)) % 16 == 0;
  Limits limits;
  if (const cudaError_t error = GetLimits(&limits); error != cudaSuccess) return error;
  const CrossEntropyShape shape = {call.rows, call.n, static_cast<int>(DTypeSize(call.dtype)),
                                   backward};
  const CrossEntropyPlan plan = PlanCrossEntropy(shape, limits.processors, limits.most_blocks);
  if (plan.blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  p.log_lanes = plan.log_lanes;
  p.tiles = FastDivisor64(static_cast<uint64_t>(plan.tiles));
  const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(plan.blocks)),
                               .block = dim3(static_cast<unsigned>(plan.threads)),
                               .cluster = plan.cluster};
  return ForDType(call.dtype, [&]<typename T>(TypeTag<T>) {
    return Launch(KernelFor<T>(plan.kernel, backward), config, stream, p);
  });
}

}  // namespace

cudaError_t CrossEntropyForward(const CrossEntropyCall& call, void* loss, void* top, void* log_sum,
                                cudaStream_t stream) {
  Params p = {};
  p.loss = loss;
  p.top = top;
  p.log_sum = log_sum;
  return Run(call, false, p, stream);
}

cudaError_t CrossEntropyBackward(const CrossEntropyCall& call, const void* cotangent,
                                 const void* top, const void* log_sum, void* dx,
                                 cudaStream_t stream) {
  Params p = {};
  p.cotangent = cotangent;
  p.top = const_cast<void*>(top);  // the backward only reads these
  p.log_sum = const_cast<void*>(log_sum);
  p.dx = dx;
  return Run(call, true, p, stream);
}

cudaError_t LoadCrossEntropyKernels() {
  Limits limits;
  return GetLimits(&limits);
}

}  // namespace jax_fastops::cuda

// The forward of layer norm and RMS norm, with an optional residual and input bias, in one pass
// over memory.
//
// These kernels are memory-bound, and every byte that has to move moves once: a row stays in
// registers between its statistics and its output, whatever its length.
//
// - A thread moves one *unit* of 16 bytes per instruction, at multiples of 16 bytes, whether rows
//   are aligned or not (see forward_row.cuh). Short rows that are not aligned are moved by single
//   elements or by pairs of 16-bit elements. Shifting the parameters would cost more.
// - A group of threads holds a row: a part of a warp, a warp, a block or a cluster. Each thread
//   holds up to 128 bytes of it, in the compute type. Saturating the memory of an H100 takes about
//   20 KB in flight per SM. A few resident groups have more than that, so the loads of one row, the
//   reductions of another and the stores of a third overlap without software pipelining, as long as
//   a row fills at least half of its group.
// - Rows that a cluster holds are pipelined nevertheless, because waiting costs more there (see
//   forward_long.cuh).
// - The variance is computed from the deviations from the mean, which is cheap because the row is
//   in registers. In float32 and float64 the sum of the deviations corrects the mean once more.
//   This sum is the rounding error of the first mean, and it matters if the mean is large relative
//   to the deviations.
// - The residual and the input bias are added when the row arrives. Which parameters exist, and of
//   what type, is known only at run time. This costs uniform branches, a few instructions per unit.
// - Rows that do not fit into a cluster are read twice. A first kernel computes the moments of
//   chunks of a row; a second one merges them and normalizes. If the sum is stored, the second
//   kernel reads only the sum.
// - float64 has one kernel for all rows, whose blocks process a row chunk by chunk.
// - Dropout is part of the kernels for aligned rows of the lengths that models with dropout have.
//   For other rows, dropout's kernels compute the sum first.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "core/alignment.h"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/math.cuh"
#include "core/integer.h"
#include "dropout/dropout.h"
#include "norm/forward_long.cuh"
#include "norm/forward_row.cuh"
#include "norm/norm.h"
#include "norm/plan.h"

namespace jax_fastops::cuda {

struct NormForwardKernels;  // the family's list of kernels

namespace {

// -------------------------------------------------------------------------------------------------
// Kernels

template <typename T, NormAccess kAccess, int kForm, bool kDrops = false>
__device__ __forceinline__ void NormRow(const NormForwardParams& p) {
  constexpr NormForwardForm kThis = kNormForwardForms[kForm];
  using Group = RowGroup<kThis.threads>;
  using Row = Held<T, kAccess, Group, kThis.held>;
  using A = typename Row::A;
  constexpr int kRows = kThis.block / kThis.threads;
  __shared__ typename Row::Scratch scratch;
  int phase = 0;

  const int64_t row =
      kRows > 1 ? int64_t{blockIdx.x} * kRows + threadIdx.x / kThis.threads : blockIdx.x;
  Row held(p, row, 0);
  // Groups without a row stay active, because the shuffles take full warps.
  if (kRows > 1 && row >= p.rows) held.piece.high = 0;
  if constexpr (kDrops) {
    held.template Load<true>(p, p.x, true, min(row, p.rows - 1));
  } else {
    held.Load(p, p.x, p.adds);
  }
  const auto moments = held.Reduce(p.layer, Inverse<A>(p), scratch, phase);
  const A rstd = ReciprocalRoot(moments.squares * Inverse<A>(p) + Eps<A>(p));
  held.Normalize(p, moments.correction, rstd);
  if (Group::Rank() == 0 && held.piece.high > 0) {
    StoreMoments(p, row, moments.mean + moments.correction, rstd);
  }
}

// Rows of more than a warp have one kernel for all types but float64, with T = __half. For shorter
// ones, a common kernel spills registers.
constexpr bool HasAnyType(int form) { return kNormForwardForms[form].threads > 32; }

template <typename T, NormAccess kAccess, int kForm, bool kDrops>
__global__ void __launch_bounds__(kNormForwardForms[kForm].block,
                                  MinBlocks<T>(kNormForwardForms[kForm].block,
                                               kNormForwardForms[kForm].held, kAccess, kDrops))
    NormRowKernel(const NormForwardParams p) {
  if constexpr (HasAnyType(kForm)) {
    static_assert(!kDrops);
    if (p.dtype == DType::kF32) return NormRow<float, kAccess, kForm>(p);
    if (p.dtype == DType::kBF16) return NormRow<__nv_bfloat16, kAccess, kForm>(p);
  }
  NormRow<T, kAccess, kForm, kDrops>(p);
}

// Rows divided into chunks. A block processes one chunk.

constexpr int kChunkBlocks =
    MinBlocks<float>(kNormChunkThreads, kNormChunkHeld, NormAccess::kShifted);

using ChunkGroup = RowGroup<kNormChunkThreads>;
template <typename T>
using NormChunk = Held<T, NormAccess::kShifted, ChunkGroup, kNormChunkHeld>;

// Computes the moments of each chunk, and stores the sum if requested.
struct ChunkMoments {
  static constexpr int kBlocks = kChunkBlocks;
  NormForwardParams p;

  template <typename T>
  __device__ __forceinline__ void Run() const {
    using Chunk = NormChunk<T>;
    using A = ComputeType<T>;
    __shared__ typename Chunk::Scratch scratch;
    int phase = 0;

    const int64_t row = blockIdx.x / p.chunks;
    const int64_t chunk = blockIdx.x - row * p.chunks;
    Chunk held(p, row, chunk * Chunk::kCapacity);
    held.Load(p, p.x, p.adds);
    // The last chunk may be empty, because rows may begin in the middle of a unit.
    const A inverse = A(1) / max(Chunk::Count(p, row, chunk), A(1));
    const auto moments = held.Reduce(p.layer, inverse, scratch, phase);
    if (threadIdx.x == 0) {
      A* partial = static_cast<A*>(p.partials) + row * p.row_partials + 2 * chunk;
      partial[0] = moments.mean + moments.correction;
      partial[1] = moments.squares;
    }
  }
};

// Merges the moments of a row's chunks, in every block of the row again, and normalizes one chunk.
// The last chunks come first, because they may still be in L2.
struct MergeChunks {
  static constexpr int kBlocks = kChunkBlocks;
  NormForwardParams p;

  template <typename T>
  __device__ __forceinline__ void Run() const {
    using Chunk = NormChunk<T>;
    using A = ComputeType<T>;
    __shared__ typename Chunk::Scratch scratch;
    int phase = 0;

    const int64_t block = gridDim.x - 1 - blockIdx.x;
    const int64_t row = block / p.chunks;
    const int64_t chunk = block - row * p.chunks;
    Chunk held(p, row, chunk * Chunk::kCapacity);
    const bool stored = p.sum != nullptr;
    held.Load(p, stored ? p.sum : p.x, p.adds && !stored);

    const A* partials = static_cast<const A*>(p.partials) + row * p.row_partials;
    // Sum the means relative to that of the first chunk, so that no large numbers are added. Then
    // sum the squares of all chunks, as deviations from the mean of the row.
    const A origin = partials[0];
    A total[1] = {A(0)};
    for (int64_t c = threadIdx.x; c < p.chunks; c += kNormChunkThreads) {
      total[0] += Chunk::Count(p, row, c) * (partials[2 * c] - origin);
    }
    ChunkGroup::AllReduce(Sum(), total, scratch, phase);
    const A mean = origin + total[0] * Inverse<A>(p);
    A squares[1] = {A(0)};
    for (int64_t c = threadIdx.x; c < p.chunks; c += kNormChunkThreads) {
      const A deviation = partials[2 * c] - mean;
      squares[0] += partials[2 * c + 1] + Chunk::Count(p, row, c) * (deviation * deviation);
    }
    ChunkGroup::AllReduce(Sum(), squares, scratch, phase);
    const A rstd = ReciprocalRoot(squares[0] * Inverse<A>(p) + Eps<A>(p));
    held.Subtract(mean);
    held.Normalize(p, A(0), rstd);
    if (chunk == 0 && threadIdx.x == 0) StoreMoments(p, row, mean, rstd);
  }
};

// Rows of any length and alignment. Each row is read twice.
template <typename T>
__global__ void __launch_bounds__(kNormGeneralThreads)
    NormGeneralKernel(const NormForwardParams p) {
  using Group = RowGroup<kNormGeneralThreads>;
  using Chunk = Held<T, NormAccess::kShifted, Group, 128>;
  using A = ComputeType<T>;
  __shared__ typename Chunk::Scratch scratch;
  int phase = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    // The moments of the chunks so far, merged one by one.
    A count = 0, mean = 0, squares = 0;
    for (int64_t chunk = 0; chunk < p.chunks; ++chunk) {
      Chunk held(p, row, chunk * Chunk::kCapacity);
      held.Load(p, p.x, p.adds);
      const A more = Chunk::Count(p, row, chunk);
      if (more == A(0)) continue;
      const auto moments = held.Reduce(p.layer, A(1) / more, scratch, phase);
      const A its_mean = moments.mean + moments.correction;
      // No product with 0, which would make a NaN of a large mean's square.
      const A difference = count > A(0) ? its_mean - mean : A(0);
      squares += moments.squares + difference * difference * (count / (count + more)) * more;
      count += more;
      mean = count > more ? mean + difference * (more / count) : its_mean;
    }
    const A rstd = ReciprocalRoot(squares * Inverse<A>(p) + Eps<A>(p));
    for (int64_t chunk = 0; chunk < p.chunks; ++chunk) {
      Chunk held(p, row, chunk * Chunk::kCapacity);
      held.Load(p, p.x, p.adds);
      held.Subtract(mean);
      held.Normalize(p, A(0), rstd);
    }
    if (threadIdx.x == 0) StoreMoments(p, row, mean, rstd);
  }
}

// -------------------------------------------------------------------------------------------------
// Launches

using Kernel = void (*)(NormForwardParams);

template <typename T, NormAccess kAccess, bool kDrops, size_t kForm>
Kernel RowKernelOf() {
  constexpr bool kExists =
      kDrops ? kNormForwardForms[kForm].drops : NormHasForm(kForm, kAccess, sizeof(T));
  using Type = std::conditional_t<HasAnyType(kForm), __half, T>;
  if constexpr (kExists) {
    return KernelOf<NormForwardKernels, NormRowKernel<Type, kAccess, kForm, kDrops>>();
  } else {
    return nullptr;
  }
}

template <typename T, size_t... kForms>
Kernel RowKernel(const NormForwardPlan& plan, std::index_sequence<kForms...>) {
  static const Kernel kernels[kNormAccesses + 1][sizeof...(kForms)] = {
      {RowKernelOf<T, NormAccess::kUnits, false, kForms>()...},
      {RowKernelOf<T, NormAccess::kPairs, false, kForms>()...},
      {RowKernelOf<T, NormAccess::kElements, false, kForms>()...},
      {RowKernelOf<T, NormAccess::kShifted, false, kForms>()...},
      {RowKernelOf<T, NormAccess::kUnits, true, kForms>()...}};  // with dropout
  return kernels[plan.drops ? kNormAccesses : static_cast<int>(plan.access)][plan.form];
}

// Computes the sum by itself, in place of the result if it is not wanted. Then it is the input.
// This is rare: XLA aligns its buffers, and norm.py asks for dropout only for rows that have a
// kernel.
cudaError_t DropFirst(DType dtype, NormForwardParams* params, cudaStream_t stream) {
  char* const s = params->sum != nullptr ? params->sum : params->y;
  const NormParameter& bias = params->input_bias;
  const cudaError_t error = Dropout(dtype, {params->x, bias.data, bias.wide, params->residual, s},
                                    params->rows, params->n, params->dropout, stream);
  params->x = s;
  params->residual = params->sum = nullptr;
  params->input_bias = {};
  params->adds = false;
  params->dropout = {};
  return error;
}

// The alignment of rows and parameters, as PlanNormForward takes it.
int AlignmentOf(int64_t row_bytes, const NormForwardArrays& a) {
  const int64_t rows = std::gcd(row_bytes, int64_t{CommonAlignment({a.x, a.residual, a.y, a.sum})});
  const int64_t parameters = CommonAlignment({a.input_bias.data, a.scale.data, a.bias.data});
  const auto at_least = [&](int64_t of_rows, int64_t of_parameters) {
    return rows % of_rows == 0 && parameters >= of_parameters;
  };
  return at_least(16, 16) ? 16 : at_least(4, 8) ? 4 : 1;
}

template <typename T>
cudaError_t LaunchForward(int alignment, DType dtype, NormForwardParams params,
                          cudaStream_t stream) {
  Device device;
  cudaError_t error = CurrentDevice(&device);
  if (error != cudaSuccess) return error;
  const auto plan_for = [&](int max_cluster) {
    int parameters = 0;
    for (const NormParameter& parameter : {params.input_bias, params.scale, params.bias}) {
      parameters += parameter.data != nullptr;
    }
    return PlanNormForward(params.rows, params.n, sizeof(T), alignment, parameters, max_cluster,
                           params.dropout.drops());
  };
  const int max_cluster = device.clusters ? kNormLongCluster : 1;
  NormForwardPlan plan = plan_for(max_cluster);
  if (params.dropout.drops() && !plan.drops) {
    error = DropFirst(dtype, &params, stream);
    if (error != cudaSuccess) return error;
    plan = plan_for(max_cluster);
  }
  const auto launch = [&](Kernel kernel) {
    return Launch(kernel, Grid(plan.blocks, plan.threads, plan.shared, plan.cluster), stream,
                  params);
  };
  if constexpr (sizeof(T) == 8) {
    params.chunks = plan.chunks;
    return launch(KernelOf<NormForwardKernels, NormGeneralKernel<T>>());
  } else {
    if (plan.kernel == NormForwardKernel::kLong) {
      const Kernel kernel = KernelOf<NormForwardKernels, NormLongKernel<T>>();
      int resident;
      error =
          ResidentBlocks(reinterpret_cast<const void*>(kernel),
                         Grid(plan.cluster, plan.threads, plan.shared, plan.cluster), &resident);
      if (error == cudaSuccess && resident > 0) {
        plan.blocks = std::min<int64_t>(plan.blocks, resident);
        params.block_columns = plan.block_columns;
        return launch(kernel);
      }
      plan = plan_for(1);  // the device cannot run such a cluster
    }
    if (plan.kernel == NormForwardKernel::kRow) {
      return launch(RowKernel<T>(plan, std::make_index_sequence<kNormForwardFormCount>()));
    }
    params.chunks = plan.chunks;
    params.row_partials = CeilDiv(params.n, 1024);
    const auto launch_any = [&](const auto& work) {
      return LaunchAnyType<NormForwardKernels, kNormChunkThreads>(
          dtype, Grid(plan.blocks, plan.threads), stream, work);
    };
    error = launch_any(ChunkMoments{params});
    return error == cudaSuccess ? launch_any(MergeChunks{params}) : error;
  }
}

NormForwardParams ParamsOf(const NormShape& shape, NormKind kind, DType dtype, double eps,
                           const NormForwardArrays& arrays) {
  NormForwardParams params = {};
  params.dtype = dtype;
  params.x = static_cast<const char*>(arrays.x);
  params.residual = static_cast<const char*>(arrays.residual);
  params.y = static_cast<char*>(arrays.y);
  params.sum = static_cast<char*>(arrays.sum);
  params.input_bias = arrays.input_bias;
  params.scale = arrays.scale;
  params.bias = arrays.bias;
  params.mean = arrays.mean;
  params.rstd = arrays.rstd;
  params.eps = eps;
  params.inverse = 1.0 / static_cast<double>(shape.n);
  params.eps32 = static_cast<float>(eps);
  params.inverse32 = static_cast<float>(params.inverse);
  params.rows = shape.all_rows();
  params.n = shape.n;
  params.layer = kind == NormKind::kLayer;
  params.adds =
      arrays.residual != nullptr || arrays.input_bias.data != nullptr || arrays.sum != nullptr;
  params.dropout = arrays.dropout;
  params.partials = arrays.workspace;
  return params;
}

}  // namespace

cudaError_t NormForward(const NormShape& shape, NormKind kind, DType dtype, double eps,
                        const NormForwardArrays& arrays, cudaStream_t stream) {
  const int64_t itemsize = DTypeSize(dtype);
  if (shape.n == 0) {  // the moments of an empty row are NaN
    const int64_t bytes = shape.all_rows() * std::max<int64_t>(itemsize, sizeof(float));
    for (void* moment : {arrays.mean, arrays.rstd}) {
      if (moment == nullptr || bytes == 0) continue;
      const cudaError_t error = cudaMemsetAsync(moment, 0xFF, bytes, stream);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }
  if (shape.all_rows() == 0) return cudaSuccess;

  const NormForwardParams params = ParamsOf(shape, kind, dtype, eps, arrays);
  const int alignment = AlignmentOf(shape.n * itemsize, arrays);
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    return LaunchForward<T>(alignment, dtype, params, stream);
  });
}

cudaError_t LoadNormForwardKernels() {
  const cudaError_t error = LoadKernels<NormForwardKernels>();
  return error == cudaSuccess ? LoadDropoutKernels() : error;
}

}  // namespace jax_fastops::cuda

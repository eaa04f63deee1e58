// The backward of layer norm and RMS norm: dx, and the gradients of the parameters as partial sums,
// in one pass that reads dy and s once.
//
// The pass moves 3 arrays (one more with dsum, and one more with dy2) and is memory-bound. Two
// requirements conflict: no dx of a row is known before the whole row has been read, and the sums
// over rows need threads that keep their columns.
//
// - A worker holds one row, or a few, in registers. The worker is a warp for up to 1024 columns,
//   two warps for up to 2048, a block of 256 threads for up to 8192, and a cluster of such blocks
//   for longer rows. Several workers of a block hide each other's reductions. A thread has the same
//   columns of every row, at most 32. The scale and the sums of its columns stay in its registers.
//   The sums are always computed, even if they are not requested, because arithmetic is not the
//   bottleneck.
// - Blocks are persistent, one per SM, except in clusters. A block reads its rows through a ring of
//   stages in shared memory. A stage is a tile of contiguous rows. Bulk copies that complete on an
//   mbarrier fill it. This keeps 50 KB or more in flight whatever the threads do, and takes no
//   registers. The workers of a block have a ring each and do not wait for each other. Before
//   sm_90, cp.async fills the same ring.
// - Bulk copies move multiples of 16 bytes. If rows are not aligned to 16 bytes, the copies move
//   the aligned blocks that cover them, and so read a few more bytes of the same array. In shared
//   memory the rows keep their offset from a 16-byte boundary. Threads then access single elements,
//   adjacent lanes adjacent elements, instead of 16-byte units. Mean and rstd are copied in the
//   same way.
// - If y has two users, the threads that read dy from a stage first add the second cotangent (dy2)
//   to it there. The rest of the code needs no change, and no registers are needed for it.
// - A partial sum belongs to one block or cluster, and its rows are contiguous. The workers of a
//   block share its partial sum. They add up their contributions at its end, while the next rows
//   are already being copied.
// - Rows that are too long for a cluster are read twice: tiles of a row are reduced separately,
//   then blocks process columns with the totals.
// - With dropout, a thread draws the random bits of its columns before it waits for them, and keeps
//   one bit of each. Rows that have no such kernel take one without dropout, and one more pass.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/alignment.h"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/kept.cuh"
#include "core/cuda/launch.h"
#include "core/integer.h"
#include "norm/backward_long.cuh"
#include "norm/backward_ring.cuh"
#include "norm/backward_rows.cuh"
#include "norm/norm.h"
#include "norm/plan.h"

namespace jax_fastops::cuda {

struct NormBackwardKernels;  // the family's list of kernels

namespace {

// dx and dinput_bias from `ds`, the gradient of the sum, as it was rounded. A thread takes blocks
// of random bits.
template <typename T>
__device__ void DropColumns(const Params& p, const T* ds) {
  using A = ComputeType<T>;
  const A gain = static_cast<A>(p.dropout.scale);
  const int64_t tiles = CeilDiv(p.n, int64_t{kBlock} * kSeedBlock);
  for (int64_t at = blockIdx.x; at < p.partials * tiles; at += gridDim.x) {
    const int64_t partial = at / tiles, block = (at - partial * tiles) * kBlock + threadIdx.x;
    const Range rows = RowsOf(partial, p.rows, p.sums);
    const int64_t first = block * kSeedBlock;
    A sums[kSeedBlock] = {};
    for (int64_t row = rows.begin; row < rows.end && first < p.n; ++row) {
      const PhiloxWords bits = RandomBits(p.dropout.seeds.At(row), static_cast<uint32_t>(block));
#pragma unroll
      for (int i = 0; i < kSeedBlock; ++i) {
        if (first + i >= p.n) break;
        const int64_t place = row * p.n + first + i;
        const A value = IsKept(bits, i, p.dropout.largest) ? ToCompute(ds[place]) * gain : A(0);
        sums[i] += value;
        static_cast<T*>(p.dx)[place] = FromCompute<T>(value);
      }
    }
#pragma unroll
    for (int i = 0; i < kSeedBlock; ++i) {
      if (p.dinput_bias == nullptr || first + i >= p.n) break;
      static_cast<A*>(p.dinput_bias)[partial * p.n + first + i] = sums[i];
    }
  }
}

// One kernel for all types, because it is rare: it runs if buffers are not aligned, which XLA's
// are, and where two stages of a ring do not fit into shared memory.
__global__ void __launch_bounds__(kBlock)
    NormDropBackwardKernel(const __grid_constant__ Params p, DType dtype, const void* ds) {
  switch (dtype) {
    case DType::kF32:
      return DropColumns(p, static_cast<const float*>(ds));
    case DType::kBF16:
      return DropColumns(p, static_cast<const __nv_bfloat16*>(ds));
    case DType::kF16:
      return DropColumns(p, static_cast<const __half*>(ds));
    default:
      return DropColumns(p, static_cast<const double*>(ds));
  }
}

using Kernel = void (*)(Params);

template <typename T, bool kAligned, bool kDrops, size_t kForm>
Kernel RowsKernelOf() {
  constexpr NormBackwardForm kThis = NormBackwardFormOf(sizeof(T), kAligned, kForm);
  // Types have kernels of their own where a common one would spill registers.
  constexpr bool kFull = kAligned && kThis.threads < kBlock && kThis.columns == 32;
  if constexpr (kDrops && !kThis.drops) {
    return nullptr;
  } else if constexpr (kFull || sizeof(T) == 8) {
    return KernelOf<NormBackwardKernels, NormRowsKernel<T, kAligned, kForm, kDrops>>();
  } else {
    return KernelOf<NormBackwardKernels, NormAnyRowsKernel<kAligned, kForm, kDrops>>();
  }
}

template <typename T, bool kAligned, bool kDrops, size_t... kForms>
Kernel RowsKernelOf(int form, std::index_sequence<kForms...>) {
  static const Kernel kernels[] = {RowsKernelOf<T, kAligned, kDrops, kForms>()...};
  return kernels[form];
}

template <typename T>
Kernel RowsKernel(bool aligned, [[maybe_unused]] bool dropout, int form) {
  if constexpr (sizeof(T) == 8) {
    return RowsKernelOf<T, false, false, 0>();
  } else {
    constexpr auto kAligned = std::make_index_sequence<kNormAlignedFormCount>();
    constexpr auto kElements = std::make_index_sequence<kNormElementFormCount>();
    return dropout   ? RowsKernelOf<T, true, true>(form, kAligned)
           : aligned ? RowsKernelOf<T, true, false>(form, kAligned)
                     : RowsKernelOf<T, false, false>(form, kElements);
  }
}

template <typename A>
cudaError_t LaunchLong(DType dtype, const Params& p, const NormBackwardPlan& plan,
                       cudaStream_t stream) {
  const auto launch = [&](const auto& work, int64_t blocks) {
    return LaunchAnyType<NormBackwardKernels, kBlock>(
        dtype, Grid(std::min(blocks, kNormMaxBlocks), kBlock), stream, work);
  };
  cudaError_t error = launch(LongSums{p, plan.tiles}, p.all_rows * plan.tiles);
  if (error != cudaSuccess) return error;
  const LongTotals<A> totals = {static_cast<char*>(p.dx), static_cast<int>(DTypeSize(dtype)), p.n,
                                plan.tiles, p.arrays[kMean] != nullptr};
  error = FinishSums<NormBackwardKernels>(totals, 1, {{p.all_rows, plan.tiles}}, stream);
  if (error != cudaSuccess) return error;
  return launch(LongRows{p, plan.tiles}, plan.blocks);
}

template <typename T>
cudaError_t LaunchBackward(const NormBackwardCall& call, DType dtype, Params p,
                           cudaStream_t stream);

// The backward without dropout, whose dx is the gradient of the sum, then the dropout.
template <typename T>
cudaError_t LaunchWithDrop(NormBackwardCall call, DType dtype, Params p, cudaStream_t stream) {
  Params without = p;
  without.dx = p.dresidual != nullptr ? p.dresidual : p.dx;
  without.dinput_bias = without.dresidual = nullptr;
  without.dropout = {};
  call.dropout = false;
  const cudaError_t error = LaunchBackward<T>(call, dtype, without, stream);
  if (error != cudaSuccess) return error;
  p.rows = call.rows;
  p.sums = p.dinput_bias != nullptr ? call.sums : call.rows;
  p.partials = call.batch * p.sums;
  const int64_t blocks = p.partials * CeilDiv(p.n, int64_t{kBlock} * kSeedBlock);
  return Launch(KernelOf<NormBackwardKernels, NormDropBackwardKernel>(),
                Grid(std::min(blocks, kNormMaxBlocks), kBlock), stream, p, dtype,
                static_cast<const void*>(without.dx));
}

template <typename T>
cudaError_t LaunchBackward(const NormBackwardCall& call, DType dtype, Params p,
                           cudaStream_t stream) {
  Device device;
  const cudaError_t error = CurrentDevice(&device);
  if (error != cudaSuccess) return error;
  const NormBackwardPlan plan = PlanNormBackward(
      call,
      {device.processors, device.shared_per_block, device.clusters ? kNormBackwardCluster : 1});
  if (call.dropout && plan.form < 0) return LaunchWithDrop<T>(call, dtype, p, stream);
  p.rows = plan.rows;
  p.sums = plan.sums;
  p.partials = plan.partials;
  if (plan.form < 0) return LaunchLong<ComputeType<T>>(dtype, p, plan, stream);
  p.ring = plan;
  return Launch(RowsKernel<T>(call.aligned, call.dropout, plan.form),
                Grid(plan.blocks, kBlock, plan.shared, plan.cluster), stream, p);
}

}  // namespace

cudaError_t NormBackward(const NormShape& shape, NormKind kind, DType dtype,
                         const NormBackwardArrays& arrays, cudaStream_t stream) {
  const int64_t accumulator = std::max<int64_t>(DTypeSize(dtype), sizeof(float));
  const int64_t partials = shape.batch * shape.sums;
  void* const sums[] = {arrays.dscale, arrays.dbias, arrays.dinput_bias};
  if (shape.n == 0 || shape.all_rows() == 0) {
    cudaError_t error = cudaSuccess;
    for (void* sum : sums) {
      if (sum != nullptr && partials * shape.n > 0 && error == cudaSuccess) {
        error = cudaMemsetAsync(sum, 0, partials * shape.n * accumulator, stream);
      }
    }
    return error;
  }

  NormBackwardCall call = {shape};
  call.itemsize = static_cast<int>(DTypeSize(dtype));
  call.aligned = shape.n * call.itemsize % 16 == 0 &&
                 CommonAlignment({arrays.dy, arrays.s, arrays.dsum, arrays.dy2, arrays.dx,
                                  arrays.dresidual}) == 16;
  call.dropout = arrays.dropout.drops();
  call.sums_wanted = sums[0] != nullptr || sums[1] != nullptr || sums[2] != nullptr;
  call.arrays = 2 + (arrays.dsum != nullptr) + (arrays.dy2 != nullptr);

  Params p = {};
  p.dtype = dtype;
  p.arrays[kDy] = arrays.dy;
  p.arrays[kS] = arrays.s;
  p.arrays[kRstd] = arrays.rstd;
  p.arrays[kMean] = kind == NormKind::kLayer ? arrays.mean : nullptr;
  p.arrays[kDsum] = arrays.dsum;
  p.arrays[kDy2] = arrays.dy2;
  p.scale = arrays.scale;
  p.dx = arrays.dx;
  p.dscale = arrays.dscale;
  p.dbias = arrays.dbias;
  p.dinput_bias = arrays.dinput_bias;
  p.dropout = arrays.dropout;
  p.gain = static_cast<float>(arrays.dropout.scale);
  p.dresidual = arrays.dresidual;
  p.all_rows = shape.all_rows();
  p.n = shape.n;
  p.aligned_sums =
      shape.n * accumulator % 16 == 0 && CommonAlignment({sums[0], sums[1], sums[2]}) == 16;
  return ForDType(
      dtype, [&]<typename T>(TypeTag<T>) { return LaunchBackward<T>(call, dtype, p, stream); });
}

cudaError_t LoadNormBackwardKernels() { return LoadKernels<NormBackwardKernels>(); }

}  // namespace jax_fastops::cuda

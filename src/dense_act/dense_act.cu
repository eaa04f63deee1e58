// y = act(x kernel + bias) in one launch: the activation of a tile runs while the tensor cores
// compute the product of the next one.
//
// As many blocks as the device has processors go through the tiles of the result. One thread of a
// block copies tiles of x and of the kernel into a ring of slots. The products add up in float32.
// docs/dev/log/elementwise.md has the forms that were tried.
//
// Devices that have no products of warpgroups, or code without them, take portable.cuh.
#include "dense_act/dense_act.h"

#include <algorithm>

#include "core/cuda/dependent.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/tensor_map.h"
#include "core/integer.h"
#include "dense_act/portable.cuh"
#include "dense_act/tile.cuh"

namespace jax_fastops::cuda {
struct DenseActFamily;
namespace {

// Copies the operands of all tiles of this block.
template <typename T, typename Tile>
__device__ __forceinline__ void CopyOperands(const DenseParams& p, DenseShared<T, Tile> shared,
                                             int tiles, int across, int steps) {
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int row = tile / across * kRows, column = tile % across * Tile::kColumns;
    for (int step = 0; step < steps; ++step) {
      T* const x = shared.slots + shared.ring.slot() * Tile::kSlot;
      const auto full = shared.ring.Fill(Tile::kSlot * sizeof(T));
      CopyTile(x, p.x, row, step * kDepth, full);
#pragma unroll
      for (int i = 0; i < Tile::kColumns / 64; ++i) {
        CopyTile(x + (kRows + i * 64) * kDepth, p.kernel, step * kDepth, column + i * 64, full);
      }
      shared.ring.Advance(1);
    }
  }
}

// c = x kernel, of a group's rows of a tile.
template <typename T, typename Tile>
__device__ __forceinline__ void MultiplyTile(MatrixC (&c)[Tile::kOwn][Tile::kColumns / 8],
                                             DenseShared<T, Tile>* shared, int row, int steps) {
  const bool frees = threadIdx.x % Tile::kGroup == 0;
  int before = 0;
  for (int step = 0; step < steps; ++step) {
    shared->ring.AwaitFilled();
    const T* const slot = shared->slots + shared->ring.slot() * Tile::kSlot;
    const uint64_t x = DescribeRows(slot + row * kDepth);
    const uint64_t kernel = DescribeArrays(slot + kRows * kDepth);
#pragma unroll
    for (int r = 0; r < Tile::kOwn; ++r) StartProducts(c[r]);
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i) {
#pragma unroll
      for (int r = 0; r < Tile::kOwn; ++r) {
        WideProduct<T>(c[r], x + r * 512 + i * 2, kernel + i * 128, step + i > 0);
      }
    }
    CommitProducts();
    if (step > 0) {  // the products before these are complete
#pragma unroll
      for (int r = 0; r < Tile::kOwn; ++r) AwaitProducts<1>(c[r]);
      if (frees) shared->ring.Free(before);
    }
    before = shared->ring.slot();
    shared->ring.Advance(1);
  }
  // The other group may start: all slots that it waits for are those of its tile now.
  if constexpr (Tile::kTurns) {
    ArriveAmongThreads<256>(kTurn + 1 - threadIdx.x / Tile::kGroup);
  }
#pragma unroll
  for (int r = 0; r < Tile::kOwn; ++r) AwaitProducts(c[r]);
  if (frees) shared->ring.Free(before);
}

template <typename T, typename Tile>
__device__ __forceinline__ void ComputeTiles(const DenseParams& p, DenseShared<T, Tile> shared,
                                             int group, int tiles, int across, int steps) {
  constexpr bool kTurns = Tile::kTurns;
  const int row = kTurns ? 0 : group * 64;
  const int stride = kTurns ? 2 * gridDim.x : gridDim.x;
  if (kTurns && group == 1) {
    shared.ring.Advance(steps);
    ArriveAmongThreads<256>(kTurn);
  }
  for (int tile = blockIdx.x + (kTurns ? group * gridDim.x : 0); tile < tiles; tile += stride) {
    const int column = tile % across * Tile::kColumns;
    MatrixC c[Tile::kOwn][Tile::kColumns / 8];
    LoadTileBias<T, Tile>(p.call, column, shared.bias);
    if constexpr (kTurns) AwaitThreads<256>(kTurn + group);
    MultiplyTile<T, Tile>(c, &shared, row, steps);
    if constexpr (kTurns) shared.ring.Advance(steps);
    FinishTile<T, Tile>(p, c, shared, group, tile / across * kRows + row, column);
  }
  if (threadIdx.x % Tile::kGroup == 0) AwaitStores();
}

template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    DenseActKernel(const __grid_constant__ DenseParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int group = WarpIndex() / 4;
  const int across = (p.call.columns + Tile::kColumns - 1) / Tile::kColumns;
  const int tiles = across * ((p.call.rows + kRows - 1) / kRows);
  const int steps = (p.call.depth + kDepth - 1) / kDepth;
  if constexpr (!kWarpgroups) {
    const DenseShared<T, Tile> shared(memory, kPortableSlots, group);
    if (group < Tile::kGroups)
      ComputeTilesPortably<T, Tile>(p, shared, group, tiles, across, steps);
  } else {
    DenseShared<T, Tile> shared(memory, Tile::kSlots, group);
    if (threadIdx.x == 0) shared.ring.Init(Tile::kTurns ? 1 : Tile::kGroups);
    AwaitBlock<false>();
    LetDependentsStart();
    AwaitPredecessors();
    if (group == Tile::kGroups) {
      FewerRegisters<40>();
      if (threadIdx.x == Tile::kGroups * Tile::kGroup) {
        CopyOperands<T, Tile>(p, shared, tiles, across, steps);
      }
    } else {
      MoreRegisters<232>();
      ComputeTiles<T, Tile>(p, shared, group, tiles, across, steps);
    }
  }
}

template <typename T, typename Tile>
cudaError_t LaunchTiles(const DenseActCall& call, const Device& device, cudaStream_t stream) {
  DenseParams p = {};
  p.call = call;
  cudaError_t error = cudaSuccess;
  if (device.clusters) {  // compute capability 9.0 or later
    error = DescribeTiles(call.x, call.rows, call.depth, kRows, &p.x);
    if (error == cudaSuccess) {
      error = DescribeTiles(call.kernel, call.depth, call.columns, kDepth, &p.kernel);
    }
    if (error == cudaSuccess) error = DescribeTiles(call.y, call.rows, call.columns, 64, &p.y);
    if (error != cudaSuccess) return error;
  }
  const bool whole = Tile::SharedBytes(Tile::kSlots) <= device.shared_per_block;
  const int64_t tiles = CeilDiv(call.rows, kRows) * CeilDiv(call.columns, Tile::kColumns);
  LaunchConfig config = Grid(std::min<int64_t>(tiles, device.processors), Tile::kThreads,
                             Tile::SharedBytes(whole ? Tile::kSlots : kPortableSlots));
  config.dependent = true;
  return Launch(KernelOf<DenseActFamily, DenseActKernel<T, Tile>>(), config, stream, p);
}

using InTurns = DenseTile<128, 5, true>;
using Wide = DenseTile<192, 4, false>;
using Narrow = DenseTile<64, 8, false>;

// Nanoseconds by a fit to 17 shapes on one H200: what a launch takes, and what a round of tiles on
// all processors takes for each element of the depth and besides.
struct Cost {
  int launch, step, round;
};

template <typename Tile>
int64_t CostOf(const Cost& cost, const DenseActCall& call, int processors) {
  const int64_t tiles = CeilDiv(call.rows, kRows) * CeilDiv(call.columns, Tile::kColumns);
  return cost.launch +
         CeilDiv(tiles, processors) * (cost.step * int64_t{call.depth} / 10 + cost.round);
}

template <typename T>
cudaError_t OfType(const DenseActCall& call, cudaStream_t stream) {
  Device device;
  const cudaError_t error = CurrentDevice(&device);
  if (error != cudaSuccess) return error;
  const int64_t in_turns = CostOf<InTurns>({4300, 62, 0}, call, device.processors);
  const int64_t wide = CostOf<Wide>({1900, 94, 1800}, call, device.processors);
  const int64_t narrow = CostOf<Narrow>({2300, 39, 600}, call, device.processors);
  const bool fits = Wide::SharedBytes(kPortableSlots) <= device.shared_per_block;
  if (narrow < std::min(in_turns, wide)) return LaunchTiles<T, Narrow>(call, device, stream);
  return wide < in_turns && fits ? LaunchTiles<T, Wide>(call, device, stream)
                                 : LaunchTiles<T, InTurns>(call, device, stream);
}

}  // namespace

cudaError_t DenseAct(const DenseActCall& call, cudaStream_t stream) {
  if (call.rows == 0) return cudaSuccess;
  return call.dtype == DType::kF16 ? OfType<__half>(call, stream)
                                   : OfType<__nv_bfloat16>(call, stream);
}

cudaError_t LoadDenseActKernels() { return LoadKernels<DenseActFamily>(); }

}  // namespace jax_fastops::cuda

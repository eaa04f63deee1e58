// y = transpose(x, axes): any rank, any permutation, elements of 1, 2, 4, 8 or 16 bytes.
//
// Nothing is computed, so the floor is a copy: every byte is read once and written once. The
// difficulty is that both sides need long contiguous accesses, but contiguous input is not
// contiguous in the output. DRAM and L2 move sectors of 32 bytes, and an SM of an H100 has about 75
// clocks for every 512 bytes that it reads and writes, too few to handle them one by one. A plan,
// computed once per shape and cached (plan.h), chooses one of three kernels:
//
// - rows.cuh: the minor dimension stays, for rows of any number of bytes;
// - tile.cuh: the minor dimension moves, by tiles of a matrix;
// - units.cuh: rows of 16-byte units, and any other permutation.
//
// Offsets into the arrays are 64-bit, but are computed once per row of a tile. All other indices
// count tiles, or units within a tile, and fit 32 bits. Divisions are multiplications by
// reciprocals from the plan.
//
// Kernels differ by the width of elements, not by their type. Elements of 8 bytes have one kernel
// of tiles, which handles any alignment: `auto` leaves them to XLA.
#include "transpose/transpose.h"

#include <memory>

#include "core/alignment.h"
#include "core/cuda/launch.h"
#include "transpose/plan.h"
#include "transpose/rows.cuh"
#include "transpose/tile.cuh"
#include "transpose/units.cuh"

namespace jax_fastops::cuda {

namespace transpose {

struct Family;

// Launches the kernel of a plan.
struct Launcher {
  const char* x;
  char* y;
  int64_t bytes;  // of the array
  int unit;
  cudaStream_t stream;

  cudaError_t operator()(const CopyPlan&) const {
    return cudaMemcpyAsync(y, x, bytes, cudaMemcpyDeviceToDevice, stream);
  }

  template <typename Index>
  static auto UnitsKernelOf(int unit) {
    if constexpr (sizeof(Index) == 8) {
      return KernelOf<Family, UnitsKernel<1, Index>>();
    } else {
      return unit == 1   ? KernelOf<Family, UnitsKernel<1, Index>>()
             : unit == 2 ? KernelOf<Family, UnitsKernel<2, Index>>()
             : unit == 4 ? KernelOf<Family, UnitsKernel<4, Index>>()
             : unit == 8 ? KernelOf<Family, UnitsKernel<8, Index>>()
                         : KernelOf<Family, UnitsKernel<16, Index>>();
    }
  }

  template <typename Index>
  cudaError_t operator()(const UnitsPlan<Index>& plan) const {
    const auto kernel =
        plan.rows ? KernelOf<Family, ByteRowsKernel<Index>>() : UnitsKernelOf<Index>(unit);
    return Launch(kernel, Grid(plan.blocks, kUnitsThreads), stream, x, y, plan);
  }

  template <int kElement>
  static auto TileKernelOf(const TilePlan& plan) {
    if (!plan.aligned_out) return KernelOf<Family, TileKernel<kElement, false, false>>();
    return plan.aligned_in ? KernelOf<Family, TileKernel<kElement, true, true>>()
                           : KernelOf<Family, TileKernel<kElement, false, true>>();
  }

  cudaError_t operator()(const TilePlan& plan) const {
    const auto kernel = unit == 1   ? TileKernelOf<1>(plan)
                        : unit == 2 ? TileKernelOf<2>(plan)
                        : unit == 4 ? TileKernelOf<4>(plan)
                        : unit == 8 ? KernelOf<Family, TileKernel<8, false, false>>()
                                    : KernelOf<Family, TileKernel<16, true, true>>();
    return Launch(kernel, Grid(plan.blocks, kTileThreads), stream, x, x + bytes, y, plan);
  }
};

}  // namespace transpose

cudaError_t Transpose(const void* x, void* y, const int64_t* dims, const int* axes, int rank,
                      int64_t itemsize, cudaStream_t stream) {
  TransposeShape shape;
  shape.dims.assign(dims, dims + rank);
  shape.axes.assign(axes, axes + rank);
  shape.itemsize = itemsize;
  shape.alignment = CommonAlignment({x, y});
  int64_t bytes = itemsize;
  for (const int64_t dim : shape.dims) bytes *= dim;
  if (bytes == 0) return cudaSuccess;

  static PlanCache<TransposePlan> plans;
  const std::shared_ptr<const TransposePlan> plan = plans.Get(shape, PlanTranspose);
  return std::visit(transpose::Launcher{static_cast<const char*>(x), static_cast<char*>(y), bytes,
                                        plan->unit, stream},
                    plan->kernel);
}

cudaError_t LoadTransposeKernels() { return LoadKernels<transpose::Family>(); }

}  // namespace jax_fastops::cuda

// y = transpose(x, axes): any rank, any permutation, elements of 1, 2, 4, 8 or 16 bytes.
//
// Nothing is computed, so the floor is a copy: every byte is read once and written once. The
// difficulty is that both sides need long contiguous accesses, but contiguous input is not
// contiguous in the output. DRAM and L2 move sectors of 32 bytes, and an SM of an H100 has about 75
// clocks for every 512 bytes that it reads and writes, too few to handle them one by one. A plan
// (plan.h) chooses one of four kernels:
//
// - rows.cuh: the minor dimension stays, for rows of 16-byte units and for rows of any length;
// - tile.cuh: the minor dimension moves, by tiles of a matrix;
// - box.cuh: the sides of a tile would share a dimension.
//
// Offsets into the arrays are 64-bit, but are computed once per row of a tile. All other indices
// count tiles, or units within a tile, and fit 32 bits. Divisions are multiplications by
// reciprocals from the plan.
//
// Kernels differ by the width of elements, not by their type. Elements of 8 bytes have one kernel
// of tiles, which handles any alignment: `auto` leaves them to XLA.
#include "transpose/transpose.h"

#include <algorithm>

#include "core/alignment.h"
#include "core/cuda/launch.h"
#include "transpose/box.cuh"
#include "transpose/plan.h"
#include "transpose/rows.cuh"
#include "transpose/tile.cuh"

namespace jax_fastops::cuda {

namespace transpose {

struct Family;

// Launches the kernel of a plan.
struct Launcher {
  const char* x;
  char* y;
  int64_t bytes;  // of the array
  int unit;
  const Device& device;
  cudaStream_t stream;

  template <typename... Params, typename... Arguments>
  cudaError_t Run(void (*kernel)(Params...), int64_t blocks, int threads, int64_t shared,
                  const Arguments&... arguments) const {
    return Launch(kernel, Grid(blocks, threads, shared), stream, arguments...);
  }

  cudaError_t operator()(const CopyPlan&) const {
    return cudaMemcpyAsync(y, x, bytes, cudaMemcpyDeviceToDevice, stream);
  }

  template <typename Index>
  cudaError_t operator()(const RowsPlan<Index>& plan) const {
    const auto kernel = plan.by_bytes ? KernelOf<Family, ByteRowsKernel<Index>>()
                                      : KernelOf<Family, UnitRowsKernel<Index>>();
    return Run(kernel, plan.blocks, kRowsThreads, 0, x, y, plan);
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
    return Run(kernel, plan.blocks, kTileThreads, 0, x, x + bytes, y, plan);
  }

  cudaError_t operator()(const BoxPlan& plan) const {
    const auto kernel = unit == 1   ? KernelOf<Family, BoxKernel<1>>()
                        : unit == 2 ? KernelOf<Family, BoxKernel<2>>()
                        : unit == 4 ? KernelOf<Family, BoxKernel<4>>()
                        : unit == 8 ? KernelOf<Family, BoxKernel<8>>()
                                    : KernelOf<Family, BoxKernel<16>>();
    // Persistent blocks: about as many as run at once. The runtime reserves 1 KB for each block.
    const int64_t fit = device.shared_per_processor / (int64_t{plan.shared_bytes} + 1024);
    const int64_t resident = device.processors * std::clamp<int64_t>(fit, 1, kBoxBlocks);
    return Run(kernel, std::min(plan.boxes, resident), kBoxThreads, plan.shared_bytes, x, y, plan);
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

  Device device;
  const cudaError_t error = CurrentDevice(&device);
  if (error != cudaSuccess) return error;
  const TransposePlan plan = PlanTranspose(shape, device.processors);
  return std::visit(transpose::Launcher{static_cast<const char*>(x), static_cast<char*>(y), bytes,
                                        plan.unit, device, stream},
                    plan.kernel);
}

cudaError_t LoadTransposeKernels() { return LoadKernels<transpose::Family>(); }

}  // namespace jax_fastops::cuda

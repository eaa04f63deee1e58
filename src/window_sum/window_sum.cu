// Launches the kernels of window sums.
//
// Most of them are bound by memory: x is read once and y is written once. Along the last axis,
// warps take a few units of a row (warps.cuh). Along another axis, blocks move along the axis in
// strips of columns (columns.cuh). The rest is summed by general kernels (general.cuh).
#include "window_sum/window_sum.h"

#include <algorithm>
#include <cstdint>

#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "window_sum/arrays.cuh"
#include "window_sum/columns.cuh"
#include "window_sum/general.cuh"
#include "window_sum/plan.h"
#include "window_sum/warps.cuh"

namespace jax_fastops::cuda {
namespace window_sum {
namespace {

struct WindowSums;  // the family of the kernels

constexpr int64_t kPiece = 1 << 28;  // sums of a row in one launch

int ShiftOf(const void* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) % 16);
}

// float64 has one kernel of each kind, and none of columns.
template <typename T>
auto ColumnsOf(int unit) {
  if (unit == 16) return KernelOf<WindowSums, ColumnsKernel<T, 16>>();
  if (unit == 4) return KernelOf<WindowSums, ColumnsKernel<T, 4>>();
  return KernelOf<WindowSums, ColumnsKernel<T, sizeof(T)>>();
}

template <typename T>
auto WarpsOf(WindowSumKernel kernel) {
  if constexpr (sizeof(T) < 8) {
    if (kernel == WindowSumKernel::kWarpsNear) {
      return KernelOf<WindowSums, WarpsKernel<T, WindowSumKernel::kWarpsNear>>();
    }
    if (kernel == WindowSumKernel::kWarpsAligned) {
      return KernelOf<WindowSums, WarpsKernel<T, WindowSumKernel::kWarpsAligned>>();
    }
  }
  return KernelOf<WindowSums, WarpsKernel<T, WindowSumKernel::kWarpsShifted>>();
}

// A level of the tree after the other, then the sums.
cudaError_t LaunchTree(const WindowSumPlan& plan, const Arrays& a, DType dtype, void* workspace,
                       cudaStream_t stream) {
  const DType sums = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const int64_t* count = plan.tree.count;
  const void* from = a.x;
  char* to = static_cast<char*>(workspace);
  for (int level = 1; level <= plan.tree.levels; ++level) {
    const int64_t nodes = a.outer * count[level] * a.inner;
    const TreeLevel next = {from, to, a.outer, count[level - 1], count[level], a.inner};
    const cudaError_t error = LaunchAnyType<WindowSums, kWindowSumThreads>(
        level == 1 ? dtype : sums, Grid(WindowSumBlocks(nodes), kWindowSumThreads), stream, next);
    if (error != cudaSuccess) return error;
    from = to;
    to += nodes * static_cast<int64_t>(DTypeSize(sums));
  }
  return LaunchAnyType<WindowSums, kWindowSumThreads>(dtype, Grid(plan.blocks, kWindowSumThreads),
                                                      stream, Tree{a, plan.tree, workspace});
}

template <typename T>
cudaError_t LaunchPlan(const WindowSumPlan& plan, const Arrays& a, void* workspace,
                       cudaStream_t stream) {
  const LaunchConfig config = Grid(plan.blocks, kWindowSumThreads, plan.shared);
  switch (plan.kernel) {
    case WindowSumKernel::kCopy:
      return cudaMemcpyAsync(a.y, a.x, static_cast<size_t>(a.outer * a.m * a.inner) * sizeof(T),
                             cudaMemcpyDeviceToDevice, stream);
    case WindowSumKernel::kDirect:
      if constexpr (sizeof(T) < 8) {
        if (plan.unit == 16) {
          return Launch(KernelOf<WindowSums, DirectUnitsKernel<T>>(), config, stream, a);
        }
      }
      return LaunchAnyType<WindowSums, kWindowSumThreads>(kDTypeOf<T>, config, stream, Direct{a});
    case WindowSumKernel::kTree:
      return LaunchTree(plan, a, kDTypeOf<T>, workspace, stream);
    case WindowSumKernel::kColumns:
      if constexpr (sizeof(T) < 8) {
        return Launch(ColumnsOf<T>(plan.unit), config, stream, a, plan.columns);
      }
      return cudaErrorInvalidValue;  // float64 takes the tree
    default:
      return Launch(WarpsOf<T>(plan.kernel), config, stream, a, plan.warps);
  }
}

cudaError_t Run(const Arrays& a, DType dtype, void* workspace, cudaStream_t stream) {
  Device device;
  const cudaError_t error = CurrentDevice(&device);
  if (error != cudaSuccess) return error;
  const WindowSumPlan plan = PlanWindowSum({.sizes = a,
                                            .itemsize = static_cast<int>(DTypeSize(dtype)),
                                            .x_shift = ShiftOf(a.x),
                                            .y_shift = ShiftOf(a.y),
                                            .workspace = workspace != nullptr,
                                            .processors = device.processors,
                                            .shared_per_block = device.shared_per_block});
  return ForDType(
      dtype, [&]<typename T>(TypeTag<T>) { return LaunchPlan<T>(plan, a, workspace, stream); });
}

}  // namespace
}  // namespace window_sum

cudaError_t WindowSum(const WindowSumShape& shape, DType dtype, const void* x, void* y,
                      void* workspace, cudaStream_t stream) {
  const int64_t itemsize = DTypeSize(dtype);
  const char* const from = static_cast<const char*>(x);
  window_sum::Arrays a = {{shape.outer, shape.n, shape.inner, shape.m(), shape.pad, shape.window()},
                          from,
                          from + shape.outer * shape.n * shape.inner * itemsize,
                          static_cast<char*>(y)};
  if (a.outer * a.inner == 0 || a.m <= 0) return cudaSuccess;
  if (a.inner > 1 || a.n <= window_sum::kPiece || a.window > kWindowSumLongWindow) {
    return window_sum::Run(a, dtype, workspace, stream);
  }
  // Long rows take the kernel of short ones, a piece at a time.
  for (int64_t row = 0; row < shape.outer; ++row) {
    for (int64_t begin = 0; begin < shape.m(); begin += window_sum::kPiece) {
      const int64_t skipped = std::max<int64_t>(begin - shape.pad, 0);
      a.outer = 1;
      a.n = std::min(shape.n - skipped, window_sum::kPiece + a.window);
      a.m = std::min(shape.m() - begin, window_sum::kPiece);
      a.pad = skipped - (begin - shape.pad);
      a.x = from + (row * shape.n + skipped) * itemsize;
      a.y = static_cast<char*>(y) + (row * shape.m() + begin) * itemsize;
      const cudaError_t error = window_sum::Run(a, dtype, nullptr, stream);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t LoadWindowSumKernels() { return LoadKernels<window_sum::WindowSums>(); }

}  // namespace jax_fastops::cuda

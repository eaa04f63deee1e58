// The public functions of softmax and log_softmax. plan.h selects the kernel: rows.cuh, span.cuh,
// block.cuh and gang.cuh have those along the minor axis, columns.cuh and column_registers.cuh
// those along any other axis.
#include <algorithm>
#include <cstdint>

#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "softmax/run.h"
#include "softmax/softmax.h"

namespace jax_fastops::cuda {
namespace softmax {
namespace {

static_assert(kWorkspaceRow == kSoftmaxWorkspace);

// Represents the cluster kernels in queries for the largest possible cluster.
__global__ void __launch_bounds__(kMostBlockThreads) ClusterProbe() {}

// Loads all kernels, and finds out what plans need to know of the current device.
cudaError_t GetLimits(Limits* limits) {
  static PerDevice<Limits> known;
  return known.Get(limits, [](Limits* found) {
    Device device;
    cudaError_t error = CurrentDevice(&device);
    if (error == cudaSuccess) error = LoadKernels<Softmax>();
    if (error != cudaSuccess) return error;
    found->processors = device.processors;
    // Without the static shared memory of the kernels, and the system's part.
    found->shared_bytes = device.shared_per_block - 2048;
    const auto kernel = reinterpret_cast<const void*>(KernelOf<Softmax, ClusterProbe>());
    const int shared = std::min(found->shared_bytes, kMostOfShared);
    found->cluster = LargestCluster(
        kernel, {.block = dim3(kMostBlockThreads), .shared = static_cast<size_t>(shared)},
        kMostCluster);
    return cudaSuccess;
  });
}

Offsets<kMaxMaskRank> OffsetsOf(const MaskIndex& index) {
  return {index.rank, index.size, index.stride};
}

template <bool kGrad>
cudaError_t PlanAndRun(const SoftmaxArguments& call, cudaStream_t stream) {
  if (call.shape.rows() == 0 || call.shape.n == 0) return cudaSuccess;
  Limits limits;
  const cudaError_t error = GetLimits(&limits);
  if (error != cudaSuccess) return error;
  const bool dropout = call.dropout.drops(), of_x = !kGrad || dropout;
  Params p = {};
  p.a = of_x ? call.x : call.y;
  p.b = call.dy;
  p.out = call.out;
  p.log = call.log;
  p.dropout = call.dropout;
  p.skip_zeros = kGrad && call.masked && !call.log;
  // In the type of the computation: a float64 scale may round to 0 in float32.
  p.zero_scale =
      of_x && (call.dtype == DType::kF64 ? call.scale == 0 : static_cast<float>(call.scale) == 0);
  p.scale = p.zero_scale ? 1 : call.scale;
  const auto address = [](const void* data) { return reinterpret_cast<uintptr_t>(data); };
  const Plan plan = MakePlan({.shape = call.shape,
                              .mask = of_x || call.log ? call.mask : SoftmaxMask(),
                              .itemsize = static_cast<int>(DTypeSize(call.dtype)),
                              .grad = kGrad,
                              .log = p.log,
                              .dropout = dropout,
                              .a = address(p.a),
                              .b = address(kGrad ? p.b : p.a),
                              .out = address(p.out)},
                             limits);
  if (plan.blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  if (dropout && !TakesDropout(plan)) return cudaErrorInvalidValue;
  p.outer = plan.shape.outer;
  p.n = plan.shape.n;
  p.inner = plan.shape.inner;
  p.mask = plan.mask.data;
  p.mask_units = plan.mask_units;
  if (p.mask != nullptr) {
    p.mask_stride = plan.mask.stride;
    p.mask_outer = OffsetsOf(plan.mask.outer);
    p.mask_inner = OffsetsOf(plan.mask.inner);
  }
  return ForDType(call.dtype, [&]<typename T>(TypeTag<T>) {
    return Run<T, kGrad>(plan, p, call.workspace, stream);
  });
}

}  // namespace
}  // namespace softmax

cudaError_t SoftmaxForward(const SoftmaxArguments& call, cudaStream_t stream) {
  return softmax::PlanAndRun<false>(call, stream);
}

cudaError_t SoftmaxBackward(const SoftmaxArguments& call, cudaStream_t stream) {
  return softmax::PlanAndRun<true>(call, stream);
}

cudaError_t LoadSoftmaxKernels() {
  softmax::Limits limits;
  return softmax::GetLimits(&limits);
}

}  // namespace jax_fastops::cuda

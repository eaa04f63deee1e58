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
    found->cluster = 1;
    const auto kernel = reinterpret_cast<const void*>(KernelOf<Softmax, ClusterProbe>());
    for (int size = 2; device.clusters && size <= kMostCluster; size *= 2) {
      const LaunchConfig config = {
          .grid = dim3(static_cast<unsigned>(size)),
          .block = dim3(kMostBlockThreads),
          .shared = static_cast<size_t>(std::min(found->shared_bytes, kMostOfShared)),
          .cluster = size};
      int blocks = 0;
      // A size that the device does not support is not an error.
      if (ResidentBlocks(kernel, config, &blocks) != cudaSuccess || blocks == 0) break;
      found->cluster = size;
    }
    return cudaSuccess;
  });
}

Offsets<kMaxMaskRank> OffsetsOf(const MaskIndex& index) {
  return {index.rank, index.size, index.stride};
}

// Tests the scale in the type of the computation: a float64 scale may round to 0 in float32.
void SetForwardScale(DType dtype, double scale, Params* p) {
  p->zero_scale = dtype == DType::kF64 ? scale == 0 : static_cast<float>(scale) == 0;
  p->scale = p->zero_scale ? 1 : scale;
}

// `p` has everything that the plan does not determine.
template <bool kGrad>
cudaError_t PlanAndRun(Params p, const SoftmaxShape& shape, const SoftmaxMask& mask, DType dtype,
                       void* workspace, cudaStream_t stream) {
  if (shape.outer == 0 || shape.n == 0 || shape.inner == 0) return cudaSuccess;
  Limits limits;
  const cudaError_t error = GetLimits(&limits);
  if (error != cudaSuccess) return error;
  const auto address = [](const void* data) { return reinterpret_cast<uintptr_t>(data); };
  const Plan plan = MakePlan({.shape = shape,
                              .mask = mask,
                              .itemsize = static_cast<int>(DTypeSize(dtype)),
                              .grad = kGrad,
                              .log = p.log,
                              .dropout = p.dropout.seeds != nullptr,
                              .a = address(p.a),
                              .b = address(kGrad ? p.b : p.a),
                              .out = address(p.out)},
                             limits);
  if (plan.blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  if (p.dropout.seeds != nullptr && !TakesDropout(plan)) return cudaErrorInvalidValue;
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
  return ForDType(
      dtype, [&]<typename T>(TypeTag<T>) { return Run<T, kGrad>(plan, p, workspace, stream); });
}

}  // namespace
}  // namespace softmax

cudaError_t SoftmaxForward(const SoftmaxShape& shape, const SoftmaxMask& mask, DType dtype,
                           bool log, double scale, const void* x, void* y, void* workspace,
                           cudaStream_t stream) {
  softmax::Params p = {};
  softmax::SetForwardScale(dtype, scale, &p);
  p.log = log;
  p.a = x;
  p.out = y;
  return softmax::PlanAndRun<false>(p, shape, mask, dtype, workspace, stream);
}

cudaError_t SoftmaxBackward(const SoftmaxShape& shape, bool masked, const SoftmaxMask& mask,
                            DType dtype, bool log, double scale, const void* y, const void* dy,
                            void* dx, void* workspace, cudaStream_t stream) {
  softmax::Params p = {};
  p.scale = scale;
  p.log = log;
  p.skip_zeros = masked && !log;
  p.a = y;
  p.b = dy;
  p.out = dx;
  return softmax::PlanAndRun<true>(p, shape, log ? mask : SoftmaxMask(), dtype, workspace, stream);
}

cudaError_t SoftmaxDropoutForward(const SoftmaxShape& shape, const SoftmaxMask& mask, DType dtype,
                                  double scale, const SoftmaxDropout& dropout, const void* x,
                                  void* y, cudaStream_t stream) {
  softmax::Params p = {};
  softmax::SetForwardScale(dtype, scale, &p);
  p.dropout = dropout;
  p.a = x;
  p.out = y;
  return softmax::PlanAndRun<false>(p, shape, mask, dtype, nullptr, stream);
}

cudaError_t SoftmaxDropoutBackward(const SoftmaxShape& shape, const SoftmaxMask& mask, DType dtype,
                                   double scale, const SoftmaxDropout& dropout, const void* x,
                                   const void* dy, void* dx, cudaStream_t stream) {
  softmax::Params p = {};
  softmax::SetForwardScale(dtype, scale, &p);
  p.dropout = dropout;
  p.skip_zeros = mask.data != nullptr;
  p.a = x;
  p.b = dy;
  p.out = dx;
  return softmax::PlanAndRun<true>(p, shape, mask, dtype, nullptr, stream);
}

cudaError_t LoadSoftmaxKernels() {
  softmax::Limits limits;
  return softmax::GetLimits(&limits);
}

}  // namespace jax_fastops::cuda

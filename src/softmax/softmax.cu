// The public functions of softmax and log_softmax. Along the minor axis, they are functors
// (rows.cuh) for the core's kernels over rows. columns.cuh and column_registers.cuh have the
// kernels along any other axis.
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
static_assert(kMaxMaskRank == kMaxRowMaskRank);

Offsets<kMaxMaskRank> OffsetsOf(const MaskIndex& index) {
  return {index.rank, index.size, index.stride};
}

template <bool kGrad>
cudaError_t PlanAndRun(const SoftmaxArguments& call, cudaStream_t stream) {
  if (call.shape.rows() == 0 || call.shape.n == 0) return cudaSuccess;
  HeldLimits limits;
  const cudaError_t error = GetHeldLimits<Softmax>(&limits);
  if (error != cudaSuccess) return error;
  const bool dropout = call.dropout.drops(), of_x = !kGrad || dropout;
  Arguments run = {};
  OpParams& op = run.op;
  op.log = call.log;
  op.dropout = call.dropout;
  op.skip_zeros = kGrad && call.masked && !call.log;
  // In the type of the computation: a float64 scale may round to 0 in float32.
  op.zero_scale =
      of_x && (call.dtype == DType::kF64 ? call.scale == 0 : static_cast<float>(call.scale) == 0);
  op.scale = op.zero_scale ? 1 : call.scale;
  run.workspace = call.workspace;

  const void* const a = of_x ? call.x : call.y;
  const void* const b = kGrad ? call.dy : a;
  const SoftmaxMask mask = of_x || call.log ? call.mask : SoftmaxMask();
  const auto address = [](const void* data) { return reinterpret_cast<uintptr_t>(data); };
  const Call planned = {.shape = call.shape,
                        .mask = mask,
                        .itemsize = static_cast<int>(DTypeSize(call.dtype)),
                        .grad = kGrad,
                        .dropout = dropout,
                        .a = address(a),
                        .b = address(b),
                        .out = address(call.out)};
  run.rows_plan = PlanRowsOf(planned, limits);
  if (run.rows_plan.holder != RowHolder::kNone) {
    run.rows = {.in = {a, b},
                .out = call.out,
                .count = call.shape.outer,
                .n = static_cast<int>(call.shape.n),
                .mask = {}};
    if (mask.data != nullptr) {
      run.rows.mask = {mask.data, mask.stride, MaskHasWords(planned), OffsetsOf(mask.outer)};
    }
  } else {
    if (dropout) return cudaErrorInvalidValue;
    run.plan = MakePlan(planned, limits);
    if (run.plan.blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
    Params& p = run.columns;
    static_cast<OpParams&>(p) = op;
    p.a = a;
    p.b = b;
    p.out = call.out;
    p.outer = call.shape.outer;
    p.n = call.shape.n;
    p.inner = call.shape.inner;
    p.mask = mask.data;
    p.mask_units = run.plan.mask_units;
    if (p.mask != nullptr) {
      p.mask_stride = mask.stride;
      p.mask_outer = OffsetsOf(mask.outer);
      p.mask_inner = OffsetsOf(mask.inner);
    }
  }
  return ForDType(call.dtype, [&]<typename T>(TypeTag<T>) { return Run<T, kGrad>(run, stream); });
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
  HeldLimits limits;
  return GetHeldLimits<softmax::Softmax>(&limits);
}

}  // namespace jax_fastops::cuda

// The public functions of softmax and log_softmax: functors (functors.cuh) for the core's kernels
// over rows, along the minor axis, and over columns, along any other axis and for what the kernels
// over rows do not take.
#include <cstdint>

#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "softmax/requests.h"
#include "softmax/run.h"
#include "softmax/softmax.h"

namespace jax_fastops::cuda {
namespace softmax {
namespace {

static_assert(kMaxMaskRank == kMaxRowMaskRank);

Offsets<kMaxMaskRank> OffsetsOf(const MaskIndex& index) {
  return {index.rank, index.size, index.stride};
}

uint64_t AddressOf(const void* data) { return reinterpret_cast<uintptr_t>(data); }

Addresses AddressesOf(const HeldRows& rows, int inputs) {
  return {AddressOf(rows.in[0]), AddressOf(rows.in[inputs - 1]), AddressOf(rows.out)};
}

void SetColumns(const SoftmaxShape& shape, const SoftmaxMask& mask, int itemsize, int inputs,
                const HeldLimits& limits, Arguments* run) {
  HeldColumns& columns = run->columns;
  columns = {.in = {run->rows.in[0], run->rows.in[1]},
             .out = run->rows.out,
             .n = shape.n,
             .inner = shape.inner,
             .mask = {}};
  run->columns_plan =
      PlanColumns(ColumnsOf(shape, mask, AddressesOf(run->rows, inputs), itemsize, inputs), limits);
  if (mask.data == nullptr) return;
  const bool words = mask.inner.rank > 0 && run->columns_plan.bytes > itemsize;
  columns.mask = {mask.data, mask.stride, words, OffsetsOf(mask.outer), OffsetsOf(mask.inner)};
}

template <bool kGrad>
cudaError_t PlanAndRun(const SoftmaxArguments& call, cudaStream_t stream) {
  const SoftmaxShape& shape = call.shape;
  if (shape.rows() == 0 || shape.n == 0) return cudaSuccess;
  HeldLimits limits;
  const cudaError_t error = GetHeldLimits<Softmax>(&limits);
  if (error != cudaSuccess) return error;
  const bool dropout = call.dropout.drops(), of_x = !kGrad || dropout;
  const int itemsize = static_cast<int>(DTypeSize(call.dtype)), inputs = kGrad ? 2 : 1;
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
  const SoftmaxMask mask = of_x || call.log ? call.mask : SoftmaxMask();
  run.rows = {.in = {a, kGrad ? call.dy : a},
              .out = call.out,
              .count = shape.outer,
              .n = static_cast<int>(shape.n),
              .mask = {}};
  run.rows_plan =
      PlanRowsOf(shape, AddressesOf(run.rows, inputs), itemsize, inputs, dropout, limits);
  if (run.rows_plan.holder != RowHolder::kNone) {
    if (mask.data != nullptr) {
      const bool words = (AddressOf(a) | AddressOf(call.out)) % 16 == 0 &&
                         MaskBits(shape, mask) % (16 / itemsize) == 0;
      run.rows.mask = {mask.data, mask.stride, words, OffsetsOf(mask.outer)};
    }
  } else {
    if (dropout) return cudaErrorInvalidValue;
    SetColumns(shape, mask, itemsize, inputs, limits, &run);
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

// The public functions of softmax and log_softmax: functors (functors.cuh) for the core's kernels
// over rows, along the minor axis, and over columns, along any other axis and for what the kernels
// over rows do not take.
#include <cstdint>

#include "core/cuda/dispatch.cuh"
#include "core/cuda/held_columns.cuh"
#include "core/cuda/held_rows.cuh"
#include "core/cuda/launch.h"
#include "softmax/functors.cuh"
#include "softmax/requests.h"
#include "softmax/softmax.h"

namespace jax_fastops::cuda {
namespace softmax {

struct Softmax;  // the family, in the list of kernels

namespace {

static_assert(kMaxMaskRank == kMaxRowMaskRank);

Offsets<kMaxMaskRank> OffsetsOf(const MaskIndex& index) {
  return {index.rank, index.size, index.stride};
}

uint64_t AddressOf(const void* data) { return reinterpret_cast<uintptr_t>(data); }

Addresses AddressesOf(const HeldRows& rows, int inputs) {
  return {AddressOf(rows.in[0]), AddressOf(rows.in[inputs - 1]), AddressOf(rows.out)};
}

// Along the minor axis, if there is a kernel for such rows.
template <template <typename> typename Functor, template <typename> typename WithDropout>
cudaError_t RunRows(DType dtype, const HeldPlan& plan, const HeldRows& rows, const OpParams& op,
                    void* workspace, cudaStream_t stream) {
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    if constexpr (sizeof(T) == 8) {
      return cudaErrorInvalidValue;  // rows of float64 are columns
    } else if (op.dropout.drops()) {
      return LaunchHeldRows<Softmax, WithDropout, T>(plan, rows, op, workspace, stream);
    } else {
      return LaunchHeldRows<Softmax, Functor, T>(plan, rows, op, workspace, stream);
    }
  });
}

template <bool kGrad>
cudaError_t RunColumns(const SoftmaxArguments& call, const SoftmaxMask& mask, const HeldRows& rows,
                       const OpParams& op, const HeldLimits& limits, cudaStream_t stream) {
  const int itemsize = static_cast<int>(DTypeSize(call.dtype)), inputs = kGrad ? 2 : 1;
  const SoftmaxShape& shape = call.shape;
  HeldColumns columns = {.in = {rows.in[0], rows.in[1]},
                         .out = rows.out,
                         .n = shape.n,
                         .inner = shape.inner,
                         .mask = {}};
  const ColumnsPlan plan =
      PlanColumns(ColumnsOf(shape, mask, AddressesOf(rows, inputs), itemsize, inputs), limits);
  if (mask.data != nullptr) {
    const bool words = mask.inner.rank > 0 && plan.bytes > itemsize;
    columns.mask = {{mask.data, mask.stride, words, OffsetsOf(mask.outer)}, OffsetsOf(mask.inner)};
  }
  return ForDType(call.dtype, [&]<typename T>(TypeTag<T>) {
    return LaunchHeldColumns<Softmax, ColumnFunctors<kGrad>, T>(plan, columns, op, call.workspace,
                                                                stream);
  });
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
  OpParams op = {};
  op.log = call.log;
  op.dropout = call.dropout;
  op.skip_zeros = kGrad && call.masked && !call.log;
  // In the type of the computation: a float64 scale may round to 0 in float32.
  op.zero_scale =
      of_x && (call.dtype == DType::kF64 ? call.scale == 0 : static_cast<float>(call.scale) == 0);
  op.scale = op.zero_scale ? 1 : call.scale;

  const void* const a = of_x ? call.x : call.y;
  const SoftmaxMask mask = of_x || call.log ? call.mask : SoftmaxMask();
  HeldRows rows = {.in = {a, kGrad ? call.dy : a},
                   .out = call.out,
                   .count = shape.outer,
                   .n = static_cast<int>(shape.n),
                   .mask = {}};
  const HeldPlan plan =
      PlanRowsOf(shape, AddressesOf(rows, inputs), itemsize, inputs, dropout, limits);
  if (plan.holder == RowHolder::kNone) {
    if (dropout) return cudaErrorInvalidValue;
    return RunColumns<kGrad>(call, mask, rows, op, limits, stream);
  }
  if (mask.data != nullptr) {
    const bool words = (AddressOf(a) | AddressOf(call.out)) % 16 == 0 &&
                       MaskBits(shape, mask) % (16 / itemsize) == 0;
    rows.mask = {mask.data, mask.stride, words, OffsetsOf(mask.outer)};
  }
  if constexpr (kGrad) {
    return RunRows<Backward, DropBackward>(call.dtype, plan, rows, op, call.workspace, stream);
  } else {
    return RunRows<Forward, DropForward>(call.dtype, plan, rows, op, call.workspace, stream);
  }
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

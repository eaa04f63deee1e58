// The public functions of softmax and log_softmax: functors (functors.cuh) for the core's kernels
// over rows, along the minor axis, and over columns, along any other axis and for what the kernels
// over rows do not take.
#include <algorithm>
#include <cstdint>

#include "core/cuda/dispatch.cuh"
#include "core/cuda/launch.h"
#include "core/integer.h"
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

// Along the minor axis, `size` elements have a word of the mask if this is a multiple of `size`:
// its bytes are contiguous, and aligned to their number.
uint64_t MaskBits(const SoftmaxShape& shape, const SoftmaxMask& mask) {
  const bool minor = shape.inner == 1;
  const bool contiguous =
      minor ? mask.stride == 1 : mask.inner.rank == 1 && mask.inner.stride[0] == 1;
  if (!contiguous) return 1;
  uint64_t bits = AddressOf(mask.data) | static_cast<uint64_t>(minor ? shape.n : mask.stride);
  for (int i = 0; i < mask.outer.rank; ++i) bits |= static_cast<uint64_t>(mask.outer.stride[i]);
  return bits;
}

// The plan along the minor axis. Without one (RowHolder::kNone), rows are columns: float64, arrays
// of other misalignments, rows of 2^31 elements. softmax.py asks for dropout only in rows that have
// a kernel.
HeldPlan PlanRowsOf(const SoftmaxShape& shape, const HeldRows& rows, int itemsize, int inputs,
                    bool dropout, const HeldLimits& limits) {
  const int64_t n = shape.n;
  if (shape.inner > 1 || itemsize == 8 || (dropout && n > kSoftmaxDropoutRow)) return {};
  const uint64_t a = AddressOf(rows.in[0]);
  const bool alike =
      (a ^ AddressOf(rows.out)) % 16 == 0 && (a ^ AddressOf(rows.in[inputs - 1])) % 16 == 0;
  return PlanHeldRows({.rows = shape.outer,
                       .n = n,
                       .itemsize = itemsize,
                       .inputs = inputs,
                       .alike = alike,
                       .aligned = alike && a % 16 == 0 && n * itemsize % 16 == 0,
                       .registers_only = dropout,
                       // The forward has two sums of a block, a maximum among them.
                       .room = n > kSoftmaxWorkspace ? CeilDiv(n, 1024) / (3 - inputs) : 0},
                      limits);
}

void SetColumns(const SoftmaxShape& shape, const SoftmaxMask& mask, int itemsize, int inputs,
                const HeldLimits& limits, Arguments* run) {
  HeldColumns& columns = run->columns;
  columns = {.in = {run->rows.in[0], run->rows.in[1]},
             .out = run->rows.out,
             .n = shape.n,
             .inner = shape.inner,
             .mask = {}};
  const bool inner_mask = mask.data != nullptr && mask.inner.rank > 0;
  const ColumnsShape planned = {.outer = shape.outer,
                                .n = shape.n,
                                .inner = shape.inner,
                                .itemsize = itemsize,
                                .inputs = inputs,
                                .addresses = AddressOf(columns.in[0]) | AddressOf(columns.out) |
                                             AddressOf(columns.in[inputs - 1]),
                                .mask_bits = inner_mask ? MaskBits(shape, mask) : 0,
                                .long_workspace = shape.n > kSoftmaxWorkspace};
  run->columns_plan = PlanColumns(planned, limits);
  if (mask.data == nullptr) return;
  const bool words = inner_mask && run->columns_plan.bytes > itemsize;
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
  run.rows_plan = PlanRowsOf(shape, run.rows, itemsize, inputs, dropout, limits);
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

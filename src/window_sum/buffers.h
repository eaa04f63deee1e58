// Reads the buffers and attributes of window sum calls, for the handlers of every backend.
//
//   window_sum   x[..., n, inner...] -> y[..., m, inner...], workspace
//
// The workspace is optional. Attributes: `radius`; `padding`, the number of zeros on either
// side of n, so that m = n + 2 * padding - 2 * radius; `inner`, the number of dimensions after n;
// and `batch_first`, if there are inner dimensions: the logical shape then has them before n (see
// transpose/buffers.h), while memory is unchanged.
#ifndef JAX_FASTOPS_WINDOW_SUM_BUFFERS_H_
#define JAX_FASTOPS_WINDOW_SUM_BUFFERS_H_

#include <cstddef>
#include <cstdint>

#include "core/ffi/buffers.h"
#include "window_sum/shape.h"

namespace jax_fastops {

struct WindowSumCall {
  WindowSumShape shape;
  DType dtype = DType::kF32;
  void* workspace = nullptr;
};

inline ffi::Error ReadWindowSum(const ffi::AnyBuffer& x, ffi::Result<ffi::AnyBuffer> y,
                                const ffi::RemainingRets& workspace,
                                const ffi::Dictionary& attributes, WindowSumCall* call) {
  const char* op = "window_sum";
  const auto radius = attributes.get<int64_t>("radius");
  const auto padding = attributes.get<int64_t>("padding");
  const auto inner = attributes.get<int64_t>("inner");
  if (radius.has_error() || padding.has_error() || inner.has_error())
    return InvalidArgument(op, "the attributes 'radius', 'padding' and 'inner' are needed");
  const auto reordered = attributes.get<bool>("batch_first");
  const bool batch_first = !reordered.has_error() && *reordered;
  const NamedBuffer from("x", x), to("y", y);
  FASTOPS_RETURN_IF_ERROR(CheckFloating(op, from, &call->dtype));
  const auto mismatch = [&](const char* what) {
    return InvalidArgument(op, Describe(from) + " and " + Describe(to) + ": " + what);
  };
  const auto x_dims = x.dimensions(), y_dims = y->dimensions();
  const size_t rank = x_dims.size();
  if (*inner < 0 || static_cast<size_t>(*inner) >= rank || y_dims.size() != rank)
    return mismatch("there are too few dimensions for the attribute inner");
  if (x.element_type() != y->element_type()) return mismatch("types differ");
  constexpr int64_t kMost = int64_t{1} << 60;
  if (*radius < 0 || *radius > kMost || *padding < 0 || *padding > 2 * *radius)
    return mismatch("the attributes 'radius' and 'padding' are not those of windows");

  WindowSumShape& shape = call->shape;
  shape.radius = *radius;
  shape.pad = *padding;
  // Batch-first, the axis is the last dimension, directly after those that follow it in memory.
  const size_t behind = static_cast<size_t>(*inner);
  const size_t axis = batch_first ? rank - 1 : rank - 1 - behind;
  const size_t inner_begin = batch_first ? rank - 1 - behind : axis + 1;
  for (size_t i = 0; i < rank; ++i) {
    if (i == axis) {
      shape.n = x_dims[i];
      continue;
    }
    if (x_dims[i] != y_dims[i]) return mismatch("shapes differ in other dimensions than the axis");
    (i >= inner_begin && i < inner_begin + behind ? shape.inner : shape.outer) *= x_dims[i];
  }
  if (y_dims[axis] != shape.m()) return mismatch("y has not one element for each window");

  if (workspace.size() > 0) {
    auto buffer = workspace.get<ffi::AnyBuffer>(0);
    if (buffer.has_error()) return buffer.error();
    const int64_t needed = shape.outer * ((shape.n + 7) / 8) * shape.inner;
    const auto wide = call->dtype == DType::kF64 ? ffi::DataType::F64 : ffi::DataType::F32;
    if (static_cast<int64_t>((*buffer)->element_count()) < needed ||
        (*buffer)->element_type() != wide)
      return InvalidArgument(op,
                             Describe({"workspace", *buffer}) + " does not fit " + Describe(from));
    call->workspace = (*buffer)->untyped_data();
  }
  return ffi::Error::Success();
}

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_WINDOW_SUM_BUFFERS_H_

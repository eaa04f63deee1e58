// Reads the shapes of a transposition's buffers, for the handlers of every backend.
//
// Dimensions with a star in a kernel's signature come in one of two forms: in the order of memory,
// or batch-first (attribute `batch_first`). Batch-first, the logical shape has these dimensions
// after the batch dimensions, in the order of the result, while the buffers' layouts keep memory
// unchanged. The FFI shows only logical shapes, so the form is undone here.
#ifndef JAX_FASTOPS_TRANSPOSE_BUFFERS_H_
#define JAX_FASTOPS_TRANSPOSE_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/ffi/buffers.h"

namespace jax_fastops {

struct TransposeView {
  std::vector<int64_t> dims;  // x's, as in memory
  std::vector<int> axes;
  int64_t itemsize = 0;
};

// x -> y, where `tail` permutes the last dimensions and the leading ones stay. Batch-first, x has
// the logical shape of y, and both have one more dimension of size 1.
inline ffi::Error ReadTranspose(const NamedBuffer& x, const NamedBuffer& y,
                                ffi::Span<const int64_t> tail, bool batch_first,
                                TransposeView* view) {
  const char* op = "transpose";
  const auto x_dims = x.buffer.dimensions();
  const auto y_dims = y.buffer.dimensions();
  const size_t rank = x_dims.size() - (batch_first && x_dims.size() > 0 ? 1 : 0);
  const auto mismatch = [&](const char* what) {
    return InvalidArgument(op, Describe(x) + " and " + Describe(y) + ": " + what);
  };
  if (tail.size() > rank || y_dims.size() != x_dims.size())
    return mismatch("ranks do not fit the permutation");
  if (batch_first && (x_dims.size() == 0 || x_dims[rank] != 1 || y_dims[rank] != 1))
    return mismatch("batch-first, the last dimension must be 1");
  if (x.buffer.element_type() != y.buffer.element_type()) return mismatch("types differ");
  view->itemsize = WholeBytes(x.buffer.element_type());
  if (view->itemsize == 0) return mismatch("elements of unknown size");

  const size_t lead = rank - tail.size();
  view->axes.resize(rank);
  std::vector<bool> seen(rank, false);
  for (size_t i = 0; i < rank; ++i) {
    const int64_t axis =
        i < lead ? static_cast<int64_t>(i) : static_cast<int64_t>(lead) + tail[i - lead];
    if (axis < 0 || axis >= static_cast<int64_t>(rank) || seen[axis])
      return mismatch("the attribute 'axes' is not a permutation");
    seen[axis] = true;
    view->axes[i] = static_cast<int>(axis);
  }
  view->dims.resize(rank);
  for (size_t i = 0; i < rank; ++i) {
    view->dims[view->axes[i]] = y_dims[i];
    if (x_dims[batch_first ? i : static_cast<size_t>(view->axes[i])] != y_dims[i])
      return mismatch("shapes do not fit the permutation");
  }
  return ffi::Error::Success();
}

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_TRANSPOSE_BUFFERS_H_

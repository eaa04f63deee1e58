// Reads the shapes of the head ops' buffers, for the handlers of every backend.
//
// Dimensions with a star in a kernel's signature come in one of two forms: in the order of memory,
// or batch-first (attribute `batch_first`). Batch-first, the logical shape has these dimensions
// after the batch dimensions, in the order of the result, while the buffers' layouts keep memory
// unchanged. The FFI shows only logical shapes, so the form is undone here.
#ifndef JAX_FASTOPS_HEADS_BUFFERS_H_
#define JAX_FASTOPS_HEADS_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/ffi/buffers.h"
#include "heads/shape.h"

namespace jax_fastops {

struct HeadsView {
  HeadsShape shape{};
  HeadsSums sums{};
  int64_t itemsize = 0;
};

// The one or three arrays of heads that a call takes or returns.
template <typename Buffers, typename Pointer, typename Get>
ffi::Error ReadParts(const char* op, const Buffers& buffers, std::vector<NamedBuffer>* named,
                     Pointer* pointers, const Get& get) {
  if (buffers.size() != 1 && buffers.size() != kMaxHeadParts)
    return InvalidArgument(op, "1 or 3 arrays of heads are needed");
  for (size_t i = 0; i < buffers.size(); ++i) {
    const auto buffer = get(i);
    if (buffer.has_error()) return buffer.error();
    named->emplace_back("y", *buffer);
    pointers[i] = named->back().buffer.untyped_data();
  }
  return ffi::Error::Success();
}

inline ffi::Error ReadOperands(const char* op, const ffi::RemainingArgs& args,
                               std::vector<NamedBuffer>* named, const void** pointers) {
  return ReadParts(op, args, named, pointers,
                   [&](size_t i) { return args.get<ffi::AnyBuffer>(i); });
}

inline ffi::Error ReadResults(const char* op, const ffi::RemainingRets& rets,
                              std::vector<NamedBuffer>* named, void** pointers) {
  return ReadParts(op, rets, named, pointers,
                   [&](size_t i) { return rets.get<ffi::AnyBuffer>(i); });
}

inline int64_t Product(ffi::AnyBuffer::Dimensions dims, size_t count) {
  int64_t product = 1;
  for (size_t i = 0; i < count; ++i) product *= dims[i];
  return product;
}

// merged[..., s, f] and parts arrays split[..., h, s, d] (batch-first [..., s, h, d]). With sums,
// the sequence is two dimensions: merged[..., g, t, f], split[..., h, g, t, d] (batch-first
// [..., g, h, t, d]), sums[..., g, r, f].
inline ffi::Error ReadHeads(const char* op, const NamedBuffer& merged,
                            const std::vector<NamedBuffer>& split, const NamedBuffer* sums,
                            bool batch_first, HeadsView* view) {
  const auto m = merged.buffer.dimensions();
  const auto s = split.front().buffer.dimensions();
  const size_t rows = sums != nullptr ? 2 : 1;  // dimensions of the sequence
  const auto mismatch = [&](const NamedBuffer& other) {
    return InvalidArgument(op, Describe(merged) + " and " + Describe(other) + " do not fit");
  };
  if (m.size() < rows + 1 || s.size() != m.size() + 1) return mismatch(split.front());
  for (const NamedBuffer& part : split) {
    FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType(op, split.front(), part));
  }
  if (merged.buffer.element_type() != split.front().buffer.element_type())
    return mismatch(split.front());
  view->itemsize = WholeBytes(merged.buffer.element_type());
  if (view->itemsize == 0) return mismatch(split.front());

  const size_t batch = m.size() - rows - 1;  // batch dimensions
  const size_t heads_at = batch + (batch_first ? 1 : 0);
  HeadsShape& shape = view->shape;
  shape.batch = Product(m, batch);
  shape.parts = static_cast<int64_t>(split.size());
  shape.heads = s[heads_at];
  shape.head_size = s[s.size() - 1];
  shape.sequence = m[batch] * (rows == 2 ? m[batch + 1] : 1);
  bool fits = m[m.size() - 1] == shape.features();
  for (size_t i = 0; fits && i < batch; ++i) fits = m[i] == s[i];
  for (size_t i = 0; fits && i < rows; ++i) {
    const size_t at = batch + i + (batch_first && i == 0 ? 0 : 1);
    fits = m[batch + i] == s[at];
  }
  if (!fits) return mismatch(split.front());
  if (sums == nullptr) return ffi::Error::Success();

  const auto p = sums->buffer.dimensions();
  fits = p.size() == m.size() && p[p.size() - 1] == shape.features();
  for (size_t i = 0; fits && i <= batch; ++i) fits = p[i] == m[i];
  if (!fits) return mismatch(*sums);
  view->sums.groups = m[batch];
  view->sums.subgroups = p[batch + 1];
  if (view->sums.subgroups < 1 && shape.size() > 0) return mismatch(*sums);
  return ffi::Error::Success();
}

// The type in which the bias is added. The bias may be wider than the elements.
inline ffi::Error CheckBias(const char* op, const NamedBuffer& x, const NamedBuffer& bias,
                            int64_t features, DType* dtype, bool* wide) {
  DType bias_dtype;
  FASTOPS_RETURN_IF_ERROR(CheckFloating(op, x, dtype));
  FASTOPS_RETURN_IF_ERROR(CheckFloating(op, bias, &bias_dtype));
  *wide = bias_dtype != *dtype;
  const bool allowed = !*wide || (DTypeSize(*dtype) == 2 && bias_dtype == DType::kF32);
  const bool fits = static_cast<int64_t>(bias.buffer.element_count()) == features;
  if (allowed && fits) return ffi::Error::Success();
  return InvalidArgument(op, Describe(bias) + " does not fit " + Describe(x));
}

// The sums are in float32, or in float64 for float64.
inline ffi::Error CheckSums(const char* op, const NamedBuffer& x, const NamedBuffer& sums,
                            DType* dtype) {
  FASTOPS_RETURN_IF_ERROR(CheckFloating(op, x, dtype));
  const auto wanted = *dtype == DType::kF64 ? ffi::DataType::F64 : ffi::DataType::F32;
  if (sums.buffer.element_type() == wanted) return ffi::Error::Success();
  return InvalidArgument(op, Describe(sums) + " has the wrong type for " + Describe(x));
}

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_HEADS_BUFFERS_H_

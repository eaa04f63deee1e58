// Reads the buffers and attributes of softmax calls, for the handlers of every backend.
//
// Names, operands and results of the kernels; `mask` and `workspace` are optional:
//   softmax      x[..., n, inner...], mask pred[~..., n or 1, inner...] -> y, workspace
//   softmax_bwd  y, dy, mask -> dx, workspace
// Attributes: `inner`, the number of dimensions after n; `scale`; `log`; in the backward `masked`;
// and `batch_first`, if there are inner dimensions: the logical shape then has them before n (see
// transpose/buffers.h), while memory is unchanged.
//
// A dimension of the mask that is shorter than that of x is broadcast: its index 0 is used for all.
// (In partitioned programs it may have several equal copies there.)
#ifndef JAX_FASTOPS_SOFTMAX_BUFFERS_H_
#define JAX_FASTOPS_SOFTMAX_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/ffi/buffers.h"
#include "softmax/shape.h"

namespace jax_fastops {

struct SoftmaxCall {
  SoftmaxShape shape;
  SoftmaxMask mask;
  DType dtype = DType::kF32;
  bool log = false;
  bool masked = false;  // of the backward
  double scale = 1.0;
  void* workspace = nullptr;
};

// The dimensions in the order of memory: [..., n, inner...].
inline std::vector<int64_t> SoftmaxDims(const ffi::AnyBuffer& buffer, size_t inner,
                                        bool batch_first) {
  const auto dims = buffer.dimensions();
  std::vector<int64_t> memory(dims.begin(), dims.end());
  if (batch_first) {
    const int64_t n = memory.back();
    memory.pop_back();
    memory.insert(memory.end() - static_cast<ptrdiff_t>(inner), n);
  }
  return memory;
}

// The dimensions from `begin` to `end` on which the mask's offset depends.
inline bool ReadMaskIndex(const std::vector<int64_t>& size, const std::vector<int64_t>& stride,
                          size_t begin, size_t end, MaskIndex* index) {
  bool matters = false;
  for (size_t i = begin; i < end; ++i) {
    if (size[i] == 1) continue;
    matters = matters || stride[i] != 0;
    const int last = index->rank - 1;
    if (last >= 0 && index->stride[last] == stride[i] * size[i]) {  // or both 0
      index->size[last] *= size[i];
      index->stride[last] = stride[i];
      continue;
    }
    if (index->rank == kMaxMaskRank) return false;
    index->size[index->rank] = size[i];
    index->stride[index->rank++] = stride[i];
  }
  if (!matters) index->rank = 0;
  return true;
}

inline ffi::Error ReadSoftmax(const char* op, const NamedBuffer& x,
                              const std::optional<ffi::AnyBuffer>& mask,
                              const std::optional<ffi::AnyBuffer>& workspace,
                              const ffi::Dictionary& attributes, SoftmaxCall* call) {
  const auto inner = attributes.get<int64_t>("inner");
  const auto scale = attributes.get<double>("scale");
  const auto log = attributes.get<bool>("log");
  if (inner.has_error() || scale.has_error() || log.has_error())
    return InvalidArgument(op, "the attributes 'inner', 'scale' and 'log' are needed");
  const bool batch_first =
      attributes.contains("batch_first") && *attributes.get<bool>("batch_first");
  FASTOPS_RETURN_IF_ERROR(CheckFloating(op, x, &call->dtype));
  call->scale = *scale;
  call->log = *log;
  const size_t rank = x.buffer.dimensions().size();
  if (*inner < 0 || static_cast<size_t>(*inner) >= rank)
    return InvalidArgument(op, Describe(x) + " has too few dimensions for the attribute inner");
  const size_t behind = static_cast<size_t>(*inner), axis = rank - 1 - behind;
  const std::vector<int64_t> size = SoftmaxDims(x.buffer, behind, batch_first);
  for (size_t i = 0; i < rank; ++i) {
    (i < axis ? call->shape.outer : i == axis ? call->shape.n : call->shape.inner) *= size[i];
  }
  if (mask.has_value()) {
    const NamedBuffer named("mask", *mask);
    if (mask->element_type() != ffi::DataType::PRED || mask->dimensions().size() != rank)
      return InvalidArgument(op, Describe(named) + " must be pred, of the rank of " + Describe(x));
    const std::vector<int64_t> own = SoftmaxDims(*mask, behind, batch_first);
    if (own[axis] != size[axis] && own[axis] != 1)
      return InvalidArgument(op, Describe(named) + " does not fit the rows of " + Describe(x));
    std::vector<int64_t> stride(rank);
    int64_t step = 1;
    for (size_t i = rank; i-- > 0; step *= own[i]) stride[i] = own[i] == size[i] ? step : 0;
    call->mask.data = static_cast<const uint8_t*>(mask->untyped_data());
    call->mask.stride = size[axis] == 1 ? 0 : stride[axis];
    if (!ReadMaskIndex(size, stride, 0, axis, &call->mask.outer) ||
        !ReadMaskIndex(size, stride, axis + 1, rank, &call->mask.inner))
      return InvalidArgument(op, Describe(named) + " is broadcast in too many ways");
  }
  if (workspace.has_value()) {
    const int64_t needed = call->shape.rows() * ((call->shape.n + 1023) / 1024);
    if (static_cast<int64_t>(workspace->element_count()) < needed)
      return InvalidArgument(op, Describe({"workspace", *workspace}) + " is too small");
    call->workspace = workspace->untyped_data();
  }
  return ffi::Error::Success();
}

// The remaining operand or result with this index, if it exists.
template <typename Remaining>
std::optional<ffi::AnyBuffer> OptionalArgument(const Remaining& rest, size_t index) {
  if (index >= rest.size()) return std::nullopt;
  const auto buffer = rest.template get<ffi::AnyBuffer>(index);
  return buffer.has_error() ? std::nullopt : std::optional<ffi::AnyBuffer>(*buffer);
}

template <typename Remaining>
std::optional<ffi::AnyBuffer> OptionalResult(const Remaining& rest, size_t index) {
  if (index >= rest.size()) return std::nullopt;
  auto buffer = rest.template get<ffi::AnyBuffer>(index);
  return buffer.has_error() ? std::nullopt : std::optional<ffi::AnyBuffer>(**buffer);
}

inline ffi::Error ReadSoftmaxForward(const char* op, const ffi::AnyBuffer& x,
                                     const ffi::RemainingArgs& mask, ffi::Result<ffi::AnyBuffer> y,
                                     const ffi::RemainingRets& workspace,
                                     const ffi::Dictionary& attributes, SoftmaxCall* call) {
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType(op, {"x", x}, {"y", y}));
  return ReadSoftmax(op, {"x", x}, OptionalArgument(mask, 0), OptionalResult(workspace, 0),
                     attributes, call);
}

inline ffi::Error ReadSoftmaxBackward(const char* op, const ffi::AnyBuffer& y,
                                      const ffi::AnyBuffer& dy, const ffi::RemainingArgs& mask,
                                      ffi::Result<ffi::AnyBuffer> dx,
                                      const ffi::RemainingRets& workspace,
                                      const ffi::Dictionary& attributes, SoftmaxCall* call) {
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType(op, {"y", y}, {"dy", dy}));
  FASTOPS_RETURN_IF_ERROR(CheckSameShapeAndType(op, {"y", y}, {"dx", dx}));
  FASTOPS_RETURN_IF_ERROR(ReadSoftmax(op, {"y", y}, OptionalArgument(mask, 0),
                                      OptionalResult(workspace, 0), attributes, call));
  const auto masked = attributes.get<bool>("masked");
  if (masked.has_error()) return InvalidArgument(op, "the attribute 'masked' is needed");
  call->masked = *masked;
  if (call->masked && call->log && call->mask.data == nullptr)
    return InvalidArgument(op, "log-softmax with a mask needs the mask");
  return ffi::Error::Success();
}

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_SOFTMAX_BUFFERS_H_

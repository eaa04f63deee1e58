// Reads the buffers and attributes of element-wise calls with broadcast operands, for the handlers
// of every backend.
//
// Names, operands and results of the kernels. A buffer in brackets is present if the attribute with
// its name is true:
//   lerp           start, end, weight -> out
//   lerp_bwd       dy, start, end, weight -> [dstart], [dend], [dweight], [workspace]
//   bias_act       x, bias -> y, [mask]
//   bias_act_bwd   dy, x, bias -> [dx], [dbias], [workspace]
//   bias_relu_bwd  dy, mask -> [dx], [dbias], [workspace]
// Further attributes: `activation` (elementwise/elementwise.h); `stars`; `batch_first`, if a star
// is 1.
//
// All buffers have the same rank. dy and the results of the forward have the whole shape. In a mask
// the last dimension has a byte for every 8 elements. An operand with a shorter dimension is
// broadcast along it: its index 0 is used for all. (In partitioned programs it may have several
// equal copies there.) A gradient has size 1 along dimensions over which it is summed.
//
// `stars` has an entry for each dimension after the batch dimensions, in the order of memory: 1 for
// a dimension over which the call shards, 0 for one that stays whole. In the batch-first form, the
// logical shape has the former before the latter (and one more dimension of size 1 if there are
// none of the latter), while memory is unchanged. The FFI shows only logical shapes, so the form is
// undone here.
#ifndef JAX_FASTOPS_ELEMENTWISE_BUFFERS_H_
#define JAX_FASTOPS_ELEMENTWISE_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/ffi/buffer_reader.h"
#include "core/ffi/buffers.h"
#include "elementwise/broadcast.h"
#include "elementwise/elementwise.h"

namespace jax_fastops {

struct ElementwiseCall {
  BroadcastShape shape;
  DType dtype = DType::kF32;
  Activation activation = Activation::kGelu;
  const void* dy = nullptr;
  void* out = nullptr;
  uint8_t* mask = nullptr;
  const uint8_t* saved_mask = nullptr;
  Operand operands[kMaxElementwiseOperands];
  Gradient gradients[kMaxElementwiseOperands];
  size_t gradient_bytes[kMaxElementwiseOperands] = {};
  SumWorkspace workspace;

  bool IsEmpty() const { return shape.elements() == 0; }
  // The gradients of an empty result are empty sums: `zero(data, bytes)` clears one.
  template <typename Zero>
  ffi::Error ClearGradients(const Zero& zero) const {
    for (int i = 0; i < kMaxElementwiseOperands; ++i) {
      if (gradient_bytes[i] == 0) continue;
      FASTOPS_RETURN_IF_ERROR(zero(gradients[i].data, gradient_bytes[i]));
    }
    return ffi::Error::Success();
  }
};

// Takes the buffers of a call in order and checks each of them. After the first error it returns
// only null pointers.
class ElementwiseReader : public BufferReader {
 public:
  ElementwiseReader(const char* op, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                    const ffi::Dictionary& attributes)
      : BufferReader(op, args, rets, attributes) {
    const auto stars = attributes.get<ffi::Span<const int64_t>>("stars");
    if (stars.has_error()) {
      Fail("the attribute 'stars' is needed");
      return;
    }
    stars_.assign(stars->begin(), stars->end());
    batch_first_ = attributes.contains("batch_first") && Flag("batch_first");
  }

  Activation ReadActivation() {
    const auto value = attributes().get<int64_t>("activation");
    if (!value.has_error() && *value >= 0 && *value <= static_cast<int64_t>(Activation::kRelu))
      return static_cast<Activation>(*value);
    Fail("the attribute 'activation' is needed, from 0 to 3");
    return Activation::kGelu;
  }

  // A buffer with the whole shape. It must be read before any other buffer.
  const void* Whole(const char* name) { return ReadWhole(NextArgument(name)); }
  void* WholeResult(const char* name) { return ReadWhole(NextResult(name)); }

  Operand ReadOperand(const char* name) {
    Operand operand;
    const auto named = NextArgument(name);
    std::vector<int64_t> dims;
    if (!Typed(named, &operand.wide) || !MemoryDims(*named, &dims)) return operand;
    if (named->buffer.element_count() == 0 && elements() != 0) {
      Mismatch(*named);
      return operand;
    }
    strides_.push_back(BroadcastStrides(result_, dims));
    operand.data = named->buffer.untyped_data();
    return operand;
  }

  uint8_t* MaskResult(const char* name) {
    return static_cast<uint8_t*>(ReadMask(NextResult(name)));
  }
  const uint8_t* Mask(const char* name) {
    return static_cast<const uint8_t*>(ReadMask(NextArgument(name)));
  }

  // A gradient that is not requested does not prevent the merging of dimensions.
  Gradient ReadGradient(const char* name, size_t* bytes) {
    Gradient gradient;
    std::vector<int64_t> dims = result_;
    if (Flag(name)) {
      const auto named = NextResult(name);
      if (!Typed(named, &gradient.wide) || !MemoryDims(*named, &dims)) return gradient;
      for (size_t i = 0; i < dims.size(); ++i) {
        if (dims[i] == result_[i] || dims[i] == 1) continue;
        Mismatch(*named);
        return gradient;
      }
      gradient.data = named->buffer.untyped_data();
      *bytes = named->buffer.size_bytes();
    }
    if (!failed()) strides_.push_back(BroadcastStrides(result_, dims));
    return gradient;
  }

  SumWorkspace ReadWorkspace() {
    SumWorkspace workspace;
    if (!Flag("workspace")) return workspace;
    const auto named = NextResult("workspace");
    if (failed()) return workspace;
    if (named->buffer.element_type() != accumulator_) {
      Mismatch(*named);
      return workspace;
    }
    workspace.data = named->buffer.untyped_data();
    workspace.size = static_cast<int64_t>(named->buffer.element_count());
    return workspace;
  }

  ffi::Error Finish(ElementwiseCall* call) {
    FASTOPS_RETURN_IF_ERROR(BufferReader::Finish());
    if (!Collapse(result_, strides_, &call->shape))
      return InvalidArgument(op(), "the operands are broadcast in too many ways");
    call->dtype = dtype_;
    return ffi::Error::Success();
  }

 private:
  int64_t elements() const {
    int64_t product = 1;
    for (const int64_t size : result_) product *= size;
    return product;
  }

  // The dimensions in the order of memory. All buffers have the same number.
  bool MemoryDims(const NamedBuffer& named, std::vector<int64_t>* memory) {
    const auto dims = named.buffer.dimensions();
    size_t own = 0;
    for (const int64_t star : stars_) own += star == 0;
    const size_t pad = batch_first_ && own == 0 ? 1 : 0;
    const bool fits = dims.size() >= stars_.size() + pad &&
                      (pad == 0 || dims[dims.size() - 1] == 1) &&
                      (!begun_ || dims.size() - pad == result_.size());
    if (!fits) {
      Mismatch(named);
      return false;
    }
    const size_t batch = dims.size() - pad - stars_.size();
    memory->assign(dims.begin(), dims.begin() + static_cast<ptrdiff_t>(batch));
    size_t free_at = batch, own_at = batch + stars_.size() - own;
    for (size_t i = 0; i < stars_.size(); ++i) {
      memory->push_back(dims[!batch_first_ ? batch + i : stars_[i] != 0 ? free_at++ : own_at++]);
    }
    return true;
  }

  void* ReadWhole(const std::optional<NamedBuffer>& named) {
    if (failed()) return nullptr;
    const ffi::Error error = CheckFloating(op(), *named, &dtype_);
    if (error.failure()) {
      Fail(Describe(*named) + " must be f32, bf16, f16 or f64");
      return nullptr;
    }
    type_ = named->buffer.element_type();
    accumulator_ = AccumulatorType(type_);
    if (!MemoryDims(*named, &result_)) return nullptr;
    begun_ = true;
    return named->buffer.untyped_data();
  }

  // In the element type, or in the accumulator type, which may be wider.
  bool Typed(const std::optional<NamedBuffer>& named, bool* wide) {
    if (failed()) return false;
    const auto type = named->buffer.element_type();
    *wide = type != type_;
    if (!*wide || type == accumulator_) return true;
    Mismatch(*named);
    return false;
  }

  // One bit for each element, in whole bytes for each row.
  void* ReadMask(const std::optional<NamedBuffer>& named) {
    std::vector<int64_t> dims;
    if (failed() || !MemoryDims(*named, &dims)) return nullptr;
    bool fits = named->buffer.element_type() == ffi::DataType::U8 && !dims.empty();
    for (size_t i = 0; fits && i < dims.size(); ++i) {
      fits = dims[i] == (i + 1 < dims.size() ? result_[i] : (result_[i] + 7) / 8);
    }
    if (!fits) {
      Mismatch(*named);
      return nullptr;
    }
    std::vector<int64_t> strides(dims.size());
    int64_t step = 1;
    for (size_t i = dims.size(); i-- > 0;) {
      strides[i] = step;
      step *= i + 1 < dims.size() ? dims[i] : 8 * dims[i];
    }
    strides_.push_back(strides);
    return named->buffer.untyped_data();
  }

  std::vector<int64_t> stars_;
  bool batch_first_ = false;
  bool begun_ = false;
  ffi::DataType type_ = ffi::DataType::INVALID, accumulator_ = ffi::DataType::INVALID;
  DType dtype_ = DType::kF32;
  std::vector<int64_t> result_;
  std::vector<std::vector<int64_t>> strides_;
};

inline ffi::Error ReadLerp(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                           const ffi::Dictionary& attributes, ElementwiseCall* call) {
  ElementwiseReader read("lerp", args, rets, attributes);
  call->out = read.WholeResult("out");
  call->operands[0] = read.ReadOperand("start");
  call->operands[1] = read.ReadOperand("end");
  call->operands[2] = read.ReadOperand("weight");
  return read.Finish(call);
}

inline ffi::Error ReadLerpBackward(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                   const ffi::Dictionary& attributes, ElementwiseCall* call) {
  ElementwiseReader read("lerp_bwd", args, rets, attributes);
  call->dy = read.Whole("dy");
  call->operands[0] = read.ReadOperand("start");
  call->operands[1] = read.ReadOperand("end");
  call->operands[2] = read.ReadOperand("weight");
  call->gradients[0] = read.ReadGradient("dstart", &call->gradient_bytes[0]);
  call->gradients[1] = read.ReadGradient("dend", &call->gradient_bytes[1]);
  call->gradients[2] = read.ReadGradient("dweight", &call->gradient_bytes[2]);
  call->workspace = read.ReadWorkspace();
  return read.Finish(call);
}

inline ffi::Error ReadBiasAct(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                              const ffi::Dictionary& attributes, ElementwiseCall* call) {
  ElementwiseReader read("bias_act", args, rets, attributes);
  call->activation = read.ReadActivation();
  call->out = read.WholeResult("y");
  call->operands[0] = read.ReadOperand("x");
  call->operands[1] = read.ReadOperand("bias");
  if (read.Flag("mask")) call->mask = read.MaskResult("mask");
  FASTOPS_RETURN_IF_ERROR(read.Finish(call));
  if (call->activation != Activation::kRelu || call->shape.IsFull(0)) return ffi::Error::Success();
  return InvalidArgument("bias_act", "with relu, x must have the shape of y");
}

inline ffi::Error ReadBiasActBackward(const ffi::RemainingArgs& args,
                                      const ffi::RemainingRets& rets,
                                      const ffi::Dictionary& attributes, ElementwiseCall* call) {
  ElementwiseReader read("bias_act_bwd", args, rets, attributes);
  call->activation = read.ReadActivation();
  if (call->activation == Activation::kRelu)
    return InvalidArgument("bias_act_bwd", "relu has bias_relu_bwd, which reads a mask");
  call->dy = read.Whole("dy");
  call->operands[0] = read.ReadOperand("x");
  call->operands[1] = read.ReadOperand("bias");
  call->gradients[0] = read.ReadGradient("dx", &call->gradient_bytes[0]);
  call->gradients[1] = read.ReadGradient("dbias", &call->gradient_bytes[1]);
  call->workspace = read.ReadWorkspace();
  return read.Finish(call);
}

inline ffi::Error ReadBiasReluBackward(const ffi::RemainingArgs& args,
                                       const ffi::RemainingRets& rets,
                                       const ffi::Dictionary& attributes, ElementwiseCall* call) {
  ElementwiseReader read("bias_relu_bwd", args, rets, attributes);
  call->dy = read.Whole("dy");
  call->saved_mask = read.Mask("mask");
  call->gradients[0] = read.ReadGradient("dx", &call->gradient_bytes[0]);
  call->gradients[1] = read.ReadGradient("dbias", &call->gradient_bytes[1]);
  call->workspace = read.ReadWorkspace();
  return read.Finish(call);
}

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_ELEMENTWISE_BUFFERS_H_

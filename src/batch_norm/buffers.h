// Reads the buffers and attributes of batch norm calls, for the handlers of every backend.
//
// Names, operands and results of the kernels. [...] are the groups. A buffer in brackets is present
// if the attribute with its name is true (var of the sums: if `dx` is):
//   batch_norm_fwd         x[..., n], [scale[..., c]], [bias], [residual[..., n]]
//                          -> y, mean[..., c], var, [mask[..., ceil(n / 8)]], workspace[..., w]
//   batch_norm_statistics  x[..., n] -> mean[..., c], var, workspace[..., w]
//   batch_norm_apply       x, mean[..., c], var, [scale[..., c]], [bias], [residual[..., n]]
//                          -> y, [mask[..., ceil(n / 8)]]
//   batch_norm_sums        x, dy, [dy2], [mask], mean, [var], [scale]
//                          -> [dx], [dresidual], sums[..., 2, c], workspace
//   batch_norm_bwd         x, dy, [mask], mean, var, [scale], sums, dmean[..., c], dvar
//                          -> dx
//   batch_norm_grad        x, dy, [mask], mean, var, [scale], dmean[..., c], dvar
//                          -> dx, sums[..., 2, c], workspace
// Each group's n elements are [outer, channels, inner]. They come flat: XLA may copy an array with
// a dimension of size 1 to give it another layout of the same bytes.
//
// Further attributes: `channels` and `inner`; `eps`, except for the statistics; `relu` for fwd and
// apply. Arrays with the shape of x have one type. All others, except the mask, have its
// accumulator type.
#ifndef JAX_FASTOPS_BATCH_NORM_BUFFERS_H_
#define JAX_FASTOPS_BATCH_NORM_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "batch_norm/shape.h"
#include "core/ffi/buffer_reader.h"
#include "core/ffi/buffers.h"

namespace jax_fastops {

struct BatchNormCall {
  BatchNormShape shape;
  DType dtype = DType::kF32;
  double eps = 0;
  bool relu = false;
};

// Takes the buffers of a call in order, beginning with x, and checks each of them. After the first
// error it returns only null pointers.
class BatchNormReader : public BufferReader {
 public:
  BatchNormReader(const char* op, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                  const ffi::Dictionary& attributes)
      : BufferReader(op, args, rets, attributes) {}

  // An array with the shape and type of x.
  const void* Array(const char* name) { return Check(NextArgument(name), kSame); }
  void* ArrayResult(const char* name) { return Check(NextResult(name), kSame); }
  // One value per channel, in the accumulator type.
  const void* Channels(const char* name) { return Check(NextArgument(name), kChannels); }
  void* ChannelsResult(const char* name) { return Check(NextResult(name), kChannels); }
  const void* Sums(const char* name) { return Check(NextArgument(name), kSums); }
  void* SumsResult(const char* name) { return Check(NextResult(name), kSums); }
  const void* Mask(const char* name) { return Check(NextArgument(name), kMask); }
  void* MaskResult(const char* name) { return Check(NextResult(name), kMask); }
  // The optional scale, bias and residual, for forward and apply.
  template <typename Arrays>
  void ScaleBiasResidual(Arrays* arrays) {
    if (Flag("scale")) arrays->scale = Channels("scale");
    if (Flag("bias")) arrays->bias = Channels("bias");
    if (Flag("residual")) arrays->residual = Array("residual");
  }
  void* WorkspaceResult(const char* name, int64_t* size) {
    void* const workspace = Check(NextResult(name), kWorkspace);
    *size = workspace_size_;
    return workspace;
  }

  ffi::Error Finish(BatchNormCall* call) {
    FASTOPS_RETURN_IF_ERROR(BufferReader::Finish());
    call->shape = shape_;
    call->dtype = dtype_;
    return ffi::Error::Success();
  }

 private:
  enum Kind { kSame, kChannels, kSums, kMask, kWorkspace };

  // x determines the shape and type of all other buffers.
  bool Begin(const NamedBuffer& x) {
    const auto dims = x.buffer.dimensions();
    shape_.channels = Size("channels");
    shape_.inner = Size("inner");
    if (failed()) return false;
    const int64_t row = shape_.channels * shape_.inner;
    if (CheckFloating(op(), x, &dtype_).failure() || dims.size() < 1 || shape_.channels < 1 ||
        shape_.inner < 1 || dims[dims.size() - 1] % row != 0) {
      Fail(Describe(x) + " must be f32, bf16, f16 or f64, and end in [outer * channels * inner]");
      return false;
    }
    begun_ = true;
    first_type_ = x.buffer.element_type();
    const size_t last = dims.size() - 1;
    shape_.outer = dims[last] / row;
    for (size_t i = 0; i < last; ++i) shape_.groups *= dims[i];
    return true;
  }

  // Whether the shape ends in [last] or [before, last], after dimensions with product `groups`.
  bool Has(const ffi::AnyBuffer& buffer, int64_t last, int64_t before = -1) const {
    const auto dims = buffer.dimensions();
    const size_t own = before < 0 ? 1 : 2;
    if (dims.size() < own || dims[dims.size() - 1] != last) return false;
    if (before >= 0 && dims[dims.size() - 2] != before) return false;
    int64_t groups = 1;
    for (size_t i = 0; i + own < dims.size(); ++i) groups *= dims[i];
    return groups == shape_.groups;
  }

  void* Check(const std::optional<NamedBuffer>& named, Kind kind) {
    if (failed() || (!begun_ && !Begin(*named))) return nullptr;
    const ffi::AnyBuffer& buffer = named->buffer;
    const auto type = buffer.element_type();
    const auto dims = buffer.dimensions();
    const auto accumulator = AccumulatorType(first_type_);
    bool valid = false;
    switch (kind) {
      case kSame:
        valid = type == first_type_ && Has(buffer, shape_.group_size());
        break;
      case kChannels:
        valid = type == accumulator && Has(buffer, shape_.channels);
        break;
      case kSums:
        valid = type == accumulator && Has(buffer, shape_.channels, 2);
        break;
      case kMask:
        valid = type == ffi::DataType::U8 && Has(buffer, shape_.mask_bytes());
        break;
      case kWorkspace:
        if (dims.size() > 0) workspace_size_ = dims[dims.size() - 1];
        valid = type == accumulator && Has(buffer, workspace_size_) &&
                workspace_size_ >= BatchNormWorkspace(shape_);
        break;
    }
    if (!valid) Mismatch(*named);
    return valid ? buffer.untyped_data() : nullptr;
  }

  bool begun_ = false;
  ffi::DataType first_type_ = ffi::DataType::INVALID;
  DType dtype_ = DType::kF32;
  BatchNormShape shape_;
  int64_t workspace_size_ = 0;
};

inline ffi::Error ReadBatchNormForward(const char* op, const ffi::RemainingArgs& args,
                                       const ffi::RemainingRets& rets,
                                       const ffi::Dictionary& attributes, BatchNormCall* call,
                                       BatchNormForwardArrays* arrays) {
  BatchNormReader read(op, args, rets, attributes);
  call->eps = read.Number("eps");
  call->relu = read.Flag("relu");
  arrays->x = read.Array("x");
  read.ScaleBiasResidual(arrays);
  arrays->y = read.ArrayResult("y");
  arrays->mean = read.ChannelsResult("mean");
  arrays->var = read.ChannelsResult("var");
  if (read.Flag("mask")) arrays->mask = read.MaskResult("mask");
  arrays->workspace = read.WorkspaceResult("workspace", &arrays->workspace_size);
  return read.Finish(call);
}

inline ffi::Error ReadBatchNormStatistics(const char* op, const ffi::RemainingArgs& args,
                                          const ffi::RemainingRets& rets,
                                          const ffi::Dictionary& attributes, BatchNormCall* call,
                                          BatchNormStatisticsArrays* arrays) {
  BatchNormReader read(op, args, rets, attributes);
  arrays->x = read.Array("x");
  arrays->mean = read.ChannelsResult("mean");
  arrays->var = read.ChannelsResult("var");
  arrays->workspace = read.WorkspaceResult("workspace", &arrays->workspace_size);
  return read.Finish(call);
}

inline ffi::Error ReadBatchNormApply(const char* op, const ffi::RemainingArgs& args,
                                     const ffi::RemainingRets& rets,
                                     const ffi::Dictionary& attributes, BatchNormCall* call,
                                     BatchNormApplyArrays* arrays) {
  BatchNormReader read(op, args, rets, attributes);
  call->eps = read.Number("eps");
  call->relu = read.Flag("relu");
  arrays->x = read.Array("x");
  arrays->mean = read.Channels("mean");
  arrays->var = read.Channels("var");
  read.ScaleBiasResidual(arrays);
  arrays->y = read.ArrayResult("y");
  if (read.Flag("mask")) arrays->mask = read.MaskResult("mask");
  return read.Finish(call);
}

inline ffi::Error ReadBatchNormSums(const char* op, const ffi::RemainingArgs& args,
                                    const ffi::RemainingRets& rets,
                                    const ffi::Dictionary& attributes, BatchNormCall* call,
                                    BatchNormSumsArrays* arrays) {
  BatchNormReader read(op, args, rets, attributes);
  call->eps = read.Number("eps");
  const bool dx = read.Flag("dx"), scale = read.Flag("scale");
  arrays->x = read.Array("x");
  arrays->dy = read.Array("dy");
  if (read.Flag("dy2")) arrays->dy2 = read.Array("dy2");
  if (read.Flag("mask")) arrays->mask = read.Mask("mask");
  arrays->mean = read.Channels("mean");
  if (dx) arrays->var = read.Channels("var");
  if (scale) arrays->scale = read.Channels("scale");
  if (dx) arrays->dx = read.ArrayResult("dx");
  if (read.Flag("dresidual")) arrays->dresidual = read.ArrayResult("dresidual");
  arrays->sums = read.SumsResult("sums");
  arrays->workspace = read.WorkspaceResult("workspace", &arrays->workspace_size);
  FASTOPS_RETURN_IF_ERROR(read.Finish(call));
  if (!dx && scale) return InvalidArgument(op, "without 'dx' there is no 'scale'");
  return ffi::Error::Success();
}

inline ffi::Error ReadBatchNormBackward(const char* op, const ffi::RemainingArgs& args,
                                        const ffi::RemainingRets& rets,
                                        const ffi::Dictionary& attributes, BatchNormCall* call,
                                        BatchNormBackwardArrays* arrays) {
  BatchNormReader read(op, args, rets, attributes);
  call->eps = read.Number("eps");
  arrays->x = read.Array("x");
  arrays->dy = read.Array("dy");
  if (read.Flag("mask")) arrays->mask = read.Mask("mask");
  arrays->mean = read.Channels("mean");
  arrays->var = read.Channels("var");
  if (read.Flag("scale")) arrays->scale = read.Channels("scale");
  arrays->sums = read.Sums("sums");
  arrays->dmean = read.Channels("dmean");
  arrays->dvar = read.Channels("dvar");
  arrays->dx = read.ArrayResult("dx");
  return read.Finish(call);
}

inline ffi::Error ReadBatchNormGradient(const char* op, const ffi::RemainingArgs& args,
                                        const ffi::RemainingRets& rets,
                                        const ffi::Dictionary& attributes, BatchNormCall* call,
                                        BatchNormGradientArrays* arrays) {
  BatchNormReader read(op, args, rets, attributes);
  call->eps = read.Number("eps");
  arrays->x = read.Array("x");
  arrays->dy = read.Array("dy");
  if (read.Flag("mask")) arrays->mask = read.Mask("mask");
  arrays->mean = read.Channels("mean");
  arrays->var = read.Channels("var");
  if (read.Flag("scale")) arrays->scale = read.Channels("scale");
  arrays->dmean = read.Channels("dmean");
  arrays->dvar = read.Channels("dvar");
  arrays->dx = read.ArrayResult("dx");
  arrays->sums = read.SumsResult("sums");
  arrays->workspace = read.WorkspaceResult("workspace", &arrays->workspace_size);
  return read.Finish(call);
}

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_BATCH_NORM_BUFFERS_H_

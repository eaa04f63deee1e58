// Reads the buffers and attributes of norm calls, for the handlers of every backend.
//
// Names, operands and results of the kernels. A buffer in brackets is present if the attribute with
// its name is true (mean and rstd: `statistics`; no mean with `rms`):
//   norm      x[..., n], [residual], [input_bias[n]], [scale[n]], [bias[n]]
//             -> y, [sum], [mean[...]], [rstd[...]], [workspace]
//   norm_bwd  dy[..., r, n], s, [mean], rstd, [scale], [dsum], [dy2]
//             -> dx, [dscale[..., sums, n]], [dbias], [dinput_bias]
// Further attributes: `rms`, `eps`.
#ifndef JAX_FASTOPS_NORM_BUFFERS_H_
#define JAX_FASTOPS_NORM_BUFFERS_H_

#include <cstdint>
#include <optional>

#include "core/ffi/buffer_reader.h"
#include "core/ffi/buffers.h"
#include "norm/shape.h"

namespace jax_fastops {

struct NormCall {
  NormShape shape;
  NormKind kind = NormKind::kLayer;
  DType dtype = DType::kF32;
  double eps = 0.0;
};

// Takes the buffers of a call in order and checks each of them. After the first error it returns
// only null pointers.
class NormReader : public BufferReader {
 public:
  NormReader(const char* op, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
             const ffi::Dictionary& attributes)
      : BufferReader(op, args, rets, attributes) {}

  // An array with the shape and type of x. The first one sets them.
  const void* Array(const char* name) { return Check(NextArgument(name), kSame); }
  void* ArrayResult(const char* name) { return Check(NextResult(name), kSame); }
  // One value per row, in the accumulator type.
  const void* Statistic(const char* name) { return Check(NextArgument(name), kStatistic); }
  void* StatisticResult(const char* name) { return Check(NextResult(name), kStatistic); }
  // ceil(n / 1024) accumulators per row.
  void* WorkspaceResult(const char* name) { return Check(NextResult(name), kWorkspace); }
  // Partial sums, whose shape ends in [sums, n].
  void* SumsResult(const char* name) { return Check(NextResult(name), kSums); }

  NormParameter Parameter(const char* name) {
    const auto buffer = NextArgument(name);
    NormParameter parameter;
    parameter.data = Check(buffer, kParameter);
    parameter.wide = parameter.data != nullptr && buffer->buffer.element_type() != first_type_;
    return parameter;
  }

  int64_t n() const { return n_; }
  int64_t rows() const { return rows_; }
  int64_t sums() const { return sums_; }
  DType dtype() const { return dtype_; }
  // The number of rows of a group, which has its own partial sums.
  int64_t group_rows() const { return group_rows_; }

 private:
  enum Kind { kSame, kStatistic, kParameter, kWorkspace, kSums };

  void* Check(const std::optional<NamedBuffer>& named, Kind kind) {
    if (failed()) return nullptr;
    const ffi::AnyBuffer& buffer = named->buffer;
    const auto dims = buffer.dimensions();
    const auto type = buffer.element_type();
    const int64_t count = static_cast<int64_t>(buffer.element_count());
    if (!begun_) {
      const ffi::Error error = CheckFloating(op(), *named, &dtype_);
      if (error.failure() || dims.size() == 0) {
        Fail(Describe(*named) + " must be f32, bf16, f16 or f64, with a dimension or more");
        return nullptr;
      }
      const MatrixView view = AsMatrix(buffer, 1);
      begun_ = true;
      first_type_ = type;
      n_ = view.columns;
      rows_ = view.rows;
      group_rows_ = dims.size() >= 2 ? dims[dims.size() - 2] : 1;
    }
    bool valid = false;
    switch (kind) {
      case kSame:
        valid = type == first_type_ && count == rows_ * n_ && dims.size() > 0 &&
                dims[dims.size() - 1] == n_;
        break;
      case kStatistic:
        valid = type == AccumulatorType(first_type_) && count == rows_;
        break;
      case kParameter:
        valid = (type == first_type_ || type == AccumulatorType(first_type_)) && count == n_;
        break;
      case kWorkspace:
        valid = type == AccumulatorType(first_type_) && count >= rows_ * ((n_ + 1023) / 1024);
        break;
      case kSums:
        valid = type == AccumulatorType(first_type_) && dims.size() >= 2 &&
                dims[dims.size() - 1] == n_ && (sums_ == 0 || sums_ == dims[dims.size() - 2]);
        if (valid) sums_ = dims[dims.size() - 2];
        valid = valid && count * group_rows_ == rows_ * sums_ * n_;
        break;
    }
    if (!valid) Mismatch(*named);
    return valid ? buffer.untyped_data() : nullptr;
  }

  bool begun_ = false;
  ffi::DataType first_type_ = ffi::DataType::INVALID;
  DType dtype_ = DType::kF32;
  int64_t n_ = 0, rows_ = 0, group_rows_ = 1, sums_ = 0;
};

inline ffi::Error ReadNormForward(const char* op, const ffi::RemainingArgs& args,
                                  const ffi::RemainingRets& rets, const ffi::Dictionary& attributes,
                                  NormCall* call, NormForwardArrays* arrays) {
  NormReader read(op, args, rets, attributes);
  const bool rms = read.Flag("rms"), statistics = read.Flag("statistics");
  call->eps = read.Number("eps");
  arrays->x = read.Array("x");
  if (read.Flag("residual")) arrays->residual = read.Array("residual");
  if (read.Flag("input_bias")) arrays->input_bias = read.Parameter("input_bias");
  if (read.Flag("scale")) arrays->scale = read.Parameter("scale");
  if (read.Flag("bias")) arrays->bias = read.Parameter("bias");
  arrays->y = read.ArrayResult("y");
  if (read.Flag("sum")) arrays->sum = read.ArrayResult("sum");
  if (statistics && !rms) arrays->mean = read.StatisticResult("mean");
  if (statistics) arrays->rstd = read.StatisticResult("rstd");
  if (read.Flag("workspace")) arrays->workspace = read.WorkspaceResult("workspace");
  FASTOPS_RETURN_IF_ERROR(read.Finish());
  call->kind = rms ? NormKind::kRms : NormKind::kLayer;
  call->dtype = read.dtype();
  call->shape.n = read.n();
  call->shape.rows = read.rows();
  return ffi::Error::Success();
}

inline ffi::Error ReadNormBackward(const char* op, const ffi::RemainingArgs& args,
                                   const ffi::RemainingRets& rets,
                                   const ffi::Dictionary& attributes, NormCall* call,
                                   NormBackwardArrays* arrays) {
  NormReader read(op, args, rets, attributes);
  const bool rms = read.Flag("rms");
  arrays->dy = read.Array("dy");
  arrays->s = read.Array("s");
  if (!rms) arrays->mean = read.Statistic("mean");
  arrays->rstd = read.Statistic("rstd");
  if (read.Flag("scale")) arrays->scale = read.Parameter("scale");
  if (read.Flag("dsum")) arrays->dsum = read.Array("dsum");
  if (read.Flag("dy2")) arrays->dy2 = read.Array("dy2");
  arrays->dx = read.ArrayResult("dx");
  if (read.Flag("dscale")) arrays->dscale = read.SumsResult("dscale");
  if (read.Flag("dbias")) arrays->dbias = read.SumsResult("dbias");
  if (read.Flag("dinput_bias")) arrays->dinput_bias = read.SumsResult("dinput_bias");
  FASTOPS_RETURN_IF_ERROR(read.Finish());
  call->kind = rms ? NormKind::kRms : NormKind::kLayer;
  call->dtype = read.dtype();
  call->shape.n = read.n();
  call->shape.rows = read.rows();
  if (read.sums() > 0) {
    call->shape.sums = read.sums();
    call->shape.rows = read.group_rows();
    call->shape.batch = read.group_rows() > 0 ? read.rows() / read.group_rows() : 0;
  }
  return ffi::Error::Success();
}

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_NORM_BUFFERS_H_

// The base of readers for calls with optional buffers: attributes by name, and operands and results
// in order.
#ifndef JAX_FASTOPS_CORE_FFI_BUFFER_READER_H_
#define JAX_FASTOPS_CORE_FFI_BUFFER_READER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "core/ffi/buffers.h"

namespace jax_fastops {

inline ffi::DataType AccumulatorType(ffi::DataType type) {
  return type == ffi::DataType::F64 ? ffi::DataType::F64 : ffi::DataType::F32;
}

// Keeps the first error for Finish() to report, so that a reader needs no check after each step.
// After an error it returns no more buffers.
class BufferReader {
 public:
  bool Flag(const char* name) { return Attribute<bool>(name); }
  int64_t Size(const char* name) { return Attribute<int64_t>(name); }
  double Number(const char* name) { return Attribute<double>(name); }

  ffi::Error Finish() {
    if (!failed_ && (next_arg_ != args_.size() || next_ret_ != rets_.size()))
      Fail("more buffers than the attributes tell of");
    return failed_ ? InvalidArgument(op_, what_) : ffi::Error::Success();
  }

 protected:
  BufferReader(const char* op, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
               const ffi::Dictionary& attributes)
      : op_(op), args_(args), rets_(rets), attributes_(attributes) {}
  ~BufferReader() = default;  // nobody owns a reader through this class

  const char* op() const { return op_; }
  const ffi::Dictionary& attributes() const { return attributes_; }
  bool failed() const { return failed_; }

  void Fail(const std::string& what) {
    if (!failed_) what_ = what;
    failed_ = true;
  }

  void Mismatch(const NamedBuffer& named) {
    Fail(Describe(named) + " does not fit the other buffers");
  }

  std::optional<NamedBuffer> NextArgument(const char* name) {
    if (!failed_ && next_arg_ < args_.size()) {
      const auto buffer = args_.get<ffi::AnyBuffer>(next_arg_++);
      if (!buffer.has_error()) return NamedBuffer(name, *buffer);
    }
    Fail(std::string("no operand ") + name);
    return std::nullopt;
  }

  std::optional<NamedBuffer> NextResult(const char* name) {
    if (!failed_ && next_ret_ < rets_.size()) {
      auto buffer = rets_.get<ffi::AnyBuffer>(next_ret_++);
      if (!buffer.has_error()) return NamedBuffer(name, **buffer);
    }
    Fail(std::string("no result ") + name);
    return std::nullopt;
  }

 private:
  template <typename T>
  T Attribute(const char* name) {
    const auto value = attributes_.get<T>(name);
    if (value.has_error()) Fail(std::string("the attribute '") + name + "' is needed");
    return value.has_error() ? T{} : *value;
  }

  const char* op_;
  const ffi::RemainingArgs& args_;
  const ffi::RemainingRets& rets_;
  const ffi::Dictionary& attributes_;
  size_t next_arg_ = 0, next_ret_ = 0;
  bool failed_ = false;
  std::string what_;
};

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_CORE_FFI_BUFFER_READER_H_

// A call of a kernel, as its handler sees it: buffers, sizes and attributes by name.
//
// Python sends a description of the call's buffers as the attribute `buffers`, such as
//
//   x: ... n, scale: n :acc? -> y: ... n, rstd: ... :acc
//
// It is the kernel's declaration (docs/dev/signatures.md) without the buffers that are absent. Each
// buffer is checked against it once, so a handler gets only buffers that fit each other, whatever
// wrote the program. A call with dimensions that have a star may come batch-first (attribute
// `batch_first`): in the logical shapes these dimensions follow the batch dimensions, in the order
// of the first result that has them, and every shape ends in 1 if no other dimension is left.
// Memory is unchanged, and so is everything that a Call tells.
//
// The first error is kept, and everything read after it is null, 0 or 1. Run() reports it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/backend.h"
#include "core/dtype.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fastops::inline xla {

namespace ffi = ::xla::ffi;

// Bytes per element. 0 for types of which XLA packs several into a byte, for types without
// elements, and for types newer than these headers, whose ByteWidth is undefined.
int64_t WholeBytes(ffi::DataType type);

#ifdef FASTOPS_CUDA
ffi::Error ToError(const char* op, cudaError_t status);
#endif

class Call {
 public:
  static constexpr int kMaxRank = 72;  // NumPy has 64

  // The dimensions of a buffer, in the order of memory.
  struct Dims {
    int rank = 0;
    int64_t size[kMaxRank];
    // The name of each dimension, -1 for those of `...`. Sizes derived from a name have that name.
    int name[kMaxRank];

    std::span<const int64_t> sizes() const { return {size, static_cast<size_t>(rank)}; }
  };
  // A dimension, and the products of those before and after it.
  struct Axis {
    int index = 0;
    int64_t outer = 1, size = 1, inner = 1;
  };

  Call(const char* op, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
       const ffi::Dictionary& attributes);

  // The data of an operand or a result. The name of an optional one ends in '?': null if absent.
  const void* In(std::string_view name) { return Find(name, false).data; }
  void* Out(std::string_view name) { return Find(name, true).data; }
  bool Has(std::string_view name) const { return IndexOf(name) >= 0; }
  // Sets pointers of a struct to buffers: call.Fill(&s, "x", &S::x, "y", &S::y). Pointers to const
  // get operands, the others results.
  template <typename Struct, typename Base, typename T, typename... Rest>
  void Fill(Struct* to, std::string_view name, T* Base::* member, const Rest&... rest) {
    if constexpr (std::is_const_v<T>) {
      to->*member = static_cast<T*>(In(name));
    } else {
      to->*member = static_cast<T*>(Out(name));
    }
    if constexpr (sizeof...(rest) > 0) Fill(to, rest...);
  }
  // Whether a present buffer has the accumulator type where the first operand's is narrower. Any
  // other type is an error.
  bool Wide(std::string_view name);
  Dims DimsOf(std::string_view name);
  int64_t Elements(std::string_view name);
  int64_t Bytes(std::string_view name) { return Elements(name) * WholeBytes(TypeOf(name)); }
  // The first dimension of a buffer that has this name or is derived from it.
  Axis AxisOf(std::string_view buffer, std::string_view dimension);

  // The size of a named dimension. `absent` if it is given and no buffer has the dimension.
  int64_t Size(std::string_view name, int64_t absent = -1);
  // The product of the dimensions `...`.
  int64_t Batch() const { return batch_; }
  // The element type of the first operand, which must be one that kernels compute in.
  DType Type();
  // The bytes per element of the first operand, which may have any type of whole bytes.
  int64_t ItemSize();

  template <typename T>
  T Attribute(const char* name) {
    ++attributes_read_;
    const auto value = attributes_.get<T>(name);
    if (value.has_error()) Fail(std::string("the attribute '") + name + "' is needed");
    return value.has_error() ? T{} : *value;
  }

  bool failed() const { return failed_; }
  void Fail(const std::string& what);
  // An error about a buffer if `valid` is false.
  void Require(bool valid, std::string_view buffer, const char* what);

  // Ends the reading, and runs the launcher unless something was wrong.
  template <typename Launch>
  ffi::Error Run(const Launch& launch) {
    Finish();
    if (failed_) return ffi::Error::InvalidArgument(what_);
    if constexpr (std::is_void_v<decltype(launch())>) {
      launch();
      return ffi::Error::Success();
    } else {
      return ToError(op_, launch());
    }
  }

 private:
  static constexpr int kMaxBuffers = 16, kMaxNames = 80, kMaxDims = 160, kMaxFactors = 3;

  // One dimension in the description: a product of names, divided and rounded up, plus a number.
  struct Dim {
    int8_t names;  // how many factors
    bool star;
    bool sized;  // "n=4"
    int16_t name[kMaxFactors];
    int64_t divisor, number;
  };
  // Nothing here is initialized before it is used: a call has far fewer than the maximum.
  struct Text {
    const char* data;
    size_t size;

    void operator=(std::string_view text) { data = text.data(), size = text.size(); }
    operator std::string_view() const { return {data, size}; }
  };
  struct Buffer {
    Text name, type;
    int first, count;  // of its dims
    bool batched, spread, result, read;
    ffi::DataType element;
    const int64_t* dims;
    int rank;
    void* data;

    std::span<const int64_t> shape() const { return {dims, static_cast<size_t>(rank)}; }
  };
  struct Name {
    Text text;
    int64_t size;
    int star;  // its place among the dimensions with a star, batch-first
  };

  void Parse(std::string_view text, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets);
  bool ParseDim(std::string_view word, Dim* dim);
  int NameOf(std::string_view text);
  void Bind();
  bool CheckShape(const Buffer& buffer, bool derived);
  bool CheckType(const Buffer& buffer) const;
  int64_t Resolve(const Dim& dim) const;
  // The logical position of dimension i of a buffer. `own` counts those without a star.
  int Place(const Buffer& buffer, int i, int* own) const;
  int IndexOf(std::string_view name) const;
  Buffer& Find(std::string_view name, bool result);
  ffi::DataType TypeOf(std::string_view name) const;
  void Finish();
  std::string Describe(const Buffer& buffer) const;

  const char* op_;
  const ffi::Dictionary& attributes_;
  std::string_view text_;
  bool batch_first_ = false, failed_ = false;
  size_t attributes_read_ = 0;
  int buffers_count_ = 0, names_count_ = 0, dims_count_ = 0;
  int rank_ = 0, stars_ = 0, pad_ = 0;  // of `...`; dimensions with a star; 1 if shapes end in 1
  int64_t batch_ = 1;
  std::string what_;
  Buffer none_;
  Buffer buffers_[kMaxBuffers];
  Name names_[kMaxNames];
  Dim dims_[kMaxDims];
};

}  // namespace jax_fastops::inline xla

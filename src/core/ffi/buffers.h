// Helpers for the handlers of every backend: the kernels' element types, a view of a buffer as rows
// x columns, and checks whose errors name the op, the buffers and their shapes.
//
// The Python side guarantees the same. The checks cost nanoseconds, and turn a program that was
// compiled against other kernels, or a hand-written ffi_call, into an error instead of a stray
// write.
#ifndef JAX_FASTOPS_CORE_FFI_BUFFERS_H_
#define JAX_FASTOPS_CORE_FFI_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>

#include "core/dtype.h"
#include "xla/ffi/api/ffi.h"

// Returns from the handler if `expression` evaluates to an error.
#define FASTOPS_RETURN_IF_ERROR(expression)            \
  do {                                                 \
    ::xla::ffi::Error fastops_error = (expression);    \
    if (fastops_error.failure()) return fastops_error; \
  } while (false)

namespace jax_fastops {

namespace ffi = ::xla::ffi;

// A buffer and its name in messages.
struct NamedBuffer {
  NamedBuffer(const char* name, const ffi::AnyBuffer& buffer) : name(name), buffer(buffer) {}
  NamedBuffer(const char* name, ffi::Result<ffi::AnyBuffer> result) : name(name), buffer(*result) {}

  const char* name;
  ffi::AnyBuffer buffer;
};

// The view of a buffer as a row-major matrix.
struct MatrixView {
  int64_t rows;
  int64_t columns;
};

inline MatrixView AsMatrix(const ffi::AnyBuffer& buffer, size_t column_dims) {
  const auto dims = buffer.dimensions();
  const size_t row_dims = dims.size() > column_dims ? dims.size() - column_dims : 0;
  MatrixView view{1, 1};
  for (size_t i = 0; i < dims.size(); ++i) (i < row_dims ? view.rows : view.columns) *= dims[i];
  return view;
}

// Bytes per element. 0 for types of which XLA packs several into a byte, for types without
// elements, and for types newer than these headers, whose ByteWidth is undefined.
inline int64_t WholeBytes(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::PRED:
    case ffi::DataType::S8:
    case ffi::DataType::S16:
    case ffi::DataType::S32:
    case ffi::DataType::S64:
    case ffi::DataType::U8:
    case ffi::DataType::U16:
    case ffi::DataType::U32:
    case ffi::DataType::U64:
    case ffi::DataType::F16:
    case ffi::DataType::F32:
    case ffi::DataType::F64:
    case ffi::DataType::BF16:
    case ffi::DataType::C64:
    case ffi::DataType::C128:
    case ffi::DataType::F8E5M2:
    case ffi::DataType::F8E4M3:
    case ffi::DataType::F8E4M3FN:
    case ffi::DataType::F8E4M3B11FNUZ:
    case ffi::DataType::F8E5M2FNUZ:
    case ffi::DataType::F8E4M3FNUZ:
    case ffi::DataType::F8E3M4:
    case ffi::DataType::F8E8M0FNU:
      return static_cast<int64_t>(ffi::ByteWidth(type));
    default:
      return 0;
  }
}

// "x f32[2,3]"
inline std::string Describe(const NamedBuffer& named) {
  std::ostringstream out;
  out << named.name << " " << named.buffer.element_type() << "[";
  const auto dims = named.buffer.dimensions();
  for (size_t i = 0; i < dims.size(); ++i) out << (i == 0 ? "" : ",") << dims[i];
  out << "]";
  return out.str();
}

inline ffi::Error InvalidArgument(const char* op, const std::string& what) {
  return ffi::Error::InvalidArgument(std::string("jax_fastops.") + op + ": " + what);
}

// Sets `*dtype` to the element type if kernels support it.
inline ffi::Error CheckFloating(const char* op, const NamedBuffer& x, DType* dtype) {
  switch (x.buffer.element_type()) {
    case ffi::DataType::F32:
      *dtype = DType::kF32;
      return ffi::Error::Success();
    case ffi::DataType::BF16:
      *dtype = DType::kBF16;
      return ffi::Error::Success();
    case ffi::DataType::F16:
      *dtype = DType::kF16;
      return ffi::Error::Success();
    case ffi::DataType::F64:
      *dtype = DType::kF64;
      return ffi::Error::Success();
    default:
      *dtype = DType::kF32;  // not used
      return InvalidArgument(op, Describe(x) + " must be f32, bf16, f16 or f64");
  }
}

inline ffi::Error CheckSameShapeAndType(const char* op, const NamedBuffer& a,
                                        const NamedBuffer& b) {
  const auto a_dims = a.buffer.dimensions();
  const auto b_dims = b.buffer.dimensions();
  bool same = a.buffer.element_type() == b.buffer.element_type() && a_dims.size() == b_dims.size();
  for (size_t i = 0; same && i < a_dims.size(); ++i) same = a_dims[i] == b_dims[i];
  if (same) return ffi::Error::Success();
  return InvalidArgument(op, Describe(a) + " and " + Describe(b) + " must agree in shape and type");
}

// The bitmask of `x[..., n]` is `u8[..., ceil(n / 8)]`.
inline ffi::Error CheckBitmask(const char* op, const NamedBuffer& mask, const NamedBuffer& x) {
  const auto mask_dims = mask.buffer.dimensions();
  const auto x_dims = x.buffer.dimensions();
  bool valid = mask.buffer.element_type() == ffi::DataType::U8 && x_dims.size() >= 1 &&
               mask_dims.size() == x_dims.size();
  for (size_t i = 0; valid && i + 1 < x_dims.size(); ++i) valid = mask_dims[i] == x_dims[i];
  if (valid) {
    const int64_t columns = x_dims[x_dims.size() - 1];
    valid = mask_dims[x_dims.size() - 1] == columns / 8 + (columns % 8 != 0);
  }
  if (valid) return ffi::Error::Success();
  return InvalidArgument(op, Describe(mask) +
                                 " must be u8, with one byte per 8 elements of the last axis of " +
                                 Describe(x));
}

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_CORE_FFI_BUFFERS_H_

// The element types that kernels take. No framework header may be included here: kernels and FFI
// handlers of every backend share this file.
#ifndef JAX_FASTOPS_CORE_DTYPE_H_
#define JAX_FASTOPS_CORE_DTYPE_H_

#include <cstddef>
#include <cstdint>

namespace jax_fastops {

enum class DType : uint8_t { kF32 = 0, kBF16 = 1, kF16 = 2, kF64 = 3 };
inline constexpr int kNumDTypes = 4;

constexpr size_t DTypeSize(DType dtype) {
  return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2;
}

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_CORE_DTYPE_H_

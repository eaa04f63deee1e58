// The element types that kernels take. No framework header may be included here: kernels and FFI
// handlers of every backend share this file.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jax_fastops {

enum class DType : uint8_t { kF32 = 0, kBF16 = 1, kF16 = 2, kF64 = 3 };
inline constexpr int kNumDTypes = 4;

constexpr size_t DTypeSize(DType dtype) {
  return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2;
}

}  // namespace jax_fastops

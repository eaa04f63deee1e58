// The accumulator type of a dtype, for launchers on the CPU. Their kernels are found by DType, so
// they have no other use for types.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace jax_fastops::cpu {

// In bytes.
inline int64_t ItemSize(DType dtype) { return static_cast<int64_t>(DTypeSize(dtype)); }
inline int64_t AccumulatorSize(DType dtype) { return dtype == DType::kF64 ? 8 : 4; }

// Calls f.operator()<Scalar>() with Scalar = double for float64, else float.
template <typename F>
auto WithAccumulator(DType dtype, const F& f) {
  return dtype == DType::kF64 ? f.template operator()<double>() : f.template operator()<float>();
}

}  // namespace jax_fastops::cpu

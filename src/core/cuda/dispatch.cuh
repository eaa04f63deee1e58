// From the element type that a call names to the C++ type of its kernels.
#ifndef JAX_FASTOPS_CORE_CUDA_DISPATCH_CUH_
#define JAX_FASTOPS_CORE_CUDA_DISPATCH_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/dtype.h"

namespace jax_fastops::cuda {

template <typename T>
struct TypeTag {
  using Type = T;
};

// The other way.
template <typename T>
inline constexpr DType kDTypeOf = std::is_same_v<T, float>           ? DType::kF32
                                  : std::is_same_v<T, __nv_bfloat16> ? DType::kBF16
                                  : std::is_same_v<T, __half>        ? DType::kF16
                                                                     : DType::kF64;

// Returns visit(TypeTag<T>()), where T is the C++ type of `dtype`:
//   return ForDType(dtype, [&](auto tag) {
//     using T = typename decltype(tag)::Type;
//     ...
//   });
template <typename Visit>
auto ForDType(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kF32:
      return visit(TypeTag<float>());
    case DType::kBF16:
      return visit(TypeTag<__nv_bfloat16>());
    case DType::kF16:
      return visit(TypeTag<__half>());
    default:
      return visit(TypeTag<double>());
  }
}

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CORE_CUDA_DISPATCH_CUH_

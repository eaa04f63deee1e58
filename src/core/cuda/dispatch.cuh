// From the element type that a call names to the C++ type of its kernels.
#ifndef JAX_FASTOPS_CORE_CUDA_DISPATCH_CUH_
#define JAX_FASTOPS_CORE_CUDA_DISPATCH_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/cuda/launch.h"
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

// The parameters of a kernel as one. With a pack of them, GCC does not find the kernel's type.
template <typename... Params>
struct Arguments {
  template <typename Visit, typename... Before>
  __device__ __forceinline__ void Apply(const Visit& visit, const Before&... before) const {
    visit(before...);
  }
};
template <typename First, typename... Rest>
struct Arguments<First, Rest...> {
  First first;
  Arguments<Rest...> rest;

  template <typename Visit, typename... Before>
  __device__ __forceinline__ void Apply(const Visit& visit, const Before&... before) const {
    rest.Apply(visit, before..., first);
  }
};
inline Arguments<> Together() { return {}; }
template <typename First, typename... Rest>
Arguments<First, Rest...> Together(const First& first, const Rest&... rest) {
  return {first, Together(rest...)};
}

// For calls that are rare: Body::Run<T>(params...), by one kernel for float64, which takes the most
// registers, and one for all other types.
template <typename Body, int kThreads, bool kDouble, typename Params>
__global__ void __launch_bounds__(kThreads)
    AnyTypeKernel(DType dtype, const __grid_constant__ Params params) {
  params.Apply([&](const auto&... each) {
    if constexpr (kDouble) {
      Body::template Run<double>(each...);
    } else if (dtype == DType::kF32) {
      Body::template Run<float>(each...);
    } else if (dtype == DType::kBF16) {
      Body::template Run<__nv_bfloat16>(each...);
    } else {
      Body::template Run<__half>(each...);
    }
  });
}

template <typename Family, typename Body, int kThreads, typename... Params>
cudaError_t LaunchAnyType(DType dtype, const LaunchConfig& config, cudaStream_t stream,
                          const Params&... params) {
  using All = Arguments<Params...>;
  const auto kernel = dtype == DType::kF64
                          ? KernelOf<Family, AnyTypeKernel<Body, kThreads, true, All>>()
                          : KernelOf<Family, AnyTypeKernel<Body, kThreads, false, All>>();
  return Launch(kernel, config, stream, dtype, Together(params...));
}

// In blocks of kThreads threads.
template <typename Family, typename Body, int kThreads, typename... Params>
cudaError_t LaunchAnyType(DType dtype, int64_t blocks, cudaStream_t stream,
                          const Params&... params) {
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks));
  return LaunchAnyType<Family, Body, kThreads>(
      dtype, LaunchConfig{.grid = grid, .block = dim3(kThreads)}, stream, params...);
}

}  // namespace jax_fastops::cuda

#endif  // JAX_FASTOPS_CORE_CUDA_DISPATCH_CUH_

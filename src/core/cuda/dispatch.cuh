// From the element type that a call names to the C++ type of its kernels.
#pragma once

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
//   return ForDType(dtype, [&]<typename T>(TypeTag<T>) { ... });
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

// On the device, in a kernel for all types that are computed in `A`: visit(TypeTag<T>()).
template <typename A, typename Visit>
__device__ __forceinline__ void ForTypesOf(DType dtype, const Visit& visit) {
  if constexpr (sizeof(A) == 8) {
    visit(TypeTag<double>());
  } else {
    if (dtype == DType::kF32) return visit(TypeTag<float>());
    if (dtype == DType::kBF16) return visit(TypeTag<__nv_bfloat16>());
    visit(TypeTag<__half>());
  }
}

// The type of a kernel that both types of 16 bits have in common if kBoth. Otherwise T.
template <typename T, bool kBoth>
using CommonType = std::conditional_t<kBoth && sizeof(T) == 2, __half, T>;

// On the device, in such a kernel: visit(TypeTag<U>()) with the type of the call.
template <typename T, bool kBoth, typename Visit>
__device__ __forceinline__ void ForCommonTypes([[maybe_unused]] DType dtype, const Visit& visit) {
  if constexpr (kBoth && sizeof(T) == 2) {
    if (dtype == DType::kBF16) return visit(TypeTag<__nv_bfloat16>());
  }
  visit(TypeTag<T>());
}

// Shared memory: one place for all element types of a kernel.
template <int kBytes>
__device__ __forceinline__ char* SharedBytes() {
  __shared__ __align__(16) char bytes[kBytes];
  return bytes;
}

// For calls that are rare: work.Run<T>(), by one kernel for all types. Work::kBlocks blocks fit on
// an SM: the registers are those of narrower types than float64. If it is 0, float64 has a kernel
// of its own, because a common one is slower for the others.
template <typename Work, int kThreads, bool kDouble>
__global__ void __launch_bounds__(kThreads, Work::kBlocks)
    AnyTypeKernel(DType dtype, const __grid_constant__ Work work) {
  if constexpr (kDouble) {
    if (Work::kBlocks == 0 || dtype == DType::kF64) return work.template Run<double>();
  }
  if constexpr (!kDouble || Work::kBlocks > 0) {
    ForTypesOf<float>(dtype, [&]<typename T>(TypeTag<T>) { work.template Run<T>(); });
  }
}

template <typename Family, int kThreads, typename Work>
cudaError_t LaunchAnyType(DType dtype, const LaunchConfig& config, cudaStream_t stream,
                          const Work& work) {
  constexpr bool kApart = Work::kBlocks == 0;
  const auto kernel = kApart && dtype != DType::kF64
                          ? KernelOf<Family, AnyTypeKernel<Work, kThreads, !kApart>>()
                          : KernelOf<Family, AnyTypeKernel<Work, kThreads, true>>();
  return Launch(kernel, config, stream, dtype, work);
}

}  // namespace jax_fastops::cuda

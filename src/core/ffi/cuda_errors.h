// CUDA errors as FFI errors.
#ifndef JAX_FASTOPS_CORE_FFI_CUDA_ERRORS_H_
#define JAX_FASTOPS_CORE_FFI_CUDA_ERRORS_H_

#include <cuda_runtime_api.h>

#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_fastops {

inline ::xla::ffi::Error ToError(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return ::xla::ffi::Error::Success();
  return ::xla::ffi::Error::Internal(std::string("jax_fastops.") + op + ": " +
                                     cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_CORE_FFI_CUDA_ERRORS_H_

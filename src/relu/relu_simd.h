// The ReLU kernels of one instruction set. isa.h says what this header may contain.
#ifndef JAX_FASTOPS_RELU_RELU_SIMD_H_
#define JAX_FASTOPS_RELU_RELU_SIMD_H_

#include <stdint.h>

#include "core/cpu/isa.h"
#include "core/dtype.h"

namespace jax_fastops::cpu {

// Kernels by DType, for the arrays of relu.h. `stream` requests stores that bypass the caches.
struct ReluKernels {
  using Forward = void(const void* x, const void* y, void* z, uint8_t* mask, int64_t rows,
                       int64_t columns, bool stream);
  using Backward = void(const uint8_t* mask, const void* dy, void* dx, int64_t rows,
                        int64_t columns, bool stream);
  Forward* forward[kNumDTypes];  // y may be null: nothing is added
  Backward* backward[kNumDTypes];
};
FASTOPS_DECLARE_KERNELS(ReluKernels, relu_kernels)

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_RELU_RELU_SIMD_H_

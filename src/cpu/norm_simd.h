// The kernels of layer norm and RMS norm for one instruction set. Included by the files that are
// compiled several times: see isa.h for what such a header may hold.
#ifndef JAX_FASTOPS_CPU_NORM_SIMD_H_
#define JAX_FASTOPS_CPU_NORM_SIMD_H_

#include <stdint.h>

#include "cpu/isa.h"
#include "dtype.h"
#include "norm_shape.h"

namespace jax_fastops::cpu {

struct NormKernels {
  // y, and what else is asked for, of `rows` rows of n elements; all arrays begin at the first of
  // these rows, parameters as they are. `stream`: y is written past the caches.
  using Forward = void(const NormForwardArrays& arrays, NormKind kind, double eps, int64_t rows,
                       int64_t n, bool stream);
  // dx of `rows` rows, and, where asked for, the sums over these rows, which are set.
  using Backward = void(const NormBackwardArrays& arrays, NormKind kind, int64_t rows, int64_t n,
                        bool stream);

  // By DType.
  Forward* forward[kNumDTypes];
  Backward* backward[kNumDTypes];
};
FASTOPS_DECLARE_KERNELS(NormKernels, norm_kernels)

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_CPU_NORM_SIMD_H_

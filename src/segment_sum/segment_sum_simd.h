// The inner loops of segment_sum_cpu.cc for one instruction set. isa.h says what this header may
// contain.
#ifndef JAX_FASTOPS_SEGMENT_SUM_SEGMENT_SUM_SIMD_H_
#define JAX_FASTOPS_SEGMENT_SUM_SEGMENT_SUM_SIMD_H_

#include <stdint.h>

#include "core/cpu/isa.h"
#include "core/dtype.h"

namespace jax_fastops::cpu {

// Kernels by DType, for n elements. Sums have the accumulator's type.
struct SegmentSumKernels {
  using Add = void(const char* x, int64_t n, char* sums);    // sums += x
  using Round = void(const char* sums, int64_t n, char* y);  // y = sums
  Add* add[kNumDTypes];
  Round* round[kNumDTypes];
};
FASTOPS_DECLARE_KERNELS(SegmentSumKernels, segment_sum_kernels)

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_SEGMENT_SUM_SEGMENT_SUM_SIMD_H_

// The element-wise ops over broadcast operands, and their arrays, shared by the backends.
#ifndef JAX_FASTOPS_ELEMENTWISE_ELEMENTWISE_H_
#define JAX_FASTOPS_ELEMENTWISE_ELEMENTWISE_H_

#include <cstdint>

#include "core/broadcast.h"

namespace jax_fastops {

inline constexpr int kMaxElementwiseOperands = 3;

// The gradient of an operand: summed over the dimensions along which its stride is 0.
struct Gradient {
  void* data = nullptr;  // null: not requested
  bool wide = false;     // has the accumulator type, not the element type
};

// Memory for partial sums, in elements of the accumulator type. None is needed if every requested
// gradient has the shape of the result. With more memory, more blocks can work on one sum.
struct SumWorkspace {
  void* data = nullptr;
  int64_t size = 0;
};

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_ELEMENTWISE_ELEMENTWISE_H_

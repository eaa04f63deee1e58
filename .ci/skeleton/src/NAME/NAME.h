// NAME, on raw pointers. Say here what arrays look like. Empty arrays succeed. Pointers need only
// the alignment of an element.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"

namespace jax_fastops::FASTOPS_BACKEND {

// y = x + x, for n elements.
Status Name(DType dtype, const void* x, void* y, int64_t n, Queue queue);

// CUDA only: loads the kernels on the current device.
Status LoadNameKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND

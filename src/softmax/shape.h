// The shape of a softmax and its mask, shared by the backends.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/philox.h"
#include "core/strided_index.h"

namespace jax_fastops {

// A row-major array [outer, n, inner]. Each line of n elements is one row, normalized separately.
struct SoftmaxShape {
  int64_t outer = 1;
  int64_t n = 1;
  int64_t inner = 1;

  int64_t rows() const { return outer * inner; }
};

inline constexpr int kMaxMaskRank = 16;

// The kernels of longer rows have a workspace.
inline constexpr int64_t kSoftmaxWorkspace = 16384;

// Where the mask is for an index.
using MaskIndex = StridedIndex<kMaxMaskRank>;

// A boolean array in its own shape, with one byte (0 or 1) per element. The element for x[o, i, j]
// is data[outer.Offset(o) + i * stride + inner.Offset(j)].
struct SoftmaxMask {
  const uint8_t* data = nullptr;  // null: no mask
  MaskIndex outer;
  int64_t stride = 0;  // 0 or more; 1 if the mask is as long as a row and inner is 1
  MaskIndex inner;
};

// The longest row whose softmax has a kernel with dropout.
inline constexpr int64_t kSoftmaxDropoutRow = 4096;

struct SoftmaxArguments {
  SoftmaxShape shape;
  SoftmaxMask mask;
  DType dtype = DType::kF32;
  bool log = false;
  double scale = 1;
  bool masked = false;       // backward of softmax: elements with y = 0 take no part
  RowDropout dropout;        // of the result
  const void* x = nullptr;   // of a forward, and of a backward with dropout
  const void* y = nullptr;   // of a backward without
  const void* dy = nullptr;  // of a backward
  void* out = nullptr;       // y or dx
  void* workspace = nullptr;
};

}  // namespace jax_fastops

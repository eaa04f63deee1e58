// A product, the sum with a bias, and an activation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/activation.h"
#include "core/dtype.h"

namespace jax_fastops::cuda {

// y = activation(x kernel + bias). All arrays begin at multiples of 16 bytes, and depth and columns
// are multiples of 8.
struct DenseActCall {
  DType dtype;  // kBF16 or kF16
  Activation activation;
  int rows, columns, depth;  // columns and depth: 1 or more
  const void* x;             // [rows, depth], row-major
  const void* kernel;        // [depth, columns]
  const void* bias;          // [columns]; null: none
  bool wide_bias;            // float32; else as x
  void* y;                   // [rows, columns]
};

cudaError_t DenseAct(const DenseActCall& call, cudaStream_t stream);

cudaError_t LoadDenseActKernels();

}  // namespace jax_fastops::cuda

// Attention of short sequences, read from one projection.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"

namespace jax_fastops::cuda {

inline constexpr int kShortAttentionHead = 64;     // elements of a head
inline constexpr int kShortAttentionLength = 128;  // tokens of a sequence, at most

struct ShortAttentionCall {
  DType dtype;  // kBF16 or kF16
  int64_t batch;
  int length, heads;
  float scale;
  const void* qkv;   // [batch, length, 3, heads, kShortAttentionHead], row-major
  const void* bias;  // [3, heads, kShortAttentionHead], added to qkv; null: none
  bool wide_bias;    // float32; else as qkv
  // [batch, length]: which keys count; null: all. Values of the others are not read.
  const bool* mask;
  // [batch]: the queries and keys that are not padding; null: all. Values are clamped.
  const int32_t *q_lengths, *kv_lengths;
  void* y;  // [batch, length, heads, kShortAttentionHead]
};

// The result of a query is 0 if no key counts, and after the length.
cudaError_t ShortAttention(const ShortAttentionCall& call, cudaStream_t stream);

cudaError_t LoadShortAttentionKernels();

}  // namespace jax_fastops::cuda

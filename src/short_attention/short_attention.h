// Attention of one projection.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/dtype.h"

namespace jax_fastops::cuda {

inline constexpr int kShortAttentionHead = 64;      // elements of a head
inline constexpr int kShortAttentionLength = 4096;  // tokens of a sequence, at most

// Sequences are rows of a batch, or follow each other in lists without padding.
struct ShortAttentionCall {
  DType dtype;    // kBF16 or kF16
  int64_t batch;  // sequences of all lists, or of the batch
  int length;     // tokens of a sequence; in a list, of the longest one
  int heads;
  float scale;
  const void* qkv;   // [batch, length, 3, heads, kShortAttentionHead], row-major
  const void* bias;  // [3, heads, kShortAttentionHead], added to qkv; null: none
  bool wide_bias;    // float32; else as qkv
  // [batch, length]: which keys count; null: all. Values of the others are not read.
  const bool* mask;
  // [batch]: the queries and keys that are not padding; null: all. Values are clamped.
  const int32_t *q_lengths, *kv_lengths;
  // [batch / sequences, sequences + 1]: where the sequences of each list begin, and where the last
  // one ends; null: a batch. In qkv and y, [batch / sequences, tokens] is then in the place of
  // [batch, length]. There is no mask, and there are no lengths. Offsets are clamped to the list,
  // and sequences to `length`: y is not written after that.
  const int32_t* offsets;
  int sequences, tokens;  // of a list
  void* y;                // [batch, length, heads, kShortAttentionHead]
};

// The result of a query is 0 if no key counts, after the length, and after the last sequence of a
// list.
cudaError_t ShortAttention(const ShortAttentionCall& call, cudaStream_t stream);

cudaError_t LoadShortAttentionKernels();

}  // namespace jax_fastops::cuda

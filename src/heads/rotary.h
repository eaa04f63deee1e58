// Splits a fused projection into queries, keys and values, with a bias, an RMS norm of each head of
// queries and keys, and rotary embedding, in one pass; and the backward of it, in one pass. On raw
// pointers, which need only the alignment of an element. Outputs must not overlap inputs.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"
#include "core/strided_index.h"
#include "heads/shape.h"

namespace jax_fastops {

// The longest head that the kernels take.
inline constexpr int64_t kRotaryMostHeadSize = 512;
// The rank of RotaryIndex.
inline constexpr int kRotaryRank = 8;

// How many heads share a sum of the gradient of their scale: heads 2i and 2i + 1 of queries or of
// keys, or one, if the gradient of the bias is summed too.
constexpr int RotaryHeadsPerSum(bool bias_sums) { return bias_sums ? 1 : 2; }

// The row of the angles for a batch.
using RotaryIndex = StridedIndex<kRotaryRank>;

// The merged array is x[batch, sequence, query_heads + 2 * key_heads, head_size]: queries, keys,
// values. A split array is y[batch, heads, sequence, head_size] if `heads_first`, otherwise
// y[batch, sequence, heads, head_size]. Cosines and sines are [.., sequence, 2, pairs], in the
// accumulator type. The pairs of elements that are rotated are (i, i + pairs), or (2i, 2i + 1) if
// `interleaved`.
struct RotaryShape {
  int64_t batch = 0, sequence = 0;
  int64_t query_heads = 0, key_heads = 0, head_size = 0;
  int64_t pairs = 0;  // 0: nothing is rotated
  bool interleaved = false, heads_first = true;
  double eps = 0;
  RotaryIndex angles;

  int64_t rows() const { return batch * sequence; }
  int64_t heads() const { return query_heads + 2 * key_heads; }
  int64_t features() const { return heads() * head_size; }
  // The elements of the sums of the scales, for each run of rows.
  int64_t scale_sums(bool bias_sums) const {
    const int64_t of = RotaryHeadsPerSum(bias_sums);
    return ((query_heads + of - 1) / of + (key_heads + of - 1) / of) * head_size;
  }
  int64_t part_heads(int part) const { return part == 0 ? query_heads : key_heads; }
};

// A bias and scales have the type of x, or are float32 while x has 16 bits (`wide_...`).
struct RotaryArrays {
  const void* x = nullptr;                    // backward: null if nothing is normalized
  void* y[kMaxHeadParts] = {};                // backward: the cotangents, which are only read
  void* dx = nullptr;                         // backward only
  const void* bias = nullptr;                 // null: none; backward: only where x is read
  const void* scale[2] = {nullptr, nullptr};  // null: not normalized
  bool wide_bias = false, wide_scale[2] = {false, false};
  const void* turns = nullptr;  // null: nothing is rotated
  // Partial sums [batch, groups, subgroups, ...] of the gradients, over runs of rows as HeadsSums
  // says, in the accumulator type: of the bias [features], and of the scales of queries and keys
  // [scale_sums / head_size, head_size]. Null if not wanted.
  void *bias_sums = nullptr, *scale_sums = nullptr;
};

}  // namespace jax_fastops

namespace jax_fastops::FASTOPS_BACKEND {

Status RotaryHeads(const RotaryShape& shape, DType dtype, const RotaryArrays& arrays, Queue queue);

Status RotaryHeadsBackward(const RotaryShape& shape, DType dtype, const HeadsSums& sums,
                           const RotaryArrays& arrays, Queue queue);

// CUDA only: loads the kernels on the current device.
Status LoadRotaryKernels();

}  // namespace jax_fastops::FASTOPS_BACKEND

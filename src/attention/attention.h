// Attention by cuDNN: a graph of two products with a softmax between them, which cuDNN compiles to
// one kernel forward and a few backward. No array of scores is written to memory.
#pragma once

#include <cuda_runtime_api.h>

#include <compare>
#include <cstdint>
#include <string>

#include "core/dtype.h"

namespace jax_fastops::cuda {

// The distances between heads and rows of heads in an array, in elements. Elements of a row are
// adjacent.
struct AttentionStrides {
  int64_t batch, head, row;
  auto operator<=>(const AttentionStrides&) const = default;
};

// What a plan of cuDNN depends on.
struct AttentionProblem {
  DType dtype = DType::kBF16;  // or kF16
  bool backward = false;
  int64_t batch, heads, kv_heads, queries, keys, size;
  // The strides of queries, keys, values and the result. A gradient has the strides of its array.
  AttentionStrides q, k, v, y;
  // A bias has a size of 1 where it is broadcast. 0: there is none.
  int64_t bias_batch = 0, bias_heads = 0, bias_rows = 0;
  AttentionStrides bias = {};
  bool wide_bias = false;  // float32
  bool lengths = false;
  // The most segments of an example. With it, a row of each array has several sequences, which are
  // found by offsets, and `lengths` is true. 0: an example is one sequence.
  int64_t segments = 0;
  // The keys before and after the position of a query that it may attend to. -1: all.
  int64_t before = -1, after = -1;
  double scale = 1;
  double rate = 0;             // of the dropout
  bool deterministic = false;  // the backward
  auto operator<=>(const AttentionProblem&) const = default;

  // What cuDNN takes for an example.
  int64_t sequences() const { return segments > 0 ? batch * segments : batch; }
  // Sets the strides of contiguous arrays; with `packed`, of the parts of [batch, length, 3, heads,
  // size].
  void SetStrides(bool packed);
  // Sets the strides of a contiguous bias.
  void SetBiasStrides() { bias = {bias_heads * bias_rows * keys, bias_rows * keys, keys}; }
};

// Null: absent. Gradients are null forward.
struct AttentionBuffers {
  const void *q, *k, *v, *bias = nullptr;
  // [batch, copies], of which the first copy counts. Values are clamped.
  const int32_t *q_lengths = nullptr, *kv_lengths = nullptr;
  int64_t copies = 1;
  // [batch, copies, segments], likewise.
  const int32_t *starts = nullptr, *counts = nullptr;
  const uint32_t* seeds = nullptr;  // pairs for each head
  const void* dy = nullptr;
  void *dq = nullptr, *dk = nullptr, *dv = nullptr;
  void* y;  // an operand backward
  // Likewise: logarithms of sums of exponentials, float32 [batch, heads, queries]; with segments
  // [batch, queries, heads].
  void* stats;
  char* workspace;
  int64_t workspace_bytes;
};

// Finds a plan for the current device, once for each problem. Sets the bytes of workspace that it
// takes. Returns why there is none, or an empty string.
std::string PlanAttention(const AttentionProblem& problem, int64_t* workspace_bytes);

// Enqueues the plan, which was found before. May be captured into a CUDA graph.
std::string RunAttention(const AttentionProblem& problem, const AttentionBuffers& buffers,
                         cudaStream_t stream);

// What PrepareAttention writes to the begin of the workspace.
struct Prepared {
  int32_t *q_lengths, *kv_lengths;  // [sequences]
  uint32_t* seed;                   // a seed of 64 bits, and an offset of 0
  int64_t* offsets[4];  // of queries, keys, the result and statistics: [sequences + 1], in elements
  int64_t bytes;
};
Prepared PreparedAt(const AttentionProblem& problem, char* workspace);

// Writes compact lengths, offsets with segments, and with seeds one seed that depends on all.
cudaError_t PrepareAttention(const AttentionProblem& problem, const AttentionBuffers& buffers,
                             cudaStream_t stream);

// Sets the rows of results to 0 that are after the lengths which PrepareAttention wrote. cuDNN does
// not write all of them.
cudaError_t ZeroRows(const AttentionProblem& problem, const AttentionBuffers& buffers,
                     cudaStream_t stream);

cudaError_t LoadAttentionKernels();

}  // namespace jax_fastops::cuda

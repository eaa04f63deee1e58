// What the kernels of this family share: rows of the projection in shared memory, and its bias.
//
// The bias takes no pass. Queries get theirs in registers, where it is rounded with the sum. That
// of the keys adds the same number to all scores of a query, so it changes no weight. The weights
// of a query sum to 1, so that of the values is added to the result.
#pragma once

#include "core/cuda/async_copy.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/matrix.cuh"
#include "core/cuda/vec.cuh"
#include "short_attention/short_attention.h"

namespace jax_fastops::cuda {

constexpr int kHead = kShortAttentionHead;
constexpr int kPitch = kHead + 8;  // of rows in shared memory, so that banks differ
constexpr int kWords = kHead / 8;  // of 16 bytes in a row

// Copies rows into shared memory: zeros where the bit of the row is 0. Rows after the last one are
// copies of it.
template <int kRows, int kThreads, typename T>
__device__ __forceinline__ void CopyRows(T* to, const T* from, int first, int last, int stride,
                                         const uint32_t* bits = nullptr) {
  constexpr int kStep = kThreads / kWords;  // rows at once, which divides 32
  const int own = threadIdx.x / kWords, word = threadIdx.x % kWords * 8;
#pragma unroll
  for (int row = 0; row < kRows; row += kStep) {
    T* const at = to + (row + own) * kPitch + word;
    const T* const source = from + min(first + row + own, last) * stride + word;
    CopyAsyncOrZero(bits == nullptr || bits[row / 32] >> (row % 32 + own) & 1, at, source);
  }
}

// Loads a lane's elements of two biases, that of queries and that of values, if there is a bias. P
// is their type. An element of the queries' bias becomes NaN where the keys' bias is not finite.
template <typename T, typename P>
__device__ __forceinline__ void LoadBiasOf(const ShortAttentionCall& call, int64_t first,
                                           float (&queries)[kHead / 8][2],
                                           float (&values)[kHead / 8][2]) {
  const int64_t features = static_cast<int64_t>(call.heads) * kHead;
  const P* const p = static_cast<const P*>(call.bias) + first;
#pragma unroll
  for (int d = 0; d < kHead / 8; ++d) {
    float keys[2];
    LoadParameter<T, P>(p, d * 8, queries[d]);
    LoadParameter<T, P>(p + features, d * 8, keys);
    LoadParameter<T, P>(p + 2 * features, d * 8, values[d]);
    for (int i = 0; i < 2; ++i) queries[d][i] += 0 * keys[i];
  }
}

template <typename T>
__device__ __forceinline__ void LoadBias(const ShortAttentionCall& call, int64_t first,
                                         float (&queries)[kHead / 8][2],
                                         float (&values)[kHead / 8][2]) {
  if (call.bias != nullptr && call.wide_bias) {
    LoadBiasOf<T, float>(call, first, queries, values);
  } else if (call.bias != nullptr) {
    LoadBiasOf<T, T>(call, first, queries, values);
  }
}

// Adds the bias of queries to 16 elements of a lane's rows, and rounds the sums.
template <typename T>
__device__ __forceinline__ void AddBias(MatrixA& q, const float (*bias)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Vec<T, 4> two;
    float values[2];
    two.words[0] = q[i];
    two.Unpack(values);
    for (int j = 0; j < 2; ++j) values[j] += bias[i / 2][j];
    q[i] = Vec<T, 4>::Packed(values).words[0];
  }
}

__device__ __forceinline__ int LengthOf(const int32_t* lengths, int64_t sequence, int whole) {
  return lengths == nullptr ? whole : min(lengths[sequence], whole);
}

}  // namespace jax_fastops::cuda

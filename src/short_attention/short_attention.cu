// Attention of sequences of up to 128 tokens, forward.
//
// At these lengths, one kernel takes as long as a few launches. So this one does all that is
// between the projection and the next product: it adds the bias of the projection, applies lengths
// and a mask of keys, and writes merged heads. All scores of a query are in registers, so there is
// one softmax, without the corrections of longer sequences. A warp has 16 queries of a head. The
// warps of a block share keys and values in shared memory. There are as many as leave a block for
// each SM.
#include "short_attention/short_attention.h"

#include <algorithm>

#include "core/cuda/async_copy.cuh"
#include "core/cuda/dependent.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/matrix.cuh"
#include "core/cuda/vec.cuh"

namespace jax_fastops::cuda {
struct ShortAttentionFamily;
namespace {

constexpr int kHead = kShortAttentionHead;
constexpr int kPitch = kHead + 8;  // of rows in shared memory, so that banks differ
constexpr int kWords = kHead / 8;  // of 16 bytes in a row
constexpr int kRows = 16;          // queries of a warp
constexpr int kMaxWarps = kShortAttentionLength / kRows;

// Copies rows of a part of the projection into shared memory. Rows after the last one are copies of
// it: neither their scores nor their values count, and their results are not stored.
template <typename T>
__device__ __forceinline__ void CopyRows(T* to, const T* from, int first, int count, int length,
                                         int64_t stride) {
  for (int i = threadIdx.x; i < count * kWords; i += blockDim.x) {
    const int row = min(first + i / kWords, length - 1);
    CopyAsync<16, true>(to + i / kWords * kPitch + i % kWords * 8,
                        from + row * stride + i % kWords * 8);
  }
}

// A word of a part of the bias.
template <typename T>
__device__ __forceinline__ void LoadBias(const ShortAttentionCall& call, int64_t at,
                                         float (&bias)[8]) {
  if (call.wide_bias) {
    LoadParameter<T, float>(call.bias, at, bias);
  } else {
    LoadParameter<T, T>(call.bias, at, bias);
  }
}

// Adds the bias to what this thread has copied. A sum is rounded once, as that of the arrays is.
template <typename T>
__device__ __forceinline__ void AddBias(T* rows, int count, const float (&bias)[8]) {
  // A thread has the same word of all its rows: the number of threads is a multiple of kWords.
  for (int row = threadIdx.x / kWords; row < count; row += blockDim.x / kWords) {
    T* const own = rows + row * kPitch + threadIdx.x % kWords * 8;
    float values[8];
    Vec<T>::Load(own).Unpack(values);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] += bias[i];
    Vec<T>::Packed(values).Store(own);
  }
}

__device__ __forceinline__ int LengthOf(const int32_t* lengths, int64_t sequence, int whole) {
  return lengths == nullptr ? whole : min(lengths[sequence], whole);
}

template <typename T, int kKeys>
__global__ void __launch_bounds__(32 * kMaxWarps)
    ShortAttentionKernel(const __grid_constant__ ShortAttentionCall call) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int queries = blockDim.x / 2, lane = threadIdx.x % 32, length = call.length;
  const int parts = (length + queries - 1) / queries, first = blockIdx.x % parts * queries;
  const int head = blockIdx.x / parts % call.heads;
  const int64_t sequence = blockIdx.x / parts / call.heads, begin = sequence * length;
  const int64_t features = static_cast<int64_t>(call.heads) * kHead;
  T* const ks = reinterpret_cast<T*>(shared);
  T* const vs = ks + kKeys * kPitch;
  T* const qs = vs + kKeys * kPitch;
  LetDependentsStart();
  AwaitPredecessors();
  const T* const from = static_cast<const T*>(call.qkv) + begin * 3 * features + head * kHead;
  CopyRows(qs, from, first, queries, length, 3 * features);
  CopyRows(ks, from + features, 0, kKeys, length, 3 * features);
  CopyRows(vs, from + 2 * features, 0, kKeys, length, 3 * features);
  const int keys = LengthOf(call.kv_lengths, sequence, length);
  uint32_t counts = 0;  // which of the keys of this lane count: those of its columns of a product
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) {
    const int key = i / 2 * 8 + lane % 4 * 2 + i % 2;
    const bool one = key < keys && (call.mask == nullptr || call.mask[begin + key]);
    counts |= static_cast<uint32_t>(one) << i;
  }
  if (call.bias != nullptr) {
    float bias[3][8];
    const int64_t word = head * kHead + threadIdx.x % kWords * 8;
#pragma unroll
    for (int i = 0; i < 3; ++i) LoadBias<T>(call, i * features + word, bias[i]);
    AwaitAllCopies();
    AddBias(qs, queries, bias[0]);
    AddBias(ks, kKeys, bias[1]);
    AddBias(vs, kKeys, bias[2]);
  }
  AwaitBlock<true>();
  const bool has_keys = !HoldsInWarp(counts == 0);  // its lanes have all keys, for any query
  const int own = WarpIndex() * kRows;
  MatrixC s[kKeys / 8] = {};
#pragma unroll
  for (int at = 0; at < kHead; at += 16) {
    MatrixA a;
    LoadA(a, qs + own * kPitch + at, kPitch, lane);
#pragma unroll
    for (int t = 0; t < kKeys / 8; ++t) {
      MatrixB b;
      LoadTransposedB(b, ks + t * 8 * kPitch + at, kPitch, lane);
      Multiply<T>(s[t], a, b);
    }
  }
  float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};  // of the two rows of this lane
#pragma unroll
  for (int t = 0; t < kKeys / 8; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[t][i] = counts >> (2 * t + i % 2) & 1 ? s[t][i] * call.scale : -INFINITY;
      most[i / 2] = Max()(most[i / 2], s[t][i]);
    }
  }
  Butterfly(Max(), most, 4);
#pragma unroll
  for (int t = 0; t < kKeys / 8; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[t][i] = __expf(s[t][i] - most[i / 2]);
      sum[i / 2] += s[t][i];
    }
  }
  Butterfly(Sum(), sum, 4);
  MatrixC c[kHead / 8] = {};
#pragma unroll
  for (int t = 0; t < kKeys / 16; ++t) {
    MatrixA a;
    uint32_t counting[2];  // the bits of values whose keys count: 0 times another one may be NaN
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float pair[2] = {s[2 * t + i / 2][i % 2 * 2], s[2 * t + i / 2][i % 2 * 2 + 1]};
      a[i] = Vec<T, 4>::Packed(pair).words[0];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t bits = counts >> (4 * t + 2 * i);
      counting[i] = (bits & 1) * 0xffffu | (bits >> 1 & 1) * 0xffff0000u;
    }
#pragma unroll
    for (int d = 0; d < kHead / 8; ++d) {
      MatrixB b;
      LoadB(b, vs + t * 16 * kPitch + d * 8, kPitch, lane);
      b[0] &= counting[0];
      b[1] &= counting[1];
      Multiply<T>(c[d], a, b);
    }
  }
  const int whole = LengthOf(call.q_lengths, sequence, length);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first + own + i * 8 + lane / 4;
    if (row >= length) continue;
    const bool zero = !has_keys || row >= whole;
    const float scale = 1 / sum[i];
    T* const to = static_cast<T*>(call.y) + (begin + row) * features + head * kHead + lane % 4 * 2;
#pragma unroll
    for (int d = 0; d < kHead / 8; ++d) {
      float pair[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) pair[j] = zero ? 0.0f : c[d][2 * i + j] * scale;
      Vec<T, 4>::Packed(pair).Store(to + d * 8);
    }
  }
}

template <typename T, int kKeys>
cudaError_t LaunchKernel(const ShortAttentionCall& call, cudaStream_t stream) {
  Device device;
  if (const cudaError_t error = CurrentDevice(&device); error != cudaSuccess) return error;
  const int64_t heads = call.batch * call.heads, rows = (call.length + kRows - 1) / kRows;
  int64_t warps = kKeys / kRows;
  const auto blocks = [&] { return heads * ((rows + warps - 1) / warps); };
  while (warps > 1 && (warps / 2 >= rows || blocks() < device.processors)) warps /= 2;
  const int64_t shared = sizeof(T) * kPitch * (2 * kKeys + kRows * warps);
  LaunchConfig config = Grid(blocks(), static_cast<int>(32 * warps), shared);
  config.dependent = true;
  return Launch(KernelOf<ShortAttentionFamily, ShortAttentionKernel<T, kKeys>>(), config, stream,
                call);
}

template <typename T>
cudaError_t OfType(const ShortAttentionCall& call, cudaStream_t stream) {
  if (call.length <= 32) return LaunchKernel<T, 32>(call, stream);
  return call.length <= 64 ? LaunchKernel<T, 64>(call, stream) : LaunchKernel<T, 128>(call, stream);
}

}  // namespace

cudaError_t ShortAttention(const ShortAttentionCall& call, cudaStream_t stream) {
  return call.dtype == DType::kF16 ? OfType<__half>(call, stream)
                                   : OfType<__nv_bfloat16>(call, stream);
}

cudaError_t LoadShortAttentionKernels() { return LoadKernels<ShortAttentionFamily>(); }

}  // namespace jax_fastops::cuda

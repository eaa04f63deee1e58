// Attention of sequences of up to 128 tokens, forward. tiled.cuh has longer ones.
//
// At these lengths, one kernel takes as long as a few launches. So this one does all that is
// between the projection and the next product: it adds the bias of the projection, applies lengths
// and a mask of keys, and writes merged heads. All scores of a query are in registers, so there is
// one softmax, without the corrections of longer sequences. A warp has 16 queries of a head. The
// warps of a block share keys and values in shared memory.
#include "short_attention/short_attention.h"

#include "core/cuda/async_copy.cuh"
#include "core/cuda/dependent.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/math.cuh"
#include "core/cuda/matrix.cuh"
#include "core/cuda/vec.cuh"
#include "short_attention/rows.cuh"
#include "short_attention/tiled.cuh"

namespace jax_fastops::cuda {
struct ShortAttentionFamily;
namespace {

// Threads of a block with so many keys. A block has half as many queries.
constexpr int ThreadsOf(int keys) { return keys <= 32 ? 64 : 128; }

template <typename T, int kKeys>
__global__ void __launch_bounds__(ThreadsOf(kKeys))
    ShortAttentionKernel(const __grid_constant__ ShortAttentionCall call) {
  constexpr int kThreads = ThreadsOf(kKeys), kQueries = kThreads / 2;
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x % 32, column = lane % 4 * 2, length = call.length;
  const int parts = (length + kQueries - 1) / kQueries, first = blockIdx.x % parts * kQueries;
  const int head = blockIdx.x / parts % call.heads;
  const int64_t sequence = blockIdx.x / parts / call.heads, begin = sequence * length;
  const int features = call.heads * kHead, stride = 3 * features;
  T* const ks = reinterpret_cast<T*>(shared);
  T* const vs = ks + kKeys * kPitch;
  T* const qs = vs + kKeys * kPitch;
  LetDependentsStart();
  AwaitPredecessors();
  const T* const from = static_cast<const T*>(call.qkv) + begin * stride + head * kHead;
  CopyRows<kQueries, kThreads>(qs, from, first, length - 1, stride);
  CopyRows<kKeys, kThreads>(ks, from + features, 0, length - 1, stride);
  CommitCopies();
  const int keys = LengthOf(call.kv_lengths, sequence, length);
  uint32_t counts[kKeys / 32], any = 0;  // bits of the keys that count
#pragma unroll
  for (int i = 0; i < kKeys / 32; ++i) {
    const int key = 32 * i + lane;
    counts[i] = LanesWhere(key < keys && (call.mask == nullptr || call.mask[begin + key]));
    any |= counts[i];
  }
  // Values that do not count are zeros: a weight of 0 times another one may be NaN.
  CopyRows<kKeys, kThreads>(vs, from + 2 * features, 0, length - 1, stride, counts);
  CommitCopies();
  float query_bias[kHead / 8][2] = {}, value_bias[kHead / 8][2] = {};
  LoadBias<T>(call, head * kHead + column, query_bias, value_bias);
  AwaitCopies<1>();
  AwaitBlock<false>();
  const int own = WarpIndex() * 16;
  MatrixA q[kHead / 16];
#pragma unroll
  for (int d = 0; d < kHead / 16; ++d) {
    LoadA(q[d], qs + own * kPitch + d * 16, kPitch, lane);
    if (call.bias != nullptr) AddBias<T>(q[d], query_bias + 2 * d);
  }
  MatrixC s[kKeys / 8] = {};
#pragma unroll
  for (int d = 0; d < kHead / 16; d += 2) {
#pragma unroll
    for (int t = 0; t < kKeys / 8; ++t) {
      uint32_t b[4];
      LoadTwoTransposedB(b, ks + t * 8 * kPitch + d * 16, kPitch, lane);
      Multiply<T>(s[t], q[d], b);
      Multiply<T>(s[t], q[d + 1], b + 2);
    }
  }
  float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};  // of the two rows of this lane
  const float scale = call.scale * kLog2E;
#pragma unroll
  for (int t = 0; t < kKeys / 8; ++t) {
    const uint32_t bits = counts[t / 4] >> column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[t][i] = bits >> (t % 4 * 8 + i % 2) & 1 ? s[t][i] * scale : -INFINITY;
      most[i / 2] = Max()(most[i / 2], s[t][i]);
    }
  }
  Butterfly(Max(), most, 4);
#pragma unroll
  for (int t = 0; t < kKeys / 8; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[t][i] = Exp2(s[t][i] - most[i / 2]);
      sum[i / 2] += s[t][i];
    }
  }
  Butterfly(Sum(), sum, 4);
  AwaitBlock<true>();
  MatrixC y[kHead / 8] = {};
#pragma unroll
  for (int t = 0; t < kKeys / 16; ++t) {
    MatrixA weights;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float pair[2] = {s[2 * t + i / 2][i % 2 * 2], s[2 * t + i / 2][i % 2 * 2 + 1]};
      weights[i] = Vec<T, 4>::Packed(pair).words[0];
    }
#pragma unroll
    for (int d = 0; d < kHead / 8; d += 2) {
      uint32_t b[4];
      LoadTwoB(b, vs + t * 16 * kPitch + d * 8, kPitch, lane);
      Multiply<T>(y[d], weights, b);
      Multiply<T>(y[d + 1], weights, b + 2);
    }
  }
  const int queries = LengthOf(call.q_lengths, sequence, length);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first + own + i * 8 + lane / 4;
    if (row >= length) continue;
    const bool zero = any == 0 || row >= queries;
    const float factor = 1 / sum[i];
    T* const to = static_cast<T*>(call.y) + (begin + row) * features + head * kHead + column;
#pragma unroll
    for (int d = 0; d < kHead / 8; ++d) {
      float pair[2];
      for (int j = 0; j < 2; ++j) {
        pair[j] = zero ? 0.0f : y[d][2 * i + j] * factor + value_bias[d][j];
      }
      Vec<T, 4>::Packed(pair).Store(to + d * 8);
    }
  }
}

template <typename T, int kKeys>
cudaError_t LaunchKernel(const ShortAttentionCall& call, cudaStream_t stream) {
  constexpr int kThreads = ThreadsOf(kKeys), kQueries = kThreads / 2;
  const int64_t parts = (call.length + kQueries - 1) / kQueries;
  LaunchConfig config =
      Grid(call.batch * call.heads * parts, kThreads, sizeof(T) * kPitch * (2 * kKeys + kQueries));
  config.dependent = true;
  return Launch(KernelOf<ShortAttentionFamily, ShortAttentionKernel<T, kKeys>>(), config, stream,
                call);
}

template <typename T>
cudaError_t LaunchTiled(const ShortAttentionCall& call, cudaStream_t stream) {
  const int64_t rests = call.offsets == nullptr ? 0 : call.batch / call.sequences;
  const int64_t blocks = (call.batch + rests) * call.heads * Tiled::Parts(call.length);
  LaunchConfig config = Grid(blocks, Tiled::kThreads, Tiled::SharedBytes(call.length));
  config.dependent = true;
  return Launch(KernelOf<ShortAttentionFamily, TiledAttentionKernel<T>>(), config, stream, call);
}

template <typename T>
cudaError_t OfType(const ShortAttentionCall& call, cudaStream_t stream) {
  if (call.length > 128 || call.offsets != nullptr) return LaunchTiled<T>(call, stream);
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

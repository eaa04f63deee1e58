// Attention of sequences of up to 128 tokens, forward.
//
// At these lengths, one kernel takes as long as a few launches. So this one does all that is
// between the projection and the next product: it adds the bias of the projection, applies the mask
// of keys and writes merged heads. All scores of a query are in registers, so there is one softmax,
// without the corrections of longer sequences. A warp has 16 queries of a head. The warps of a
// block share keys and values in shared memory. There are as many as leave a block for each SM.
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
// it: their scores do not count, and their results are not stored.
template <typename T>
__device__ __forceinline__ void CopyRows(T* to, const T* from, int first, int count, int length,
                                         int64_t stride) {
  for (int i = threadIdx.x; i < count * kWords; i += blockDim.x) {
    const int row = min(first + i / kWords, length - 1);
    CopyAsync<16, true>(to + i / kWords * kPitch + i % kWords * 8,
                        from + row * stride + i % kWords * 8);
  }
}

// Adds the bias to what this thread has copied. Sums are rounded, as those of the array would be.
template <typename T>
__device__ __forceinline__ void AddBias(T* rows, int count, const ShortAttentionCall& call,
                                        int64_t at) {
  // A thread has the same word of all its rows: the number of threads is a multiple of kWords.
  const int word = threadIdx.x % kWords * 8;
  float bias[8], values[8];
  if (call.wide_bias) {
    Vec<float, 32>::Load(static_cast<const float*>(call.bias) + at + word).Unpack(bias);
    Vec<T>::Packed(bias).Unpack(bias);
  } else {
    Vec<T>::Load(static_cast<const T*>(call.bias) + at + word).Unpack(bias);
  }
  for (int row = threadIdx.x / kWords; row < count; row += blockDim.x / kWords) {
    T* const own = rows + row * kPitch + word;
    Vec<T>::Load(own).Unpack(values);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] += bias[i];
    Vec<T>::Packed(values).Store(own);
  }
}

template <typename T, int kKeys>
__global__ void __launch_bounds__(32 * kMaxWarps)
    ShortAttentionKernel(const __grid_constant__ ShortAttentionCall call) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int queries = blockDim.x / 2, lane = threadIdx.x % 32, length = call.length;
  const int parts = (length + queries - 1) / queries, part = blockIdx.x % parts;
  const int head = blockIdx.x / parts % call.heads, first = part * queries;
  const int64_t begin = static_cast<int64_t>(blockIdx.x / parts / call.heads) * length;
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
  uint32_t counts = 0;  // which of the keys of this lane count
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) {
    const int key = i / 2 * 8 + lane % 4 * 2 + i % 2;
    const bool one = key < length && (call.mask == nullptr || call.mask[begin + key]);
    counts |= static_cast<uint32_t>(one) << i;
  }
  if (call.bias != nullptr) {
    AwaitAllCopies();
    AddBias(qs, queries, call, head * kHead);
    AddBias(ks, kKeys, call, features + head * kHead);
    AddBias(vs, kKeys, call, 2 * features + head * kHead);
  }
  AwaitCopiesOfBlock();
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
      s[t][i] = most[i / 2] == -INFINITY ? 0.0f : __expf(s[t][i] - most[i / 2]);
      sum[i / 2] += s[t][i];
    }
  }
  Butterfly(Sum(), sum, 4);
  MatrixC c[kHead / 8] = {};
#pragma unroll
  for (int t = 0; t < kKeys / 16; ++t) {
    MatrixA a;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float pair[2] = {s[2 * t + i / 2][i % 2 * 2], s[2 * t + i / 2][i % 2 * 2 + 1]};
      a[i] = Vec<T, 4>::Packed(pair).words[0];
    }
#pragma unroll
    for (int d = 0; d < kHead / 8; ++d) {
      MatrixB b;
      LoadB(b, vs + t * 16 * kPitch + d * 8, kPitch, lane);
      Multiply<T>(c[d], a, b);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first + own + i * 8 + lane / 4;
    if (row >= length) continue;
    const float scale = sum[i] == 0 ? 0.0f : 1 / sum[i];
    T* const to = static_cast<T*>(call.y) + (begin + row) * features + head * kHead + lane % 4 * 2;
#pragma unroll
    for (int d = 0; d < kHead / 8; ++d) {
      const float pair[2] = {c[d][2 * i] * scale, c[d][2 * i + 1] * scale};
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

// A trial: the layers of BERT-base as one call would run them. A CUDA graph has all launches of 12
// layers, or they are launched one by one: products by cuBLASLt, whose algorithms are timed first,
// or by the tiled product below for few tokens, and kernels for attention, norms and GELU, with and
// without programmatic dependent launches. Data is random. encoder_layer.py compiles and runs it,
// and says what the output means.
//
// A block of the tiled product has one part of the sum for one tile of the result. It requests its
// weights before it waits for the preceding kernel, because weights do not depend on it. The blocks
// of a tile are a cluster. They add their parts through distributed shared memory, and apply bias
// and GELU.
#include <cooperative_groups.h>
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/cuda/async_copy.cuh"
#include "core/cuda/dependent.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/matrix.cuh"
#include "core/cuda/vec.cuh"

namespace cg = cooperative_groups;
using namespace jax_fastops::cuda;
using bf16 = __nv_bfloat16;

#define CHECK(call)                                                                 \
  do {                                                                              \
    if (const auto code = (call); static_cast<int>(code) != 0) {                    \
      std::fprintf(stderr, "%s:%d: %d\n", #call, __LINE__, static_cast<int>(code)); \
      std::exit(1);                                                                 \
    }                                                                               \
  } while (false)

constexpr int kFeatures = 768, kInner = 3072, kHeads = 12, kSize = 64, kLayers = 12;

// ---- functions -------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t Pack(float a, float b) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<uint32_t*>(&pair);
}

__device__ __forceinline__ float Gelu(float x) { return 0.5f * x * (1 + erff(x * 0.70710678f)); }

using MatrixB = uint32_t[2];

// B, whose 16 rows are rows at `p`.
template <typename T>
__device__ __forceinline__ void LoadB(MatrixB& b, const T* p, int pitch, int lane) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(b[0]), "=r"(b[1])
               : "r"(SharedAddress(p + lane % 16 * pitch)));
}

// B, whose 8 columns are rows at `p`.
template <typename T>
__device__ __forceinline__ void LoadTransposedB(MatrixB& b, const T* p, int pitch, int lane) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(b[0]), "=r"(b[1])
               : "r"(SharedAddress(p + lane % 8 * pitch + lane / 8 % 2 * 8)));
}

__device__ __forceinline__ void Begin() {
  LetDependentsStart();
  AwaitPredecessors();
}

// ---- kernels ------------------------------------------------------------------------------------

// y [tokens, n] = act(x [tokens, k] w [k, n] + bias). A cluster has `split` blocks of `part` terms.
template <int BM, int BN, int WN, bool kGelu>
__global__ void __launch_bounds__(BM / 32 * WN * 32)
    Product(const bf16* __restrict__ x, const bf16* __restrict__ w, const bf16* __restrict__ bias,
            bf16* __restrict__ y, int n, int k, int part, int split) {
  constexpr int kThreads = BM / 32 * WN * 32, kTiles = BN / WN / 8, kPitch = BN + 8;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* ws = reinterpret_cast<bf16*>(shared);
  bf16* xs = ws + part * kPitch;
  auto* sums = reinterpret_cast<float*>(shared);  // after the products
  const int x_pitch = part + 8, rank = blockIdx.x % split, first = blockIdx.x / split * BN;
  const int row = blockIdx.y * BM, begin = rank * part, thread = threadIdx.x;
  for (int i = thread; i < part * (BN / 8); i += kThreads) {
    const int r = i / (BN / 8), c = i % (BN / 8) * 8;
    CopyAsync<16, true>(ws + r * kPitch + c, w + static_cast<int64_t>(begin + r) * n + first + c);
  }
  Begin();
  for (int i = thread; i < BM * (part / 8); i += kThreads) {
    const int r = i / (part / 8), c = i % (part / 8) * 8;
    CopyAsync<16, true>(xs + r * x_pitch + c, x + static_cast<int64_t>(row + r) * k + begin + c);
  }
  AwaitBlock<true>();
  const int warp = thread / 32, lane = thread % 32, wm = warp / WN * 32,
            wn = warp % WN * kTiles * 8;
  float c[2][kTiles][4] = {};
#pragma unroll 4
  for (int at = 0; at < part; at += 16) {
    MatrixA a[2];
    MatrixB b[kTiles];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      LoadA(a[m], xs + (wm + m * 16) * x_pitch + at, x_pitch, lane);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      LoadB(b[t], ws + at * kPitch + wn + t * 8, kPitch, lane);
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) Multiply<bf16>(c[m][t], a[m], b[t]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float* to = sums + (wm + m * 16 + lane / 4) * BN + wn + t * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = make_float2(c[m][t][0], c[m][t][1]);
      *reinterpret_cast<float2*>(to + 8 * BN) = make_float2(c[m][t][2], c[m][t][3]);
    }
  }
  cg::cluster_group cluster = cg::this_cluster();
  if (split > 1) {
    cluster.sync();
  } else {
    __syncthreads();
  }
  for (int i = rank * kThreads + thread; i < BM * BN / 4; i += split * kThreads) {
    float4 sum = make_float4(0, 0, 0, 0);
    for (int s = 0; s < split; ++s) {
      const float* from = split > 1 ? cluster.map_shared_rank(sums, s) : sums;
      const float4 v = reinterpret_cast<const float4*>(from)[i];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    const int r = i / (BN / 4), column = first + i % (BN / 4) * 4;
    const uint2 raw = *reinterpret_cast<const uint2*>(bias + column);
    const float2 b0 = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&raw.x));
    const float2 b1 = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&raw.y));
    sum.x += b0.x, sum.y += b0.y, sum.z += b1.x, sum.w += b1.y;
    if constexpr (kGelu) {
      sum = make_float4(Gelu(sum.x), Gelu(sum.y), Gelu(sum.z), Gelu(sum.w));
    }
    *reinterpret_cast<uint2*>(y + static_cast<int64_t>(row + r) * n + column) =
        make_uint2(Pack(sum.x, sum.y), Pack(sum.z, sum.w));
  }
  if (split > 1) cluster.sync();  // others read this block's sums
}

// Each warp has 16 queries of a head, and all of its keys.
template <int L>
__global__ void Attention(const bf16* __restrict__ qkv, const int* __restrict__ lengths,
                          bf16* __restrict__ y) {
  constexpr int kPitch = kSize + 8, kStride = 3 * kFeatures;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* ks = reinterpret_cast<bf16*>(shared);
  bf16 *vs = ks + L * kPitch, *qs = vs + L * kPitch;
  const int rows = blockDim.x / 2, first = blockIdx.x * rows, head = blockIdx.y, b = blockIdx.z;
  const bf16* from = qkv + static_cast<int64_t>(b) * L * kStride + head * kSize;
  const int length = lengths[b];
  Begin();
  for (int i = threadIdx.x; i < rows * 8; i += blockDim.x) {
    CopyAsync<16, true>(qs + i / 8 * kPitch + i % 8 * 8,
                        from + (first + i / 8) * kStride + i % 8 * 8);
  }
  for (int i = threadIdx.x; i < L * 8; i += blockDim.x) {
    const bf16* key = from + kFeatures + i / 8 * kStride + i % 8 * 8;
    CopyAsync<16, true>(ks + i / 8 * kPitch + i % 8 * 8, key);
    CopyAsync<16, true>(vs + i / 8 * kPitch + i % 8 * 8, key + kFeatures);
  }
  AwaitBlock<true>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float s[L / 8][4] = {};
#pragma unroll
  for (int at = 0; at < kSize; at += 16) {
    MatrixA a;
    LoadA(a, qs + warp * 16 * kPitch + at, kPitch, lane);
#pragma unroll
    for (int t = 0; t < L / 8; ++t) {
      MatrixB key;
      LoadTransposedB(key, ks + t * 8 * kPitch + at, kPitch, lane);
      Multiply<bf16>(s[t], a, key);
    }
  }
  float most[2] = {-1e30f, -1e30f}, sum[2] = {};
#pragma unroll
  for (int t = 0; t < L / 8; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[t][i] = t * 8 + lane % 4 * 2 + i % 2 < length ? s[t][i] * 0.125f : -1e30f;
      most[i / 2] = fmaxf(most[i / 2], s[t][i]);
    }
  }
  Butterfly(Max(), most, 4);
#pragma unroll
  for (int t = 0; t < L / 8; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i / 2] += s[t][i] = __expf(s[t][i] - most[i / 2]);
  }
  Butterfly(Sum(), sum, 4);
  float c[kSize / 8][4] = {};
#pragma unroll
  for (int t = 0; t < L / 16; ++t) {
    const auto &one = s[2 * t], &two = s[2 * t + 1];
    const MatrixA a = {Pack(one[0], one[1]), Pack(one[2], one[3]), Pack(two[0], two[1]),
                       Pack(two[2], two[3])};
#pragma unroll
    for (int d = 0; d < kSize / 8; ++d) {
      MatrixB value;
      LoadB(value, vs + t * 16 * kPitch + d * 8, kPitch, lane);
      Multiply<bf16>(c[d], a, value);
    }
  }
  const int64_t row = static_cast<int64_t>(b) * L + first + warp * 16 + lane / 4;
#pragma unroll
  for (int d = 0; d < kSize / 8; ++d) {
    bf16* to = y + row * kFeatures + head * kSize + d * 8 + lane % 4 * 2;
    *reinterpret_cast<uint32_t*>(to) = Pack(c[d][0] / sum[0], c[d][1] / sum[0]);
    *reinterpret_cast<uint32_t*>(to + 8 * kFeatures) = Pack(c[d][2] / sum[1], c[d][3] / sum[1]);
  }
}

// The layer norm of x + residual + bias. A warp has a row.
__global__ void Norm(const bf16* __restrict__ x, const bf16* __restrict__ residual,
                     const bf16* __restrict__ bias, const bf16* __restrict__ scale,
                     const bf16* __restrict__ shift, bf16* __restrict__ y) {
  constexpr int kWords = kFeatures / 256;
  const int lane = threadIdx.x % 32;
  const int64_t at =
      (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * static_cast<int64_t>(kFeatures) +
      lane * 8;
  float v[kWords][8], mean = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if (bias == nullptr) {
      for (float& one : v[i]) one = 0;
    } else {
      Vec<bf16>::Load(bias + i * 256 + lane * 8).Unpack(v[i]);
    }
  }
  Begin();
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    float a[8], b[8];
    Vec<bf16>::Load(x + at + i * 256).Unpack(a);
    Vec<bf16>::Load(residual + at + i * 256).Unpack(b);
#pragma unroll
    for (int j = 0; j < 8; ++j) mean += v[i][j] += a[j] + b[j];
  }
#pragma unroll
  for (int m = 16; m > 0; m /= 2) mean += __shfl_xor_sync(~0u, mean, m);
  mean /= kFeatures;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += (v[i][j] - mean) * (v[i][j] - mean);
  }
#pragma unroll
  for (int m = 16; m > 0; m /= 2) squares += __shfl_xor_sync(~0u, squares, m);
  const float rstd = rsqrtf(squares / kFeatures + 1e-12f);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    float a[8], b[8];
    Vec<bf16>::Load(scale + i * 256 + lane * 8).Unpack(a);
    Vec<bf16>::Load(shift + i * 256 + lane * 8).Unpack(b);
#pragma unroll
    for (int j = 0; j < 8; ++j) a[j] = (v[i][j] - mean) * rstd * a[j] + b[j];
    Vec<bf16>::Packed(a).Store(y + at + i * 256);
  }
}

__global__ void BiasGelu(bf16* __restrict__ x, const bf16* __restrict__ bias, int n) {
  const int64_t at = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) * 8;
  float v[8], b[8];
  Vec<bf16>::Load(bias + at % n).Unpack(b);
  Begin();
  Vec<bf16>::Load(x + at).Unpack(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = Gelu(v[i] + b[i]);
  Vec<bf16>::Packed(v).Store(x + at);
}

__global__ void Fill(bf16* x, int64_t size, uint32_t seed, float scale, float shift) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    float sum = 0;  // of four uniform numbers, nearly normal
    for (uint32_t j = 0; j < 4; ++j) {
      uint32_t h = static_cast<uint32_t>(i) * 4 + j + seed * 0x9e3779b9u;
      h = (h ^ (h >> 16)) * 0x85ebca6bu;
      h = (h ^ (h >> 13)) * 0xc2b2ae35u;
      sum += static_cast<float>(h ^ (h >> 16)) * (1.0f / 4294967296.0f) - 0.5f;
    }
    x[i] = __float2bfloat16(sum * 1.7320508f * scale + shift);
  }
}

// ---- launches -----------------------------------------------------------------------------------

bool dependent = false;
cudaStream_t stream;

template <typename... Params>
void Launch(void (*kernel)(Params...), dim3 grid, int threads, size_t bytes, int cluster,
            std::type_identity_t<Params>... params) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {
      .gridDim = grid, .blockDim = dim3(threads), .dynamicSmemBytes = bytes, .stream = stream};
  config.attrs = attributes;
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = cluster;
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  if (dependent) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  CHECK(cudaLaunchKernelEx(&config, kernel, params...));
}

// Milliseconds of one of the calls.
double Timed(const std::function<void()>& calls, int count) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<double> times;
  for (int run = 0; run < 4; ++run) {
    CHECK(cudaEventRecord(begin, stream));
    calls();
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (run > 0) times.push_back(ms / count);
  }
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[1];
}

cudaGraphExec_t Captured(const std::function<void()>& calls) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  calls();
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&executable, graph, 0));
  CHECK(cudaGraphDestroy(graph));
  return executable;
}

double TimedGraph(const std::function<void()>& calls, int count) {
  const cudaGraphExec_t graph = Captured(calls);
  const double ms = Timed([&] { CHECK(cudaGraphLaunch(graph, stream)); }, count);
  CHECK(cudaGraphExecDestroy(graph));
  return ms;
}

// ---- cuBLASLt -----------------------------------------------------------------------------------

void* library;
cublasLtHandle_t handle;
void* workspace;
constexpr size_t kWorkspace = 32 << 20;

#define LT(name) reinterpret_cast<decltype(&name)>(dlsym(library, #name))

bf16* Array(int64_t size, float scale, float shift = 0) {
  static uint32_t seed = 0;
  bf16* found;
  CHECK(cudaMalloc(&found, size * sizeof(bf16)));
  Fill<<<1024, 256, 0, stream>>>(found, size, ++seed, scale, shift);
  return found;
}

struct Weights {
  int k, n;
  std::vector<bf16*> kernels, biases;
  Weights(int k, int n) : k(k), n(n) {
    for (int layer = 0; layer < kLayers; ++layer) {
      kernels.push_back(Array(static_cast<int64_t>(k) * n, 0.03f));
      biases.push_back(Array(n, 0.02f));
    }
  }
};

// y = act(x w + bias) in one of the ways that were timed. `y(x, layer, result)` enqueues it.
struct Way {
  std::string name;
  double ms = 1e9;
  std::function<void(const bf16*, int, bf16*)> call;
};

Way ByLt(const Weights& w, int tokens, cublasLtEpilogue_t epilogue, const bf16* x, bf16* y) {
  cublasLtMatmulDesc_t how;
  cublasLtMatrixLayout_t a, b, d;
  cublasLtMatmulPreference_t preference;
  CHECK(LT(cublasLtMatmulDescCreate)(&how, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  CHECK(LT(cublasLtMatmulDescSetAttribute)(how, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                           sizeof epilogue));
  const bool biased = epilogue != CUBLASLT_EPILOGUE_DEFAULT;
  const auto bias = [=](int layer) {
    const void* pointer = w.biases[layer];
    CHECK(LT(cublasLtMatmulDescSetAttribute)(how, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &pointer,
                                             sizeof pointer));
  };
  if (biased) bias(0);
  CHECK(LT(cublasLtMatrixLayoutCreate)(&a, CUDA_R_16BF, w.n, w.k, w.n));
  CHECK(LT(cublasLtMatrixLayoutCreate)(&b, CUDA_R_16BF, w.k, tokens, w.k));
  CHECK(LT(cublasLtMatrixLayoutCreate)(&d, CUDA_R_16BF, w.n, tokens, w.n));
  CHECK(LT(cublasLtMatmulPreferenceCreate)(&preference));
  CHECK(LT(cublasLtMatmulPreferenceSetAttribute)(
      preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspace, sizeof kWorkspace));
  cublasLtMatmulHeuristicResult_t results[16];
  int count = 0;
  CHECK(
      LT(cublasLtMatmulAlgoGetHeuristic)(handle, how, a, b, d, d, preference, 16, results, &count));
  Way best;
  for (int i = 0; i < count; ++i) {
    const auto algorithm = results[i].algo;
    const auto call = [=](const bf16* x, int layer, bf16* y) {
      const float one = 1, zero = 0;
      if (biased) bias(layer);
      return LT(cublasLtMatmul)(handle, how, &one, w.kernels[layer], a, x, b, &zero, y, d, y, d,
                                &algorithm, workspace, kWorkspace, stream);
    };
    if (call(x, 0, y) != CUBLAS_STATUS_SUCCESS) continue;
    const double ms = TimedGraph(
        [&] {
          for (int layer = 0; layer < kLayers; ++layer) CHECK(call(x, layer, y));
        },
        kLayers);
    if (ms < best.ms) {
      best = {"cublasLt " + std::to_string(i), ms,
              [=](const bf16* x, int layer, bf16* y) { CHECK(call(x, layer, y)); }};
    }
  }
  return best;
}

template <int BM, int BN, int WN, bool kGelu>
void TryTile(Way* best, const Weights& w, int tokens, const bf16* x, bf16* y) {
  if (tokens % BM) return;
  const auto kernel = Product<BM, BN, WN, kGelu>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10));
  for (int split = 1; split <= 8; ++split) {
    const int part = w.k / split;
    if (w.k % split || part % 16) continue;
    const size_t bytes = std::max<size_t>(
        part * (BN + 8) * 2 + static_cast<size_t>(BM) * (part + 8) * 2, BM * BN * 4);
    if (bytes > 227 << 10) continue;
    const auto call = [=](const bf16* x, int layer, bf16* y) {
      Launch(kernel, dim3(split * (w.n / BN), tokens / BM), BM * WN, bytes, split, x,
             w.kernels[layer], w.biases[layer], y, w.n, w.k, part, split);
    };
    const double ms = TimedGraph(
        [&] {
          for (int layer = 0; layer < kLayers; ++layer) call(x, layer, y);
        },
        kLayers);
    if (ms < best->ms) {
      best->name = "tile " + std::to_string(BM) + "x" + std::to_string(BN) + ", " +
                   std::to_string(split) + " parts";
      best->ms = ms, best->call = call;
    }
  }
}

template <bool kGelu>
Way ByTiles(const Weights& w, int tokens, const bf16* x, bf16* y) {
  Way best;
  TryTile<32, 32, 4, kGelu>(&best, w, tokens, x, y);
  TryTile<32, 64, 4, kGelu>(&best, w, tokens, x, y);
  TryTile<64, 32, 4, kGelu>(&best, w, tokens, x, y);
  TryTile<64, 64, 4, kGelu>(&best, w, tokens, x, y);
  TryTile<128, 64, 2, kGelu>(&best, w, tokens, x, y);
  return best;
}

// ---- the layers ---------------------------------------------------------------------------------

int main(int, char** argv) {
  library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  CHECK(cudaStreamCreate(&stream));
  CHECK(LT(cublasLtCreate)(&handle));
  CHECK(cudaMalloc(&workspace, kWorkspace));
  const Weights in(kFeatures, 3 * kFeatures), out(kFeatures, kFeatures), up(kFeatures, kInner),
      down(kInner, kFeatures);
  bf16 *scale = Array(kFeatures, 0.1f, 1), *shift = Array(kFeatures, 0.1f);
  constexpr int64_t kMost = 32 * 512;
  bf16 *begin = Array(kMost * kFeatures, 1), *x = Array(kMost * kFeatures, 1),
       *qkv = Array(kMost * 3 * kFeatures, 1), *y = Array(kMost * kFeatures, 1),
       *product = Array(kMost * kFeatures, 1), *x1 = Array(kMost * kFeatures, 1),
       *inner = Array(kMost * kInner, 1);
  int* lengths;
  CHECK(cudaMalloc(&lengths, 32 * sizeof(int)));
  CHECK(
      cudaFuncSetAttribute(Attention<128>, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));

  for (const auto [batch, length] : {std::pair(1, 32), {1, 128}, {8, 128}, {32, 512}}) {
    const int tokens = batch * length;
    const bool few = tokens <= 128;
    std::vector<int> own(32, length - length / 5);
    CHECK(cudaMemcpy(lengths, own.data(), 32 * sizeof(int), cudaMemcpyHostToDevice));
    std::vector<std::vector<float>> results;
    const auto attention = [&] {
      if (length > 128) return;  // left out
      const int warps = few ? 1 : 4;
      const size_t bytes = (2 * length + 16 * warps) * (kSize + 8) * 2;
      Launch(length == 32 ? Attention<32> : Attention<128>,
             dim3(length / 16 / warps, kHeads, batch), 32 * warps, bytes, 1, qkv, lengths, y);
    };
    const auto norm = [&](const bf16* from, const bf16* residual, const bf16* bias, bf16* to) {
      const int warps = tokens <= 1024 ? 1 : 4;
      Launch(Norm, dim3(tokens / warps), 32 * warps, 0, 1, from, residual, bias, scale, shift, to);
    };
    const auto report = [&](const char* name, const std::vector<Way>& ways, bool gelu,
                            bool biased) {
      const auto forward = [&] {
        for (int layer = 0; layer < kLayers; ++layer) {
          const bf16* input = layer == 0 ? begin : x;
          ways[0].call(input, layer, qkv);
          attention();
          ways[1].call(y, layer, product);
          norm(product, input, biased ? nullptr : out.biases[layer], x1);
          ways[2].call(x1, layer, inner);
          if (!gelu) {
            Launch(BiasGelu, dim3(tokens * (kInner / 8 / 128)), 128, 0, 1, inner, up.biases[layer],
                   kInner);
          }
          ways[3].call(inner, layer, product);
          norm(product, x1, biased ? nullptr : down.biases[layer], x);
        }
      };
      for (int form = 0; form < 4; ++form) {
        const bool launches = form % 2, replayed = form < 2;
        dependent = launches;
        const cudaGraphExec_t graph = Captured(forward);
        const auto call = [&] {
          if (replayed) {
            CHECK(cudaGraphLaunch(graph, stream));
          } else {
            forward();
          }
        };
        const int calls = tokens > 1024 ? 5 : 30;
        const double ms = Timed(
            [&] {
              for (int i = 0; i < calls; ++i) call();
            },
            calls);
        std::vector<double> waited;
        for (int i = 0; i < 31; ++i) {
          const auto from = std::chrono::steady_clock::now();
          call();
          CHECK(cudaStreamSynchronize(stream));
          const std::chrono::duration<double, std::milli> time =
              std::chrono::steady_clock::now() - from;
          waited.push_back(time.count());
        }
        std::sort(waited.begin(), waited.end());
        std::vector<bf16> raw(tokens * kFeatures);
        CHECK(cudaMemcpy(raw.data(), x, raw.size() * 2, cudaMemcpyDeviceToHost));
        double apart = 0, all = 0;
        std::vector<float> values(raw.begin(), raw.end());
        if (results.empty()) results.push_back(values);
        for (size_t i = 0; i < values.size(); ++i) {
          apart += (values[i] - results[0][i]) * (values[i] - results[0][i]);
          all += results[0][i] * results[0][i];
        }
        std::printf(
            "{\"shape\": \"%dx%d\", \"products\": \"%s\", \"dependent\": %s, \"graph\": %s, "
            "\"ms\": %.4f, "
            "\"latency_ms\": %.4f, \"apart\": %.4f",
            batch, length, name, launches ? "true" : "false", replayed ? "true" : "false", ms,
            waited[15], std::sqrt(apart / all));
        for (int i = 0; i < 4; ++i) {
          std::printf(", \"%s\": [\"%s\", %.2f]", (const char*[]){"qkv", "output", "up", "down"}[i],
                      ways[i].name.c_str(), ways[i].ms * 1e3);
        }
        std::printf("}\n");
        std::fflush(stdout);
        CHECK(cudaGraphExecDestroy(graph));
      }
      dependent = false;
    };
    const Way q = ByLt(in, tokens, CUBLASLT_EPILOGUE_BIAS, x, qkv);
    const Way o = ByLt(out, tokens, CUBLASLT_EPILOGUE_DEFAULT, y, product);
    const Way u = ByLt(up, tokens, CUBLASLT_EPILOGUE_DEFAULT, x1, inner);
    const Way d = ByLt(down, tokens, CUBLASLT_EPILOGUE_DEFAULT, inner, product);
    report("cublasLt", {q, o, u, d}, false, false);
    const Way g = ByLt(up, tokens, CUBLASLT_EPILOGUE_GELU_BIAS, x1, inner);
    report("cublasLt with GELU by tanh", {q, o, g, d}, true, false);
    if (few) {
      dependent = true;
      report("tiles",
             {ByTiles<false>(in, tokens, x, qkv), ByTiles<false>(out, tokens, y, product),
              ByTiles<true>(up, tokens, x1, inner), ByTiles<false>(down, tokens, inner, product)},
             true, true);
    }
  }
}

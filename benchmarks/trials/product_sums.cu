// A 1x1 convolution of channels-last arrays as a product, with sums for batch norm in its epilogue.
//
//   forward   y = a b^T;  per column the sums of y and of y^2
//   backward  y = (a b^T + other) where a bit is set, else 0;  the sums of y and of y * x
//
// a: [m, k], b: [n, k], the others [m, n], all bfloat16, and 8 bits in a byte of the mask. A
// product with so few channels is bound by bytes, so plain mma.sync is enough. A block computes a
// tile of 128 rows, keeps it in shared memory, and goes through it row by row, so that all accesses
// of the epilogue have 16 bytes and a thread has the same 8 columns in every row.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int kRows = 128, kDepth = 64, kStages = 3, kThreads = 256, kWarps = kThreads / 32;

struct Arrays {
  const __nv_bfloat16 *a, *b, *other, *x;
  const uint8_t* bits;
  __nv_bfloat16* y;
  float *sum, *sum2;  // [partial rows, n], zero
  int n, k, partial_rows;
};

__device__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ void CopyAsync(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ void PrefetchToL2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// A tile has rows of 128 bytes, whose 16-byte words are permuted against bank conflicts.
__device__ uint32_t WordOffset(int row, int word) { return row * 128 + ((word ^ (row & 7)) << 4); }

template <int kCount>
__device__ void LoadTile(uint32_t to, const __nv_bfloat16* from, int64_t stride) {
#pragma unroll
  for (int i = threadIdx.x; i < kCount * 8; i += kThreads) {
    CopyAsync(to + WordOffset(i / 8, i % 8), from + (i / 8) * stride + (i % 8) * 8);
  }
}

__device__ void LoadMatrices(uint32_t (&r)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from));
}

__device__ void Multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

struct alignas(16) Eight {
  __nv_bfloat16 v[8];
};

template <int kColumns, bool kBackward>
__global__ void __launch_bounds__(kThreads, 2) ProductSums(const Arrays p) {
  constexpr int kTileBytes = (kRows + kColumns) * 128, kPitch = kColumns + 8;
  constexpr int kWarpColumns = kColumns / 2, kPairs = kWarpColumns / 16;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ float partial[2][kWarps][kColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row0 = warp / 2 * 32, column0 = warp % 2 * kWarpColumns;
  const int64_t m0 = static_cast<int64_t>(blockIdx.y) * kRows;
  const int n0 = blockIdx.x * kColumns, steps = p.k / kDepth;
  const __nv_bfloat16* const a = p.a + m0 * p.k;
  const __nv_bfloat16* const b = p.b + static_cast<int64_t>(n0) * p.k;
  const uint32_t tiles = SharedAddress(shared);

  const auto load = [&](int step) {
    if (step < steps) {
      const uint32_t to = tiles + step % kStages * kTileBytes;
      LoadTile<kRows>(to, a + step * kDepth, p.k);
      LoadTile<kColumns>(to + kRows * 128, b + step * kDepth, p.k);
    }
    asm volatile("cp.async.commit_group;");
  };
  for (int step = 0; step < kStages - 1; ++step) load(step);
  if (kBackward) {  // what the epilogue reads is on its way while the product is computed
    constexpr int kLines = kColumns / 64;
    if (threadIdx.x < kRows * kLines) {
      const int64_t row = m0 + threadIdx.x / kLines;
      const int64_t at = row * p.n + n0 + threadIdx.x % kLines * 64;
      PrefetchToL2(p.x + at);
      if (p.other != nullptr) PrefetchToL2(p.other + at);
      PrefetchToL2(p.bits + at / 8);
    }
  }

  float c[2][2 * kPairs][4] = {};
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
    __syncthreads();
    load(step + kStages - 1);
    const uint32_t at = tiles + step % kStages * kTileBytes, bt = at + kRows * 128;
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      uint32_t af[2][4], bf[kPairs][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        LoadMatrices(af[i], at + WordOffset(row0 + i * 16 + lane % 16, 2 * k + lane / 16));
      }
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int row = column0 + j * 16 + lane % 8 + lane / 16 * 8;
        LoadMatrices(bf[j], bt + WordOffset(row, 2 * k + lane / 8 % 2));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          Multiply(c[i][2 * j], af[i], bf[j][0], bf[j][1]);
          Multiply(c[i][2 * j + 1], af[i], bf[j][2], bf[j][3]);
        }
      }
    }
  }

  asm volatile("cp.async.wait_group 0;");
  __syncthreads();
  float* const tile = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * kPairs; ++j) {
      float* const to = tile + (row0 + i * 16 + lane / 4) * kPitch + column0 + j * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = {c[i][j][0], c[i][j][1]};
      *reinterpret_cast<float2*>(to + 8 * kPitch) = {c[i][j][2], c[i][j][3]};
    }
  }
  __syncthreads();

  constexpr int kGroups = kColumns / 8, kRowsAtOnce = kThreads / kGroups;
  constexpr int kAhead = 4;
  const int column = threadIdx.x % kGroups * 8;
  float sums[2][8] = {};
  for (int r = threadIdx.x / kGroups; r < kRows; r += kRowsAtOnce * kAhead) {
    Eight other[kAhead], x[kAhead];
    uint32_t bits[kAhead];
    if (kBackward) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t at = (m0 + r + i * kRowsAtOnce) * p.n + n0 + column;
        x[i] = *reinterpret_cast<const Eight*>(p.x + at);
        if (p.other != nullptr) other[i] = *reinterpret_cast<const Eight*>(p.other + at);
        bits[i] = p.bits[at / 8];
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int row = r + i * kRowsAtOnce;
      const float* const from = tile + row * kPitch + column;
      const float4 low = *reinterpret_cast<const float4*>(from);
      const float4 high = *reinterpret_cast<const float4*>(from + 4);
      const float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      Eight y;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float value = v[e];
        if (kBackward) {
          if (p.other != nullptr) value += __bfloat162float(other[i].v[e]);
          value = bits[i] >> e & 1 ? value : 0.0f;
        }
        y.v[e] = __float2bfloat16(value);
        const float rounded = __bfloat162float(y.v[e]);
        sums[0][e] += rounded;
        sums[1][e] += rounded * (kBackward ? __bfloat162float(x[i].v[e]) : rounded);
      }
      *reinterpret_cast<Eight*>(p.y + (m0 + row) * p.n + n0 + column) = y;
    }
  }

#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      for (int o = kGroups; o < 32; o *= 2) sums[s][e] += __shfl_xor_sync(~0u, sums[s][e], o);
      if (lane < kGroups) partial[s][warp][column + e] = sums[s][e];
    }
  }
  __syncthreads();
  if (threadIdx.x < 2 * kColumns) {
    const int s = threadIdx.x / kColumns, at = threadIdx.x % kColumns;
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += partial[s][w][at];
    float* const to = s == 0 ? p.sum : p.sum2;
    atomicAdd(to + static_cast<int64_t>(blockIdx.y) % p.partial_rows * p.n + n0 + at, sum);
  }
}

template <int kColumns, bool kBackward>
cudaError_t Launch(const Arrays& p, int64_t m, cudaStream_t stream) {
  constexpr int kTiles = kStages * (kRows + kColumns) * 128, kResult = kRows * (kColumns + 8) * 4;
  constexpr int kBytes = kTiles > kResult ? kTiles : kResult;
  auto* const kernel = ProductSums<kColumns, kBackward>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  const dim3 grid(p.n / kColumns, static_cast<unsigned>(m / kRows));
  kernel<<<grid, kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

// Waits for the result. Returns a CUDA error, or -1 for sizes that it does not take.
extern "C" int product_sums(const void* a, const void* b, const void* other, const void* x,
                            const void* bits, void* y, float* sum, float* sum2, int64_t m,
                            int64_t n, int64_t k, int64_t partial_rows) {
  static cudaStream_t stream = nullptr;
  if (stream == nullptr) cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (m % kRows != 0 || n % 64 != 0 || k % kDepth != 0) return -1;
  using T = const __nv_bfloat16*;
  const Arrays p = {static_cast<T>(a),
                    static_cast<T>(b),
                    static_cast<T>(other),
                    static_cast<T>(x),
                    static_cast<const uint8_t*>(bits),
                    static_cast<__nv_bfloat16*>(y),
                    sum,
                    sum2,
                    static_cast<int>(n),
                    static_cast<int>(k),
                    static_cast<int>(partial_rows)};
  const size_t bytes = partial_rows * n * sizeof(float);
  cudaMemsetAsync(sum, 0, bytes, stream);
  cudaMemsetAsync(sum2, 0, bytes, stream);
  const bool wide = n % 128 == 0, backward = x != nullptr;
  const cudaError_t error =
      backward ? wide ? Launch<128, true>(p, m, stream) : Launch<64, true>(p, m, stream)
      : wide   ? Launch<128, false>(p, m, stream)
               : Launch<64, false>(p, m, stream);
  if (error != cudaSuccess) return error;
  return cudaStreamSynchronize(stream);
}

// Attention of longer sequences, of a batch or of a list without padding.
//
// A block has 64 queries of a head, a warp 16 of them. Keys come in tiles of 64: the next tile is
// on its way while one is computed, and tiles in which no key counts are not read. The softmax is
// corrected from tile to tile (Dao, "FlashAttention-2", 2023), but only if a score is far above
// those before. A processor has four blocks, whose products and weights take turns.
#pragma once

#include "core/cuda/dependent.cuh"
#include "core/cuda/math.cuh"
#include "core/cuda/warpgroup.cuh"
#include "core/integer.h"
#include "short_attention/rows.cuh"

namespace jax_fastops::cuda {

struct Tiled {
  static constexpr int kThreads = 128, kBlocks = 4;  // blocks: of a processor
  static constexpr int kQueries = 64;                // of a block
  static constexpr int kKeys = 64;                   // of a tile
  static constexpr int kRows = 64 * kHead;           // elements of 64 queries, keys or values

  static int64_t Parts(int length) { return CeilDiv(length, kQueries); }

  // Two tiles of keys and values, the queries, the bias of the values, and bits of the keys that
  // count.
  static int64_t SharedBytes(int length) {
    return 1024 + int64_t{2} * 5 * kRows + int64_t{sizeof(float)} * kHead +
           8 * CeilDiv(length, kKeys);
  }
};

// Where a sequence is. After the last sequence of a list is a part without keys.
struct Sequence {
  int64_t begin;
  int length, keys, queries;

  __device__ __forceinline__ Sequence(const ShortAttentionCall& call, int index) {
    if (call.offsets == nullptr) {
      begin = static_cast<int64_t>(index) * call.length;
      length = call.length;
      keys = LengthOf(call.kv_lengths, index, length);
      queries = LengthOf(call.q_lengths, index, length);
    } else {
      const int list = index / (call.sequences + 1), own = index % (call.sequences + 1);
      const bool is_rest = own == call.sequences;
      const int first = min(max(call.offsets[index], 0), call.tokens);
      const int end = is_rest ? call.tokens : min(call.offsets[index + 1], call.tokens);
      begin = static_cast<int64_t>(list) * call.tokens + first;
      length = is_rest ? end - first : min(max(end - first, 0), call.length);
      keys = queries = is_rest ? 0 : length;
    }
  }
};

// s = q k^T of a tile.
template <typename T>
__device__ __forceinline__ void Score(MatrixC (&s)[8], const T* queries, const T* keys, int lane) {
  if constexpr (kWarpgroups) {
    const uint64_t q = DescribeRows(queries), k = DescribeRows(keys);
    StartProducts(s);
#pragma unroll
    for (int d = 0; d < 4; ++d) RowProduct<T>(s, q + d * 2, k + d * 2, d > 0);
    CommitProducts();
    AwaitProducts(s);
  } else {
    const int row = WarpIndex() * 16 + lane % 16;
#pragma unroll
    for (int d = 0; d < 4; d += 2) {
      MatrixA q[2];
      LoadMatrices<false>(q[0], queries + Swizzled(row, d * 2 + lane / 16));
      LoadMatrices<false>(q[1], queries + Swizzled(row, d * 2 + 2 + lane / 16));
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        uint32_t b[4];
        LoadMatrices<false>(b, keys + Swizzled(t * 8 + lane % 8, d * 2 + lane / 8));
        if (d == 0) {
          MultiplyAdd<T>(s[t], q[0], b, {});
        } else {
          Multiply<T>(s[t], q[0], b);
        }
        Multiply<T>(s[t], q[1], b + 2);
      }
    }
  }
}

// y += weights * values of a tile.
template <typename T>
__device__ __forceinline__ void AddValues(MatrixC (&y)[8], const MatrixA (&weights)[4],
                                          const T* values, int lane) {
  if constexpr (kWarpgroups) {
    const uint64_t rows = DescribeRows(values);
    StartProducts(y);
#pragma unroll
    for (int t = 0; t < 4; ++t) AddProduct<T>(y, weights[t], rows + t * 128);
    CommitProducts();
    AwaitProducts(y);
  } else {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
      for (int d = 0; d < 8; d += 2) {
        uint32_t b[4];
        LoadMatrices<true>(b, values + Swizzled(t * 16 + lane % 16, d + lane / 16));
        Multiply<T>(y[d], weights[t], b);
        Multiply<T>(y[d + 1], weights[t], b + 2);
      }
    }
  }
}

// Sets the bits of the keys that count, two words a tile.
__device__ __forceinline__ void MarkKeys(const ShortAttentionCall& call, const Sequence& at,
                                         int tiles, uint32_t* bits) {
  for (int i = WarpIndex(); i < 2 * tiles; i += Tiled::kThreads / kWarpSize) {
    const int lane = threadIdx.x % kWarpSize, key = kWarpSize * i + lane;
    const uint32_t word =
        LanesWhere(key < at.keys && (call.mask == nullptr || call.mask[at.begin + key]));
    if (lane == 0) bits[i] = word;
  }
}

// Adds the bias to a warp's queries, and changes their sign if the scale is negative.
template <typename T>
__device__ __forceinline__ void AddQueryBias(const ShortAttentionCall& call, T* queries,
                                             const float (&bias)[kHead / 8][2], int lane) {
  const int own = WarpIndex() * 16;
#pragma unroll
  for (int d = 0; d < kHead / 16; ++d) {
    MatrixA q;
    LoadMatrices<false>(q, queries + Swizzled(own + lane % 16, d * 2 + lane / 16));
    AddBias<T>(q, bias + 2 * d);
    AwaitWarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = own + lane / 4 + i % 2 * 8;
      T* const two = queries + Swizzled(row, d * 2 + i / 2) + lane % 4 * 2;
      *reinterpret_cast<uint32_t*>(two) = q[i] ^ (call.scale < 0 ? 0x80008000u : 0);
    }
  }
}

// The results of a lane's two rows so far, without the division by the sums of the weights.
struct Attended {
  MatrixC results[kHead / 8] = {};
  float base[2] = {-1e30f, -1e30f}, sum[2] = {};  // weights are 2^(score - base)
  float scale;  // of scores, whose unit is then a factor of 2; positive

  // The weights of the keys of a tile by their scores. All results are corrected if a score is far
  // above those before, so that weights are at most 2^8.
  template <typename T>
  __device__ __forceinline__ void Weigh(MatrixA (&weights)[4], MatrixC (&s)[8],
                                        const uint32_t* bits, int lane) {
    const uint32_t words[2] = {bits[0], bits[1]};
    if ((words[0] & words[1]) != ~0u) {
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const uint32_t two = words[t / 4] >> (t % 4 * 8 + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!(two >> i % 2 & 1)) s[t][i] = -INFINITY;
        }
      }
    }
    float most[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = -INFINITY;
#pragma unroll
      for (int t = 0; t < 8; ++t) most[i] = Max()(most[i], Max()(s[t][i * 2], s[t][i * 2 + 1]));
      most[i] *= scale;
    }
    if (!HoldsInWarp(!(most[0] > base[0] + 8 || most[1] > base[1] + 8))) Correct(most);
#pragma unroll
    for (int t = 0; t < 8; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float pair[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          pair[j] = Exp2(fmaf(s[t][i * 2 + j], scale, -base[i]));
          sum[i] += pair[j];
        }
        weights[t / 2][t % 2 * 2 + i] = Vec<T, 4>::Packed(pair).words[0];
      }
    }
  }

  __device__ __forceinline__ void Correct(float (&most)[2]) {
    Butterfly(Max(), most, 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float now = Max()(base[i], most[i]), factor = Exp2(base[i] - now);
      base[i] = now;
      sum[i] *= factor;
#pragma unroll
      for (int d = 0; d < kHead / 4; ++d) results[d / 2][i * 2 + d % 2] *= factor;
    }
  }

  // Writes the results, with the bias of the values, to the rows of this warp.
  template <typename T>
  __device__ __forceinline__ void Finish(T* rows, const float* bias, int first, int queries,
                                         int lane) {
    Butterfly(Sum(), sum, 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = WarpIndex() * 16 + i * 8 + lane / 4, column = lane % 4 * 2;
      const float factor = 1 / sum[i];
#pragma unroll
      for (int d = 0; d < kHead / 8; ++d) {
        float pair[2];
        for (int j = 0; j < 2; ++j) {
          const float y = results[d][i * 2 + j] * factor + bias[d * 8 + column + j];
          pair[j] = first + row < queries ? y : 0.0f;
        }
        Vec<T, 4>::Packed(pair).Store(rows + Swizzled(row, d) + column);
      }
    }
    AwaitWarp();
  }
};

template <typename T>
__global__ void __launch_bounds__(Tiled::kThreads, Tiled::kBlocks)
    TiledAttentionKernel(const __grid_constant__ ShortAttentionCall call) {
  constexpr int kKeys = Tiled::kKeys, kStep = Tiled::kThreads / kWords;  // rows at once
  extern __shared__ __align__(16) unsigned char shared[];
  T* const tiles = reinterpret_cast<T*>(shared + (-SharedAddress(shared) & 1023));
  T* const queries = tiles + 4 * Tiled::kRows;
  float* const value_bias = reinterpret_cast<float*>(queries + Tiled::kRows);
  uint32_t* const bits = reinterpret_cast<uint32_t*>(value_bias + kHead);
  const int lane = threadIdx.x % kWarpSize, own_row = threadIdx.x / kWords;
  const int own_word = threadIdx.x % kWords, column = lane % 4 * 2;
  const int parts = (call.length + Tiled::kQueries - 1) / Tiled::kQueries;
  const int head = blockIdx.x / parts % call.heads;
  const int features = call.heads * kHead, stride = 3 * features;
  LetDependentsStart();
  AwaitPredecessors();
  const Sequence at(call, blockIdx.x / parts / call.heads);
  int first = blockIdx.x % parts * Tiled::kQueries;
  const int64_t offset = int64_t{head} * kHead + own_word * 8;
  const T* const from = static_cast<const T*>(call.qkv) + at.begin * stride + offset;
  T* const to = static_cast<T*>(call.y) + at.begin * features + offset;
  const int count = first < at.queries ? (at.keys + kKeys - 1) / kKeys : 0;
  if (count > 0) {
#pragma unroll
    for (int row = own_row; row < Tiled::kQueries; row += kStep) {
      const T* const query = from + int64_t{min(first + row, at.length - 1)} * stride;
      CopyAsync<16, true>(queries + Swizzled(row, own_word), query);
    }
  }
  MarkKeys(call, at, count, bits);
  float query_bias[kHead / 8][2] = {};
  {
    float own_bias[kHead / 8][2] = {};
    LoadBias<T>(call, head * kHead + column, query_bias, own_bias);
    if (threadIdx.x < 4) {
#pragma unroll
      for (int i = 0; i < kHead / 4; ++i) {
        value_bias[i / 2 * 8 + column + i % 2] = own_bias[i / 2][i % 2];
      }
    }
  }
  AwaitBlock<false>();
  const auto next = [&](int tile) {
    while (tile < count && (bits[2 * tile] | bits[2 * tile + 1]) == 0) ++tile;
    return tile;
  };
  int tile = next(0);
  if (tile >= count) {
    AwaitAllCopies();
    const int step = call.offsets == nullptr ? at.length : parts * Tiled::kQueries;
    for (; first < at.length; first += step) {
      for (int row = first + own_row; row < min(first + Tiled::kQueries, at.length); row += kStep) {
        StoreWord(to + int64_t{row} * features, Unit<T>());
      }
    }
    return;
  }
  // Keys and values that do not count are zeros: a weight of 0 times another value may be NaN.
  const auto load = [&](int tile, T* rows) {
    const T* keys = from + features + (int64_t{tile} * kKeys + own_row) * stride;
    rows += Swizzled(own_row, own_word);
    const uint32_t words[2] = {bits[2 * tile] >> own_row, bits[2 * tile + 1] >> own_row};
#pragma unroll
    for (int row = 0; row < kKeys; row += kStep) {
      const bool counts = words[row / 32] >> row % 32 & 1;
      CopyAsyncOrZero(counts, rows + row * kHead, keys);
      CopyAsyncOrZero(counts, rows + Tiled::kRows + row * kHead, keys + features);
      keys += kStep * stride;
    }
  };
  const auto await_tile = [] {
    AwaitAllCopies();
    ShowToProducts();
    AwaitBlock<false>();
  };
  T* keys = tiles;
  load(tile, keys);
  await_tile();
  if (call.bias != nullptr || call.scale < 0) {
    AddQueryBias(call, queries, query_bias, lane);
    ShowToProducts();
    AwaitBlock<false>();
  }
  // The largest score is found before scores are scaled. So queries change their sign with the
  // scale, and a scale of 0 is tiny.
  Attended attended;
  attended.scale = fmaxf(fabsf(call.scale), 1e-30f) * kLog2E;
  while (tile < count) {
    const int following = next(tile + 1);
    T* const other = keys == tiles ? tiles + 2 * Tiled::kRows : tiles;
    if (following < count) load(following, other);
    MatrixC s[kKeys / 8];
    MatrixA weights[kKeys / 16];
    Score(s, queries, keys, lane);
    attended.Weigh<T>(weights, s, bits + 2 * tile, lane);
    AddValues(attended.results, weights, keys + Tiled::kRows, lane);
    tile = following;
    keys = other;
    await_tile();
  }
  attended.Finish(queries, value_bias, first, at.queries, lane);
#pragma unroll
  for (int i = 0; i < 16; i += kWarpSize / kWords) {
    const int row = WarpIndex() * 16 + i + lane / kWords;
    if (first + row >= at.length) continue;
    StoreWord(to + int64_t{first + row} * features,
              Unit<T>::Load(queries + Swizzled(row, own_word)));
  }
}

}  // namespace jax_fastops::cuda

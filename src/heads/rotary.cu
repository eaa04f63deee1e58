// Queries, keys and values from a fused projection, with a bias, an RMS norm of each head of
// queries and keys, and rotary embedding; and the backward of all this. heads.cu has the same move
// without arithmetic between the elements of a head.
//
// Both directions read every element once and write it once, so they are bound by memory. (With a
// norm, the backward reads x as well, and computes the statistics again.)
//
// - A group of lanes takes one head of one token, and a warp takes as many heads of the token as it
//   has groups. A lane holds pairs of units, 16 bytes each. The two units of a pair are chosen such
//   that both elements of a rotation are in one lane: one unit from each half of the rotated part,
//   or, if pairs are interleaved, two neighbors. So rotations need no communication, and only the
//   norm's sums need shuffles.
// - If units of 16 bytes do not divide the head and its rotated part, or a pointer is not aligned
// to
//   them, units are single elements, and a lane has up to eight pairs of them. float64 has only
//   this kernel. Everything else is a run-time parameter.
// - A lane stays with its head, so it holds the norm's scale and its share of the parameters'
//   gradients in registers. The warps of a block take the rows of a run in turn. A lane loads
//   several rows before it uses the first, which keeps 32 KB or more in flight per SM.
// - Sums: a block takes a whole run, so its warps combine their sums in shared memory, once.
// Without
//   atomics, the same input gives the same bits.
#include "heads/rotary.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/alignment.h"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/offsets.cuh"
#include "core/cuda/packed.cuh"
#include "core/cuda/unit.cuh"
#include "core/integer.h"

namespace jax_fastops::cuda {
namespace {

struct Rotary;  // the family of the kernels

constexpr int kWarpSize = 32, kWarps = 8;

// How rows and heads are divided. Row `i` of run `r` of group `g` is g * group_rows + r * run_rows
// + i.
struct Tiles {
  FastDivisor64 whole_sequence, subgroups, head_blocks;
  FastDivisor sequence;
  int64_t group_rows = 0, run_rows = 0;
  int log_lanes = 0;  // of a group
  Offsets<kRotaryRank> angles;

  int query_heads, key_heads, head_size, pairs;
  bool interleaved, heads_first;
  double eps, inverse_size;
};

// The units of a lane: kPairs pairs of kSize elements each.
template <typename T, int kSize, int kPairs>
struct Lane {
  using A = ComputeType<T>;
  using Bits = Word<kSize * sizeof(T)>;
  static constexpr int kUnit = kSize, kElements = 2 * kSize * kPairs;

  struct Raw {
    Bits bits[2 * kPairs];
  };

  const Tiles& t;
  int lane;  // in its group
  int size;  // of the head; 0: nothing is loaded and stored

  // The place of a unit in the head. Beyond the head's end, there is no such unit.
  __device__ __forceinline__ int At(int unit) const {
    const int first = First(unit / 2);
    // Beyond the rotated part, both formulas have reached the same place.
    const bool halves = !t.interleaved && first < t.pairs;
    if (unit % 2 == 0) return halves ? first : 2 * first;
    return halves ? first + t.pairs : 2 * first + kSize;
  }
  // The first rotation of a pair of units.
  __device__ __forceinline__ int First(int pair) const {
    return (lane + (pair << t.log_lanes)) * kSize;
  }

  __device__ __forceinline__ Raw Load(const T* head, bool valid) const {
    Raw raw{};
#pragma unroll
    for (int u = 0; u < 2 * kPairs; ++u) {
      const int at = At(u);
      if (valid && at < size) raw.bits[u] = *reinterpret_cast<const Bits*>(head + at);
    }
    return raw;
  }

  static __device__ __forceinline__ void Widen(const Raw& raw, A (&v)[kElements]) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      v[i] = ToCompute(ElementOf<T>(raw.bits[i / kSize], i % kSize));
    }
  }

  __device__ __forceinline__ void Store(T* head, const A (&v)[kElements]) const {
#pragma unroll
    for (int u = 0; u < 2 * kPairs; ++u) {
      const int at = At(u);
      if (at >= size) continue;
      Unit<T, kSize * sizeof(T)> unit;
#pragma unroll
      for (int i = 0; i < kSize; ++i) unit.elements[i] = FromCompute<T>(v[u * kSize + i]);
      unit.Store(head + at);
    }
  }

  // The lane's elements of a parameter; 0 where it has none.
  __device__ __forceinline__ void Parameter(const void* head, bool wide, A (&v)[kElements]) const {
#pragma unroll
    for (int u = 0; u < 2 * kPairs; ++u) {
      const int at = At(u);
      A values[kSize] = {};
      if (at < size) {
        if (sizeof(T) == 2 && wide) {
          LoadParameter<T, A>(head, at, values);
        } else {
          LoadParameter<T, T>(head, at, values);
        }
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) v[u * kSize + i] = values[i];
    }
  }

  // Rotates by the angles of a token, or back. Their cosines come before the sines.
  __device__ __forceinline__ void Rotate(const A* angles, bool back, A (&v)[kElements]) const {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      const int first = First(k);
      if (first >= t.pairs) continue;
      A cos[kSize], sin[kSize];
      LoadParameter<A, A>(angles, first, cos);
      LoadParameter<A, A>(angles, t.pairs + first, sin);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sin[i] = back ? -sin[i] : sin[i];
      A* const pair = v + 2 * k * kSize;
      if (t.interleaved) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) Turn(pair[2 * i], pair[2 * i + 1], cos[i], sin[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) Turn(pair[i], pair[kSize + i], cos[i], sin[i]);
      }
    }
  }

  static __device__ __forceinline__ void Turn(A& a, A& b, A cos, A sin) {
    const A first = a * cos - b * sin;
    b = b * cos + a * sin;
    a = first;
  }
};

// The sum over the lanes of a group, in each of them.
template <typename A>
__device__ __forceinline__ A GroupSum(A sum, int log_lanes) {
  for (int i = log_lanes; i-- > 0;) sum += __shfl_xor_sync(0xffffffffu, sum, 1 << i);
  return sum;
}

template <typename A>
__device__ __forceinline__ A ReciprocalRoot(A x) {
  if constexpr (sizeof(A) == 8) {
    return 1 / sqrt(x);
  } else {
    return rsqrtf(x);
  }
}

// What a thread works on.
struct Place {
  int64_t run;          // of all runs
  int64_t row;          // the first row of the run
  int rows;             // of the run
  int lane;             // in its group
  int head, part, own;  // of all heads; queries, keys or values; the head in its part
  bool active;          // there is such a head
  int heads;            // of the part

  __device__ __forceinline__ explicit Place(const Tiles& t) {
    const int in_warp = threadIdx.x % kWarpSize, log_groups = 5 - t.log_lanes;
    run = Divide(uint64_t{blockIdx.x}, t.head_blocks);
    const int block = static_cast<int>(blockIdx.x - run * t.head_blocks.divisor);
    lane = in_warp & ((1 << t.log_lanes) - 1);
    head = (block << log_groups) + (in_warp >> t.log_lanes);
    active = head < t.query_heads + 2 * t.key_heads;
    part = head < t.query_heads ? 0 : head < t.query_heads + t.key_heads ? 1 : 2;
    own = head - (part > 0 ? t.query_heads : 0) - (part > 1 ? t.key_heads : 0);
    heads = part == 0 ? t.query_heads : t.key_heads;
    const int64_t group = Divide(static_cast<uint64_t>(run), t.subgroups);
    const int64_t first = (run - group * t.subgroups.divisor) * t.run_rows;
    row = group * t.group_rows + first;
    const int64_t left = min(t.run_rows, t.group_rows - first);
    rows = left > 0 ? static_cast<int>(left) : 0;
  }

  // Selected, not indexed: an index into a kernel's parameters needs a copy of them in local
  // memory.
  template <typename V>
  __device__ __forceinline__ V Of(V queries, V keys, std::type_identity_t<V> values) const {
    return part == 0 ? queries : part == 1 ? keys : values;
  }
};

// Where the rows of a run are in the arrays, in elements.
struct Rows {
  int64_t merged, split, batch;  // of the first row's sequence; `merged`: of the first row
  int64_t batch_step;
  int merged_step, token_step;
  uint32_t token;  // of the first row

  __device__ __forceinline__ Rows(const Tiles& t, const Place& place) {
    const int64_t sequence = t.whole_sequence.divisor;
    batch = Divide(static_cast<uint64_t>(place.row), t.whole_sequence);
    token = static_cast<uint32_t>(place.row - batch * sequence);
    merged_step = (t.query_heads + 2 * t.key_heads) * t.head_size;
    merged = place.row * merged_step + int64_t{place.head} * t.head_size;
    token_step = t.heads_first ? t.head_size : place.heads * t.head_size;
    batch_step = sequence * place.heads * t.head_size;
    split = batch * batch_step + place.own * (t.heads_first ? sequence : 1) * t.head_size;
  }

  __device__ __forceinline__ int64_t Merged(int i) const {
    return merged + int64_t{i} * merged_step;
  }
  __device__ __forceinline__ int64_t Split(const Tiles& t, int i) const {
    const uint32_t ahead = Divide(token + i, t.sequence);
    const uint32_t own = token + i - ahead * t.sequence.divisor;
    return split + ahead * batch_step + int64_t{own} * token_step;
  }
  __device__ __forceinline__ int64_t Angle(const Tiles& t, int i) const {
    const uint32_t ahead = Divide(token + i, t.sequence);
    const uint32_t own = token + i - ahead * t.sequence.divisor;
    return (t.angles.Offset(batch + ahead) + own) * 2 * t.pairs;
  }
};

// Also the backward if nothing is normalized and there are no sums.
template <typename T, int kSize, int kPairs, int kRows>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    RotaryForward(const Tiles t, const RotaryArrays arrays) {
  using L = Lane<T, kSize, kPairs>;
  using A = typename L::A;
  const A inverse_size = static_cast<A>(t.inverse_size);
  const Place place(t);
  const bool rotated = arrays.turns != nullptr && place.part < 2;
  const L lane{t, place.lane, place.active ? t.head_size : 0};
  const bool back = arrays.dx != nullptr;
  T* const y = static_cast<T*>(place.Of(arrays.y[0], arrays.y[1], arrays.y[2]));
  const T* const from = back ? y : static_cast<const T*>(arrays.x);
  T* const to = back ? static_cast<T*>(arrays.dx) : y;
  const void* const scale = place.Of(arrays.scale[0], arrays.scale[1], nullptr);
  const bool wide_scale = place.Of(arrays.wide_scale[0], arrays.wide_scale[1], false);
  const bool normalizes = arrays.scale[0] != nullptr || arrays.scale[1] != nullptr;
  const bool biased = arrays.bias != nullptr && !back;
  const Rows rows(t, place);
  const int first = threadIdx.x / kWarpSize;

  typename L::Raw raw[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int i = first + k * kWarps;
    raw[k] = lane.Load(from + (back ? rows.Split(t, i) : rows.Merged(i)), i < place.rows);
  }
  // After x, because their conversions wait for them.
  A factor[L::kElements], bias[L::kElements];
  if (scale != nullptr) lane.Parameter(scale, wide_scale, factor);
  if (biased) {
    const int64_t feature = int64_t{place.head} * t.head_size;
    const int64_t bytes = feature * (arrays.wide_bias ? sizeof(A) : sizeof(T));
    lane.Parameter(static_cast<const char*>(arrays.bias) + bytes, arrays.wide_bias, bias);
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int i = first + k * kWarps;
    if (i >= place.rows) break;
    A v[L::kElements];
    L::Widen(raw[k], v);
    if (biased) {
#pragma unroll
      for (int e = 0; e < L::kElements; ++e) v[e] += bias[e];
    }
    if (normalizes) {
      A squares = 0;
#pragma unroll
      for (int e = 0; e < L::kElements; ++e) squares += v[e] * v[e];
      squares = GroupSum(squares, t.log_lanes);
      if (scale != nullptr) {
        const A rstd = ReciprocalRoot<A>(squares * inverse_size + static_cast<A>(t.eps));
#pragma unroll
        for (int e = 0; e < L::kElements; ++e) v[e] = v[e] * rstd * factor[e];
      }
    }
    if (rotated) {
      lane.Rotate(static_cast<const A*>(arrays.turns) + rows.Angle(t, i), back, v);
    }
    lane.Store(to + (back ? rows.Merged(i) : rows.Split(t, i)), v);
  }
}

// Adds up a sum over the warps of the block, and writes it. All threads call it.
template <typename L, typename A, int kElements>
__device__ __forceinline__ void StoreSums(const L& lane, A* shared, const A (&sums)[kElements],
                                          A* to) {
  const int warp = threadIdx.x / kWarpSize, in_warp = threadIdx.x % kWarpSize;
  __syncthreads();  // the previous sums have been read
#pragma unroll
  for (int e = 0; e < kElements; ++e)
    shared[(warp * kElements + e) * kWarpSize + in_warp] = sums[e];
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    const int at = lane.At(e / L::kUnit);
    if (e % kWarps != warp || at >= lane.size) continue;
    A sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared[(w * kElements + e) * kWarpSize + in_warp];
    to[at + e % L::kUnit] = sum;
  }
}

template <typename T, int kSize, int kPairs, int kRows>
__global__ void __launch_bounds__(kWarps* kWarpSize, sizeof(T) == 8 ? 1 : 2)
    RotaryBackward(const Tiles t, const RotaryArrays arrays) {
  using L = Lane<T, kSize, kPairs>;
  using A = typename L::A;
  constexpr int kElements = L::kElements;
  __shared__ A shared[kWarps * kElements * kWarpSize];
  const A inverse_size = static_cast<A>(t.inverse_size);
  const Place place(t);
  const bool rotated = arrays.turns != nullptr && place.part < 2;
  const L lane{t, place.lane, place.active ? t.head_size : 0};
  const T* const x = static_cast<const T*>(arrays.x);
  const T* const dy = static_cast<const T*>(place.Of(arrays.y[0], arrays.y[1], arrays.y[2]));
  T* const dx = static_cast<T*>(arrays.dx);
  const void* const scale = place.Of(arrays.scale[0], arrays.scale[1], nullptr);
  const bool wide_scale = place.Of(arrays.wide_scale[0], arrays.wide_scale[1], false);
  const int64_t feature = int64_t{place.head} * t.head_size;
  const char* const bias =
      static_cast<const char*>(arrays.bias) + feature * (arrays.wide_bias ? sizeof(A) : sizeof(T));
  A factor[kElements], bias_sums[kElements] = {}, scale_sums[kElements] = {};
  if (scale != nullptr) lane.Parameter(scale, wide_scale, factor);

  const Rows rows(t, place);
  for (int first = threadIdx.x / kWarpSize; first < place.rows; first += kRows * kWarps) {
    typename L::Raw raw_dy[kRows], raw_x[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int i = first + k * kWarps;
      raw_dy[k] = lane.Load(dy + rows.Split(t, i), i < place.rows);
      raw_x[k] = lane.Load(x + rows.Merged(i), i < place.rows && scale != nullptr);
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int i = first + k * kWarps;
      if (i >= place.rows) break;
      A g[kElements];
      L::Widen(raw_dy[k], g);
      if (rotated) {
        lane.Rotate(static_cast<const A*>(arrays.turns) + rows.Angle(t, i), true, g);
      }
      if (arrays.x != nullptr) {
        A v[kElements];
        L::Widen(raw_x[k], v);
        if (arrays.bias != nullptr && scale != nullptr) {
          A add[kElements];
          lane.Parameter(bias, arrays.wide_bias, add);
#pragma unroll
          for (int e = 0; e < kElements; ++e) v[e] += add[e];
        }
        A squares = 0;
#pragma unroll
        for (int e = 0; e < kElements; ++e) squares += v[e] * v[e];
        const A mean_square = GroupSum(squares, t.log_lanes) * inverse_size;
        const A rstd = ReciprocalRoot<A>(mean_square + static_cast<A>(t.eps));
        A products = 0;
        if (scale != nullptr) {
#pragma unroll
          for (int e = 0; e < kElements; ++e) {
            v[e] *= rstd;
            scale_sums[e] += g[e] * v[e];
            g[e] *= factor[e];
            products += g[e] * v[e];
          }
        }
        products = GroupSum(products, t.log_lanes) * inverse_size;
        if (scale != nullptr) {
#pragma unroll
          for (int e = 0; e < kElements; ++e) g[e] = (g[e] - v[e] * products) * rstd;
        }
      }
      if (arrays.bias_sums != nullptr) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) bias_sums[e] += g[e];
      }
      lane.Store(dx + rows.Merged(i), g);
    }
  }

  if (arrays.bias_sums != nullptr) {
    const int64_t features = int64_t{t.query_heads + 2 * t.key_heads} * t.head_size;
    StoreSums(lane, shared, bias_sums,
              static_cast<A*>(arrays.bias_sums) + place.run * features + feature);
  }
  if (arrays.scale_sums != nullptr) {
    const int64_t features = int64_t{t.query_heads + t.key_heads} * t.head_size;
    // Values have no scale.
    const L own{t, lane.lane, place.part == 2 ? 0 : lane.size};
    StoreSums(own, shared, scale_sums,
              static_cast<A*>(arrays.scale_sums) + place.run * features + feature);
  }
}

// -------------------------------------------------------------------------------------------------
// Launches

constexpr int kForwardRows = 4, kBackwardRows = 2, kGeneralPairs = 8;

using Kernel = void (*)(Tiles, RotaryArrays);

template <typename T, bool kBack>
Kernel FindKernel(bool units) {
  constexpr int kSize = 16 / sizeof(T);
  if constexpr (sizeof(T) < 8) {
    if (units && kBack) return KernelOf<Rotary, RotaryBackward<T, kSize, 1, kBackwardRows>>();
    if (units) return KernelOf<Rotary, RotaryForward<T, kSize, 1, kForwardRows>>();
  }
  if (kBack) return KernelOf<Rotary, RotaryBackward<T, 1, kGeneralPairs, 1>>();
  return KernelOf<Rotary, RotaryForward<T, 1, kGeneralPairs, 1>>();
}

// Whether lanes take units of 16 bytes.
bool TakesUnits(const RotaryShape& shape, DType dtype, const RotaryArrays& arrays) {
  const int64_t size = 16 / DTypeSize(dtype);
  const int64_t alignment =
      CommonAlignment({arrays.x, arrays.y[0], arrays.y[1], arrays.y[2], arrays.dx, arrays.turns,
                       arrays.bias, arrays.scale[0], arrays.scale[1]});
  return dtype != DType::kF64 && alignment == 16 && shape.head_size % size == 0 &&
         shape.pairs % size == 0 && shape.head_size <= 2 * kWarpSize * size;
}

// Without sums, all rows are one group of runs that the warps of a block take in one turn.
template <bool kBack>
cudaError_t Run(const RotaryShape& shape, DType dtype, const HeadsSums* sums,
                const RotaryArrays& arrays, cudaStream_t stream) {
  const bool units = TakesUnits(shape, dtype, arrays);
  const int64_t turn = kWarps * (!units ? 1 : kBack ? kBackwardRows : kForwardRows);
  const int64_t groups = sums == nullptr ? 1 : shape.batch * sums->groups;
  const int64_t subgroups = sums == nullptr ? CeilDiv(shape.rows(), turn) : sums->subgroups;
  const int64_t pairs = CeilDiv(shape.head_size, units ? 32 / DTypeSize(dtype) : 2);
  Tiles t;
  while (t.log_lanes < 5 && pairs > 1 << t.log_lanes) ++t.log_lanes;
  const int64_t head_blocks = CeilDiv(shape.heads(), kWarpSize >> t.log_lanes);
  const int64_t blocks = groups * subgroups * head_blocks;
  constexpr int64_t kMost = INT32_MAX;
  t.whole_sequence = FastDivisor64(shape.sequence);
  t.sequence = FastDivisor(static_cast<uint32_t>(std::min(shape.sequence, kMost)));
  t.subgroups = FastDivisor64(subgroups);
  t.head_blocks = FastDivisor64(head_blocks);
  t.group_rows = shape.rows() / groups;
  t.run_rows = CeilDiv(t.group_rows, subgroups);
  t.angles = Offsets<kRotaryRank>(shape.angles.rank, shape.angles.size, shape.angles.stride);
  t.query_heads = static_cast<int>(shape.query_heads);
  t.key_heads = static_cast<int>(shape.key_heads);
  t.head_size = static_cast<int>(shape.head_size);
  t.pairs = static_cast<int>(shape.pairs);
  t.interleaved = shape.interleaved;
  t.heads_first = shape.heads_first;
  t.eps = shape.eps;
  t.inverse_size = 1.0 / static_cast<double>(shape.head_size);
  if (blocks > kMost || shape.features() > kMost || shape.sequence + t.run_rows > kMost) {
    return cudaErrorInvalidConfiguration;
  }
  const Kernel kernel = ForDType(
      dtype, [&]<typename T>(TypeTag<T>) -> Kernel { return FindKernel<T, kBack>(units); });
  const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(blocks)),
                               .block = dim3(kWarps * kWarpSize)};
  return Launch(kernel, config, stream, t, arrays);
}

cudaError_t Clear(void* sums, int64_t bytes, cudaStream_t stream) {
  return sums == nullptr || bytes == 0 ? cudaSuccess : cudaMemsetAsync(sums, 0, bytes, stream);
}

}  // namespace

cudaError_t RotaryHeads(const RotaryShape& shape, DType dtype, const RotaryArrays& arrays,
                        cudaStream_t stream) {
  if (shape.rows() * shape.features() == 0) return cudaSuccess;
  return Run<false>(shape, dtype, nullptr, arrays, stream);
}

cudaError_t RotaryHeadsBackward(const RotaryShape& shape, DType dtype, const HeadsSums& sums,
                                const RotaryArrays& arrays, cudaStream_t stream) {
  if (shape.rows() * shape.features() == 0) {
    const int64_t bytes =
        shape.batch * sums.groups * sums.subgroups * std::max<int64_t>(4, DTypeSize(dtype));
    const int64_t heads = shape.query_heads + shape.key_heads;
    const cudaError_t error = Clear(arrays.bias_sums, bytes * shape.features(), stream);
    if (error != cudaSuccess) return error;
    return Clear(arrays.scale_sums, bytes * heads * shape.head_size, stream);
  }
  const bool summing = arrays.bias_sums != nullptr || arrays.scale_sums != nullptr;
  if (!summing && arrays.x == nullptr) return Run<false>(shape, dtype, nullptr, arrays, stream);
  return Run<true>(shape, dtype, summing ? &sums : nullptr, arrays, stream);
}

cudaError_t LoadRotaryKernels() { return LoadKernels<Rotary>(); }

}  // namespace jax_fastops::cuda

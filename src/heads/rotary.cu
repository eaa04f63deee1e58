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
// - A lane takes several heads of a token, all of which it loads before it uses the first. That
//   keeps 32 KB or more in flight per SM. The cosines and sines of the token, which have as many
//   bytes as two heads of 16-bit elements, are loaded once for all of them.
// - If units of 16 bytes do not divide the head and its rotated part, or a pointer is not aligned,
//   units are single elements, and a lane has up to eight pairs of them. float64 has only this
//   kernel. Everything else is a run-time parameter.
// - Sums: the backward has lanes that stay with two heads, which share the sum of the gradient of
//   their scale. The warps of a block take the rows of a run in turn, and combine their sums in
//   shared memory, once. Sums of the bias need registers for each head, so a lane then has one head
//   of two rows. Without atomics, the same input gives the same bits.
#include "heads/rotary.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/alignment.h"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/math.cuh"
#include "core/cuda/offsets.cuh"
#include "core/cuda/partial_sums.cuh"
#include "core/cuda/vec.cuh"
#include "core/integer.h"

namespace jax_fastops::cuda {
namespace {

struct Rotary;  // the family of the kernels

constexpr int kWarps = 8;

// How rows and heads are divided. A block takes a chunk of heads for a run of rows. Row `i` of run
// `r` of group `g` is g * group_rows + r * run_rows + i.
struct Tiles {
  FastDivisor64 whole_sequence, subgroups, chunks;
  FastDivisor sequence;
  int64_t group_rows = 0, run_rows = 0;
  int log_lanes = 0;  // of a group
  Offsets<kRotaryRank> angles;

  int query_heads, key_heads, head_size, pairs;
  int steps;     // forward: the heads of a lane
  int per_lane;  // backward: likewise
  bool interleaved, heads_first, back;
  double eps, inverse_size;
};

// The units of a lane: kPairs pairs of kSize elements each.
template <typename T, int kSize, int kPairs>
struct Lane {
  using A = ComputeType<T>;
  using V = Vec<T, kSize * sizeof(T)>;
  static constexpr int kUnit = kSize, kElements = 2 * kSize * kPairs;

  struct Raw {
    V units[2 * kPairs];
  };

  const Tiles& t;
  int lane;  // in its group

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
      if (valid && at < t.head_size) raw.units[u] = V::Load(head + at);
    }
    return raw;
  }

  static __device__ __forceinline__ void Widen(const Raw& raw, A (&v)[kElements]) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) v[i] = ToCompute(raw.units[i / kSize][i % kSize]);
  }

  __device__ __forceinline__ void Store(T* head, const A (&v)[kElements]) const {
#pragma unroll
    for (int u = 0; u < 2 * kPairs; ++u) {
      const int at = At(u);
      if (at >= t.head_size) continue;
      A values[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = v[u * kSize + i];
      V::Packed(values).Store(head + at);
    }
  }

  // The lane's elements of a parameter; 0 where it has none.
  __device__ __forceinline__ void Parameter(const void* head, bool wide, A (&v)[kElements]) const {
#pragma unroll
    for (int u = 0; u < 2 * kPairs; ++u) {
      const int at = At(u);
      A values[kSize] = {};
      if (at < t.head_size) {
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

  // The cosines and sines of a token.
  struct Angles {
    A cos[kElements / 2], sin[kElements / 2];
  };
  // `token` has the cosines before the sines. With `back`, rotations are undone.
  __device__ __forceinline__ Angles LoadAngles(const A* token, bool back) const {
    Angles angles;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      A cos[kSize] = {}, sin[kSize] = {};
      if (First(k) < t.pairs) {
        LoadParameter<A, A>(token, First(k), cos);
        LoadParameter<A, A>(token, t.pairs + First(k), sin);
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        angles.cos[k * kSize + i] = cos[i];
        angles.sin[k * kSize + i] = back ? -sin[i] : sin[i];
      }
    }
    return angles;
  }

  __device__ __forceinline__ void Rotate(const Angles& angles, A (&v)[kElements]) const {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (First(k) >= t.pairs) continue;
      A* const pair = v + 2 * k * kSize;
      if (t.interleaved) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) Turn(angles, k * kSize + i, pair[2 * i], pair[2 * i + 1]);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) Turn(angles, k * kSize + i, pair[i], pair[kSize + i]);
      }
    }
  }

  static __device__ __forceinline__ void Turn(const Angles& angles, int i, A& a, A& b) {
    const A first = a * angles.cos[i] - b * angles.sin[i];
    b = b * angles.cos[i] + a * angles.sin[i];
    a = first;
  }
};

// The sum over the lanes of a group, in each of them.
template <typename A>
__device__ __forceinline__ A GroupSum(A sum, int log_lanes) {
  A sums[1] = {sum};
  Butterfly(Sum(), sums, 1 << log_lanes);
  return sums[0];
}

// What a block works on, and the thread's place in it.
struct Place {
  int64_t run, row;  // of all runs; its first row
  int rows;          // of the run
  int chunk;
  int groups, group, lane;  // of the warp; the thread's group; its place in it
  int64_t batch;            // of the first row
  uint32_t token;           // likewise

  __device__ __forceinline__ explicit Place(const Tiles& t) {
    const int in_warp = threadIdx.x % kWarpSize;
    groups = kWarpSize >> t.log_lanes;
    group = in_warp >> t.log_lanes;
    lane = in_warp & ((1 << t.log_lanes) - 1);
    run = Divide(uint64_t{blockIdx.x}, t.chunks);
    chunk = static_cast<int>(blockIdx.x - run * t.chunks.divisor);
    const int64_t of = Divide(static_cast<uint64_t>(run), t.subgroups);
    const int64_t first = (run - of * t.subgroups.divisor) * t.run_rows;
    row = of * t.group_rows + first;
    const int64_t left = min(t.run_rows, t.group_rows - first);
    rows = left > 0 ? static_cast<int>(left) : 0;
    batch = Divide(static_cast<uint64_t>(row), t.whole_sequence);
    token = static_cast<uint32_t>(row - batch * static_cast<int64_t>(t.whole_sequence.divisor));
  }
};

// Row `i` of a run.
struct Row {
  int64_t row, batch;
  uint32_t token;

  __device__ __forceinline__ Row(const Tiles& t, const Place& place, int i) : row(place.row + i) {
    const uint32_t ahead = Divide(place.token + i, t.sequence);
    batch = place.batch + ahead;
    token = place.token + i - ahead * t.sequence.divisor;
  }

  __device__ __forceinline__ int64_t Angles(const Tiles& t) const {
    return (t.angles.Offset(batch) + token) * 2 * t.pairs;
  }
};

// A head of queries (part 0), keys or values.
struct Head {
  int part, own, heads;  // its place in the part, of so many

  static __device__ __forceinline__ Head Of(const Tiles& t, int index) {
    const int part = index < t.query_heads ? 0 : index < t.query_heads + t.key_heads ? 1 : 2;
    const int own = index - (part > 0 ? t.query_heads : 0) - (part > 1 ? t.key_heads : 0);
    return {part, own, part == 0 ? t.query_heads : t.key_heads};
  }

  __device__ __forceinline__ int64_t Feature(const Tiles& t) const {
    const int before = part == 0 ? 0 : part == 1 ? t.query_heads : t.query_heads + t.key_heads;
    return int64_t{before + own} * t.head_size;
  }
  __device__ __forceinline__ int64_t Merged(const Tiles& t, const Row& row) const {
    const int64_t features = int64_t{t.query_heads + 2 * t.key_heads} * t.head_size;
    return row.row * features + Feature(t);
  }
  __device__ __forceinline__ int64_t Split(const Tiles& t, const Row& row) const {
    const int64_t sequence = t.whole_sequence.divisor;
    return (t.heads_first ? (row.batch * heads + own) * sequence + row.token
                          : row.row * heads + own) *
           t.head_size;
  }

  // Selected, not indexed: an index into a kernel's parameters needs a copy of them in local
  // memory.
  template <typename V>
  __device__ __forceinline__ V Choose(V queries, V keys, std::type_identity_t<V> values) const {
    return part == 0 ? queries : part == 1 ? keys : values;
  }
};

// Also the backward if nothing is normalized and there are no sums. A chunk has t.steps heads for
// each group of lanes. All groups of a warp together have neighboring heads in each step.
template <typename T, int kSize, int kPairs, int kHeads>
__device__ __forceinline__ void Turn(const Tiles& t, const RotaryArrays& arrays) {
  using L = Lane<T, kSize, kPairs>;
  using A = typename L::A;
  const Place place(t);
  const L lane{t, place.lane};
  const int first = place.chunk * t.steps * place.groups + place.group;
  const int all = t.query_heads + 2 * t.key_heads;
  const bool normalizes = arrays.scale[0] != nullptr || arrays.scale[1] != nullptr;
  const bool biased = arrays.bias != nullptr && !t.back;
  int loaded = -1;  // the part whose scale is loaded
  A factor[L::kElements];

  for (int i = threadIdx.x / kWarpSize; i < place.rows; i += kWarps) {
    const Row row(t, place, i);
    typename L::Raw raw[kHeads];
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      const int index = first + k * place.groups;
      const Head head = Head::Of(t, index);
      const T* const y = static_cast<const T*>(head.Choose(arrays.y[0], arrays.y[1], arrays.y[2]));
      const T* const from =
          t.back ? y + head.Split(t, row) : static_cast<const T*>(arrays.x) + head.Merged(t, row);
      raw[k] = lane.Load(from, k < t.steps && index < all);
    }
    typename L::Angles angles;
    if (arrays.turns != nullptr && first < t.query_heads + t.key_heads) {
      angles = lane.LoadAngles(static_cast<const A*>(arrays.turns) + row.Angles(t), t.back);
    }
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      if (k >= t.steps) break;
      const int index = first + k * place.groups;
      const Head head = Head::Of(t, index);
      A v[L::kElements];
      L::Widen(raw[k], v);
      if (biased && index < all) {
        A bias[L::kElements];
        const int64_t bytes = head.Feature(t) * (arrays.wide_bias ? sizeof(A) : sizeof(T));
        lane.Parameter(static_cast<const char*>(arrays.bias) + bytes, arrays.wide_bias, bias);
#pragma unroll
        for (int e = 0; e < L::kElements; ++e) v[e] += bias[e];
      }
      if (normalizes) {
        const void* const scale = head.Choose(arrays.scale[0], arrays.scale[1], nullptr);
        if (scale != nullptr && loaded != head.part) {
          lane.Parameter(scale, head.Choose(arrays.wide_scale[0], arrays.wide_scale[1], false),
                         factor);
          loaded = head.part;
        }
        A squares = 0;
#pragma unroll
        for (int e = 0; e < L::kElements; ++e) squares += v[e] * v[e];
        squares = GroupSum(squares, t.log_lanes) * static_cast<A>(t.inverse_size);
        if (scale != nullptr) {
          const A rstd = FastReciprocalRoot(squares + static_cast<A>(t.eps));
#pragma unroll
          for (int e = 0; e < L::kElements; ++e) v[e] = v[e] * rstd * factor[e];
        }
      }
      if (arrays.turns != nullptr && head.part < 2) lane.Rotate(angles, v);
      if (index >= all) continue;
      T* const y = static_cast<T*>(head.Choose(arrays.y[0], arrays.y[1], arrays.y[2]));
      lane.Store(t.back ? static_cast<T*>(arrays.dx) + head.Merged(t, row) : y + head.Split(t, row),
                 v);
    }
  }
}

// Adds up a sum over the warps of the block, and writes it to `to`, unless that is null. All
// threads call it.
template <typename L, typename A, int kElements>
__device__ __forceinline__ void StoreSums(const L& lane, A* shared, const A (&sums)[kElements],
                                          A* to) {
  const int warp = threadIdx.x / kWarpSize, in_warp = threadIdx.x % kWarpSize;
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    shared[(warp * kElements + e) * kWarpSize + in_warp] = sums[e];
  }
  constexpr int kWidth = kElements * kWarpSize;
  AddParts<kWarps * kWarpSize, true>(shared, kWarps, kWidth, kWidth, [&](int i, A sum) {
    // The thread's own lane, since a block is a whole number of warps.
    const int e = i / kWarpSize, at = lane.At(e / L::kUnit);
    if (at < lane.t.head_size && to != nullptr) to[at + e % L::kUnit] = sum;
  });
}

// Heads that share a sum are a slot: t.per_lane heads of one part. A chunk has a slot for each
// group of lanes. A lane has two heads of a row in flight, or one head of two rows.
template <typename T, int kSize, int kPairs>
__device__ __forceinline__ void TurnBack(const Tiles& t, const RotaryArrays& arrays) {
  using L = Lane<T, kSize, kPairs>;
  using A = typename L::A;
  constexpr int kElements = L::kElements;
  constexpr int kMost = kSize == 1 ? sizeof(double) : sizeof(A);  // of an element of a kernel
  A* const shared = reinterpret_cast<A*>(SharedBytes<kWarps * kElements * kWarpSize * kMost>());
  const Place place(t);
  const L lane{t, place.lane};
  const bool one_head = t.per_lane == 1;
  const int query_slots = (t.query_heads + t.per_lane - 1) / t.per_lane;
  const int key_slots = (t.key_heads + t.per_lane - 1) / t.per_lane;
  const int slot = place.chunk * place.groups + place.group;
  Head head;
  head.part = slot < query_slots ? 0 : slot < query_slots + key_slots ? 1 : 2;
  head.heads = head.part == 0 ? t.query_heads : t.key_heads;
  const int before = head.Choose(0, query_slots, query_slots + key_slots);
  head.own = (slot - before) * t.per_lane;

  const bool normalizes = arrays.scale[0] != nullptr || arrays.scale[1] != nullptr;
  const void* const scale = head.Choose(arrays.scale[0], arrays.scale[1], nullptr);
  const T* const dy = static_cast<const T*>(head.Choose(arrays.y[0], arrays.y[1], arrays.y[2]));
  const bool rotated = arrays.turns != nullptr && head.part < 2;
  const bool wide_scale = head.Choose(arrays.wide_scale[0], arrays.wide_scale[1], false);
  A bias_sums[kElements] = {}, scale_sums[kElements] = {};
  const int turn = one_head ? 2 * kWarps : kWarps;
  for (int i = threadIdx.x / kWarpSize; i < place.rows; i += turn) {
    typename L::Raw raw_dy[2], raw_x[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int r = one_head ? i + k * kWarps : i;
      const Row row(t, place, r);
      const Head own = {head.part, one_head ? head.own : head.own + k, head.heads};
      const bool valid = r < place.rows && own.own < own.heads;
      raw_dy[k] = lane.Load(dy + own.Split(t, row), valid);
      raw_x[k] = lane.Load(static_cast<const T*>(arrays.x) + own.Merged(t, row),
                           valid && scale != nullptr);
    }
    typename L::Angles angles;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int r = one_head ? i + k * kWarps : i;
      if (r >= place.rows) break;
      const Row row(t, place, r);
      const Head own = {head.part, one_head ? head.own : head.own + k, head.heads};
      if (rotated && (k == 0 || one_head)) {
        angles = lane.LoadAngles(static_cast<const A*>(arrays.turns) + row.Angles(t), true);
      }
      A g[kElements];
      L::Widen(raw_dy[k], g);
      if (rotated) lane.Rotate(angles, g);
      if (normalizes) {
        A v[kElements];
        L::Widen(raw_x[k], v);
        if (arrays.bias != nullptr && scale != nullptr && own.own < own.heads) {
          A bias[kElements];
          const int64_t bytes = own.Feature(t) * (arrays.wide_bias ? sizeof(A) : sizeof(T));
          lane.Parameter(static_cast<const char*>(arrays.bias) + bytes, arrays.wide_bias, bias);
#pragma unroll
          for (int e = 0; e < kElements; ++e) v[e] += bias[e];
        }
        A squares = 0;
#pragma unroll
        for (int e = 0; e < kElements; ++e) squares += v[e] * v[e];
        squares = GroupSum(squares, t.log_lanes) * static_cast<A>(t.inverse_size);
        // An absent head adds nothing to the sum that it shares, also if eps is 0.
        const bool present = own.own < own.heads;
        const A rstd = present ? FastReciprocalRoot(squares + static_cast<A>(t.eps)) : A(0);
        A products = 0;
        if (scale != nullptr) {
          A factor[kElements];
          lane.Parameter(scale, wide_scale, factor);  // again, for fewer registers
#pragma unroll
          for (int e = 0; e < kElements; ++e) {
            v[e] *= rstd;
            scale_sums[e] += g[e] * v[e];
            g[e] *= factor[e];
            products += g[e] * v[e];
          }
        }
        products = GroupSum(products, t.log_lanes) * static_cast<A>(t.inverse_size);
        if (scale != nullptr) {
#pragma unroll
          for (int e = 0; e < kElements; ++e) g[e] = (g[e] - v[e] * products) * rstd;
        }
      }
      if (arrays.bias_sums != nullptr) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) bias_sums[e] += g[e];
      }
      if (own.own < own.heads) {
        lane.Store(static_cast<T*>(arrays.dx) + own.Merged(t, row), g);
      }
    }
  }

  const bool active = head.own < head.heads;
  if (arrays.bias_sums != nullptr) {
    const int64_t features = int64_t{t.query_heads + 2 * t.key_heads} * t.head_size;
    A* const to = static_cast<A*>(arrays.bias_sums) + place.run * features + head.Feature(t);
    StoreSums(lane, shared, bias_sums, active ? to : nullptr);
  }
  if (arrays.scale_sums != nullptr) {
    const int slots = query_slots + key_slots;
    A* const to = static_cast<A*>(arrays.scale_sums) + (place.run * slots + slot) * t.head_size;
    StoreSums(lane, shared, scale_sums, slot < slots ? to : nullptr);
  }
}

// -------------------------------------------------------------------------------------------------
// Launches

constexpr int kHeads = 4, kForwardRows = 2, kGeneralPairs = 8;

// `kSums`: for norms in the backward, and for sums.
template <typename T, bool kSums>
__global__ void __launch_bounds__(kWarps* kWarpSize, 2)
    RotaryKernel(const Tiles t, const RotaryArrays arrays) {
  if constexpr (kSums) {
    TurnBack<T, 16 / sizeof(T), 1>(t, arrays);
  } else {
    Turn<T, 16 / sizeof(T), 1, kHeads>(t, arrays);
  }
}

// Lanes take single elements.
template <bool kSums>
struct RotaryElements {
  static constexpr int kBlocks = kSums ? 1 : 2;
  Tiles t;
  RotaryArrays arrays;

  template <typename T>
  __device__ __forceinline__ void Run() const {
    if constexpr (kSums) {
      TurnBack<T, 1, kGeneralPairs>(t, arrays);
    } else {
      Turn<T, 1, kGeneralPairs, 1>(t, arrays);
    }
  }
};

template <bool kSums>
cudaError_t LaunchRotary(DType dtype, bool units, int64_t blocks, const Tiles& t,
                         const RotaryArrays& arrays, cudaStream_t stream) {
  constexpr int kThreads = kWarps * kWarpSize;
  const LaunchConfig config = Grid(blocks, kThreads);
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    if constexpr (sizeof(T) < 8) {
      const auto kernel = KernelOf<Rotary, RotaryKernel<T, kSums>>();
      if (units) return Launch(kernel, config, stream, t, arrays);
    }
    return LaunchAnyType<Rotary, kThreads>(dtype, config, stream, RotaryElements<kSums>{t, arrays});
  });
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

// Without sums, all rows are one group.
cudaError_t Run(const RotaryShape& shape, DType dtype, const HeadsSums* sums,
                const RotaryArrays& arrays, cudaStream_t stream) {
  const bool units = TakesUnits(shape, dtype, arrays), back = arrays.dx != nullptr;
  const bool with_sums = sums != nullptr || (back && arrays.x != nullptr);
  const int64_t pairs = CeilDiv(shape.head_size, units ? 32 / DTypeSize(dtype) : 2);
  Tiles t;
  while (t.log_lanes < 5 && pairs > 1 << t.log_lanes) ++t.log_lanes;
  const int64_t warp_heads = kWarpSize >> t.log_lanes;
  int64_t chunks;
  if (with_sums) {
    t.per_lane = RotaryHeadsPerSum(arrays.bias_sums != nullptr);
    const int64_t slots =
        CeilDiv(shape.query_heads, t.per_lane) + 2 * CeilDiv(shape.key_heads, t.per_lane);
    chunks = CeilDiv(slots, warp_heads);
  } else {  // chunks of almost equal length
    const int64_t steps = CeilDiv(shape.heads(), warp_heads);
    chunks = CeilDiv(steps, units ? kHeads : 1);
    t.steps = static_cast<int>(CeilDiv(steps, chunks));
  }
  const int64_t groups = sums == nullptr ? 1 : shape.batch * sums->groups;
  const int64_t subgroups =
      sums == nullptr ? CeilDiv(shape.rows(), kWarps * kForwardRows) : sums->subgroups;
  const int64_t blocks = groups * subgroups * chunks;
  constexpr int64_t kMost = INT32_MAX;
  t.whole_sequence = FastDivisor64(shape.sequence);
  t.sequence = FastDivisor(static_cast<uint32_t>(std::min(shape.sequence, kMost)));
  t.subgroups = FastDivisor64(subgroups);
  t.chunks = FastDivisor64(chunks);
  t.group_rows = shape.rows() / groups;
  t.run_rows = CeilDiv(t.group_rows, subgroups);
  t.angles = Offsets<kRotaryRank>(shape.angles.rank, shape.angles.size, shape.angles.stride);
  t.query_heads = static_cast<int>(shape.query_heads);
  t.key_heads = static_cast<int>(shape.key_heads);
  t.head_size = static_cast<int>(shape.head_size);
  t.pairs = static_cast<int>(shape.pairs);
  t.interleaved = shape.interleaved;
  t.heads_first = shape.heads_first;
  t.back = back;
  t.eps = shape.eps;
  t.inverse_size = 1.0 / static_cast<double>(shape.head_size);
  if (blocks > kMost || shape.features() > kMost || shape.sequence + t.run_rows > kMost) {
    return cudaErrorInvalidConfiguration;
  }
  return with_sums ? LaunchRotary<true>(dtype, units, blocks, t, arrays, stream)
                   : LaunchRotary<false>(dtype, units, blocks, t, arrays, stream);
}

cudaError_t Clear(void* sums, int64_t bytes, cudaStream_t stream) {
  return sums == nullptr || bytes == 0 ? cudaSuccess : cudaMemsetAsync(sums, 0, bytes, stream);
}

}  // namespace

cudaError_t RotaryHeads(const RotaryShape& shape, DType dtype, const RotaryArrays& arrays,
                        cudaStream_t stream) {
  if (shape.rows() * shape.features() == 0) return cudaSuccess;
  return Run(shape, dtype, nullptr, arrays, stream);
}

cudaError_t RotaryHeadsBackward(const RotaryShape& shape, DType dtype, const HeadsSums& sums,
                                const RotaryArrays& arrays, cudaStream_t stream) {
  const bool summing = arrays.bias_sums != nullptr || arrays.scale_sums != nullptr;
  if (shape.rows() * shape.features() > 0) {
    return Run(shape, dtype, summing ? &sums : nullptr, arrays, stream);
  }
  const int64_t bytes =
      shape.batch * sums.groups * sums.subgroups * std::max<int64_t>(4, DTypeSize(dtype));
  const cudaError_t error = Clear(arrays.bias_sums, bytes * shape.features(), stream);
  if (error != cudaSuccess) return error;
  const int64_t scales = shape.scale_sums(arrays.bias_sums != nullptr);
  return Clear(arrays.scale_sums, bytes * scales, stream);
}

cudaError_t LoadRotaryKernels() { return LoadKernels<Rotary>(); }

}  // namespace jax_fastops::cuda

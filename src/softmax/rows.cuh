// What softmax and log_softmax compute along the minor axis, as functors for the kernels over rows
// in core/cuda/held_rows.cuh. Those with dropout are functors of their own, because dropout takes
// registers. log_softmax is a flag, as the kernels are bound by memory.
#ifndef JAX_FASTOPS_SOFTMAX_ROWS_CUH_
#define JAX_FASTOPS_SOFTMAX_ROWS_CUH_

#include <cstdint>
#include <iterator>
#include <type_traits>

#include "core/cuda/held_rows.cuh"
#include "core/cuda/kept.cuh"
#include "softmax/math.cuh"

namespace jax_fastops::cuda::softmax {

// The forward of one row. Excluded elements are held as the infinity that the scale turns into
// -inf. Without kMayLog, it is never log_softmax.
template <typename T, bool kMayLog>
struct ForwardOf {
  using A = ComputeType<T>;
  using Params = OpParams;
  static constexpr int kInputs = 1, kReductions = 2, kSums = 2;
  static constexpr bool kStreams = true;
  // 64 registers, 48, or 40.
  static constexpr int MinBlocks(int words) { return words == 1 ? 6 : words == 2 ? 5 : 4; }

  const Params& p;
  A scale;
  A most = -A(INFINITY);  // a result of Top::Get
  A top = 0;
  A total = 0;

  __device__ __forceinline__ ForwardOf(const Params& p, int64_t)
      : p(p), scale(static_cast<A>(p.scale)) {}

  __device__ __forceinline__ bool log() const { return kMayLog && p.log; }
  __device__ __forceinline__ T Outside(int) const { return Excluded<T, false>(log(), p); }
  __device__ __forceinline__ T Masked() const { return ExcludedResult<T, false>(log()); }
  __device__ __forceinline__ bool Undefined() const { return Normalizer<T>::Undefined(total); }

  template <typename Row>
  __device__ __forceinline__ void Prepare(Row& row) const {
    if (!p.zero_scale) return;
    row.Change([](auto& word) { word.TimesZero([](int) { return true; }, T()); });
  }

  // Replaces elements by their exponentials, or for log_softmax by the distances from the top
  // element. Returns the sum of the exponentials.
  template <int kSize>
  static __device__ __forceinline__ A ToPowers(const Normalizer<T>& normalize, A (&x)[kSize]) {
    A powers[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      powers[i] = normalize.Power(x[i]);
      x[i] = normalize.log ? x[i] - normalize.top : powers[i];
    }
    return SumOf(powers);
  }

  template <typename Row>
  __device__ __forceinline__ A FindTop(const Row& row) const {
    Top<T> largest(scale);
    row.Each([&](const auto& word, const auto&...) { largest.Add(word); });
    return largest.Get();
  }
  template <typename Row>
  __device__ __forceinline__ A AddPowers(Row& row, A from) const {
    A sum = 0;
    Branch(log(), [&](auto is_log) {
      const Normalizer<T> normalize(is_log, scale, from);
      row.Map([&](auto& x) { sum += ToPowers(normalize, x); });
    });
    return sum;
  }

  template <typename Row, typename G>
  __device__ __forceinline__ void Reduce(Row& row, G& group) {
    A value[1] = {FindTop(row)};
    group.All(Max(), value);
    row.Forget();
    top = TopElement(value[0], scale);
    value[0] = AddPowers(row, top);
    group.All(Sum(), value);
    total = value[0];
  }

  // From what Map has left to results times `gain`, which log_softmax does not have.
  __device__ __forceinline__ auto Results(A gain = 1) const {
    Normalizer<T> normalize(log(), scale, top);
    normalize.SetTotal(total);
    const A factor = log() ? scale : normalize.last * gain;
    const A offset = log() ? -normalize.last : A(0);
    return [factor, offset](auto& x) {
#pragma unroll
      for (auto& value : x) value = MulAdd(value, factor, offset);
    };
  }

  template <typename Row>
  __device__ __forceinline__ void Write(Row& row) const {
    const auto last = Results();
    if constexpr (Row::kKeeps) {
      row.Write([](auto&) {}, last);
    } else {
      Branch(log(), [&](auto is_log) {
        const Normalizer<T> again(is_log, scale, top);
        row.Write([&](auto& x) { ToPowers(again, x); }, last);
      });
    }
  }

  // A row that is streamed: the maximum so far, and a sum relative to it.
  template <typename Row>
  __device__ __forceinline__ void Add(Row& row) {
    const A both = Max()(most, FindTop(row));
    total = Corrected(total, most, both, scale) + AddPowers(row, PartTopElement(both, scale));
    most = both;
  }
  __device__ __forceinline__ void Join(const A (&sums)[kSums]) {
    const A both = Max()(most, sums[0]);
    total = Corrected(total, most, both, scale) + Corrected(sums[1], sums[0], both, scale);
    most = both;
  }
  __device__ __forceinline__ void Collect(A (&sums)[kSums]) const {
    sums[0] = most;
    sums[1] = total;
  }
  template <typename G>
  __device__ __forceinline__ void Combine(G& group) {
    A sums[kSums] = {most, total};
    const A of_op = scale;
    group.AllReduce(
        [of_op](A(&own)[kSums], int width) {
          A largest[1] = {own[0]};
          Butterfly(Max(), largest, width);
          A sum[1] = {Corrected(own[1], own[0], largest[0], of_op)};
          Butterfly(Sum(), sum, width);
          own[0] = largest[0];
          own[1] = sum[0];
        },
        sums);
    most = sums[0];
    total = sums[1];
  }
  __device__ __forceinline__ void Settle() {
    if (IsBottom(most, scale)) total = A(NAN);  // the row has only -inf
    top = TopElement(most, scale);
  }
};

// The backward of one row, from y and dy. For excluded elements y is held as -inf (log_softmax) or
// 0, and dy as 0.
template <typename T, bool kMayLog>
struct BackwardOf {
  using A = ComputeType<T>;
  using Params = OpParams;
  static constexpr int kInputs = 2, kReductions = 1, kSums = 1;
  static constexpr bool kStreams = true;
  // 64 registers, 48, or 40.
  static constexpr int MinBlocks(int words) { return words == 1 ? 6 : words == 2 ? 5 : 4; }

  const Params& p;
  A scale;
  A total = 0;

  __device__ __forceinline__ BackwardOf(const Params& p, int64_t)
      : p(p), scale(static_cast<A>(p.scale)) {}

  __device__ __forceinline__ bool log() const { return kMayLog && p.log; }
  __device__ __forceinline__ T Outside(int input) const {
    return input == 0 ? Excluded<T, true>(log(), p) : FromCompute<T>(0);
  }
  __device__ __forceinline__ T Masked() const { return ExcludedResult<T, true>(log()); }
  __device__ __forceinline__ bool Undefined() const { return Gradient<T>::Undefined(total, scale); }

  template <typename Row>
  __device__ __forceinline__ void Prepare(Row&) const {}

  template <typename Row>
  __device__ __forceinline__ void Add(Row& row) {
    // A branch of each word. One around all lets the compiler unpack them at once, and spill.
    row.Each([&](const auto& y, const auto& dy) {
      Branch(log(), [&](auto is_log) {
        constexpr int kSize = std::remove_reference_t<decltype(y)>::kSize;
        A terms[kSize], dys[kSize];
        y.Unpack(terms);
        dy.Unpack(dys);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          terms[i] = Gradient<T>::Term(is_log, terms[i], dys[i], p.skip_zeros);
        }
        total += SumOf(terms);
      });
    });
  }
  template <typename G>
  __device__ __forceinline__ void Combine(G& group) {
    A value[1] = {total};
    group.All(Sum(), value);
    total = value[0];
  }
  template <typename Row, typename G>
  __device__ __forceinline__ void Reduce(Row& row, G& group) {
    Add(row);
    Combine(group);
    row.Forget();
  }

  template <typename Row>
  __device__ __forceinline__ void Write(Row& row) const {
    const Gradient<T> gradient(log(), scale, total, p.skip_zeros);
    row.Write([&](auto& y, const auto& dy) {
      Branch(log(), [&](auto is_log) {
        Gradient<T> of_op = gradient;
        of_op.log = is_log;
#pragma unroll
        for (int i = 0; i < static_cast<int>(std::size(y)); ++i) y[i] = of_op(y[i], dy[i]);
      });
    });
  }

  __device__ __forceinline__ void Join(const A (&sums)[kSums]) { total += sums[0]; }
  __device__ __forceinline__ void Collect(A (&sums)[kSums]) const { sums[0] = total; }
  __device__ __forceinline__ void Settle() const {}
};

template <typename T>
struct Forward : ForwardOf<T, true> {
  using ForwardOf<T, true>::ForwardOf;
};
template <typename T>
struct Backward : BackwardOf<T, true> {
  using BackwardOf<T, true>::BackwardOf;
};

// -------------------------------------------------------------------------------------------------
// With dropout

// Sets to 0 the elements of array kInput of a row in registers that dropout does not keep.
template <int kInput, typename T, int kInputs, int kWords, bool kEdges>
__device__ __forceinline__ void KeepSome(const PhiloxWords& seed, uint32_t largest,
                                         RegisterRow<T, kInputs, 16, kWords, kEdges>& row) {
  const KeptLimit limit(largest);
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    if (kEdges && !row.Has(k)) break;
    uint32_t kept[16 / sizeof(T) / 2];
    KeptPairs<!kEdges>(seed, row.Index(k), limit, kept);
    KeepOnly<T>(kept, row.words[kInput][k].words);
  }
  if constexpr (kEdges) {
    if (row.slice.has_edge && !IsElementKept(seed, row.slice.edge, largest)) {
      row.edges[kInput] = Vec<T, sizeof(T)>::Filled(FromCompute<T>(0));
    }
  }
}

// The factor of elements that are kept goes into that of the row.
template <typename T>
struct DropForward : ForwardOf<T, false> {
  static constexpr bool kStreams = false;
  static constexpr int MinBlocks(int) { return 3; }  // 80 registers

  PhiloxWords seed;

  __device__ __forceinline__ DropForward(const OpParams& p, int64_t row)
      : ForwardOf<T, false>(p, row), seed(p.dropout.seeds.At(row)) {}

  template <typename Row>
  __device__ __forceinline__ void Write(Row& row) const {
    row.Finish(this->Results(static_cast<ComputeType<T>>(this->p.dropout.scale)));
    KeepSome<0>(seed, this->p.dropout.largest, row);
    row.Store();
  }
};

// From x and the cotangent after dropout. The softmax is computed again.
template <typename T>
struct DropBackward {
  using A = ComputeType<T>;
  using Params = OpParams;
  static constexpr int kInputs = 2, kReductions = 3;
  static constexpr bool kStreams = false;
  static constexpr int MinBlocks(int) { return 3; }  // 80 registers

  ForwardOf<T, false> forward;
  BackwardOf<T, false> backward;
  PhiloxWords seed;

  __device__ __forceinline__ DropBackward(const Params& p, int64_t row)
      : forward(p, row), backward(p, row), seed(p.dropout.seeds.At(row)) {
    backward.scale = p.zero_scale ? A(0) : forward.scale * static_cast<A>(p.dropout.scale);
  }

  __device__ __forceinline__ T Outside(int input) const {
    return input == 0 ? forward.Outside(0) : FromCompute<T>(0);
  }
  __device__ __forceinline__ T Masked() const { return FromCompute<T>(0); }
  __device__ __forceinline__ bool Undefined() const { return forward.Undefined(); }
  template <typename Row>
  __device__ __forceinline__ void Prepare(Row& row) const {
    forward.Prepare(row);
  }

  template <typename Row, typename G>
  __device__ __forceinline__ void Reduce(Row& row, G& group) {
    forward.Reduce(row, group);
    row.Finish(forward.Results());
    KeepSome<1>(seed, forward.p.dropout.largest, row);
    backward.Reduce(row, group);
  }
  template <typename Row>
  __device__ __forceinline__ void Write(Row& row) const {
    backward.Write(row);
  }
};

}  // namespace jax_fastops::cuda::softmax

#endif  // JAX_FASTOPS_SOFTMAX_ROWS_CUH_

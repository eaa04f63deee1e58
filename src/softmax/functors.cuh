// What softmax and log_softmax compute, as functors for the core's kernels over rows along the
// minor axis (core/cuda/held_rows.cuh) and along any other axis (core/cuda/held_columns.cuh). A
// functor has a maximum and a sum for each of kColumns columns: element i of a word belongs to
// column i % kColumns. Rows along the minor axis are one column. Softmax with
// dropout has functors of its own, because dropout takes registers.
#pragma once

#include <cstdint>
#include <iterator>
#include <type_traits>

#include "core/cuda/held_rows.cuh"
#include "core/cuda/kept.cuh"
#include "softmax/math.cuh"

namespace jax_fastops::cuda::softmax {

// Whether a functor computes log_softmax. A flag is enough for rows, whose kernels are bound by
// memory; columns have no registers for it.
enum class Log { kNever, kAlways, kFlag };

template <typename T, Log kLog>
struct FunctorBase {
  using A = ComputeType<T>;
  using Params = OpParams;
  static constexpr bool kStreams = true;
  // 64 registers, 48, or 40.
  static constexpr int MinBlocks(int words) { return words == 1 ? 6 : words == 2 ? 5 : 4; }

  const Params& p;
  A scale;

  explicit __device__ __forceinline__ FunctorBase(const Params& p)
      : p(p), scale(static_cast<A>(p.scale)) {}

  __device__ __forceinline__ bool log() const {
    return kLog == Log::kAlways || (kLog == Log::kFlag && p.log);
  }
};

// The forward. Excluded elements are held as the infinity that the scale turns into -inf.
template <typename T, Log kLog, int kColumns = 1>
struct ForwardOf : FunctorBase<T, kLog> {
  using Base = FunctorBase<T, kLog>;
  using A = ComputeType<T>;
  using Base::log, Base::p, Base::scale;
  static constexpr int kInputs = 1, kReductions = 2, kSums = 2 * kColumns;
  static constexpr bool kMasks = true;

  A most[kColumns];  // results of Tops
  A top[kColumns];
  A total[kColumns];

  __device__ __forceinline__ ForwardOf(const OpParams& p, int64_t) : Base(p) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      most[i] = -A(INFINITY);
      top[i] = total[i] = 0;
    }
  }

  __device__ __forceinline__ T Outside(int) const { return Excluded<T, false>(log(), p); }
  __device__ __forceinline__ T Masked() const { return ExcludedResult<T, false>(log()); }
  __device__ __forceinline__ bool Undefined(int column = 0) const {
    return Normalizer<T>::Undefined(total[column]);
  }

  template <typename Row>
  __device__ __forceinline__ void Prepare(Row& row) const {
    if (!p.zero_scale) return;
    row.Change([](auto& word) { word.TimesZero(); });
  }

  // Replaces elements by their exponentials, or for log_softmax by the distances from the top
  // elements. Adds the exponentials to `sums`.
  template <int kSize>
  __device__ __forceinline__ void ToPowers(bool is_log, const A (&from)[kColumns], A (&x)[kSize],
                                           A (&sums)[kColumns]) const {
    A powers[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const Normalizer<T> normalize(is_log, scale, from[i % kColumns]);
      powers[i] = normalize.Power(x[i]);
      x[i] = is_log ? x[i] - normalize.top : powers[i];
    }
    AddTo(powers, sums);
  }

  template <typename Row>
  __device__ __forceinline__ void FindTops(const Row& row, A (&tops)[kColumns]) const {
    Tops<T, kColumns> largest(scale);
    row.Each([&](const auto& word, const auto&...) { largest.Add(word); });
    largest.Get(tops);
  }
  template <typename Row>
  __device__ __forceinline__ void AddPowers(Row& row, const A (&from)[kColumns],
                                            A (&sums)[kColumns]) const {
    Branch(log(), [&](auto is_log) { row.Map([&](auto& x) { ToPowers(is_log, from, x, sums); }); });
  }

  template <typename Row, typename G>
  __device__ __forceinline__ void Reduce(Row& row, G& group) {
    FindTops(row, top);
    group.All(Max(), top);
#pragma unroll
    for (A& value : top) value = TopElement(value, scale);
    row.Forget();
    AddPowers(row, top, total);
    group.All(Sum(), total);
  }

  // From what Map has left to results times `gain`, which log_softmax does not have.
  __device__ __forceinline__ auto Results(A gain = 1) const {
    A factor[kColumns], offset[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      Normalizer<T> normalize(log(), scale, top[i]);
      normalize.SetTotal(total[i]);
      factor[i] = log() ? scale : normalize.last * gain;
      offset[i] = log() ? -normalize.last : A(0);
    }
    return [factor, offset](auto& x) {
#pragma unroll
      for (int i = 0; i < static_cast<int>(std::size(x)); ++i) {
        x[i] = fma(x[i], factor[i % kColumns], offset[i % kColumns]);
      }
    };
  }

  template <typename Row>
  __device__ __forceinline__ void Write(Row& row) const {
    const auto last = Results();
    if constexpr (Row::kKeeps) {
      row.Write([](auto&) {}, last);
    } else {
      Branch(log(), [&](auto is_log) {
        A unused[kColumns] = {};
        row.Write([&](auto& x) { ToPowers(is_log, top, x, unused); }, last);
      });
    }
  }

  // A row that is streamed: the maximum so far, and a sum relative to it.
  __device__ __forceinline__ void Raise(const A (&both)[kColumns]) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      total[i] = Corrected(total[i], most[i], both[i], scale);
      most[i] = both[i];
    }
  }
  template <typename Row>
  __device__ __forceinline__ void Add(Row& row) {
    A both[kColumns], from[kColumns], sums[kColumns] = {};
    FindTops(row, both);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      both[i] = Max()(most[i], both[i]);
      from[i] = PartTopElement(both[i], scale);
    }
    AddPowers(row, from, sums);
    Raise(both);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) total[i] += sums[i];
  }
  __device__ __forceinline__ void Join(const A (&sums)[kSums]) {
    A both[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) both[i] = Max()(most[i], sums[i]);
    Raise(both);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      total[i] += Corrected(sums[kColumns + i], sums[i], both[i], scale);
    }
  }
  __device__ __forceinline__ void Collect(A (&sums)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      sums[i] = most[i];
      sums[kColumns + i] = total[i];
    }
  }
  template <typename G>
  __device__ __forceinline__ void Combine(G& group) {
    A both[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) both[i] = most[i];
    group.All(Max(), both);
    Raise(both);
    group.All(Sum(), total);
  }
  __device__ __forceinline__ void Settle() {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (IsBottom(most[i], scale)) total[i] = A(NAN);  // the row has only -inf
      top[i] = TopElement(most[i], scale);
    }
  }
};

// The backward, from y and dy. For excluded elements y is held as -inf (log_softmax) or 0, and dy
// as 0.
template <typename T, Log kLog, int kColumns = 1>
struct BackwardOf : FunctorBase<T, kLog> {
  using Base = FunctorBase<T, kLog>;
  using A = ComputeType<T>;
  using Base::log, Base::p, Base::scale;
  static constexpr int kInputs = 2, kReductions = 1, kSums = kColumns;
  static constexpr bool kMasks = kLog != Log::kNever;  // otherwise y is 0 there

  A total[kColumns];

  __device__ __forceinline__ BackwardOf(const OpParams& p, int64_t) : Base(p) {
#pragma unroll
    for (A& sum : total) sum = 0;
  }

  __device__ __forceinline__ T Outside(int input) const {
    return input == 0 ? Excluded<T, true>(log(), p) : FromCompute<T>(0);
  }
  __device__ __forceinline__ T Masked() const { return ExcludedResult<T, true>(log()); }
  __device__ __forceinline__ bool Undefined(int column = 0) const {
    return Gradient<T>::Undefined(total[column], scale);
  }

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
        AddTo(terms, total);
      });
    });
  }
  template <typename G>
  __device__ __forceinline__ void Combine(G& group) {
    group.All(Sum(), total);
  }
  template <typename Row, typename G>
  __device__ __forceinline__ void Reduce(Row& row, G& group) {
    Add(row);
    Combine(group);
    row.Forget();
  }

  template <typename Row>
  __device__ __forceinline__ void Write(Row& row) const {
    A sums[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sums[i] = Gradient<T>(log(), scale, total[i], false).sum;
    row.Write([&](auto& y, const auto& dy) {
      Branch(log(), [&](auto is_log) {
        Gradient<T> gradient(is_log, scale, A(0), p.skip_zeros);
#pragma unroll
        for (int i = 0; i < static_cast<int>(std::size(y)); ++i) {
          gradient.sum = sums[i % kColumns];
          y[i] = gradient(y[i], dy[i]);
        }
      });
    });
  }

  __device__ __forceinline__ void Join(const A (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) total[i] += sums[i];
  }
  __device__ __forceinline__ void Collect(A (&sums)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sums[i] = total[i];
  }
  __device__ __forceinline__ void Settle() const {}
};

template <typename T>
struct Forward : ForwardOf<T, Log::kFlag> {
  using ForwardOf<T, Log::kFlag>::ForwardOf;
};
template <typename T>
struct Backward : BackwardOf<T, Log::kFlag> {
  using BackwardOf<T, Log::kFlag>::BackwardOf;
};

// The functors of columns.
template <bool kGrad, Log kLog = Log::kFlag>
struct ColumnFunctors {
  using Params = OpParams;
  static constexpr int kInputs = kGrad ? 2 : 1;

  template <typename Run>
  static cudaError_t Choose(const OpParams& p, const Run& run) {
    return p.log ? run(ColumnFunctors<kGrad, Log::kAlways>())
                 : run(ColumnFunctors<kGrad, Log::kNever>());
  }
  template <typename T, int kColumns, typename Run>
  static __device__ __forceinline__ void With(const OpParams& p, const Run& run) {
    if constexpr (kLog == Log::kFlag) {
      Branch(p.log, [&](auto is_log) {
        constexpr Log kKnown = decltype(is_log)::value ? Log::kAlways : Log::kNever;
        ColumnFunctors<kGrad, kKnown>::template With<T, kColumns>(p, run);
      });
    } else if constexpr (kGrad) {
      run(BackwardOf<T, kLog, kColumns>(p, 0));
    } else {
      run(ForwardOf<T, kLog, kColumns>(p, 0));
    }
  }
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
struct DropForward : ForwardOf<T, Log::kNever> {
  static constexpr bool kStreams = false;
  static constexpr int MinBlocks(int) { return 3; }  // 80 registers

  PhiloxWords seed;

  __device__ __forceinline__ DropForward(const OpParams& p, int64_t row)
      : ForwardOf<T, Log::kNever>(p, row), seed(p.dropout.seeds.At(row)) {}

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

  ForwardOf<T, Log::kNever> forward;
  BackwardOf<T, Log::kNever> backward;
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

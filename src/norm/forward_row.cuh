// How the forward of layer norm and RMS norm holds a row, or a part of one, in the registers of a
// group of threads: loads, moments, normalization. forward.cu explains the design.
//
// A thread accesses one *unit* at a time: 16 bytes, or in short rows that are not aligned a pair of
// elements or a single one. In longer rows that are not aligned, units have 16 bytes and start at
// multiples of 16 bytes of x, so the first and the last unit of a row may be partly outside of it
// (NormAccess::kShifted). Their elements outside the row are 0 in the registers, and are not
// stored. The same column is at another place of a unit in every row then, so parameters are loaded
// with a shift (Shifted).
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/cuda/group.cuh"
#include "core/cuda/kept.cuh"
#include "core/cuda/vec.cuh"
#include "norm/plan.h"
#include "norm/shape.h"

namespace jax_fastops::cuda {
namespace {

// Rows bypass L1, which is left to the parameters.
constexpr CacheHint kRowHint = CacheHint::kNoAllocate;

struct NormForwardParams {
  const char* x;
  const char* residual;
  char* y;
  char* sum;
  NormParameter input_bias;
  NormParameter scale;
  NormParameter bias;
  void* mean;
  void* rstd;
  double eps;
  double inverse;  // 1 / n
  float eps32;
  float inverse32;
  int64_t rows;
  int64_t n;
  bool layer;  // false: RMS norm
  bool adds;   // s differs from x, or is stored
  DType dtype;

  // For rows that are read twice.
  void* partials;
  int64_t chunks;        // per row
  int64_t row_partials;  // workspace elements per row

  int64_t block_columns;  // columns of a row in each block of a cluster

  RowDropout dropout;
};

template <typename A>
__device__ __forceinline__ A Eps(const NormForwardParams& p) {
  if constexpr (sizeof(A) == 4) return p.eps32;
  return p.eps;
}
template <typename A>
__device__ __forceinline__ A Inverse(const NormForwardParams& p) {
  if constexpr (sizeof(A) == 4) return p.inverse32;
  return p.inverse;
}

// A unit of elements.
template <typename T, NormAccess kAccess>
using UnitVec = Vec<T, kAccess == NormAccess::kElements ? int{sizeof(T)}
                       : kAccess == NormAccess::kPairs  ? 2 * int{sizeof(T)}
                                                        : 16>;

// A part of a row from the view of one thread. Elements are counted from the first one of the
// thread's first unit. The other units follow at distances that are compile-time constants, so one
// address per array is enough.
template <typename T, NormAccess kAccess>
struct Piece {
  using U = UnitVec<T, kAccess>;
  static constexpr int kSize = U::kSize;
  static constexpr bool kAligned = kAccess != NormAccess::kShifted;

  int64_t start;   // index of the thread's first element in x; may be before the row
  int64_t column;  // and in the row
  int high;        // elements below it belong to the part
  // Only if rows are shifted: elements from `low` on belong to the row, and those from `begin`
  // to `end` to the array.
  int low, begin, end;

  // The part of the row that has `most` units from unit `first` on, for the thread of rank `rank`.
  __device__ __forceinline__ Piece(const NormForwardParams& p, int64_t row, int64_t first, int most,
                                   int rank) {
    const int64_t offset =
        kAligned ? 0 : (reinterpret_cast<uintptr_t>(p.x) / sizeof(T) + row * p.n) % kSize;
    const int64_t origin = first * kSize - offset;
    const int before = rank * kSize;
    column = origin + before;
    start = row * p.n + column;
    high = static_cast<int>(min(p.n - origin, int64_t{most} * kSize)) - before;
    if constexpr (!kAligned) {
      low = column < 0 ? static_cast<int>(-column) : 0;
      begin = start < 0 ? static_cast<int>(-start) : 0;
      end = static_cast<int>(min(p.rows * p.n - start, int64_t{1} << 30));
    }
  }

  // Whether the unit at element `first` has an element of the row, and whether all of its elements
  // belong to the row.
  __device__ __forceinline__ bool Has(int first) const { return first < high; }
  __device__ __forceinline__ bool HasAll(int first) const {
    return kAligned || (first >= low && first + kSize <= high);
  }
  __device__ __forceinline__ bool HasElement(int element) const {
    return kAligned || (element >= low && element < high);
  }

  // Loads the unit at element `first`. It may have elements of neighboring rows.
  __device__ __forceinline__ U Load(const char* array, int first) const {
    const char* at = array + start * int64_t{sizeof(T)} + first * int{sizeof(T)};
    if constexpr (!kAligned) {
      const bool inside = first >= begin && first + kSize <= end;
      if (!inside || reinterpret_cast<uintptr_t>(at) % 16 != 0) return LoadElements(at, first);
    }
    return U::template Load<kRowHint>(at);
  }

  __device__ __forceinline__ void Store(char* array, int first, const U& unit) const {
    char* at = array + start * int64_t{sizeof(T)} + first * int{sizeof(T)};
    if constexpr (!kAligned) {
      if (!HasAll(first) || reinterpret_cast<uintptr_t>(at) % 16 != 0) {
        return StoreElements(at, first, unit);
      }
    }
    unit.Store(at);
  }

  // Sets the elements of a unit that are outside the row to 0.
  template <typename A>
  __device__ __forceinline__ void Mask(int first, A (&values)[kSize]) const {
    if (HasAll(first)) return;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (!HasElement(first + i)) values[i] = 0;
    }
  }

  // Loads the columns of a unit from a parameter of type P.
  template <typename P, typename A>
  __device__ __forceinline__ void LoadColumns(const NormForwardParams& p, const void* parameter,
                                              int first, A (&values)[kSize]) const {
    if constexpr (kAligned) {
      LoadParameter<T, P, kSize>(static_cast<const P*>(parameter) + column, first, values);
    } else {
      using Source = Shifted<P, kSize>;
      const P* data = static_cast<const P*>(parameter);
      const int64_t from = column + first;
      // Loads by words stay within the whole words of the parameter.
      const bool words = reinterpret_cast<uintptr_t>(data) % 16 == 0 && from >= 0 &&
                         from + kSize <= p.n / Source::kPerWord * Source::kPerWord &&
                         from < int64_t{1} << 31;
      if (words) {
        Source source;
        source.Load(data, static_cast<uint32_t>(from));
        P elements[kSize];
        source.Take(elements);
#pragma unroll
        for (int i = 0; i < kSize; ++i) values[i] = ToCompute(elements[i]);
        return;
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        values[i] = HasElement(first + i) ? ToCompute(data[from + i]) : A(0);
      }
    }
  }

 private:
  // Element by element: units at the ends of the array, or of the row, and arrays whose offset from
  // 16 bytes is not that of x.
  __device__ __forceinline__ U LoadElements(const char* at, int first) const {
    return U::LoadElements(reinterpret_cast<const T*>(at),
                           [&](int i) { return HasElement(first + i); });
  }
  __device__ __forceinline__ void StoreElements(char* at, int first, const U& unit) const {
    unit.StoreElements(reinterpret_cast<T*>(at), [&](int i) { return HasElement(first + i); });
  }
};

// A part of a row that a group of threads holds: `held` bytes per thread, in the compute type.
template <typename Element, NormAccess kAccess, typename Group, int kHeld>
struct Held {
  using T = Element;
  using U = UnitVec<T, kAccess>;
  using A = ComputeType<T>;
  using Part = Piece<T, kAccess>;
  static constexpr bool kAligned = Part::kAligned;
  static constexpr int kSize = U::kSize;
  static constexpr int kUnits = kHeld / int{sizeof(A)} / kSize;  // per thread
  static constexpr int kCapacity = kUnits * Group::kSize;        // units
  // Units whose parameters a thread loads before it waits for them.
  static constexpr int kBatch = kSize * sizeof(A) >= 32 ? 1 : 32 / (kSize * sizeof(A));
  // Types in which the error of the first mean may be as large as the rounding error of the result.
  static constexpr bool kCorrects = std::is_same_v<T, A>;
  using Scratch = typename Group::template Scratch<A, 2>;

  Part piece;
  A s[kUnits][kSize];  // elements outside the piece are 0

  // The part of the row that has up to `most` units from unit `first` on.
  __device__ __forceinline__ Held(const NormForwardParams& p, int64_t row, int64_t first,
                                  int most = kCapacity)
      : piece(p, row, first, most, Group::Rank()) {}

  static constexpr int First(int k) { return k * Group::kSize * kSize; }
  __device__ __forceinline__ bool Has(int k) const { return piece.Has(First(k)); }

  // The number of elements in piece `chunk` of a row that is divided into pieces of kCapacity
  // units.
  static __device__ __forceinline__ A Count(const NormForwardParams& p, int64_t row,
                                            int64_t chunk) {
    const Part piece(p, row, chunk * kCapacity, kCapacity, 0);
    return static_cast<A>(max(piece.high - (kAligned ? 0 : piece.low), 0));
  }

  template <typename P>
  __device__ __forceinline__ void LoadColumns(const NormForwardParams& p, const void* parameter,
                                              int from, A (&values)[kBatch][kSize]) const {
#pragma unroll
    for (int k = 0; k < kBatch && from + k < kUnits; ++k) {
      if (Has(from + k)) {
        piece.template LoadColumns<P>(p, parameter, First(from + k), values[k]);
      }
    }
  }
  __device__ __forceinline__ void LoadColumns(const NormForwardParams& p,
                                              const NormParameter& parameter, int from,
                                              A (&values)[kBatch][kSize]) const {
    if constexpr (!std::is_same_v<T, A>) {
      if (parameter.wide) return LoadColumns<A>(p, parameter.data, from, values);
    }
    LoadColumns<T>(p, parameter.data, from, values);
  }

  // Loads s: `array` is x, or the stored sum. If `adds`, adds the input bias and the residual to it
  // and stores the sum. With kDrops, that is done with dropout, whose seed is that of row `row`.
  // The random bits are drawn while x arrives.
  template <bool kDrops = false>
  __device__ __forceinline__ void Load(const NormForwardParams& p, const char* array, bool adds,
                                       [[maybe_unused]] int64_t row = 0) {
    U units[kUnits];
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      units[k] = Has(k) ? piece.Load(array, First(k)) : U{};
    }
    [[maybe_unused]] KeptUnits<kSize, kUnits> kept;
    [[maybe_unused]] const A gain = static_cast<A>(p.dropout.scale);
    if constexpr (kDrops) {
      kept.Draw(p.dropout.seeds.At(row), static_cast<int>(piece.column), First(1),
                KeptLimit(p.dropout.largest));
    }
    if (!kDrops && !adds) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        units[k].Unpack(s[k]);
        piece.Mask(First(k), s[k]);
      }
      return;
    }
    // Process a few units at a time. The loads of x are all in flight already, and the registers
    // limit the number of threads. Three units of 16-bit elements fit: then all loads of a row are
    // under way at once.
    constexpr int kResiduals = kSize < 8 || kUnits == 1 ? kBatch : kAligned && kUnits == 3 ? 3 : 2;
#pragma unroll
    for (int from = 0; from < kUnits; from += kResiduals) {
      U residual[kResiduals];
      if (p.residual != nullptr) {
#pragma unroll
        for (int k = 0; k < kResiduals && from + k < kUnits; ++k) {
          if (Has(from + k)) residual[k] = piece.Load(p.residual, First(from + k));
        }
      }
      A bias[kBatch][kSize];
#pragma unroll
      for (int k = 0; k < kResiduals && from + k < kUnits; ++k) {
        if (k % kBatch == 0 && p.input_bias.data != nullptr) {
          LoadColumns(p, p.input_bias, from + k, bias);
        }
        A(&values)[kSize] = s[from + k];
        units[from + k].Unpack(values);
        if (!Has(from + k)) continue;
        if (p.input_bias.data != nullptr) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] += bias[k % kBatch][i];
        }
        if constexpr (kDrops) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            values[i] = kept.Has(from + k, i) ? values[i] * gain : A(0);
          }
        }
        if (p.residual != nullptr) {
          A added[kSize];
          residual[k].Unpack(added);
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] += added[i];
        }
        const U rounded = U::Packed(values);
        if (p.sum != nullptr) piece.Store(p.sum, First(from + k), rounded);
        rounded.Unpack(values);
        piece.Mask(First(from + k), values);
      }
    }
  }

  // The mean of `count` elements is mean + correction.
  struct Moments {
    A mean = 0;
    A correction = 0;
    A squares;  // of the deviations
  };

  // `inverse` is 1 / count. s becomes the deviation from the uncorrected mean. For RMS norm the
  // mean is 0.
  __device__ __forceinline__ Moments Reduce(bool layer, A inverse, Scratch& scratch, int& phase) {
    Moments moments;
    if (layer) {
      A total[1] = {A(0)};
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        A sum = s[k][0];
#pragma unroll
        for (int i = 1; i < kSize; ++i) sum += s[k][i];
        total[0] += sum;
      }
      Group::AllReduce(Sum(), total, scratch, phase);
      moments.mean = total[0] * inverse;
    }

    A values[kCorrects ? 2 : 1] = {};  // sums of the squares, and of the deviations
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (!Has(k)) continue;
      A squares = 0, rest = 0;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        A& value = s[k][i];
        value -= moments.mean;
        if (!piece.HasElement(First(k) + i)) value = 0;
        squares += value * value;
        rest += value;
      }
      values[0] += squares;
      if constexpr (kCorrects) values[1] += rest;
    }
    Group::AllReduce(Sum(), values, scratch, phase);
    moments.squares = values[0];
    if constexpr (kCorrects) {
      if (layer) {
        moments.correction = values[1] * inverse;
        moments.squares -= moments.correction * values[1];
        if (moments.squares < 0) moments.squares = 0;  // rounding may make it negative; a NaN stays
      }
    }
    return moments;
  }

  __device__ __forceinline__ void Subtract(A mean) {
#pragma unroll
    for (auto& unit : s) {
#pragma unroll
      for (A& value : unit) value -= mean;
    }
  }

  // Writes the output for s - offset.
  __device__ __forceinline__ void Normalize(const NormForwardParams& p, A offset, A rstd) const {
    const bool scale = p.scale.data != nullptr, bias = p.bias.data != nullptr;
    const bool mixed = scale && bias && p.scale.wide != p.bias.wide;
    if (!kAligned || !scale || mixed) return NormalizeWith<void, true>(p, offset, rstd);
    if constexpr (!std::is_same_v<T, A>) {
      if (p.scale.wide) {
        return bias ? NormalizeWith<A, true>(p, offset, rstd)
                    : NormalizeWith<A, false>(p, offset, rstd);
      }
    }
    bias ? NormalizeWith<T, true>(p, offset, rstd) : NormalizeWith<T, false>(p, offset, rstd);
  }

 private:
  // Both parameters have type P, and kBias says whether there is a bias. If P is void, each of them
  // may have either type or be absent, which is found out for each unit.
  template <typename P, bool kBias>
  __device__ __forceinline__ void NormalizeWith(const NormForwardParams& p, A offset,
                                                A rstd) const {
    constexpr bool kMixed = std::is_void_v<P>;
#pragma unroll
    for (int from = 0; from < kUnits; from += kBatch) {
      A scale[kBatch][kSize], bias[kBatch][kSize];
      if constexpr (kMixed) {
        if (p.scale.data != nullptr) LoadColumns(p, p.scale, from, scale);
        if (p.bias.data != nullptr) LoadColumns(p, p.bias, from, bias);
      } else {
        LoadColumns<P>(p, p.scale.data, from, scale);
        if constexpr (kBias) LoadColumns<P>(p, p.bias.data, from, bias);
      }
#pragma unroll
      for (int k = 0; k < kBatch && from + k < kUnits; ++k) {
        if (!Has(from + k)) continue;
        A values[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          values[i] = (kCorrects ? s[from + k][i] - offset : s[from + k][i]) * rstd;
          if (!kMixed || p.scale.data != nullptr) values[i] *= scale[k][i];
          if (kBias && (!kMixed || p.bias.data != nullptr)) values[i] += bias[k][i];
        }
        piece.Store(p.y, First(from + k), U::Packed(values));
      }
    }
  }
};

template <typename A>
__device__ __forceinline__ void StoreMoments(const NormForwardParams& p, int64_t row, A mean,
                                             A rstd) {
  if (p.mean != nullptr) static_cast<A*>(p.mean)[row] = mean;
  if (p.rstd != nullptr) static_cast<A*>(p.rstd)[row] = rstd;
}

// The least number of resident blocks per SM, given the bytes of a row that a thread holds in the
// compute type. It leaves each thread registers for these bytes, at least as many again for
// everything else, and some more if rows are shifted, or with dropout.
template <typename T>
constexpr int MinBlocks(int block, int held, NormAccess access, bool drops = false) {
  const bool aligned = access != NormAccess::kShifted;
  const int threads = held > 64 ? (drops            ? 896
                                   : aligned        ? (held > 96 || sizeof(T) > 2 ? 1024 : 1152)
                                   : sizeof(T) == 2 ? 896
                                                    : 768)
                                : (aligned ? 1280 : 1024);
  return threads < block ? 1 : threads / block;
}

}  // namespace
}  // namespace jax_fastops::cuda

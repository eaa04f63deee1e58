// The forward of layer norm and RMS norm, with an optional residual and input bias, in one pass
// over memory.
//
// These kernels are memory-bound, and every byte that has to move moves once: a row stays in
// registers between its statistics and its output, whatever its length.
//
// - A thread moves one *unit* per instruction: 16 bytes if every row is aligned to 16 bytes,
//   otherwise single elements or pairs of 16-bit elements. Narrow units of neighboring lanes share
//   sectors; they still reach L2 as whole sectors, shortly after each other.
// - A group of threads holds a row: a part of a warp, a warp, a block or a cluster. Each thread
//   holds up to 128 bytes of it, in the compute type. Saturating the memory of an H100 takes about
//   20 KB in flight per SM. A few resident groups have more than that, so the loads of one row, the
//   reductions of another and the stores of a third overlap without software pipelining.
// - Rows that a cluster holds are pipelined nevertheless, because waiting costs more there (see
//   NormLongKernel).
// - The variance is computed from the deviations from the mean, which is cheap because the row is
//   in registers. In float32 and float64 the sum of the deviations corrects the mean once more.
//   This sum is the rounding error of the first mean, and it matters if the mean is large relative
//   to the deviations.
// - The residual and the input bias are added when the row arrives. Which parameters exist, and of
//   what type, is known only at run time. This costs uniform branches, a few instructions per unit.
// - Rows that do not fit into a cluster are read twice. A first kernel computes the moments of
//   chunks of a row; a second one merges them and normalizes. If the sum is stored, the second
//   kernel reads only the sum.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "core/cuda/load_kernels.h"
#include "core/cuda/packed.cuh"
#include "core/cuda/row_group.cuh"
#include "core/cuda/unit.cuh"
#include "norm/norm_cuda.h"

namespace jax_fastops::cuda {
namespace {

// -------------------------------------------------------------------------------------------------
// Rows and their parts

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

  // For rows that are read twice.
  void* partials;
  int64_t chunks;        // per row
  int64_t row_partials;  // workspace elements per row
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

// A part of a row from the view of one thread. Elements are counted from the thread's first one;
// those below `high` belong to the part. The thread's first unit is at element 0, and the others
// follow at distances that are compile-time constants. So one address per array is enough.
struct Piece {
  int64_t start;   // index of the thread's first element in x
  int64_t column;  // and in the row
  int high;
};

// Units are loaded as whole registers. Otherwise the compiler would split them into 16-bit
// elements.
template <typename T, int kUnit>
struct Units {
  using A = ComputeType<T>;
  using Part = std::conditional_t<sizeof(T) == 8, uint64_t,
                                  std::conditional_t<kUnit == 2, uint16_t, uint32_t>>;
  using U = Unit<Part, kUnit>;
  static constexpr int kSize = kUnit / sizeof(T);
  static constexpr int kPartSize = sizeof(Part) / sizeof(T);

  static __device__ __forceinline__ void Unpack(const U& unit, A (&values)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize; i += kPartSize) {
      const Part part = unit.elements[i / kPartSize];
      T elements[kPartSize];
      memcpy(elements, &part, sizeof(Part));
#pragma unroll
      for (int j = 0; j < kPartSize; ++j) values[i + j] = ToCompute(elements[j]);
    }
  }

  static __device__ __forceinline__ U Pack(const A (&values)[kSize]) {
    U unit;
#pragma unroll
    for (int i = 0; i < kSize; i += kPartSize) {
      T elements[kPartSize];
#pragma unroll
      for (int j = 0; j < kPartSize; ++j) elements[j] = FromCompute<T>(values[i + j]);
      Part part;
      memcpy(&part, elements, sizeof(Part));
      unit.elements[i / kPartSize] = part;
    }
    return unit;
  }

  // The part of the row that has `most` units from unit `first` on, for the thread of rank `rank`.
  static __device__ __forceinline__ Piece Make(const NormForwardParams& p, int64_t row,
                                               int64_t first, int most, int rank) {
    const int64_t column = first * kSize;
    const int before = rank * kSize;
    Piece piece;
    piece.start = row * p.n + column + before;
    piece.column = column + before;
    piece.high = static_cast<int>(min(p.n - column, int64_t{most} * kSize)) - before;
    return piece;
  }

  static __device__ __forceinline__ U Load(const char* array, const Piece& piece, int first) {
    return U::template Load<kRowHint>(array + piece.start * int64_t{sizeof(T)} +
                                      first * int{sizeof(T)});
  }

  static __device__ __forceinline__ void Store(char* array, const Piece& piece, int first,
                                               const U& unit) {
    unit.Store(array + piece.start * int64_t{sizeof(T)} + first * int{sizeof(T)});
  }

  template <typename P>
  static __device__ __forceinline__ void LoadColumns(const void* parameter, const Piece& piece,
                                                     int first, A (&values)[kSize]) {
    LoadParameter<T, P, kSize>(static_cast<const P*>(parameter) + piece.column, first, values);
  }
};

// The size of `bytes` bytes of a row after conversion to the compute type.
template <typename T>
constexpr int HeldBytes(int bytes) {
  return bytes / sizeof(T) * sizeof(ComputeType<T>);
}

// A piece of a row that a group of threads holds, with kUnits units in each thread.
template <typename Element, int kUnit, typename Group, int kUnits>
struct Held {
  using T = Element;
  using Us = Units<T, kUnit>;
  using U = typename Us::U;
  using A = ComputeType<T>;
  using Scratch = typename Group::template Scratch<A, 2>;
  static constexpr int kSize = Us::kSize;
  static constexpr int kCapacity = kUnits * Group::kSize;  // units
  // Units whose parameters a thread loads before it waits for them.
  static constexpr int kBatch = kSize * sizeof(A) >= 32 ? 1 : 32 / (kSize * sizeof(A));
  // Types in which the error of the first mean may be as large as the rounding error of the result.
  static constexpr bool kCorrects = std::is_same_v<T, A>;

  Piece piece;
  A s[kUnits][kSize];  // units outside the piece are 0

  __device__ __forceinline__ Held(const NormForwardParams& p, int64_t row, int64_t first)
      : piece(Us::Make(p, row, first, kCapacity, Group::Rank())) {}

  static constexpr int GroupSize() { return Group::kSize; }
  static constexpr int First(int k) { return k * Group::kSize * kSize; }
  __device__ __forceinline__ bool Has(int k) const { return First(k) < piece.high; }

  // The number of elements in piece `chunk` of a row that is divided into pieces of kCapacity
  // units.
  static __device__ __forceinline__ A Count(const NormForwardParams& p, int64_t row,
                                            int64_t chunk) {
    const Piece piece = Us::Make(p, row, chunk * kCapacity, kCapacity, 0);
    return static_cast<A>(max(piece.high, 0));
  }

  template <typename P>
  __device__ __forceinline__ void LoadColumns(const void* parameter, int from,
                                              A (&values)[kBatch][kSize]) const {
#pragma unroll
    for (int k = 0; k < kBatch && from + k < kUnits; ++k) {
      if (Has(from + k)) {
        Us::template LoadColumns<P>(parameter, piece, First(from + k), values[k]);
      }
    }
  }
  __device__ __forceinline__ void LoadColumns(const NormParameter& parameter, int from,
                                              A (&values)[kBatch][kSize]) const {
    if constexpr (!std::is_same_v<T, A>) {
      if (parameter.wide) return LoadColumns<A>(parameter.data, from, values);
    }
    LoadColumns<T>(parameter.data, from, values);
  }

  // Loads s: `array` is x, or the stored sum. If `adds`, adds the input bias and the residual to it
  // and stores the sum.
  __device__ __forceinline__ void Load(const NormForwardParams& p, const char* array, bool adds) {
    U units[kUnits];
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (Has(k)) {
        units[k] = Us::Load(array, piece, First(k));
      } else {
        memset(&units[k], 0, sizeof(U));
      }
    }
    if (!adds) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) Us::Unpack(units[k], s[k]);
      return;
    }
    // Process a few units at a time. The loads of x are all in flight already, and the registers
    // limit the number of threads.
    constexpr int kResiduals = kSize >= 8 && kUnits > 1 ? 2 : kBatch;
#pragma unroll
    for (int from = 0; from < kUnits; from += kResiduals) {
      U residual[kResiduals];
      if (p.residual != nullptr) {
#pragma unroll
        for (int k = 0; k < kResiduals && from + k < kUnits; ++k) {
          if (Has(from + k)) residual[k] = Us::Load(p.residual, piece, First(from + k));
        }
      }
      A bias[kBatch][kSize];
#pragma unroll
      for (int k = 0; k < kResiduals && from + k < kUnits; ++k) {
        if (k % kBatch == 0 && p.input_bias.data != nullptr) {
          LoadColumns(p.input_bias, from + k, bias);
        }
        A(&values)[kSize] = s[from + k];
        Us::Unpack(units[from + k], values);
        if (!Has(from + k)) continue;
        if (p.input_bias.data != nullptr) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] += bias[k % kBatch][i];
        }
        if (p.residual != nullptr) {
          A added[kSize];
          Us::Unpack(residual[k], added);
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] += added[i];
        }
        const U rounded = Us::Pack(values);
        if (p.sum != nullptr) Us::Store(p.sum, piece, First(from + k), rounded);
        Us::Unpack(rounded, values);
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
  __device__ __forceinline__ void Normalise(const NormForwardParams& p, A offset, A rstd) const {
    const bool scale = p.scale.data != nullptr, bias = p.bias.data != nullptr;
    const bool mixed = scale && bias && p.scale.wide != p.bias.wide;
    if (!scale || mixed) return NormaliseMixed(p, offset, rstd);
    if constexpr (!std::is_same_v<T, A>) {
      if (p.scale.wide) {
        return bias ? NormaliseWith<A, true>(p, offset, rstd)
                    : NormaliseWith<A, false>(p, offset, rstd);
      }
    }
    bias ? NormaliseWith<T, true>(p, offset, rstd) : NormaliseWith<T, false>(p, offset, rstd);
  }

 private:
  // Both parameters have type P.
  template <typename P, bool kBias>
  __device__ __forceinline__ void NormaliseWith(const NormForwardParams& p, A offset,
                                                A rstd) const {
#pragma unroll
    for (int from = 0; from < kUnits; from += kBatch) {
      A scale[kBatch][kSize], bias[kBatch][kSize];
      LoadColumns<P>(p.scale.data, from, scale);
      if constexpr (kBias) LoadColumns<P>(p.bias.data, from, bias);
#pragma unroll
      for (int k = 0; k < kBatch && from + k < kUnits; ++k) {
        if (!Has(from + k)) continue;
        A values[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const A deviation = kCorrects ? s[from + k][i] - offset : s[from + k][i];
          values[i] = deviation * rstd * scale[k][i];
          if constexpr (kBias) values[i] += bias[k][i];
        }
        Us::Store(p.y, piece, First(from + k), Us::Pack(values));
      }
    }
  }

  // Each parameter may have either type or be absent.
  __device__ __forceinline__ void NormaliseMixed(const NormForwardParams& p, A offset,
                                                 A rstd) const {
#pragma unroll
    for (int from = 0; from < kUnits; from += kBatch) {
      A scale[kBatch][kSize], bias[kBatch][kSize];
      if (p.scale.data != nullptr) LoadColumns(p.scale, from, scale);
      if (p.bias.data != nullptr) LoadColumns(p.bias, from, bias);
#pragma unroll
      for (int k = 0; k < kBatch && from + k < kUnits; ++k) {
        if (!Has(from + k)) continue;
        A values[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          values[i] = (kCorrects ? s[from + k][i] - offset : s[from + k][i]) * rstd;
          if (p.scale.data != nullptr) values[i] *= scale[k][i];
          if (p.bias.data != nullptr) values[i] += bias[k][i];
        }
        Us::Store(p.y, piece, First(from + k), Us::Pack(values));
      }
    }
  }
};

// rsqrtf with one Newton step, since its error may reach two units in the last place. The step is
// skipped where its terms would not be normal numbers.
__device__ __forceinline__ float ReciprocalRoot(float x) {
  const float root = rsqrtf(x);
  const float step = 0.5f * root * fmaf(-(x * root), root, 1.0f);
  return x > 1e-30f && x < 1e30f ? root + step : root;
}
__device__ __forceinline__ double ReciprocalRoot(double x) { return 1.0 / sqrt(x); }

template <typename A>
__device__ __forceinline__ void StoreMoments(const NormForwardParams& p, int64_t row, A mean,
                                             A rstd) {
  if (p.mean != nullptr) static_cast<A*>(p.mean)[row] = mean;
  if (p.rstd != nullptr) static_cast<A*>(p.rstd)[row] = rstd;
}

// -------------------------------------------------------------------------------------------------
// Kernels

constexpr bool HasClusters() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return false;
#else
  return true;
#endif
}

// Resident blocks per SM, given the `held` bytes of a row that a thread holds in the compute type.
// A thread gets registers for these bytes and at least as many again for everything else.
constexpr int MinBlocks(int block, int held) {
  return std::max(1, (held > 128 ? 512 : held > 64 ? 1024 : 1280) / block);
}

// kThreads threads in each of kCluster blocks hold a row.
template <typename T, int kUnit, int kThreads, int kCluster, int kBlock, int kUnits>
__global__ void __launch_bounds__(kBlock, MinBlocks(kBlock, HeldBytes<T>(kUnit* kUnits)))
    NormKernel(const NormForwardParams p) {
  if constexpr (kCluster == 1 || HasClusters()) {
    using Group = RowGroup<kThreads, kCluster>;
    using Row = Held<T, kUnit, Group, kUnits>;
    using A = typename Row::A;
    constexpr int kRows = kBlock / kThreads;
    __shared__ typename Row::Scratch scratch;
    int phase = 0;

    const int64_t row =
        kRows > 1 ? int64_t{blockIdx.x} * kRows + threadIdx.x / kThreads : blockIdx.x / kCluster;
    Row held(p, row, 0);
    // Groups without a row stay active, because the shuffles take full warps.
    if (kRows > 1 && row >= p.rows) held.piece.high = 0;
    held.Load(p, p.x, p.adds);
    Group::Begin();
    const auto moments = held.Reduce(p.layer, Inverse<A>(p), scratch, phase);
    const A rstd = ReciprocalRoot(moments.squares * Inverse<A>(p) + Eps<A>(p));
    held.Normalise(p, moments.correction, rstd);
    if (Group::Rank() == 0 && held.piece.high > 0) {
      StoreMoments(p, row, moments.mean + moments.correction, rstd);
    }
  }
}

// Long rows. Reading the parameters from L2 for every row would move as many bytes as the row
// itself, or more, and every row would wait for them. So blocks are persistent and process many
// rows. Each thread keeps the parameters of its columns in shared memory, where no other thread
// reads them. The next row is loaded while the current one is reduced. Blocks exchange their sums
// by asynchronous stores that an mbarrier counts. A cluster barrier would also wait for all pending
// stores to global memory.
constexpr int kLongThreads = 512;
constexpr int kLongHeld = 64;  // bytes of a row that a thread holds, in the compute type

template <int kCluster>
struct LongGroup : RowGroup<kLongThreads, kCluster> {
  using Base = RowGroup<kLongThreads, kCluster>;
  static constexpr int kWarps = kLongThreads / 32;
  static constexpr int kSlots = kWarps * kCluster;

  template <typename A, int kMost>
  struct Scratch {
    alignas(8) uint64_t barriers[2];
    A values[2][kMost][kSlots];
  };

  static __device__ __forceinline__ uint32_t Address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }

  template <typename S>
  static __device__ __forceinline__ void Begin(S& scratch) {
    if (threadIdx.x < 2) {
      asm volatile(
          "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(Address(&scratch.barriers[threadIdx.x]))
          : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    Base::Begin();
  }

  // As RowGroup::AllReduce, but `phase` counts the calls. Two buffers suffice. A block sends values
  // for call i + 2 only after it has received all values of call i + 1, and every warp sends those
  // after it has read the values of call i.
  template <typename Op, typename A, int kCount, int kMost>
  static __device__ __forceinline__ void AllReduce(Op op, A (&values)[kCount],
                                                   Scratch<A, kMost>& scratch, int& phase) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int half = phase & 1;
    const uint32_t barrier = Address(&scratch.barriers[half]);
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(static_cast<uint32_t>(kCount * kSlots * sizeof(A)))
                   : "memory");
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[i] = op(values[i], __shfl_xor_sync(0xffffffffu, values[i], lanes));
      }
    }
    if (lane < kCluster) {
      const int slot = Base::BlockRank() * kWarps + warp;
      uint32_t remote_barrier;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(barrier), "r"(lane));
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        uint32_t remote;
        asm("mapa.shared::cluster.u32 %0, %1, %2;"
            : "=r"(remote)
            : "r"(Address(&scratch.values[half][i][slot])), "r"(lane));
        if constexpr (sizeof(A) == 4) {
          asm volatile(
              "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                  remote),
              "r"(__float_as_uint(values[i])), "r"(remote_barrier)
              : "memory");
        } else {
          asm volatile(
              "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
                  remote),
              "l"(__double_as_longlong(values[i])), "r"(remote_barrier)
              : "memory");
        }
      }
    }
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{\n\t.reg .pred p;\n\t"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
          "selp.u32 %0, 1, 0, p;\n\t}"
          : "=r"(done)
          : "r"(barrier), "r"(phase >> 1 & 1)
          : "memory");
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      A value = lane < kSlots ? scratch.values[half][i][lane] : Op::template Identity<A>();
#pragma unroll
      for (int slot = 32; slot < kSlots; slot += 32) {
        value = op(value, scratch.values[half][i][slot + lane]);
      }
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) {
        value = op(value, __shfl_xor_sync(0xffffffffu, value, lanes));
      }
      values[i] = value;
    }
    ++phase;
  }
};

// The columns of a parameter that a thread needs, in shared memory.
template <typename Row>
struct KeptParameter {
  using Us = typename Row::Us;
  using A = typename Row::A;
  static constexpr int kUnits = Row::kCapacity / Row::GroupSize();
  static constexpr int kPieces = Row::kSize * int{sizeof(A)} / 16;  // words of a wide unit
  static constexpr int kBytes = kUnits * kPieces * 16 * kLongThreads;

  char* place = nullptr;  // null: absent
  bool wide = false;

  // Copies the parameter to shared memory at `next`, and advances `next`.
  __device__ __forceinline__ void Keep(const NormParameter& parameter, const Row& row,
                                       char*& next) {
    if (parameter.data == nullptr) return;
    place = next + threadIdx.x * 16;
    next += kBytes;
    wide = parameter.wide;
    const int size = wide ? sizeof(A) : sizeof(typename Row::T);
    const char* from = static_cast<const char*>(parameter.data) + row.piece.column * size;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (!row.Has(k)) continue;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (i * 16 >= Row::kSize * size) continue;
        Unit<uint32_t, 16>::Load(from + Row::First(k) * size + i * 16).Store(At(k, i));
      }
    }
  }

  __device__ __forceinline__ void Load(int k, A (&values)[Row::kSize]) const {
    if constexpr (!std::is_same_v<A, typename Row::T>) {
      if (!wide) {
        Us::Unpack(Us::U::Load(At(k, 0)), values);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const auto piece = Unit<A, 16>::Load(At(k, i));
#pragma unroll
      for (int j = 0; j < piece.kSize; ++j) values[i * piece.kSize + j] = piece.elements[j];
    }
  }

 private:
  __device__ __forceinline__ char* At(int k, int i) const {
    return place + (k * kPieces + i) * kLongThreads * 16;
  }
};

template <typename T, int kCluster>
__global__ void __launch_bounds__(kLongThreads, 1024 / kLongThreads)
    NormLongKernel(const NormForwardParams p) {
  if constexpr (HasClusters()) {
    using Group = LongGroup<kCluster>;
    constexpr int kUnits = kLongHeld / int{sizeof(ComputeType<T>)} * int{sizeof(T)} / 16;
    using Row = Held<T, 16, Group, kUnits>;
    using Us = typename Row::Us;
    using U = typename Us::U;
    using A = typename Row::A;
    constexpr int kSize = Row::kSize;
    __shared__ typename Row::Scratch scratch;
    extern __shared__ uint4 kept[];
    int phase = 0;
    Group::Begin(scratch);

    const int64_t stride = gridDim.x / kCluster;
    int64_t index = blockIdx.x / kCluster;
    Row row(p, index, 0);
    U units[kUnits], residual[kUnits];
    const auto fetch = [&] {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        if (row.Has(k)) {
          units[k] = Us::Load(p.x, row.piece, Row::First(k));
        } else {
          memset(&units[k], 0, sizeof(U));
        }
      }
      if (p.residual == nullptr) return;
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        if (row.Has(k)) residual[k] = Us::Load(p.residual, row.piece, Row::First(k));
      }
    };
    fetch();
    KeptParameter<Row> input_bias, scale, bias;
    char* next = reinterpret_cast<char*>(kept);
    input_bias.Keep(p.input_bias, row, next);
    scale.Keep(p.scale, row, next);
    bias.Keep(p.bias, row, next);
    for (; index < p.rows; index += stride) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        A(&values)[kSize] = row.s[k];
        Us::Unpack(units[k], values);
        if (!p.adds || !row.Has(k)) continue;
        if (p.input_bias.data != nullptr) {
          A added[kSize];
          input_bias.Load(k, added);
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] += added[i];
        }
        if (p.residual != nullptr) {
          A added[kSize];
          Us::Unpack(residual[k], added);
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] += added[i];
        }
        const U rounded = Us::Pack(values);
        if (p.sum != nullptr) Us::Store(p.sum, row.piece, Row::First(k), rounded);
        Us::Unpack(rounded, values);
      }
      const int64_t start = row.piece.start;
      row.piece.start += stride * p.n;
      if (index + stride < p.rows) fetch();
      row.piece.start = start;

      const auto moments = row.Reduce(p.layer, Inverse<A>(p), scratch, phase);
      const A rstd = ReciprocalRoot(moments.squares * Inverse<A>(p) + Eps<A>(p));
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        if (!row.Has(k)) continue;
        A values[kSize], columns[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) values[i] = (row.s[k][i] - moments.correction) * rstd;
        if (p.scale.data != nullptr) {
          scale.Load(k, columns);
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] *= columns[i];
        }
        if (p.bias.data != nullptr) {
          bias.Load(k, columns);
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] += columns[i];
        }
        Us::Store(p.y, row.piece, Row::First(k), Us::Pack(values));
      }
      if (Group::Rank() == 0) StoreMoments(p, index, moments.mean + moments.correction, rstd);
      row.piece.start += stride * p.n;
    }
  }
}

// Rows divided into chunks. A block processes one chunk.
constexpr int kChunkThreads = 256;

// Computes the moments of each chunk, and stores the sum if requested.
template <typename T, int kUnit, int kUnits>
__global__ void __launch_bounds__(kChunkThreads,
                                  MinBlocks(kChunkThreads, HeldBytes<T>(kUnit* kUnits)))
    NormChunkKernel(const NormForwardParams p) {
  using Group = RowGroup<kChunkThreads>;
  using Chunk = Held<T, kUnit, Group, kUnits>;
  using A = ComputeType<T>;
  __shared__ typename Chunk::Scratch scratch;
  int phase = 0;

  const int64_t row = blockIdx.x / p.chunks;
  const int64_t chunk = blockIdx.x - row * p.chunks;
  Chunk held(p, row, chunk * Chunk::kCapacity);
  held.Load(p, p.x, p.adds);
  const A inverse = A(1) / Chunk::Count(p, row, chunk);
  const auto moments = held.Reduce(p.layer, inverse, scratch, phase);
  if (threadIdx.x == 0) {
    A* partial = static_cast<A*>(p.partials) + row * p.row_partials + 2 * chunk;
    partial[0] = moments.mean + moments.correction;
    partial[1] = moments.squares;
  }
}

// Merges the moments of a row's chunks, in every block of the row again, and normalizes one chunk.
// The last chunks come first, because they may still be in L2.
template <typename T, int kUnit, int kUnits>
__global__ void __launch_bounds__(kChunkThreads,
                                  MinBlocks(kChunkThreads, HeldBytes<T>(kUnit* kUnits)))
    NormMergeKernel(const NormForwardParams p) {
  using Group = RowGroup<kChunkThreads>;
  using Chunk = Held<T, kUnit, Group, kUnits>;
  using A = ComputeType<T>;
  __shared__ typename Chunk::Scratch scratch;
  int phase = 0;

  const int64_t block = gridDim.x - 1 - blockIdx.x;
  const int64_t row = block / p.chunks;
  const int64_t chunk = block - row * p.chunks;
  Chunk held(p, row, chunk * Chunk::kCapacity);
  const bool stored = p.sum != nullptr;
  held.Load(p, stored ? p.sum : p.x, p.adds && !stored);

  const A* partials = static_cast<const A*>(p.partials) + row * p.row_partials;
  // Sum the means relative to that of the first chunk, so that no large numbers are added. Then sum
  // the squares of all chunks, as deviations from the mean of the row.
  const A origin = partials[0];
  A total[1] = {A(0)};
  for (int64_t c = threadIdx.x; c < p.chunks; c += kChunkThreads) {
    total[0] += Chunk::Count(p, row, c) * (partials[2 * c] - origin);
  }
  Group::AllReduce(Sum(), total, scratch, phase);
  const A mean = origin + total[0] * Inverse<A>(p);
  A squares[1] = {A(0)};
  for (int64_t c = threadIdx.x; c < p.chunks; c += kChunkThreads) {
    const A deviation = partials[2 * c] - mean;
    squares[0] += partials[2 * c + 1] + Chunk::Count(p, row, c) * (deviation * deviation);
  }
  Group::AllReduce(Sum(), squares, scratch, phase);
  const A rstd = ReciprocalRoot(squares[0] * Inverse<A>(p) + Eps<A>(p));
  held.Subtract(mean);
  held.Normalise(p, A(0), rstd);
  if (chunk == 0 && threadIdx.x == 0) StoreMoments(p, row, mean, rstd);
}

// -------------------------------------------------------------------------------------------------
// Launches

using Kernel = void (*)(NormForwardParams);

// A kernel and its launch configuration.
struct Form {
  Kernel kernel = nullptr;
  int threads = 1;  // threads of a block that hold a row
  int cluster = 1;
  int block = 1;
  int64_t kept = 0;      // bytes of shared memory per parameter; above 0: persistent blocks
  int64_t capacity = 0;  // longest row, in elements
};

template <typename T, int kUnit, int kThreads, int kCluster, int kBlock, int kUnits>
Form FormOf() {
  constexpr int kSize = kUnit / static_cast<int>(sizeof(T));
  return {NormKernel<T, kUnit, kThreads, kCluster, kBlock, kUnits>,
          kThreads,
          kCluster,
          kBlock,
          0,
          int64_t{kThreads} * kCluster * kUnits * kSize};
}

template <typename T, int kCluster>
Form LongFormOf() {
  constexpr int64_t kColumns = kLongThreads * kLongHeld / int64_t{sizeof(ComputeType<T>)};
  return {NormLongKernel<T, kCluster>, kLongThreads,       kCluster, kLongThreads,
          kLongThreads * kLongHeld,    kColumns * kCluster};
}

// Calls visit(form) in the order of preference, from short rows to long ones. A thread holds at
// most 64 bytes of a row, in the compute type, in groups of up to a warp, and 128 bytes from a warp
// up.
template <typename T, int kUnit, typename Visit>
void VisitForms(const Visit& visit) {
  constexpr int kFull = static_cast<int>(128 * sizeof(T) / sizeof(ComputeType<T>) / kUnit);
  constexpr int kHalf = kFull / 2;
  visit(FormOf<T, kUnit, 1, 1, 128, kUnit == 16 ? 2 : 4>());
  visit(FormOf<T, kUnit, 4, 1, 128, kHalf>());
  visit(FormOf<T, kUnit, 16, 1, 128, kHalf>());
  visit(FormOf<T, kUnit, 32, 1, 128, kHalf>());
  visit(FormOf<T, kUnit, 32, 1, 128, kFull>());
  visit(FormOf<T, kUnit, 128, 1, 128, kFull>());
  visit(FormOf<T, kUnit, 256, 1, 256, kFull>());
  // For 16-bit types the parameters have as many bytes as the row, or more, so the long forms come
  // first.
  if constexpr (sizeof(T) > 2) visit(FormOf<T, kUnit, 512, 1, 512, kFull>());
  if constexpr (kUnit == 16) {
    visit(LongFormOf<T, 2>());
    visit(LongFormOf<T, 4>());
    visit(LongFormOf<T, 8>());
  }
  if constexpr (sizeof(T) == 2) visit(FormOf<T, kUnit, 512, 1, 512, kFull>());
  visit(FormOf<T, kUnit, 1024, 1, 1024, kFull>());
  visit(FormOf<T, kUnit, 512, 8, 512, kFull>());
  visit(FormOf<T, kUnit, 1024, 8, 1024, kFull>());
}

// What the launchers need to know about the kernels of one type and unit.
struct Family {
  Form forms[16];
  int size = 0;
  Kernel chunk;
  Kernel merge;
  int64_t chunk_units;
  int unit;
};

template <typename T, int kUnit>
Family MakeFamily() {
  constexpr int kUnits = static_cast<int>(128 * sizeof(T) / sizeof(ComputeType<T>) / kUnit);
  Family family;
  VisitForms<T, kUnit>([&](const Form& form) { family.forms[family.size++] = form; });
  family.chunk = NormChunkKernel<T, kUnit, kUnits>;
  family.merge = NormMergeKernel<T, kUnit, kUnits>;
  family.chunk_units = kChunkThreads * kUnits;
  family.unit = kUnit;
  return family;
}

enum class Access { kWide, kPair, kElement };

template <typename T>
const Family& TypedFamily(Access access) {
  if (access == Access::kWide) {
    static const Family family = MakeFamily<T, 16>();
    return family;
  }
  if constexpr (sizeof(T) == 2) {
    if (access == Access::kPair) {
      static const Family family = MakeFamily<T, 4>();
      return family;
    }
  }
  static const Family family = MakeFamily<T, sizeof(T)>();
  return family;
}

const Family& FamilyOf(DType dtype, Access access) {
  switch (dtype) {
    case DType::kF32:
      return TypedFamily<float>(access);
    case DType::kBF16:
      return TypedFamily<__nv_bfloat16>(access);
    case DType::kF16:
      return TypedFamily<__half>(access);
    default:
      return TypedFamily<double>(access);
  }
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Units need every row and every parameter to be aligned.
Access AccessOf(int64_t n, int64_t itemsize, const NormForwardArrays& arrays) {
  const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  uintptr_t rows = static_cast<uintptr_t>(n * itemsize), parameters = 0;
  for (const void* p : {arrays.x, arrays.residual}) rows |= address(p);
  for (const void* p : {arrays.y, arrays.sum}) rows |= address(p);
  for (const NormParameter& parameter : {arrays.input_bias, arrays.scale, arrays.bias}) {
    parameters |= address(parameter.data);
  }
  if ((rows | parameters) % 16 == 0) return Access::kWide;
  const bool pairs = itemsize == 2 && rows % 4 == 0 && parameters % 8 == 0;
  return pairs ? Access::kPair : Access::kElement;
}

// Whether the current device has clusters, and the loaded code uses them.
cudaError_t HasClusters(const Form& any_cluster, bool& has) {
  constexpr int kMaxDevices = 256;
  static std::atomic<int8_t> known[kMaxDevices] = {};  // 0 unknown, 1 no, 2 yes
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < kMaxDevices && known[device].load(std::memory_order_relaxed) != 0) {
    has = known[device].load(std::memory_order_relaxed) == 2;
    return cudaSuccess;
  }
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(any_cluster.kernel));
  if (error != cudaSuccess) return error;
  has = std::min(attributes.ptxVersion, attributes.binaryVersion) >= 90;
  if (device < kMaxDevices) known[device].store(has ? 2 : 1, std::memory_order_relaxed);
  return cudaSuccess;
}

// The number of blocks of this form that the current device runs at once.
cudaError_t Resident(const Form& form, cudaLaunchConfig_t& config, int* blocks) {
  const void* kernel = reinterpret_cast<const void*>(form.kernel);
  const cudaError_t error = cudaOccupancyMaxActiveClusters(blocks, kernel, &config);
  *blocks = std::max(*blocks, 1) * form.cluster;
  return error;
}

cudaError_t LaunchForm(const Form& form, NormForwardParams params, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute;
  const int64_t blocks = CeilDiv(params.rows, form.block / form.threads) * form.cluster;
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(form.block);
  config.stream = stream;
  if (form.cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = form.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  if (form.kept > 0) {
    int64_t parameters = 0;
    for (const NormParameter& parameter : {params.input_bias, params.scale, params.bias}) {
      parameters += parameter.data != nullptr;
    }
    config.dynamicSmemBytes = parameters * form.kept;
    int resident;
    const cudaError_t error = Resident(form, config, &resident);
    if (error != cudaSuccess) return error;
    config.gridDim.x = static_cast<unsigned>(std::min<int64_t>(blocks, resident));
  }
  void* arguments[] = {&params};
  static_cast<void>(
      cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(form.kernel), arguments));
  return cudaGetLastError();  // clears the error, so that the next launch does not report it
}

cudaError_t LaunchChunks(const Family& family, int64_t itemsize, NormForwardParams params,
                         cudaStream_t stream) {
  const int64_t unit_size = family.unit / itemsize;
  params.chunks = CeilDiv(params.n, family.chunk_units * unit_size);
  params.row_partials = CeilDiv(params.n, 1024);
  const dim3 grid(static_cast<unsigned>(params.rows * params.chunks));
  void* arguments[] = {&params};
  for (const Kernel kernel : {family.chunk, family.merge}) {
    const cudaError_t error = cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid,
                                               dim3(kChunkThreads), arguments, 0, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

NormForwardParams ParamsOf(const NormShape& shape, NormKind kind, double eps,
                           const NormForwardArrays& arrays) {
  NormForwardParams params = {};
  params.x = static_cast<const char*>(arrays.x);
  params.residual = static_cast<const char*>(arrays.residual);
  params.y = static_cast<char*>(arrays.y);
  params.sum = static_cast<char*>(arrays.sum);
  params.input_bias = arrays.input_bias;
  params.scale = arrays.scale;
  params.bias = arrays.bias;
  params.mean = arrays.mean;
  params.rstd = arrays.rstd;
  params.eps = eps;
  params.inverse = 1.0 / static_cast<double>(shape.n);
  params.eps32 = static_cast<float>(eps);
  params.inverse32 = static_cast<float>(params.inverse);
  params.rows = shape.all_rows();
  params.n = shape.n;
  params.layer = kind == NormKind::kLayer;
  params.adds =
      arrays.residual != nullptr || arrays.input_bias.data != nullptr || arrays.sum != nullptr;
  params.partials = arrays.workspace;
  return params;
}

}  // namespace

cudaError_t NormForward(const NormShape& shape, NormKind kind, DType dtype, double eps,
                        const NormForwardArrays& arrays, cudaStream_t stream) {
  const int64_t itemsize = DTypeSize(dtype);
  if (shape.n == 0) {  // the moments of an empty row are NaN
    const int64_t bytes = shape.all_rows() * std::max<int64_t>(itemsize, sizeof(float));
    for (void* moment : {arrays.mean, arrays.rstd}) {
      if (moment == nullptr || bytes == 0) continue;
      const cudaError_t error = cudaMemsetAsync(moment, 0xFF, bytes, stream);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }
  if (shape.all_rows() == 0) return cudaSuccess;

  const NormForwardParams params = ParamsOf(shape, kind, eps, arrays);
  const Family& family = FamilyOf(dtype, AccessOf(shape.n, itemsize, arrays));
  bool clusters;
  const cudaError_t error = HasClusters(family.forms[family.size - 1], clusters);
  if (error != cudaSuccess) return error;
  for (int i = 0; i < family.size; ++i) {
    const Form& form = family.forms[i];
    if (shape.n <= form.capacity && (clusters || form.cluster == 1)) {
      return LaunchForm(form, params, stream);
    }
  }
  return LaunchChunks(family, itemsize, params, stream);
}

cudaError_t LoadNormForwardKernels() {
  static KernelLoader loader;
  return loader.Load([](const auto& load) {
    for (int i = 0; i < kNumDTypes; ++i) {
      for (const Access access : {Access::kWide, Access::kPair, Access::kElement}) {
        const Family& family = FamilyOf(static_cast<DType>(i), access);
        for (int form = 0; form < family.size; ++form) {
          const void* kernel = reinterpret_cast<const void*>(family.forms[form].kernel);
          load(kernel);
          // A device with less shared memory rejects this. Then launches of this form fail, but no
          // others.
          const int kept = static_cast<int>(3 * family.forms[form].kept);
          if (kept > 0 && cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               kept) != cudaSuccess) {
            cudaGetLastError();
          }
        }
        load(reinterpret_cast<const void*>(family.chunk));
        load(reinterpret_cast<const void*>(family.merge));
      }
    }
  });
}

}  // namespace jax_fastops::cuda

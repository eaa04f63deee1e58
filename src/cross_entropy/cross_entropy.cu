// Cross entropy with integer labels: the forward reads each logit once, the backward reads it once
// and writes its gradient. core/cuda/rows.cuh has the kernels.
//
// - A lane keeps a maximum and a sum of exponentials relative to it ("online softmax", Milakov and
//   Gimelshein), and changes the maximum once per chunk, so the change costs one exponential for
//   many elements. The lanes of a row combine at its end.
// - The gradient needs no reduction: the row's maximum and logarithm are residuals.
// - Of a row whose label is negative, the forward reads at most the first chunk, and the backward
//   nothing.
#include "cross_entropy/cross_entropy.h"

#include "core/cuda/dispatch.cuh"
#include "core/cuda/math.cuh"
#include "core/cuda/rows.cuh"

namespace jax_fastops::cuda {

struct CrossEntropyFamily;

namespace {

// exp(x - less). 16-bit elements are rounded so much that the errors of the products, up to 1e-6
// for the terms that matter, have no effect.
template <typename T>
__device__ __forceinline__ ComputeType<T> ExpFor(ComputeType<T> x, ComputeType<T> less = 0) {
  if constexpr (sizeof(T) == 2) {
    return Exp2(fmaf(x, kLog2E, -less * kLog2E));
  } else {
    return Exp(x - less);
  }
}

// -------------------------------------------------------------------------------------------------
// Forward

struct ForwardParams : CrossEntropyForwardCall {
  bool smooth;
};

template <typename T>
struct Forward {
  using A = ComputeType<T>;
  using Params = ForwardParams;
  static constexpr int kReduced = 3;
  static constexpr bool kWrites = false;

  // Before there is an element above -inf, the sum is 0, or NaN if there was a NaN. With +inf, it
  // is inf, as in jax.nn.logsumexp, or NaN.
  A top = -A(INFINITY);
  A sum = 0;    // of exp(x - top), or of exp(x) if top is infinite
  A drift = 0;  // of x - anchor, with smoothing
  // An element: sums of differences from it are exact where the logits are far from 0.
  A anchor = 0;
  A at_label = A(NAN);

  __device__ __forceinline__ bool Begin(const Params& p, const Rows& rows, int64_t row,
                                        bool first) {
    const T* const x = static_cast<const T*>(rows.in) + row * rows.n;
    const int label = p.labels[row];
    if (label < 0) return false;
    // Loaded now, so that it arrives with the row.
    if (first && label < rows.n) at_label = ToCompute(x[label]);
    if (p.smooth) {
      anchor = ToCompute(x[0]);
      if (anchor - anchor != A(0)) anchor = 0;
    }
    return true;
  }

  static __device__ __forceinline__ A Finite(A top) { return isinf(top) ? A(0) : top; }

  // The sum of exp(x - shift).
  template <typename Chunk>
  static __device__ __forceinline__ A SumOf(const Chunk& chunk, A shift) {
    A even = 0, odd = 0;  // few successive additions: the rounding error grows with them
    const auto add = [&](A term) {
      const A last = odd;
      odd = even + term;
      even = last;
    };
    if constexpr (sizeof(T) == 2) {
      // 2^(x * unit - less) takes one operation before the power. `less` is rounded, which is made
      // good in the sum. From 2^16 on, elements are so far apart that their terms are 0 or 1.
      const A unit = fabsf(shift) < 65536.0f ? kLog2E : 1.0f, less = shift * unit;
      chunk.Each([&](A x) { add(Exp2(fmaf(x, unit, -less))); });
      return (even + odd) * Exp2(-fmaf(shift, unit, -less));
    } else {
      chunk.Each([&](A x) { add(Exp(x - shift)); });
      return even + odd;
    }
  }

  template <typename Chunk>
  __device__ __forceinline__ void Add(const Params& p, const Chunk& chunk) {
    const A most = chunk.Max(top), shift = Finite(most);
    sum = sum * ExpFor<T>(top - shift) + SumOf(chunk, shift);  // 0 if there was nothing yet
    top = most;
    if (!p.smooth) return;
    A drifted = 0;
    chunk.Each([&](A x) { drifted += x - anchor; });
    drift += drifted;
  }

  __device__ __forceinline__ void Finish(const Params& p, const Rows& rows, int64_t row, bool read,
                                         bool first, Group<A, 3>& group) {
    A all[3] = {top, sum, drift};
    group.AllReduce(
        [](A(&values)[3], int width) {
          A most[1] = {values[0]};
          Butterfly(Max(), most, width);
          A sums[2] = {values[1] * ExpFor<T>(values[0] - Finite(most[0])), values[2]};
          Butterfly(Sum(), sums, width);
          values[0] = most[0];
          values[1] = sums[0];
          values[2] = sums[1];
        },
        all);
    if (!first) return;
    A loss = 0, log_sum = 0;
    if (read) {
      const A e = static_cast<A>(p.smoothing), z = static_cast<A>(p.z_loss), m = all[0];
      log_sum = Log(all[1]);
      loss = (1 - e) * (log_sum + (m - at_label));
      if (e != 0) loss += e * (log_sum + ((m - anchor) - all[2] / static_cast<A>(rows.n)));
      if (z != 0) loss += z * (m + log_sum) * (m + log_sum);
    }
    static_cast<A*>(p.loss)[row] = loss;
    if (p.top == nullptr) return;
    static_cast<A*>(p.top)[row] = read ? all[0] : A(0);
    static_cast<A*>(p.log_sum)[row] = log_sum;
  }
};

// -------------------------------------------------------------------------------------------------
// Backward

template <typename T>
struct Backward {
  using A = ComputeType<T>;
  using Params = CrossEntropyBackwardCall;
  static constexpr int kReduced = 0;
  static constexpr bool kWrites = true;

  A top = 0, log_sum = 0, scale = 0, all = 0, label_too = 0;
  int label;

  __device__ __forceinline__ bool Begin(const Params& p, const Rows& rows, int64_t row, bool) {
    label = p.labels[row];
    if (label < 0) return false;
    const A g = static_cast<const A*>(p.cotangent)[row];
    const A e = static_cast<A>(p.smoothing), z = static_cast<A>(p.z_loss);
    top = static_cast<const A*>(p.top)[row];
    log_sum = static_cast<const A*>(p.log_sum)[row];
    scale = z == 0 ? g : g * (1 + 2 * z * (top + log_sum));
    all = e == 0 ? A(0) : g * (e / static_cast<A>(rows.n));
    label_too = g * (1 - e);
    return true;
  }

  __device__ __forceinline__ A Result(A x, int index) const {
    const A d = AtOther(x);
    return index == label ? d - label_too : d;
  }
  // Few words have the label, so the others do not look for it.
  template <int kSize>
  __device__ __forceinline__ void Results(A (&x)[kSize], int index) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = AtOther(x[i]);
    const int here = label - index;
    if (static_cast<unsigned>(here) < static_cast<unsigned>(kSize)) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] -= i == here ? label_too : A(0);
    }
  }

 private:
  // The gradient at another class than the label.
  __device__ __forceinline__ A AtOther(A x) const {
    return scale * ExpFor<T>(x - top, log_sum) - all;
  }
};

// -------------------------------------------------------------------------------------------------
// Launches

// `out` has a result for each logit, or is null.
template <template <typename> typename Functor, typename Params>
cudaError_t Run(const Params& call, void* out, cudaStream_t stream) {
  if (call.rows == 0 || (out != nullptr && call.n == 0)) return cudaSuccess;
  if (call.n > 0x7fffffff) return cudaErrorInvalidValue;
  HeldLimits limits;
  const cudaError_t error = GetRowsLimits<CrossEntropyFamily, Forward>(&limits);
  if (error != cudaSuccess) return error;
  const RowsShape shape = {call.rows, call.n, static_cast<int>(DTypeSize(call.dtype)),
                           out == nullptr};
  const RowsPlan plan = PlanRows(shape, limits.processors, limits.max_cluster);
  const Rows rows = {call.logits, out, call.rows, static_cast<int>(call.n)};
  return ForDType(call.dtype, [&]<typename T>(TypeTag<T>) {
    return LaunchRows<CrossEntropyFamily, Functor, T>(plan, rows, call, stream);
  });
}

}  // namespace

cudaError_t CrossEntropyForward(const CrossEntropyForwardCall& call, cudaStream_t stream) {
  return Run<Forward>(ForwardParams{call, call.smoothing != 0}, nullptr, stream);
}

cudaError_t CrossEntropyBackward(const CrossEntropyBackwardCall& call, cudaStream_t stream) {
  return Run<Backward>(call, call.dx, stream);
}

cudaError_t LoadCrossEntropyKernels() {
  HeldLimits limits;
  return GetRowsLimits<CrossEntropyFamily, Forward>(&limits);
}

}  // namespace jax_fastops::cuda

// gated_act: y = act(gate) * up, and the gradients dgate = dy * up * act'(gate), dup = dy *
// act(gate).
//
// A pure element-wise pass, bound by memory. Two operands are one long row. The halves of one array
// are rows of n elements, 2 n apart. A thread handles a few 16-byte units, or single elements if
// the rows or the arrays are not aligned to 16 bytes; neighboring threads access neighboring units,
// so single elements are coalesced too. The activation is a run-time switch: it is the same for all
// threads, and costs nothing next to the memory accesses.
#include <algorithm>
#include <cstdint>

#include "core/alignment.h"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/divide.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/unit.cuh"
#include "core/integer.h"
#include "elementwise/activation.cuh"
#include "elementwise/bias_act.h"

namespace jax_fastops::cuda {
struct GatedAct;
namespace {

constexpr int kThreads = 256;

struct Params {
  const char *dy = nullptr, *gate = nullptr, *up = nullptr;  // the forward has no dy
  char *y = nullptr, *dgate = nullptr, *dup = nullptr;       // null: not requested
  uint32_t units = 0;                                        // of the result
  FastDivisor row_units{};                                   // of a row of the result
  int64_t gap = 0;  // bytes between the rows of operands and gradients
  Activation activation = Activation::kSilu;
};

// How many units a thread has in flight.
constexpr int UnitsPerThread(int64_t bytes) { return bytes == 16 ? 2 : 8; }

template <typename T, int kBytes, bool kBackward>
__global__ void __launch_bounds__(kThreads) GatedActKernel(const Params p) {
  using U = Unit<T, kBytes>;
  using A = ComputeType<T>;
  constexpr int kUnits = UnitsPerThread(kBytes);
  U dy[kUnits], gate[kUnits], up[kUnits];
  int64_t at[kUnits], result[kUnits];  // offsets in bytes
  const uint32_t first = blockIdx.x * (kUnits * kThreads) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const uint32_t unit = first + u * kThreads;
    if (unit >= p.units) continue;
    result[u] = int64_t{unit} * kBytes;
    at[u] = result[u] + Divide(unit, p.row_units) * p.gap;
    gate[u] = U::Load(p.gate + at[u]);
    up[u] = U::Load(p.up + at[u]);
    if constexpr (kBackward) dy[u] = U::Load(p.dy + result[u]);
  }
  ForActivation(p.activation, [&](auto activation) {
    using M = ActivationMath<T>;
    using F = FormulaOf<activation.value, M>;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (first + u * kThreads >= p.units) break;
#pragma unroll
      for (int i = 0; i < U::kSize; ++i) {
        const A s = ToCompute(gate[u].elements[i]), other = ToCompute(up[u].elements[i]);
        const A value = F::Value(s);
        if constexpr (kBackward) {
          const A g = ToCompute(dy[u].elements[i]);
          gate[u].elements[i] = FromCompute<T>(Pull<M, F>(s, g * other));
          up[u].elements[i] = FromCompute<T>(g * value);
        } else {
          gate[u].elements[i] = FromCompute<T>(value * other);
        }
      }
      if constexpr (kBackward) {
        if (p.dgate != nullptr) gate[u].Store(p.dgate + at[u]);
        if (p.dup != nullptr) up[u].Store(p.dup + at[u]);
      } else {
        gate[u].Store(p.y + result[u]);
      }
    }
  });
}

// The units of one launch fit 31 bits.
constexpr int64_t kMostUnits = int64_t{1} << 30;

template <bool kBackward>
cudaError_t Run(const GatedShape& shape, DType dtype, Params p, cudaStream_t stream) {
  const int64_t itemsize = DTypeSize(dtype);
  const bool flat = shape.pitch == shape.n || shape.rows == 1;
  const bool aligned = CommonAlignment({p.dy, p.gate, p.up, p.y, p.dgate, p.dup}) == 16 &&
                       (flat ? shape.rows : 1) * shape.n * itemsize % 16 == 0 &&
                       (flat || shape.pitch * itemsize % 16 == 0);
  const int64_t unit = aligned ? 16 : itemsize;
  // A launch takes whole lines: rows, or units if the array is one row.
  const int64_t lines = flat ? shape.rows * shape.n * itemsize / unit : shape.rows;
  const int64_t line = flat ? unit : shape.n * itemsize;
  const int64_t pitch = flat ? unit : shape.pitch * itemsize;
  const int64_t step = std::max<int64_t>(1, kMostUnits * unit / line);
  if (line / unit > kMostUnits) return cudaErrorInvalidValue;
  p.row_units = FastDivisor(static_cast<uint32_t>(line / unit));
  p.gap = pitch - line;
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    const auto kernel = aligned ? KernelOf<GatedAct, GatedActKernel<T, 16, kBackward>>()
                                : KernelOf<GatedAct, GatedActKernel<T, sizeof(T), kBackward>>();
    for (int64_t begin = 0; begin < lines; begin += step) {
      p.units = static_cast<uint32_t>(std::min(step, lines - begin) * (line / unit));
      const int64_t blocks = CeilDiv(p.units, kThreads * UnitsPerThread(unit));
      const cudaError_t error =
          Launch(kernel, {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads)},
                 stream, p);
      if (error != cudaSuccess) return error;
      const auto advance = [](auto*& array, int64_t bytes) {
        if (array != nullptr) array += bytes;
      };
      for (const char** array : {&p.gate, &p.up}) advance(*array, step * pitch);
      for (char** array : {&p.dgate, &p.dup}) advance(*array, step * pitch);
      advance(p.dy, step * line);
      advance(p.y, step * line);
    }
    return cudaSuccess;
  });
}

}  // namespace

cudaError_t GatedActForward(const GatedShape& shape, DType dtype, Activation activation,
                            const char* gate, const char* up, char* y, cudaStream_t stream) {
  return Run<false>(shape, dtype, {.gate = gate, .up = up, .y = y, .activation = activation},
                    stream);
}

cudaError_t GatedActBackward(const GatedShape& shape, DType dtype, Activation activation,
                             const char* dy, const char* gate, const char* up, char* dgate,
                             char* dup, cudaStream_t stream) {
  const Params p = {
      .dy = dy, .gate = gate, .up = up, .dgate = dgate, .dup = dup, .activation = activation};
  return Run<true>(shape, dtype, p, stream);
}

cudaError_t LoadGatedActKernels() { return LoadKernels<GatedAct>(); }

}  // namespace jax_fastops::cuda

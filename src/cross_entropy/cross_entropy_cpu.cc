// Cross entropy on the CPU: divides the rows for the threads. What is done once for a row is
// computed in float64.
#include <cmath>
#include <cstring>

#include "core/cpu/dtype.h"
#include "core/cpu/parallel.h"
#include "core/cpu/stream.h"
#include "cross_entropy/cross_entropy.h"
#include "cross_entropy/cross_entropy_simd.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(Kernels, cross_entropy_kernels)

// What is done once for a row takes as long as this many bytes of logits: about 30 ns on an EPYC.
constexpr int64_t kBytesPerRow = 256;

// Calls body(row, first byte of the row, label) for each row.
template <typename Body>
void OverRows(const CrossEntropyCall& call, int arrays, Executor& executor, const Body& body) {
  const int64_t row_bytes = call.n * ItemSize(call.dtype);
  ParallelFor(executor, call.rows, 1, static_cast<double>(arrays * row_bytes + kBytesPerRow),
              [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; ++row) {
                  body(row, row * row_bytes, int64_t{call.labels[row]});
                }
              });
}

}  // namespace

void CrossEntropyForward(const CrossEntropyForwardCall& call, Executor& executor) {
  auto* kernel = Kernels(call.dtype).forward;
  const char* const x = static_cast<const char*>(call.logits);
  const double e = call.smoothing, z = call.z_loss;
  WithAccumulator(call.dtype, [&]<typename Scalar>() {
    Scalar *loss = static_cast<Scalar*>(call.loss), *top = static_cast<Scalar*>(call.top);
    Scalar* const log_sum = static_cast<Scalar*>(call.log_sum);
    OverRows(call, 1, executor, [&](int64_t row, int64_t at, int64_t label) {
      double found = 0, s = 0;
      CrossEntropyStatistics stats = {};
      if (label >= 0) {
        kernel(x + at, call.n, label, e != 0, &stats);
        s = std::log(stats.sum);
        found = (1 - e) * (s + (stats.top - stats.at_label));
        if (e != 0) found += e * (s + stats.above_mean);
        if (z != 0) found += z * (stats.top + s) * (stats.top + s);
      }
      loss[row] = static_cast<Scalar>(found);
      if (top != nullptr) {
        top[row] = static_cast<Scalar>(stats.top);
        log_sum[row] = static_cast<Scalar>(s);
      }
    });
  });
}

void CrossEntropyBackward(const CrossEntropyBackwardCall& call, Executor& executor) {
  auto* kernel = Kernels(call.dtype).backward;
  const char* const x = static_cast<const char*>(call.logits);
  char* const dx = static_cast<char*>(call.dx);
  const int64_t row_bytes = call.n * ItemSize(call.dtype);
  const bool stream = ShouldStream(call.rows * row_bytes);
  const double e = call.smoothing, z = call.z_loss;
  WithAccumulator(call.dtype, [&]<typename Scalar>() {
    const Scalar* const cotangent = static_cast<const Scalar*>(call.cotangent);
    const Scalar* const top = static_cast<const Scalar*>(call.top);
    const Scalar* const log_sum = static_cast<const Scalar*>(call.log_sum);
    OverRows(call, 2, executor, [&](int64_t row, int64_t at, int64_t label) {
      if (label < 0) {
        std::memset(dx + at, 0, static_cast<size_t>(row_bytes));
        return;
      }
      const double g = cotangent[row], m = top[row], s = log_sum[row];
      kernel({.top = m,
              .log_sum = s,
              .scale = z == 0 ? g : g * (1 + 2 * z * (m + s)),
              .all = e == 0 ? 0 : g * (e / static_cast<double>(call.n)),
              .label_too = g * (1 - e),
              .stream = stream},
             x + at, call.n, label, dx + at);
    });
  });
}

}  // namespace jax_fastops::cpu

// The transposition kernels of one instruction set. Included by the files that are compiled several
// times: see isa.h for what such a header may hold.
#ifndef JAX_FASTOPS_CPU_TRANSPOSE_SIMD_H_
#define JAX_FASTOPS_CPU_TRANSPOSE_SIMD_H_

#include <stdint.h>

#include "cpu/isa.h"

namespace jax_fastops::cpu {

// Loops around a kernel's innermost piece, outermost first: how often, and how far one turn and the
// next are apart, in bytes.
struct LoopNest {
  static constexpr int kMaxRank = 48;

  int rank = 0;
  int64_t size[kMaxRank];
  int64_t in_step[kMaxRank];
  int64_t out_step[kMaxRank];

  void Add(int64_t count, int64_t in, int64_t out) {
    size[rank] = count;
    in_step[rank] = in;
    out_step[rank++] = out;
  }
};

struct TransposeKernels {
  // For each turn of the nest, and every r < rows and c < columns:
  //   out[column_offset[c] + r * unit] = in[row_offset[r] + c * unit]
  // Offsets are in bytes. `stream` asks for stores that go past the caches: all that is written
  // must then begin and end at whole cache lines.
  using Matrix = void(const LoopNest& nest, const char* in, const int64_t* row_offset, char* out,
                      const int64_t* column_offset, int64_t rows, int64_t columns, bool stream);
  // A matrix of at most 16 / unit rows whose columns follow one another in the output without a
  // gap, as the turns of the nest do: all of `out` is written, in order. `stream` asks for stores
  // that go past the caches, of whatever whole cache lines there are.
  using Dense = void(const LoopNest& nest, const char* in, const int64_t* row_offset, char* out,
                     int64_t rows, int64_t columns, bool stream);
  // Copies `bytes` bytes for each turn of the nest.
  using Rows = void(const LoopNest& nest, const char* in, char* out, int64_t bytes);

  Matrix* matrix[5];  // by the binary logarithm of the unit
  Dense* dense[5];
  Rows* rows;
};
FASTOPS_DECLARE_KERNELS(TransposeKernels, transpose_kernels)

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_CPU_TRANSPOSE_SIMD_H_

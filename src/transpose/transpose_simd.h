// The transposition kernels of one instruction set. isa.h says what this header may contain.
#pragma once

#include <stdint.h>

#include "core/cpu/isa.h"

namespace jax_fastops::cpu {

// The loops around a kernel, outermost first: the number of iterations, and the step of each
// iteration in the input and in the output, in bytes.
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

// The first two are by log2 of the unit.
struct TransposeKernels {
  // For each iteration of the nest, and every r < rows and c < columns:
  //   out[column_offset[c] + r * unit] = in[row_offset[r] + c * unit]
  // Offsets are in bytes. `stream` requests stores that bypass the caches. The written parts must
  // then begin and end at whole cache lines.
  void (*matrix[5])(const LoopNest& nest, const char* in, const int64_t* row_offset, char* out,
                    const int64_t* column_offset, int64_t rows, int64_t columns, bool stream);
  // Transposes matrices of at most 16 / unit rows, whose columns are adjacent in the output. The
  // matrices of the nest are adjacent too, so all of `out` is written in order. `stream` requests
  // stores that bypass the caches, for the whole cache lines of `out`.
  void (*dense[5])(const LoopNest& nest, const char* in, const int64_t* row_offset, char* out,
                   int64_t rows, int64_t columns, bool stream);
  // Copies `bytes` bytes for each iteration of the nest.
  void (*rows)(const LoopNest& nest, const char* in, char* out, int64_t bytes);
};
FASTOPS_DECLARE_KERNELS(TransposeKernels, transpose_kernels)

}  // namespace jax_fastops::cpu

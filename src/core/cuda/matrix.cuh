// Products of 16 x 8 x 16 by the tensor cores: C += A B, with A [16, 16] and B [16, 8] of 16 bits
// in shared memory, and C [16, 8] in the float registers of a warp. A lane has the rows lane / 4
// (first two registers) and lane / 4 + 8 of C, and the columns lane % 4 * 2 and the next one. All
// lanes of the warp call these functions. Rows in shared memory begin at multiples of 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/cuda/async_copy.cuh"

namespace jax_fastops::cuda {

using MatrixA = uint32_t[4];
using MatrixC = float[4];

// Four matrices of 8 x 8, of which a lane gets two elements each. The rows of matrix i are at the
// addresses that lanes 8 i to 8 i + 7 give.
template <bool kTransposed>
__device__ __forceinline__ void LoadMatrices(uint32_t (&m)[4], const void* row) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(SharedAddress(row)));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(SharedAddress(row)));
  }
}

// A, row by row, at `p`: `pitch` elements from a row to the next one.
template <typename T>
__device__ __forceinline__ void LoadA(MatrixA& a, const T* p, int pitch, int lane) {
  LoadMatrices<false>(a, p + lane % 16 * pitch + lane / 16 * 8);
}

// Two B for adjacent columns, one after the other, whose 16 rows are rows at `p`.
template <typename T>
__device__ __forceinline__ void LoadTwoB(uint32_t (&b)[4], const T* p, int pitch, int lane) {
  LoadMatrices<true>(b, p + lane % 16 * pitch + lane / 16 * 8);
}

// Two B for adjacent rows, one after the other, whose 8 columns are rows at `p`.
template <typename T>
__device__ __forceinline__ void LoadTwoTransposedB(uint32_t (&b)[4], const T* p, int pitch,
                                                   int lane) {
  LoadMatrices<false>(b, p + lane % 8 * pitch + lane / 8 * 8);
}

// The statement with the name of T in instructions.
#define FASTOPS_OF_16_BITS(T, statement)             \
  if constexpr (std::is_same_v<T, __half>) {         \
    statement("f16");                                \
  } else {                                           \
    static_assert(std::is_same_v<T, __nv_bfloat16>); \
    statement("bf16");                               \
  }

// result = plus + A B, with the B at `b`, two registers.
#define FASTOPS_MULTIPLY(type)                                                          \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                            \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"        \
      : "=f"(result[0]), "=f"(result[1]), "=f"(result[2]), "=f"(result[3])              \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(plus[0]), \
        "f"(plus[1]), "f"(plus[2]), "f"(plus[3]))

template <typename T>
__device__ __forceinline__ void MultiplyAdd(MatrixC& result, const MatrixA& a, const uint32_t* b,
                                            const MatrixC& plus) {
  FASTOPS_OF_16_BITS(T, FASTOPS_MULTIPLY);
}

#undef FASTOPS_MULTIPLY

// Adds the product.
template <typename T>
__device__ __forceinline__ void Multiply(MatrixC& c, const MatrixA& a, const uint32_t* b) {
  MultiplyAdd<T>(c, a, b, c);
}

}  // namespace jax_fastops::cuda

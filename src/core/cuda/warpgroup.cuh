// Products of 64 x 64 x 16 by the tensor cores of compute capability 9.0: C += A B, with A [64, 16]
// in shared memory or in the registers of four warps, 16 rows in each as a MatrixA, and B [16, 64]
// of 16 bits in shared memory. A warp has its 16 rows of C [64, 64] as eight MatrixC. All threads
// of the four warps call these functions. Products run asynchronously: what they read and write may
// not be touched from StartProducts to AwaitProducts.
//
// They need code for sm_90a: CMakeLists.txt lists the files that are compiled for it.
#pragma once

#include "core/cuda/matrix.cuh"

namespace jax_fastops::cuda {

constexpr bool kWarpgroups =
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    true;
#else
    false;
#endif

// Rows of 64 elements, whose words of 16 bytes are permuted in every eight rows, so that no banks
// conflict. Such an array begins at a multiple of 1024 bytes.
__device__ __forceinline__ int Swizzled(int row, int word) {
  return row * 64 + (word ^ row % 8) * 8;
}

// Describes such rows to the tensor cores.
__device__ __forceinline__ uint64_t DescribeRows(const void* rows) {
  constexpr uint64_t kSwizzle = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32;
  return kSwizzle | kEightRows | uint64_t{1} << 16 | (SharedAddress(rows) & 0x3ffff) / 16;
}

#define FASTOPS_ROW_OF(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define FASTOPS_ALL_OF(c)                                                                 \
  FASTOPS_ROW_OF(c, 0), FASTOPS_ROW_OF(c, 1), FASTOPS_ROW_OF(c, 2), FASTOPS_ROW_OF(c, 3), \
      FASTOPS_ROW_OF(c, 4), FASTOPS_ROW_OF(c, 5), FASTOPS_ROW_OF(c, 6), FASTOPS_ROW_OF(c, 7)

#define FASTOPS_RESULT                                                                         \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19," \
  " %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

__device__ __forceinline__ void StartProducts([[maybe_unused]] MatrixC (&c)[8]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" : FASTOPS_ALL_OF(c)::"memory");
#endif
}

__device__ __forceinline__ void AwaitProducts([[maybe_unused]] MatrixC (&c)[8]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" : FASTOPS_ALL_OF(c)::"memory");
#endif
}

// Makes what this thread has stored in shared memory visible to the tensor cores. A barrier
// follows.
__device__ __forceinline__ void ShowToProducts() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// A is in registers, which may not change before AwaitProducts, and hold A for this call only: the
// compiler has put other values into them when they were read again later. B is in rows, the first
// one at `b`.
template <typename T>
__device__ __forceinline__ void AddProduct([[maybe_unused]] MatrixC (&c)[8],
                                           [[maybe_unused]] const MatrixA& a,
                                           [[maybe_unused]] uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FASTOPS_MULTIPLY(type)                                                                \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " FASTOPS_RESULT \
               ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"                                   \
               : FASTOPS_ALL_OF(c)                                                            \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
  FASTOPS_OF_16_BITS(T, FASTOPS_MULTIPLY);
#undef FASTOPS_MULTIPLY
#endif
}

// A and B^T are in rows, 16 columns of them at `a` and `b`. The product replaces C if `add` is
// false.
template <typename T>
__device__ __forceinline__ void RowProduct([[maybe_unused]] MatrixC (&c)[8],
                                           [[maybe_unused]] uint64_t a, [[maybe_unused]] uint64_t b,
                                           [[maybe_unused]] bool add) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FASTOPS_MULTIPLY(type)                                                       \
  asm volatile(                                                                      \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                   \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " FASTOPS_RESULT \
      ", %32, %33, p, 1, 1, 0, 0;\n}\n"                                              \
      : FASTOPS_ALL_OF(c)                                                            \
      : "l"(a), "l"(b), "r"(int{add}))
  FASTOPS_OF_16_BITS(T, FASTOPS_MULTIPLY);
#undef FASTOPS_MULTIPLY
#endif
}

#undef FASTOPS_RESULT
#undef FASTOPS_ALL_OF
#undef FASTOPS_ROW_OF

}  // namespace jax_fastops::cuda

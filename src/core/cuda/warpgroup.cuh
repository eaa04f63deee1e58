// Products by the tensor cores of compute capability 9.0: C += A B, with A [64, 16] in shared
// memory or in the registers of four warps, 16 rows in each as a MatrixA, and B [16, 64], or wider,
// of 16 bits in shared memory. A warp has its 16 rows of C as a MatrixC for each eight columns. All
// threads of the four warps call these functions. Products run asynchronously: what they read and
// write may not be touched from StartProducts to AwaitProducts.
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

// Describes arrays of 64 such rows, one after the other, each with the next 64 columns.
__device__ __forceinline__ uint64_t DescribeArrays(const void* rows) {
  return DescribeRows(rows) + (uint64_t{64 * 128 / 16 - 1} << 16);
}

#define FASTOPS_ROW_OF(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define FASTOPS_64_OF(c, i)                                                         \
  FASTOPS_ROW_OF(c, i), FASTOPS_ROW_OF(c, i + 1), FASTOPS_ROW_OF(c, i + 2),         \
      FASTOPS_ROW_OF(c, i + 3), FASTOPS_ROW_OF(c, i + 4), FASTOPS_ROW_OF(c, i + 5), \
      FASTOPS_ROW_OF(c, i + 6), FASTOPS_ROW_OF(c, i + 7)
#define FASTOPS_128_OF(c) FASTOPS_64_OF(c, 0), FASTOPS_64_OF(c, 8)
#define FASTOPS_192_OF(c) FASTOPS_128_OF(c), FASTOPS_64_OF(c, 16)

// The same registers in instructions.
#define FASTOPS_64                                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FASTOPS_128                                                                              \
  FASTOPS_64                                                                                     \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FASTOPS_192                                                                              \
  FASTOPS_128                                                                                    \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

// The compiler may not move what computes C, or reads it, over this.
template <int kCount>
__device__ __forceinline__ void Hold(MatrixC (&c)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : FASTOPS_ROW_OF(c, i)::"memory");
}

template <int kCount>
__device__ __forceinline__ void StartProducts(MatrixC (&c)[kCount]) {
  Hold(c);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// The products since the last call are a group.
__device__ __forceinline__ void CommitProducts() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits for all but the last kPending groups.
template <int kPending = 0, int kCount>
__device__ __forceinline__ void AwaitProducts(MatrixC (&c)[kCount]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
  Hold(c);
}

// Makes what this thread has stored in shared memory visible to the tensor cores and to copies of
// tiles. A barrier follows.
__device__ __forceinline__ void ShowToProducts() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Lets the other warps of the block have registers, or takes what they leave. All warps of a
// warpgroup call it.
template <int kRegisters>
__device__ __forceinline__ void FewerRegisters() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void MoreRegisters() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// A is in registers, which may not change before AwaitProducts, and hold A for this call only: the
// compiler has put other values into them when they were read again later. B [16, 64] is in rows,
// the first one at `b`.
template <typename T>
__device__ __forceinline__ void AddProduct([[maybe_unused]] MatrixC (&c)[8],
                                           [[maybe_unused]] const MatrixA& a,
                                           [[maybe_unused]] uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FASTOPS_MULTIPLY(type)                                                            \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type "{" FASTOPS_64 \
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"                              \
               : FASTOPS_64_OF(c, 0)                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
  FASTOPS_OF_16_BITS(T, FASTOPS_MULTIPLY);
#undef FASTOPS_MULTIPLY
#endif
}

// The product replaces C if `add` is false. `first`, `second` and `third` are the operands after C.
#define FASTOPS_WGMMA(type, columns, c, of, first, second, third, transposed)                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " third                                         \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" c \
               "}, " first ", " second ", p, 1, 1, 0, " transposed ";\n}\n"                      \
               : of                                                                              \
               : "l"(a), "l"(b), "r"(int{add}))

// A and B^T [64, 16] are in rows, 16 columns of them at `a` and `b`.
template <typename T>
__device__ __forceinline__ void RowProduct([[maybe_unused]] MatrixC (&c)[8],
                                           [[maybe_unused]] uint64_t a, [[maybe_unused]] uint64_t b,
                                           [[maybe_unused]] bool add) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FASTOPS_MULTIPLY(type) \
  FASTOPS_WGMMA(type, "64", FASTOPS_64, FASTOPS_64_OF(c, 0), "%32", "%33", "%34", "0")
  FASTOPS_OF_16_BITS(T, FASTOPS_MULTIPLY);
#undef FASTOPS_MULTIPLY
#endif
}

// A and B are in rows, 16 columns of A at `a`, 16 rows of B at `b`. B is wider than its rows of 64
// columns: DescribeArrays says where the next 64 are.
template <typename T, int kCount>
__device__ __forceinline__ void WideProduct([[maybe_unused]] MatrixC (&c)[kCount],
                                            [[maybe_unused]] uint64_t a,
                                            [[maybe_unused]] uint64_t b,
                                            [[maybe_unused]] bool add) {
  static_assert(kCount == 8 || kCount == 16 || kCount == 24);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FASTOPS_MULTIPLY(type)                                                            \
  if constexpr (kCount == 8) {                                                            \
    FASTOPS_WGMMA(type, "64", FASTOPS_64, FASTOPS_64_OF(c, 0), "%32", "%33", "%34", "1"); \
  } else if constexpr (kCount == 16) {                                                    \
    FASTOPS_WGMMA(type, "128", FASTOPS_128, FASTOPS_128_OF(c), "%64", "%65", "%66", "1"); \
  } else {                                                                                \
    FASTOPS_WGMMA(type, "192", FASTOPS_192, FASTOPS_192_OF(c), "%96", "%97", "%98", "1"); \
  }
  FASTOPS_OF_16_BITS(T, FASTOPS_MULTIPLY);
#undef FASTOPS_MULTIPLY
#endif
}

#undef FASTOPS_WGMMA
#undef FASTOPS_192
#undef FASTOPS_128
#undef FASTOPS_64
#undef FASTOPS_192_OF
#undef FASTOPS_128_OF
#undef FASTOPS_64_OF
#undef FASTOPS_ROW_OF

}  // namespace jax_fastops::cuda

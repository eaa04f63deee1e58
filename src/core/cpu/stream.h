// When CPU kernels write their results with streaming stores, which bypass the caches.
#pragma once

#include <cstdint>

namespace jax_fastops::cpu {

// Streaming stores avoid reading each output line before it is overwritten. Outputs of less than 16
// MiB would have stayed in the cache. An allocation of 32 MiB or more is fresh from the operating
// system each time (glibc's largest mmap threshold): page faults dominate, and plain stores hit the
// lines that the OS kernel has just zeroed in the cache. With huge pages (core/ffi/huge_pages.h),
// the two kinds of stores are equal there.
inline constexpr int64_t kStreamBytes = int64_t{16} << 20, kFreshBytes = int64_t{32} << 20;

// `least` is for ops that gain from a different size.
inline bool ShouldStream(int64_t output_bytes, int64_t least = kStreamBytes) {
  return output_bytes >= least && output_bytes < kFreshBytes;
}

// Whether an array of rows of `row_bytes` begins each row at a whole cache line.
inline bool IsWholeLines(const void* p, int64_t row_bytes = 0) {
  return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(row_bytes)) % 64 == 0;
}

}  // namespace jax_fastops::cpu

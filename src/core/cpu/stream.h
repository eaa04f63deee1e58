// When CPU kernels write their results with streaming stores, which bypass the caches.
#pragma once

#include <cstdint>

namespace jax_fastops::cpu {

// Streaming stores avoid reading each output line before it is overwritten. Measured for relu on
// two cores of an EPYC with 32 MiB of last-level cache, float32, as speed relative to plain stores:
// - 8 MiB of output: 0.7, because the output would have stayed in the cache.
// - 16 MiB or more: 1.3 to 1.5. A consumer that reads the output next is not slower.
// - 32 MiB or more: 0.7 to 0.9. Such an allocation is fresh from the operating system each time
//   (glibc's largest mmap threshold), and page faults dominate. Plain stores hit the lines that the
//   OS kernel has just zeroed in the cache. With huge pages (core/ffi/huge_pages.h), the two kinds
//   of stores are equal within the spread: seven ops, 48 to 256 MiB.
inline constexpr int64_t kStreamBytes = int64_t{16} << 20, kFreshBytes = int64_t{32} << 20;

// `least` is for ops that gain from a different size.
inline bool ShouldStream(int64_t output_bytes, int64_t least = kStreamBytes) {
  return output_bytes >= least && output_bytes < kFreshBytes;
}

}  // namespace jax_fastops::cpu

// When CPU kernels write their results past the caches.
#ifndef JAX_FASTOPS_CPU_STREAM_H_
#define JAX_FASTOPS_CPU_STREAM_H_

#include <cstdint>

namespace jax_fastops::cpu {

// Stores past the caches save reading each output line before it is overwritten. Measured for relu
// on two cores of an EPYC with 32 MiB of last-level cache, float32, against plain stores: 0.7 times
// the speed at 8 MiB of output, where it would have stayed in the cache; 1.3 to 1.5 times from
// 16 MiB on, and no loss for a consumer that reads the output next. But an allocation of 32 MiB or
// more comes fresh from the operating system each time (glibc's largest mmap threshold), the cost
// is in its page faults, and lines that the kernel has just zeroed in the cache take a plain store
// better: 0.7 to 0.9 times the speed there. (Behind huge pages, which ffi/huge_pages.h asks for,
// the two are the same within the spread: seven ops, 48 to 256 MiB.)
inline constexpr int64_t kStreamBytes = int64_t{16} << 20, kFreshBytes = int64_t{32} << 20;

// `least` is for ops that gain from another size on.
inline bool ShouldStream(int64_t output_bytes, int64_t least = kStreamBytes) {
  return output_bytes >= least && output_bytes < kFreshBytes;
}

}  // namespace jax_fastops::cpu

#endif  // JAX_FASTOPS_CPU_STREAM_H_

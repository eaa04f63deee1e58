// Huge pages for what CPU kernels write.
#ifndef JAX_FASTOPS_FFI_HUGE_PAGES_H_
#define JAX_FASTOPS_FFI_HUGE_PAGES_H_

#include "xla/ffi/api/c_api.h"

namespace jax_fastops {

// Asks the operating system for huge pages behind the large results of a call. The allocator gives
// results without memory behind them, in every call from 32 MiB on (where glibc stops keeping what
// was freed), and a fault for each 4 KiB costs more than the kernel itself: where huge pages are
// given on request only, as Ubuntu sets them, 256 MiB of float32 take split_heads on two cores
// 91 ms, with this advice 41.
//
// A result fills all of the 2 MiB pages that are asked for. The advice stays with the addresses,
// also when the allocator has given them to another array. JAX_FASTOPS_HUGE_PAGES=0 turns it off.
// On systems with other pages than of 4 KiB and 2 MiB, and on others than Linux, nothing happens.
void AdviseHugePages(const XLA_FFI_CallFrame& frame);

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_FFI_HUGE_PAGES_H_

// Huge pages for the results of CPU kernels.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_fastops::inline xla {

// Asks the operating system for huge pages for the large results of a call. The allocator returns
// unmapped memory for every result of 32 MiB or more, because glibc does not keep freed blocks of
// that size. A page fault for each 4 KiB then costs more than the kernel. If huge pages are given
// only on request, as Ubuntu configures them, split_heads of 256 MiB of float32 takes 91 ms on two
// cores, and 41 ms with this advice.
//
// Only 2 MiB pages that the result fills completely are requested. The advice stays with the
// addresses when the allocator reuses them for another array. JAX_FASTOPS_HUGE_PAGES=0 disables it.
// Nothing happens on systems without pages of 4 KiB and 2 MiB, and on systems other than Linux.
void AdviseHugePages(const XLA_FFI_CallFrame& frame);

}  // namespace jax_fastops::inline xla

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "core/ffi/call.h"
#include "core/ffi/huge_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace jax_fastops::inline xla {

#if defined(__linux__) && defined(MADV_HUGEPAGE)

namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
// Smaller results do not repay the system call. NumPy uses the same limit.
constexpr size_t kLeastBytes = size_t{4} << 20;

bool IsWanted() {
  const char* const choice = std::getenv("JAX_FASTOPS_HUGE_PAGES");
  return (choice == nullptr || std::strcmp(choice, "0") != 0) && sysconf(_SC_PAGESIZE) == 4096;
}

void Advise(void* data, size_t bytes) {
  if (bytes < kLeastBytes) return;
  // Only pages that lie completely within the result: their neighbors belong to others.
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data), end = begin + bytes;
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = end / kHugePage * kHugePage;
  // Only advice: an error has no consequence.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

}  // namespace

void AdviseHugePages(const XLA_FFI_CallFrame& frame) {
  static const bool is_wanted = IsWanted();
  // The handler refuses frames of another size. A frame with an extension queries the handler.
  if (!is_wanted || frame.struct_size != XLA_FFI_CallFrame_STRUCT_SIZE ||
      frame.extension_start != nullptr || frame.stage != XLA_FFI_ExecutionStage_EXECUTE) {
    return;
  }
  for (int64_t i = 0; i < frame.rets.size; ++i) {
    if (frame.rets.types[i] != XLA_FFI_RetType_BUFFER) continue;
    const ffi::AnyBuffer result(static_cast<const XLA_FFI_Buffer*>(frame.rets.rets[i]));
    const auto itemsize = static_cast<size_t>(WholeBytes(result.element_type()));
    Advise(result.untyped_data(), result.element_count() * itemsize);
  }
}

#else

void AdviseHugePages(const XLA_FFI_CallFrame&) {}

#endif

}  // namespace jax_fastops::inline xla

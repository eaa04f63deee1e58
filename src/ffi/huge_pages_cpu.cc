#include <cstddef>
#include <cstdint>

#include "ffi/huge_pages.h"
#include "xla/ffi/api/ffi.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jax_fastops {

#if defined(__linux__) && defined(MADV_HUGEPAGE)

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// Less is done before the advice pays; NumPy asks from there on too.
constexpr size_t kLeastBytes = size_t{4} << 20;

void Advise(void* data, size_t bytes) {
  if (bytes < kLeastBytes) return;
  // Whole pages of the result alone: what lies beside it is not ours.
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (begin + bytes) / kHugePage * kHugePage;
  // It is advice: an error changes nothing.
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

}  // namespace

void AdviseHugePages(const XLA_FFI_CallFrame& frame) {
  if (frame.stage != XLA_FFI_ExecutionStage_EXECUTE) return;
  for (int64_t i = 0; i < frame.rets.size; ++i) {
    if (frame.rets.types[i] != XLA_FFI_RetType_BUFFER) continue;
    const ::xla::ffi::AnyBuffer result(static_cast<const XLA_FFI_Buffer*>(frame.rets.rets[i]));
    Advise(result.untyped_data(), result.size_bytes());
  }
}

#else

void AdviseHugePages(const XLA_FFI_CallFrame&) {}

#endif

}  // namespace jax_fastops

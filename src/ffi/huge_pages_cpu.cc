#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "ffi/huge_pages.h"
#include "xla/ffi/api/ffi.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace jax_fastops {

#if defined(__linux__) && defined(MADV_HUGEPAGE)

namespace {

namespace ffi = ::xla::ffi;

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
// Less is done before the advice pays; NumPy asks from there on too.
constexpr size_t kLeastBytes = size_t{4} << 20;

bool IsWanted() {
  const char* const choice = std::getenv("JAX_FASTOPS_HUGE_PAGES");
  return (choice == nullptr || std::strcmp(choice, "0") != 0) && sysconf(_SC_PAGESIZE) == 4096;
}

// 0 for types that are no kernel's results, whose sizes XLA's headers may not know.
size_t ElementBytes(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::U8:
    case ffi::DataType::S8:
    case ffi::DataType::PRED:
    case ffi::DataType::BF16:
    case ffi::DataType::F16:
    case ffi::DataType::U16:
    case ffi::DataType::S16:
    case ffi::DataType::F32:
    case ffi::DataType::U32:
    case ffi::DataType::S32:
    case ffi::DataType::F64:
    case ffi::DataType::U64:
    case ffi::DataType::S64:
    case ffi::DataType::C64:
    case ffi::DataType::C128:
      return ffi::ByteWidth(type);
    default:
      return 0;
  }
}

void Advise(void* data, size_t bytes) {
  if (bytes < kLeastBytes) return;
  // Whole pages of the result alone: what lies beside it is not ours.
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data), end = begin + bytes;
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = end / kHugePage * kHugePage;
  // It is advice: an error changes nothing.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

}  // namespace

void AdviseHugePages(const XLA_FFI_CallFrame& frame) {
  static const bool is_wanted = IsWanted();
  // The handler refuses frames of another size. One with an extension asks what the handler is.
  if (!is_wanted || frame.struct_size != XLA_FFI_CallFrame_STRUCT_SIZE ||
      frame.extension_start != nullptr || frame.stage != XLA_FFI_ExecutionStage_EXECUTE) {
    return;
  }
  for (int64_t i = 0; i < frame.rets.size; ++i) {
    if (frame.rets.types[i] != XLA_FFI_RetType_BUFFER) continue;
    const ffi::AnyBuffer result(static_cast<const XLA_FFI_Buffer*>(frame.rets.rets[i]));
    Advise(result.untyped_data(), result.element_count() * ElementBytes(result.element_type()));
  }
}

#else

void AdviseHugePages(const XLA_FFI_CallFrame&) {}

#endif

}  // namespace jax_fastops

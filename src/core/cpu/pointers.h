// Pointers to arrays that may be absent. Always inline, for core/cpu/isa.h.
#pragma once

#include <stdint.h>

namespace jax_fastops::cpu {

__attribute__((always_inline)) inline const char* Offset(const void* p, int64_t bytes) {
  return p == nullptr ? nullptr : static_cast<const char*>(p) + bytes;
}
__attribute__((always_inline)) inline char* Offset(void* p, int64_t bytes) {
  return p == nullptr ? nullptr : static_cast<char*>(p) + bytes;
}

// How many of the arrays are present.
template <typename... Pointers>
int Count(const Pointers*... p) {
  return (... + (p == nullptr ? 0 : 1));
}

}  // namespace jax_fastops::cpu

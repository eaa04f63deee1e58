// Pointers to arrays that may be absent.
#pragma once

#include <cstdint>

namespace jax_fastops::cpu {

inline const void* Offset(const void* p, int64_t bytes) {
  return p == nullptr ? nullptr : static_cast<const char*>(p) + bytes;
}
inline void* Offset(void* p, int64_t bytes) {
  return p == nullptr ? nullptr : static_cast<char*>(p) + bytes;
}

// How many of the arrays are present.
template <typename... Pointers>
int Count(const Pointers*... p) {
  return (... + (p == nullptr ? 0 : 1));
}

}  // namespace jax_fastops::cpu

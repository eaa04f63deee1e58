// The alignment of pointers.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace jax_fastops {

// The largest power of two up to 16 that divides every address.
inline int64_t CommonAlignment(std::initializer_list<const void*> pointers) {
  uintptr_t bits = 16;
  for (const void* p : pointers) bits |= reinterpret_cast<uintptr_t>(p);
  return static_cast<int64_t>(bits & (~bits + 1));
}

}  // namespace jax_fastops

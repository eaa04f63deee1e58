// Reads what calls with dropout have in common (core/philox.h): the seeds of the rows or the key,
// and the attributes `threshold` and `dropout_scale`. jax_fastops/_random.py passes them.
#pragma once

#include "core/ffi/call.h"
#include "core/philox.h"

namespace jax_fastops::inline xla {

// Without seeds and a key, there is no dropout.
inline RowDropout ReadDropout(Call& call, bool required = false) {
  RowDropout dropout;
  const bool counted = call.Has("key?"), given = call.Has("seeds?");
  if (required ? counted == given : counted && given) call.Fail("needs seeds or a key, not both");
  if (!counted && !given) return dropout;
  dropout.seeds.counted = counted;
  dropout.seeds.words = static_cast<const uint32_t*>(call.In(counted ? "key?" : "seeds?"));
  const int64_t threshold = call.Attribute<int64_t>("threshold");
  if (threshold < 1 || threshold > 1 << 16) call.Fail("the threshold is not in [1, 65536]");
  dropout.largest = static_cast<uint32_t>(threshold - 1);
  dropout.scale = call.Attribute<double>("dropout_scale");
  return dropout;
}

}  // namespace jax_fastops::inline xla

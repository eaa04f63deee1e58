// Handler of the transposition. jax_fastops/transpose.py declares its buffers.
#include "core/ffi/handler.h"
#include "transpose/transpose.h"

namespace jax_fastops {
namespace {

ffi::Error Move(Call& call, Queue queue) {
  const void* const x = call.In("x");
  void* const y = call.Out("y");
  const int64_t itemsize = call.ItemSize();
  const Call::Dims from = call.DimsOf("x"), to = call.DimsOf("y");
  // The dimensions of x and y have the same names, in another order; those of `...` stay.
  int axes[Call::kMaxRank] = {};
  bool seen[Call::kMaxRank] = {};
  bool valid = from.rank == to.rank;
  for (int i = 0; valid && i < to.rank; ++i) {
    int axis = i;
    for (int j = 0; to.name[i] >= 0 && j < from.rank; ++j) {
      if (from.name[j] == to.name[i]) axis = j;
    }
    valid = !seen[axis] && from.name[axis] == to.name[i];
    seen[axis] = true;
    axes[i] = axis;
  }
  call.Require(valid, "y", "is not a permutation of x");
  return call.Run(
      [&] { return backend::Transpose(x, y, from.size, axes, from.rank, itemsize, queue); });
}

FASTOPS_HANDLER("transpose", Move, LoadTransposeKernels);

}  // namespace
}  // namespace jax_fastops

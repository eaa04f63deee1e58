// Handler of the window sum. jax_fastops/window_sum.py declares its buffers.
#include "core/ffi/handler.h"
#include "window_sum/window_sum.h"

namespace jax_fastops {
namespace {

const Limit kLongWindow("window_sum_long_window", kWindowSumLongWindow);
const Limit kShortAxis("window_sum_short_axis", kWindowSumShortAxis);

ffi::Error Sum(Call& call, Queue queue) {
  const void* const x = call.In("x");
  void *const y = call.Out("y"), *const workspace = call.Out("workspace?");
  const DType dtype = call.Type();
  const Call::Axis n = call.AxisOf("x", "n");
  WindowSumShape shape{.outer = n.outer, .n = n.size, .inner = n.inner};
  shape.radius = call.Attribute<int64_t>("radius");
  shape.pad = call.Attribute<int64_t>("padding");
  constexpr int64_t kMost = int64_t{1} << 60;
  const bool windows =
      shape.radius >= 0 && shape.radius <= kMost && shape.pad >= 0 && shape.pad <= 2 * shape.radius;
  call.Require(windows && call.AxisOf("y", "n").size == shape.m(), "y",
               "has not one element for each window");
  return call.Run([&] { return backend::WindowSum(shape, dtype, x, y, workspace, queue); });
}

FASTOPS_HANDLER("window_sum", Sum, LoadWindowSumKernels);

}  // namespace
}  // namespace jax_fastops

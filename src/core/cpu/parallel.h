// How CPU kernels divide work between threads, independent of the thread pool.
#pragma once

#include <cstdint>

namespace jax_fastops::cpu {

class Executor {
 public:
  using Task = void (*)(void* context, int64_t index);

  virtual ~Executor() = default;
  // The number of threads that Run() can keep busy, including the caller.
  virtual int threads() const = 0;
  // Calls task(context, i) once for every i in [0, n), in any order and on any thread, and returns
  // after all calls have returned. `task` must not throw.
  virtual void Run(int64_t n, Task task, void* context) = 0;
};

// Runs everything on the calling thread.
class InlineExecutor final : public Executor {
 public:
  int threads() const override { return 1; }
  void Run(int64_t n, Task task, void* context) override {
    for (int64_t i = 0; i < n; ++i) task(context, i);
  }
};

// If fewer bytes than this are moved, waking another thread costs more than it saves.
inline constexpr int64_t kParallelBytes = 128 << 10;

// Calls body(begin, end) on pieces that together cover [0, total). `bytes_per_item` is the memory
// traffic of one item. Pieces begin at multiples of `multiple`. There are several pieces per
// thread, so that a thread that starts late or is preempted does not delay the others for long.
template <typename Body>
void ParallelFor(Executor& executor, int64_t total, int64_t multiple, double bytes_per_item,
                 const Body& body) {
  constexpr int kPiecesPerThread = 8;
  if (total <= 0) return;
  const int64_t units = (total - 1) / multiple + 1;
  const double bytes = bytes_per_item * static_cast<double>(total);
  int64_t pieces = static_cast<int64_t>(executor.threads()) * kPiecesPerThread;
  if (bytes < static_cast<double>(kParallelBytes) * static_cast<double>(pieces)) {
    pieces = static_cast<int64_t>(bytes / static_cast<double>(kParallelBytes));
  }
  if (pieces > units) pieces = units;
  if (executor.threads() <= 1 || pieces <= 1) {
    body(int64_t{0}, total);
    return;
  }
  struct Context {
    const Body& body;
    int64_t total, step;
  };
  const int64_t step = ((units - 1) / pieces + 1) * multiple;
  Context context{body, total, step};
  executor.Run((total - 1) / step + 1,
               +[](void* opaque, int64_t index) {
                 const Context& c = *static_cast<const Context*>(opaque);
                 const int64_t begin = index * c.step;
                 const int64_t end = c.total - begin < c.step ? c.total : begin + c.step;
                 c.body(begin, end);
               },
               &context);
}

}  // namespace jax_fastops::cpu

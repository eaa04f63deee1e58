#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "core/ffi/executor.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace jax_fastops::inline xla {
namespace {

// The calling thread's rounding mode and treatment of subnormals. Helper threads use the same, so
// that a result does not depend on the thread that computed it.
#if defined(__SSE2__)
using FloatMode = unsigned;
FloatMode GetFloatMode() { return _mm_getcsr(); }
void SetFloatMode(FloatMode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
using FloatMode = uint64_t;
FloatMode GetFloatMode() {
  FloatMode mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void SetFloatMode(FloatMode mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
using FloatMode = int;
FloatMode GetFloatMode() { return 0; }
void SetFloatMode(FloatMode) {}
#endif

// Shared by the caller and its helpers, and kept alive by the last of them. A helper may start long
// after the caller has returned. It then finds no task, and must not read `context`.
struct Batch {
  Batch(int64_t n, cpu::Executor::Task task, void* context)
      : n(n), task(task), context(context), mode(GetFloatMode()) {
    next.store(0, std::memory_order_release);
  }

  // Takes tasks until none is left. Each thread acquires what the caller wrote before: XLA's pool
  // does so, too, but ThreadSanitizer does not see it.
  void Work() {
    int64_t mine = 0;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_acquire)) < n; ++mine)
      task(context, i);
    if (mine == 0) return;
    if (finished.fetch_add(mine, std::memory_order_acq_rel) + mine == n) {
      // Under the lock, so that it cannot happen between the caller's last check and its sleep.
      std::lock_guard<std::mutex> lock(mutex);
      done.notify_one();
    }
  }

  void Help() {
    if (next.load(std::memory_order_acquire) >= n) return;
    const FloatMode own = GetFloatMode();
    SetFloatMode(mode);
    Work();
    SetFloatMode(own);
  }

  bool Finished() const { return finished.load(std::memory_order_acquire) == n; }

  void Wait() {
    if (Finished()) return;
    std::unique_lock<std::mutex> lock(mutex);
    done.wait(lock, [this] { return Finished(); });
  }

  const int64_t n;
  const cpu::Executor::Task task;
  void* const context;
  const FloatMode mode;
  std::atomic<int64_t> next;
  std::atomic<int64_t> finished{0};
  std::mutex mutex;
  std::condition_variable done;
};

}  // namespace

XlaExecutor::XlaExecutor(::xla::ffi::ThreadPool pool)
    : pool_(pool), threads_(static_cast<int>(std::max<int64_t>(1, pool.num_threads()))) {}

void XlaExecutor::Run(int64_t n, Task task, void* context) {
  const int64_t helpers = std::min<int64_t>(threads_, n) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < n; ++i) task(context, i);
    return;
  }
  auto batch = std::make_shared<Batch>(n, task, context);
  for (int64_t i = 0; i < helpers; ++i) pool_.Schedule([batch] { batch->Help(); });
  batch->Work();
  batch->Wait();
}

}  // namespace jax_fastops::inline xla

// XLA's CPU thread pool as the Executor that CPU kernels take.
#pragma once

#include <cstdint>

#include "core/cpu/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fastops::inline xla {

// The calling thread also works, and takes every task that no other thread has started. So Run()
// waits only for running tasks, never for a place in the pool's queue. It cannot deadlock, even if
// it is called from the pool's last free thread.
class XlaExecutor final : public cpu::Executor {
 public:
  explicit XlaExecutor(::xla::ffi::ThreadPool pool);

  int threads() const override { return threads_; }
  void Run(int64_t n, Task task, void* context) override;

 private:
  ::xla::ffi::ThreadPool pool_;
  int threads_;
};

}  // namespace jax_fastops::inline xla

// XLA's CPU thread pool as the Executor that CPU kernels take.
#ifndef JAX_FASTOPS_FFI_EXECUTOR_H_
#define JAX_FASTOPS_FFI_EXECUTOR_H_

#include <cstdint>

#include "cpu/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fastops {

// The calling thread works too and takes whatever no one else has started, so Run() never waits for
// a place in the pool's queue, only for tasks that are running: it cannot deadlock, even when
// called from the pool's last free thread.
class XlaExecutor final : public cpu::Executor {
 public:
  explicit XlaExecutor(::xla::ffi::ThreadPool pool);

  int threads() const override { return threads_; }
  void Run(int64_t n, Task task, void* context) override;

 private:
  ::xla::ffi::ThreadPool pool_;
  int threads_;
};

}  // namespace jax_fastops

#endif  // JAX_FASTOPS_FFI_EXECUTOR_H_

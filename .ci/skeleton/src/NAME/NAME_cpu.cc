#include "NAME/NAME.h"
#include "NAME/NAME_simd.h"
#include "core/cpu/dtype.h"
#include "core/cpu/parallel.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(KernelOf, NAME_kernels)

}  // namespace

void Name(DType dtype, const void* x, void* y, int64_t n, Executor& executor) {
  const int64_t size = ItemSize(dtype);
  const NameKernel run = KernelOf(dtype);
  ParallelFor(executor, n, 64, 2.0 * static_cast<double>(size), [&](int64_t begin, int64_t end) {
    run(static_cast<const char*>(x) + begin * size, static_cast<char*>(y) + begin * size,
        end - begin);
  });
}

}  // namespace jax_fastops::cpu

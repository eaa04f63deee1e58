// Memory for kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace jax_fastops::cpu {

// n uninitialized numbers that begin at a whole cache line.
template <typename Scalar>
class Buffer {
 public:
  explicit Buffer(int64_t n)
      : memory_(n > 0 ? new Scalar[static_cast<size_t>(n) + kLine] : nullptr) {
    const size_t past = reinterpret_cast<uintptr_t>(memory_.get()) % (kLine * sizeof(Scalar));
    begin_ = memory_.get() + (past == 0 ? 0 : kLine - past / sizeof(Scalar));
  }
  Scalar* begin() const { return begin_; }

 private:
  static constexpr size_t kLine = 64 / sizeof(Scalar);

  std::unique_ptr<Scalar[]> memory_;
  Scalar* begin_;
};

}  // namespace jax_fastops::cpu

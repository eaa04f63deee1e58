#include "relu/relu.h"

#include "core/cpu/dtype.h"
#include "core/cpu/stream.h"
#include "relu/relu_simd.h"

namespace jax_fastops::cpu {
namespace {

FASTOPS_DEFINE_KERNELS(Kernels, relu_kernels)

// Pieces of a flat array begin at whole cache lines of every array, including the mask.
constexpr int64_t kMultiple = 512;

// Calls body(rows, columns, element offset, mask offset) for each piece of the array.
template <typename Body>
void OverPieces(Executor& executor, bool has_mask, int64_t rows, int64_t columns,
                int64_t bytes_per_element, const Body& body) {
  const double bytes = static_cast<double>(bytes_per_element);
  if (!has_mask || rows == 1 || columns % 8 == 0) {
    ParallelFor(executor, rows * columns, kMultiple, bytes,
                [&](int64_t begin, int64_t end) { body(1, end - begin, begin, begin / 8); });
  } else if (columns > 0) {
    ParallelFor(executor, rows, 1, bytes * static_cast<double>(columns),
                [&](int64_t begin, int64_t end) {
                  body(end - begin, columns, begin * columns, begin * (columns / 8 + 1));
                });
  }
}

}  // namespace

void Relu(DType dtype, const void* x, void* y, uint8_t* mask, int64_t rows, int64_t columns,
          Executor& executor) {
  AddRelu(dtype, x, nullptr, y, mask, rows, columns, executor);
}

void AddRelu(DType dtype, const void* x, const void* y, void* z, uint8_t* mask, int64_t rows,
             int64_t columns, Executor& executor) {
  const int64_t size = ItemSize(dtype);
  const bool stream = ShouldStream(rows * columns * size);
  auto* kernel = Kernels().forward[static_cast<int>(dtype)];
  OverPieces(executor, mask != nullptr, rows, columns, size * (y == nullptr ? 2 : 3),
             [&](int64_t r, int64_t c, int64_t element, int64_t mask_byte) {
               const int64_t at = element * size;
               kernel(static_cast<const char*>(x) + at,
                      y == nullptr ? nullptr : static_cast<const char*>(y) + at,
                      static_cast<char*>(z) + at, mask == nullptr ? nullptr : mask + mask_byte, r,
                      c, stream);
             });
}

void ReluBackward(DType dtype, const uint8_t* mask, const void* dy, void* dx, int64_t rows,
                  int64_t columns, Executor& executor) {
  const int64_t size = ItemSize(dtype);
  const bool stream = ShouldStream(rows * columns * size);
  auto* kernel = Kernels().backward[static_cast<int>(dtype)];
  OverPieces(executor, true, rows, columns, size * 2,
             [&](int64_t r, int64_t c, int64_t element, int64_t mask_byte) {
               kernel(mask + mask_byte, static_cast<const char*>(dy) + element * size,
                      static_cast<char*>(dx) + element * size, r, c, stream);
             });
}

}  // namespace jax_fastops::cpu

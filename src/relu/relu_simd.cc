// The inner loops of relu.h: one pass over memory, with the widest registers of the machine. Whole
// blocks stay in registers. The rest of a row goes through a zeroed block on the stack, whose zero
// lanes also make the unused bits of the mask zero.
#include "relu/relu_simd.h"
#include "core/cpu/simd.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

// The number of elements before the first block of `p` that is aligned for streaming stores, or -1
// if no such block begins at a whole byte of the mask.
template <typename T>
FASTOPS_INLINE int64_t StreamHead(const void* p) {
  const int64_t past =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) % sizeof(typename T::Vec));
  if (past % (8 * T::kBytes) != 0) return -1;
  return past == 0 ? 0 : (static_cast<int64_t>(sizeof(typename T::Vec)) - past) / T::kBytes;
}

template <typename T, bool kStream>
FASTOPS_INLINE void Put(void* p, typename T::Vec v) {
  if constexpr (kStream) {
    T::Stream(p, v);
  } else {
    T::Store(p, v);
  }
}

template <typename T, bool kAdd, bool kMask>
struct Forward {
  using Vec = typename T::Vec;
  using Bits = typename T::Bits;

  static FASTOPS_INLINE Bits Compute(const char* x, const char* y, Vec* z) {
    Vec v = T::Load(x);
    if constexpr (kAdd) v = T::Add(v, T::Load(y));
    return T::Positive(v, z);
  }

  // n < kLanes elements
  static void Part(const char* x, const char* y, char* z, uint8_t* mask, int64_t n) {
    alignas(64) char block[2][sizeof(Vec)] = {};
    const size_t bytes = static_cast<size_t>(n) * T::kBytes;
    memcpy(block[0], x, bytes);
    if constexpr (kAdd) memcpy(block[1], y, bytes);
    Vec v;
    const Bits bits = Compute(block[0], block[1], &v);
    T::Store(block[0], v);
    memcpy(z, block[0], bytes);
    if constexpr (kMask) memcpy(mask, &bits, static_cast<size_t>(n + 7) / 8);
  }

  // Processes the whole blocks from i on, and returns the position after them.
  template <bool kStream>
  static FASTOPS_INLINE int64_t Blocks(const char* x, const char* y, char* z, uint8_t* mask,
                                       int64_t i, int64_t n) {
#pragma GCC unroll 4
    for (; i + T::kLanes <= n; i += T::kLanes) {
      Vec v;
      const Bits bits = Compute(x + i * T::kBytes, y + i * T::kBytes, &v);
      Put<T, kStream>(z + i * T::kBytes, v);
      if constexpr (kMask) memcpy(mask + i / 8, &bits, sizeof(bits));
    }
    return i;
  }

  static void Run(const void* x_data, const void* y_data, void* z_data, uint8_t* mask, int64_t rows,
                  int64_t columns, bool stream) {
    const char* x = static_cast<const char*>(x_data);
    // Without an addition y is not read. It points to x because arithmetic on a null pointer is
    // undefined.
    const char* y = kAdd ? static_cast<const char*>(y_data) : x;
    char* z = static_cast<char*>(z_data);
    const int64_t row_bytes = columns * T::kBytes;
    for (int64_t row = 0; row < rows; ++row) {
      int64_t i = 0;
      const int64_t head = stream ? StreamHead<T>(z) : -1;
      if (head >= 0 && head <= columns) {
        if (head > 0) Part(x, y, z, mask, head);
        i = Blocks<true>(x, y, z, mask, head, columns);
      } else {
        i = Blocks<false>(x, y, z, mask, 0, columns);
      }
      if (i < columns) {
        const int64_t at = i * T::kBytes;
        Part(x + at, y + at, z + at, kMask ? mask + i / 8 : nullptr, columns - i);
      }
      x += row_bytes;
      y += row_bytes;
      z += row_bytes;
      if constexpr (kMask) mask += (columns + 7) / 8;
    }
    if (stream) StreamFence();
  }
};

template <typename T, bool kAdd>
void RunForward(const void* x, const void* y, void* z, uint8_t* mask, int64_t rows, int64_t columns,
                bool stream) {
  if (mask != nullptr) {
    Forward<T, kAdd, true>::Run(x, y, z, mask, rows, columns, stream);
  } else {
    Forward<T, kAdd, false>::Run(x, y, z, mask, rows, columns, stream);
  }
}

template <typename T>
struct Backward {
  using Vec = typename T::Vec;
  using Bits = typename T::Bits;

  static void Part(const uint8_t* mask, const char* dy, char* dx, int64_t n) {
    alignas(64) char block[sizeof(Vec)] = {};
    const size_t bytes = static_cast<size_t>(n) * T::kBytes;
    Bits bits = 0;
    memcpy(&bits, mask, static_cast<size_t>(n + 7) / 8);
    memcpy(block, dy, bytes);
    T::Store(block, T::Select(bits, T::Load(block)));
    memcpy(dx, block, bytes);
  }

  template <bool kStream>
  static FASTOPS_INLINE int64_t Blocks(const uint8_t* mask, const char* dy, char* dx, int64_t i,
                                       int64_t n) {
#pragma GCC unroll 4
    for (; i + T::kLanes <= n; i += T::kLanes) {
      Bits bits;
      memcpy(&bits, mask + i / 8, sizeof(bits));
      Put<T, kStream>(dx + i * T::kBytes, T::Select(bits, T::Load(dy + i * T::kBytes)));
    }
    return i;
  }

  static void Run(const uint8_t* mask, const void* dy_data, void* dx_data, int64_t rows,
                  int64_t columns, bool stream) {
    const char* dy = static_cast<const char*>(dy_data);
    char* dx = static_cast<char*>(dx_data);
    for (int64_t row = 0; row < rows; ++row) {
      int64_t i = 0;
      const int64_t head = stream ? StreamHead<T>(dx) : -1;
      if (head >= 0 && head <= columns) {
        if (head > 0) Part(mask, dy, dx, head);
        i = Blocks<true>(mask, dy, dx, head, columns);
      } else {
        i = Blocks<false>(mask, dy, dx, 0, columns);
      }
      if (i < columns) Part(mask + i / 8, dy + i * T::kBytes, dx + i * T::kBytes, columns - i);
      mask += (columns + 7) / 8;
      dy += columns * T::kBytes;
      dx += columns * T::kBytes;
    }
    if (stream) StreamFence();
  }
};

}  // namespace

extern const ReluKernels relu_kernels;
const ReluKernels relu_kernels = {
    {RunForward<F32, false>, RunForward<BF16, false>, RunForward<F16, false>,
     RunForward<F64, false>},
    {RunForward<F32, true>, RunForward<BF16, true>, RunForward<F16, true>, RunForward<F64, true>},
    {Backward<F32>::Run, Backward<BF16>::Run, Backward<F16>::Run, Backward<F64>::Run}};

}  // namespace jax_fastops::cpu::FASTOPS_ISA

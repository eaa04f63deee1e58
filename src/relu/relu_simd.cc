// The inner loops of relu.h: one pass over memory, with the widest registers of the machine.
//
// NaN is not > 0, but relu returns it unchanged. A float16 subnormal is a normal float32, and keeps
// its value; subnormals of the other types count as zero if the calling thread is in that mode.
#include "relu/relu_simd.h"

#include "core/cpu/block_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

// Calls block(extent, stream, i, count) for the blocks of a row whose output is `to`. Streaming
// stores begin at a whole cache line, if a whole byte of the mask begins there too.
template <typename E, typename F>
FASTOPS_INLINE void OverRow(const char* to, int64_t n, bool stream, const F& block) {
  const int64_t head = stream ? StreamHead<E>(to, n) : n;
  if (head % 8 != 0 || head == n) {
    OverBlocks<E::kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      block.template operator()<false>(extent, i, count);
    });
    return;
  }
  OverBlocks<E::kBlock>(0, head, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
    block.template operator()<false>(extent, i, count);
  });
  OverBlocks<E::kBlock>(head, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
    block.template operator()<true>(extent, i, count);
  });
}

template <typename E>
struct Relu {
  using A = typename E::A;
  using Raw = typename E::Raw;

  template <bool kAdd, bool kMask>
  static void Rows(const char* x, const char* y, char* z, uint8_t* mask_data, int64_t rows,
                   int64_t columns, bool stream) {
    BlockArray mask;
    for (int64_t row = 0; row < rows; ++row) {
      mask.data = reinterpret_cast<char*>(mask_data);
      OverRow<E>(z, columns, stream,
                 [&]<bool kStream>(auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
                   const int64_t at = i * E::kBytes;
                   Raw v = LoadRaw<E>(extent, x + at, count);
                   if constexpr (kAdd)
                     v = E::Narrow(Add(E::Widen(v), E::Widen(LoadRaw<E>(extent, y + at, count))));
                   const Pair<A> wide = E::Widen(v);
                   StoreElements<E, kStream>(extent, z + at,
                                             E::Keep(BitsOfPair<A>(Positive(wide)), v), count);
                   if constexpr (kMask)
                     StoreBits<E>(extent, mask, i, count, Less(SetPair<A>(0), wide));
                 });
      x += columns * E::kBytes;
      if constexpr (kAdd) y += columns * E::kBytes;
      z += columns * E::kBytes;
      if constexpr (kMask) mask_data += (columns + 7) / 8;
    }
    if (stream) StreamFence();
  }

  static void Forward(const void* x, const void* y, void* z, uint8_t* mask, int64_t rows,
                      int64_t columns, bool stream) {
    WithFlags(
        [&]<bool kAdd, bool kMask>() {
          Rows<kAdd, kMask>(static_cast<const char*>(x), static_cast<const char*>(y),
                            static_cast<char*>(z), mask, rows, columns, stream);
        },
        y != nullptr, mask != nullptr);
  }

  static void Backward(const uint8_t* mask, const void* dy_data, void* dx_data, int64_t rows,
                       int64_t columns, bool stream) {
    const char* dy = static_cast<const char*>(dy_data);
    char* dx = static_cast<char*>(dx_data);
    for (int64_t row = 0; row < rows; ++row) {
      OverRow<E>(dx, columns, stream,
                 [&]<bool kStream>(auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
                   const int64_t at = i * E::kBytes;
                   const uint32_t bits = BitsAt<E>(extent, mask, i, count);
                   StoreElements<E, kStream>(
                       extent, dx + at, E::Keep(bits, LoadRaw<E>(extent, dy + at, count)), count);
                 });
      mask += (columns + 7) / 8;
      dy += columns * E::kBytes;
      dx += columns * E::kBytes;
    }
    if (stream) StreamFence();
  }
};

}  // namespace

extern const ReluKernels relu_kernels;
const ReluKernels relu_kernels = {FASTOPS_EACH_DTYPE(Relu, Forward),
                                  FASTOPS_EACH_DTYPE(Relu, Backward)};

}  // namespace jax_fastops::cpu::FASTOPS_ISA

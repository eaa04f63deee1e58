// The inner loops of dropout.h: the bits of a piece go to a small mask, then one pass applies it.
#include "dropout/dropout_simd.h"

#include "core/cpu/block_math.h"
#include "core/cpu/philox_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

template <typename E>
struct Dropout {
  using A = typename E::A;

  static void Piece(const uint32_t* seed, uint32_t block, int64_t n, uint32_t largest, double scale,
                    const char* x, char* y) {
    uint8_t mask[kDropoutPiece / kSeedBlock];
    KeptBits(seed, block, (n + kSeedBlock - 1) / kSeedBlock, largest, mask);
    const Pair<A> factor = SetPair<A>(static_cast<typename A::Scalar>(scale));
    OverBlocks<E::kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const uint32_t bits = BitsAt<E>(extent, mask, i, count);
      const Pair<A> v = Loaded<A>(LoadElements<E>(extent, x + i * E::kBytes, count));
      StoreElements<E, false>(extent, y + i * E::kBytes, E::Keep(bits, E::Narrow(Mul(v, factor))),
                              count);
    });
  }
};

}  // namespace

extern const DropoutKernels dropout_kernels;
const DropoutKernels dropout_kernels = {FASTOPS_EACH_DTYPE(Dropout, Piece)};

}  // namespace jax_fastops::cpu::FASTOPS_ISA

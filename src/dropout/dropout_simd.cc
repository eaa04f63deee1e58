// The inner loops of dropout.h: the bits of a piece go to a small mask, then one pass applies it.
#include "dropout/dropout_simd.h"

#include "core/cpu/block_math.h"
#include "core/cpu/philox_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

template <typename E>
struct Dropout {
  using A = typename E::A;

  static void Piece(const DropoutPiece& p, uint32_t largest, double scale) {
    uint8_t mask[kDropoutPiece / kSeedBlock];
    KeptBits(p.seed, p.block, (p.n + kSeedBlock - 1) / kSeedBlock, largest, mask);
    const Pair<A> factor = SetPair<A>(static_cast<typename A::Scalar>(scale));
    OverBlocks<E::kBlock>(0, p.n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const uint32_t bits = BitsAt<E>(extent, mask, i, count);
      Pair<A> v = Loaded<A>(LoadElements<E>(extent, p.x + i * E::kBytes, count));
      if (p.bias != nullptr) v = Add(v, LoadEither<E>(extent, p.bias, p.wide_bias, i, count));
      v = Mul(v, factor);
      char* const y = p.y + i * E::kBytes;
      if (p.residual == nullptr) {
        StoreElements<E, false>(extent, y, E::Keep(bits, E::Narrow(v)), count);
      } else {
        v = Select(PairOfBits<A>(bits), v, SetPair<A>(0));
        v = Add(v, LoadElements<E>(extent, p.residual + i * E::kBytes, count));
        StoreElements<E, false>(extent, y, E::Narrow(v), count);
      }
    });
  }
};

}  // namespace

const DropoutKernel dropout_kernels[] = FASTOPS_EACH_DTYPE(Dropout, Piece);

}  // namespace jax_fastops::cpu::FASTOPS_ISA

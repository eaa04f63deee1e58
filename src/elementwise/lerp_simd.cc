// The inner loops of lerp.
//
// The formula starts from the nearer end. So weights of 0 and 1 give exactly the ends, and weights
// between them give a result between the ends. The result is monotonic for weights below 1/2 and
// for weights from 1/2 on. At 1/2 it may step back by the rounding error of end - start. If the
// difference of the ends is not finite, this formula may give Inf - Inf although start + weight *
// (end - start) has a value. The latter is then used.
#include "elementwise/elementwise_simd.h"

#include "core/cpu/block_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

template <typename E>
struct Lerp {
  using A = typename E::A;
  using Vec = typename A::Vec;

  // near + fraction * (end - start). The fraction is the weight, or, if the nearer end is `end`,
  // the weight minus 1. If the fraction is 0, nothing is added, so -0.0 stays -0.0.
  static FASTOPS_INLINE Vec Value(Vec start, Vec end, Vec weight) {
    const Vec d = A::Sub(end, start);
    const auto finite = A::Finite(d);
    const auto at_end = A::And(finite, A::AtLeast(weight, A::Set(0.5f)));
    const Vec near = A::Select(at_end, end, start);
    const Vec fraction = A::Select(at_end, A::Sub(weight, A::Set(1)), weight);
    const auto there = A::And(finite, A::Equal(fraction, A::Set(0)));
    return A::Select(there, near, A::MulAdd(fraction, d, near));
  }

  static void Forward(int64_t n, const BlockArray* in, const BlockArray* out) {
    const BlockArray start = in[0], end = in[1], weight = in[2], y = out[0];
    OverBlocks<E::kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> v =
          Each<A>([](Vec s, Vec e, Vec w) FASTOPS_LAMBDA { return Value(s, e, w); },
                  LoadBlock<E>(extent, start, i, count), LoadBlock<E>(extent, end, i, count),
                  LoadBlock<E>(extent, weight, i, count));
      StoreBlock<E>(extent, y, i, count, v);
    });
  }

  static void Backward(int64_t n, const BlockArray* in, const BlockArray* out) {
    const BlockArray dy = in[0], start = in[1], end = in[2], weight = in[3];
    const BlockArray dstart = out[0], dend = out[1], dweight = out[2];
    OverBlocks<E::kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> g = LoadBlockAhead<E>(extent, dy, i, count);
      const Pair<A> w = LoadBlockAhead<E>(extent, weight, i, count);
      StoreBlock<E>(extent, dstart, i, count, Mul(g, Sub(SetPair<A>(1), w)));
      StoreBlock<E>(extent, dend, i, count, Mul(g, w));
      if (dweight.data == nullptr) return;
      const Pair<A> d =
          Sub(LoadBlockAhead<E>(extent, end, i, count), LoadBlockAhead<E>(extent, start, i, count));
      StoreBlock<E>(extent, dweight, i, count, Mul(g, d));
    });
  }

  static constexpr ElementwiseKernels kKernels = {Forward, Backward};
};

}  // namespace

const ElementwiseKernels lerp_kernels[] = FASTOPS_EACH_DTYPE(Lerp, kKernels);

}  // namespace jax_fastops::cpu::FASTOPS_ISA

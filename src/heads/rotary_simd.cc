// One head of one token: bias, RMS norm and rotary embedding, and their gradients. The head is in
// the caches in the accumulator type. Its passes are short loops over whole blocks; elements after
// the end of the head are 0.
#include "heads/rotary_simd.h"

#include "core/cpu/simd_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

template <typename E>
struct Rotary {
  using A = typename E::A;
  using Scalar = typename A::Scalar;
  static constexpr int64_t kBlock = E::kBlock;
  static constexpr int kMost = 512 + kBlock;  // kRotaryMostHeadSize

  // Rotates the pairs of v, forwards or backwards.
  static FASTOPS_INLINE void Rotate(const RotaryHead& head, bool backwards, Scalar* v) {
    const Scalar* cos = reinterpret_cast<const Scalar*>(head.cos);
    const Scalar* sin = reinterpret_cast<const Scalar*>(head.sin);
    const Scalar sign = backwards ? -1 : 1;
    if (head.interleaved) {
      for (int64_t i = 0; i < head.pairs; ++i) {
        const Scalar a = v[2 * i], b = v[2 * i + 1], s = sign * sin[i];
        v[2 * i] = a * cos[i] - b * s;
        v[2 * i + 1] = b * cos[i] + a * s;
      }
    } else {
      Scalar* const second = v + head.pairs;
      for (int64_t i = 0; i < head.pairs; ++i) {
        const Scalar a = v[i], b = second[i], s = sign * sin[i];
        v[i] = a * cos[i] - b * s;
        second[i] = b * cos[i] + a * s;
      }
    }
  }

  // Loads x plus the bias. Returns the reciprocal root mean square if there is a scale.
  static FASTOPS_INLINE Scalar LoadHead(const RotaryHead& head, Scalar* v) {
    Pair<A> squares = SetPair<A>(0);
    OverBlocks<kBlock>(0, head.size, [&](auto extent, int64_t at, int64_t count) FASTOPS_LAMBDA {
      Pair<A> x = LoadElements<E>(extent, head.x + at * E::kBytes, count);
      if (head.bias) x = Add(x, LoadEither<E>(extent, head.bias, head.wide_bias, at, count));
      squares = MulAdd(x, x, squares);
      StorePair<A>(v + at, x);
    });
    if (!head.scale) return 1;
    const double mean = static_cast<double>(SumOf(squares)) / static_cast<double>(head.size);
    return static_cast<Scalar>(1 / __builtin_sqrt(mean + head.eps));
  }

  static void Forward(const RotaryHead& head) {
    alignas(64) Scalar v[kMost];
    const Pair<A> rstd = SetPair<A>(LoadHead(head, v));
    if (head.scale) {
      OverBlocks<kBlock>(0, head.size, [&](auto extent, int64_t at, int64_t count) FASTOPS_LAMBDA {
        const Pair<A> scale = LoadEither<E>(extent, head.scale, head.wide_scale, at, count);
        StorePair<A>(v + at, Mul(Mul(LoadPair<A>(v + at), rstd), scale));
      });
    }
    if (head.cos) Rotate(head, false, v);
    OverBlocks<kBlock>(0, head.size, [&](auto extent, int64_t at, int64_t count) FASTOPS_LAMBDA {
      StoreElements<E, false>(extent, head.y + at * E::kBytes, E::Narrow(LoadPair<A>(v + at)),
                              count);
    });
  }

  static void Backward(const RotaryHead& head) {
    alignas(64) Scalar g[kMost], v[kMost];
    OverBlocks<kBlock>(0, head.size, [&](auto extent, int64_t at, int64_t count) FASTOPS_LAMBDA {
      StorePair<A>(g + at, LoadElements<E>(extent, head.y + at * E::kBytes, count));
    });
    if (head.cos) Rotate(head, true, g);
    Pair<A> rstd = SetPair<A>(1), mean = SetPair<A>(0);
    if (head.scale) {
      rstd = SetPair<A>(LoadHead(head, v));
      Pair<A> products = SetPair<A>(0);
      OverBlocks<kBlock>(0, head.size, [&](auto extent, int64_t at, int64_t count) FASTOPS_LAMBDA {
        const Pair<A> dy = LoadPair<A>(g + at), xhat = Mul(LoadPair<A>(v + at), rstd);
        if (head.scale_sums) AddTo(extent, head.scale_sums, at, count, Mul(dy, xhat));
        const Pair<A> dxhat =
            Mul(dy, LoadEither<E>(extent, head.scale, head.wide_scale, at, count));
        products = MulAdd(dxhat, xhat, products);
        StorePair<A>(g + at, dxhat);
        StorePair<A>(v + at, xhat);
      });
      mean = SetPair<A>(SumOf(products) / static_cast<Scalar>(head.size));
    }
    OverBlocks<kBlock>(0, head.size, [&](auto extent, int64_t at, int64_t count) FASTOPS_LAMBDA {
      Pair<A> dx = LoadPair<A>(g + at);
      if (head.scale) dx = Mul(Sub(dx, Mul(LoadPair<A>(v + at), mean)), rstd);
      if (head.bias_sums) AddTo(extent, head.bias_sums, at, count, dx);
      StoreElements<E, false>(extent, head.dx + at * E::kBytes, E::Narrow(dx), count);
    });
  }

  static constexpr RotaryKernels kKernels = {Forward, Backward};
};

}  // namespace

const RotaryKernels rotary_kernels[] = FASTOPS_EACH_DTYPE(Rotary, kKernels);

}  // namespace jax_fastops::cpu::FASTOPS_ISA

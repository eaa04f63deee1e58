// The inner loops of cross_entropy_cpu.cc. The forward goes through a row in pieces that stay in
// the L1 cache: it finds the maximum of a piece, then adds up its exponentials, and combines the
// pieces in float64. So memory is read once.
#include "cross_entropy/cross_entropy_simd.h"

#include "core/cpu/simd_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

constexpr int64_t kPiece = 4096;
// The blocks of a segment of a sum.
constexpr int64_t kSegmentBlocks = 16;
constexpr double kInfinity = __builtin_inf();

template <typename E>
struct CrossEntropy {
  using A = typename E::A;
  using Scalar = typename A::Scalar;
  static constexpr int kBlock = E::kBlock;

  // Elements after the end are `outside`.
  template <typename Extent>
  static FASTOPS_INLINE Pair<A> LoadOr(Extent extent, const char* x, int64_t i, int64_t count,
                                       Scalar outside) {
    const Pair<A> v = LoadElements<E>(extent, x + i * E::kBytes, count);
    if constexpr (Extent::kWhole) return v;
    return Select(FirstOfPair<A>(count), v, SetPair<A>(outside));
  }

  static double ElementAt(const char* x, int64_t i) {
    Scalar values[2 * A::kLanes];
    StorePair<A>(values, LoadElements<E>(Part(), x + i * E::kBytes, 1));
    return static_cast<double>(values[0]);
  }

  // The maximum of a piece, and the sum of exp(x - maximum), or of exp(x) if that is infinite: 0 or
  // inf, or NaN if there is a NaN. `drift` becomes the sum of x - anchor.
  template <bool kSmooth>
  static FASTOPS_INLINE void OverPiece(const char* x, int64_t n, Scalar anchor, double* top,
                                       double* sum, double* drift) {
    Pair<A> most = SetPair<A>(static_cast<Scalar>(-kInfinity));
    OverBlocks<kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      most = Max(LoadOr(extent, x, i, count, static_cast<Scalar>(-kInfinity)), most);
    });
    const Scalar largest = LargestOf(most);
    const Pair<A> shift = SetPair<A>(largest - largest == 0 ? largest : 0);
    Pair<A> totals[kSmooth ? 2 : 1];
    SumRow<kSegmentBlocks>(
        n, totals, [&](auto extent, int64_t i, int64_t count, Pair<A>* sums) FASTOPS_LAMBDA {
          const Pair<A> v = LoadOr(extent, x, i, count, static_cast<Scalar>(-kInfinity));
          sums[0] = Add(sums[0], Exp(Sub(v, shift)));
          if constexpr (kSmooth) {
            const Pair<A> drift = Sub(LoadOr(extent, x, i, count, anchor), SetPair<A>(anchor));
            sums[1] = Add(sums[1], drift);
          }
        });
    *top = static_cast<double>(largest);
    *sum = static_cast<double>(SumOf(totals[0]));
    if constexpr (kSmooth) *drift += static_cast<double>(SumOf(totals[1]));
  }

  // sum * exp(from - to), where 0 remains 0. From -inf, the result is 0, or NaN for NaN.
  static FASTOPS_INLINE double Moved(double sum, double from, double to) {
    if (from == to || sum == 0) return sum;
    return sum * __builtin_exp(from - (to - to == 0 ? to : 0));
  }

  static void Forward(const char* x, int64_t n, int64_t label, bool smooth,
                      CrossEntropyStatistics* found) {
    // Differences from an element of the row add up exactly where the logits are far from 0.
    const double first = smooth ? ElementAt(x, 0) : 0, anchor = first - first == 0 ? first : 0;
    double top = -kInfinity, sum = 0, drift = 0;
    for (int64_t begin = 0; begin < n; begin += kPiece) {
      const int64_t count = n - begin < kPiece ? n - begin : kPiece;
      const char* piece = x + begin * E::kBytes;
      double piece_top, piece_sum;
      WithFlags(
          [&]<bool kSmooth>() {
            OverPiece<kSmooth>(piece, count, static_cast<Scalar>(anchor), &piece_top, &piece_sum,
                               &drift);
          },
          smooth);
      const double most = piece_top > top ? piece_top : top;
      sum = Moved(sum, top, most) + Moved(piece_sum, piece_top, most);
      top = most;
    }
    const double at_label = label < n ? ElementAt(x, label) : __builtin_nan("");
    *found = {top, sum, top - anchor - drift / static_cast<double>(n), at_label};
  }

  static void Backward(const CrossEntropyGradient& gradient, const char* x, int64_t n,
                       int64_t label, char* dx) {
    const Pair<A> top = SetPair<A>(static_cast<Scalar>(gradient.top));
    const Pair<A> log_sum = SetPair<A>(static_cast<Scalar>(gradient.log_sum));
    const Pair<A> scale = SetPair<A>(static_cast<Scalar>(gradient.scale));
    const auto block = [&]<bool kStream>(auto extent, int64_t i, int64_t count, Pair<A> less)
                           FASTOPS_LAMBDA {
                             const Pair<A> v = LoadElements<E>(extent, x + i * E::kBytes, count);
                             const Pair<A> p = Exp(Sub(Sub(v, top), log_sum));
                             StoreElements<E, kStream>(extent, dx + i * E::kBytes,
                                                       E::Narrow(MulAdd(scale, p, less)), count);
                           };
    const Pair<A> others = SetPair<A>(static_cast<Scalar>(-gradient.all));
    const Pair<A> at_label = SetPair<A>(static_cast<Scalar>(-(gradient.all + gradient.label_too)));
    if (n < kBlock) {  // one store in place of two
      const PairMask<A> is_label = PairOfBits<A>(label < n ? uint32_t{1} << label : 0);
      return block.template operator()<false>(Part(), 0, n, Select(is_label, at_label, others));
    }
    WithFlags(
        [&]<bool kStream>() {
          OverRow<E, kStream>(dx, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
            block.template operator()<kStream>(extent, i, count, others);
          });
          if constexpr (kStream) StreamFence();
        },
        gradient.stream);
    if (label < n) block.template operator()<false>(Part(), label, 1, at_label);
  }

  static constexpr CrossEntropyKernels kKernels = {Forward, Backward};
};

}  // namespace

const CrossEntropyKernels cross_entropy_kernels[] = FASTOPS_EACH_DTYPE(CrossEntropy, kKernels);

}  // namespace jax_fastops::cpu::FASTOPS_ISA

// The inner loops of group_norm_cpu.cc. A strip is what has the same coefficients: a block of
// neighboring channels at all positions if channels are last, or one channel if they are first.
// Sums of a strip are computed in segments, which limits the number of successive additions. The
// deviations of a segment are those from its first values, so their squares do not cancel if the
// mean is large, and the segments are added up in float64.
#include "group_norm/group_norm_simd.h"

#include "core/cpu/activation_math.h"
#include "core/cpu/simd_math.h"

namespace jax_fastops::cpu::FASTOPS_ISA {
namespace {

constexpr int64_t kSegmentPositions = 64, kSegmentBlocks = 16;

// What stands for an activation where there is none.
template <typename M>
struct Identity {
  using Vec = typename M::Vec;
  static FASTOPS_INLINE Vec Value(Vec s) { return s; }
  static FASTOPS_INLINE Vec Pull(Vec, Vec g) { return g; }
};

template <typename E>
struct Strips {
  using A = typename E::A;
  using Scalar = typename A::Scalar;
  using Wide = SameElement<A>;
  static constexpr int kBlock = E::kBlock;

  static FASTOPS_INLINE Scalar At(const GroupNormSet& set, int row, int64_t channel) {
    Scalar value;
    const int64_t i = row * set.channels() + channel;
    memcpy(&value, static_cast<const char*>(set.coefficients) + i * Wide::kBytes, sizeof(value));
    return value;
  }
  // The coefficients of a strip.
  template <bool kLast, typename Extent>
  static FASTOPS_INLINE Pair<A> Row(Extent extent, const GroupNormSet& set, int row,
                                    int64_t channel, int64_t count) {
    if constexpr (!kLast) return SetPair<A>(At(set, row, channel));
    const int64_t i = row * set.channels() + channel;
    return LoadElements<Wide>(extent, static_cast<const char*>(set.coefficients) + i * Wide::kBytes,
                              count);
  }

  // Calls strip(extent, channel, channels, body), which calls body(block) for a segment at a time,
  // where block(extent, element, count) is a block of elements.
  template <bool kLast, typename Strip>
  static FASTOPS_INLINE void OverStrips(const GroupNormSet& set, const Strip& strip) {
    if constexpr (kLast) {
      OverBlocks<kBlock>(
          0, set.channels(), [&](auto extent, int64_t channel, int64_t count) FASTOPS_LAMBDA {
            strip(extent, channel, count, [&](const auto& segment) FASTOPS_LAMBDA {
              for (int64_t first = 0; first < set.positions; first += kSegmentPositions) {
                const int64_t left = set.positions - first;
                const int64_t positions = left < kSegmentPositions ? left : kSegmentPositions;
                segment(first * set.position_step + channel, positions,
                        [&](const auto& block) FASTOPS_LAMBDA {
                          for (int64_t i = first; i < first + positions; ++i) {
                            block(extent, i * set.position_step + channel, count);
                          }
                        });
              }
            });
          });
    } else {
      constexpr int64_t kSegment = kSegmentBlocks * kBlock;
      for (int64_t channel = 0; channel < set.channels(); ++channel) {
        const int64_t at = channel * set.channel_step;
        strip(Whole(), channel, int64_t{1}, [&](const auto& segment) FASTOPS_LAMBDA {
          for (int64_t first = 0; first < set.positions; first += kSegment) {
            const int64_t left = set.positions - first, size = left < kSegment ? left : kSegment;
            segment(at + first, size, [&](const auto& block) FASTOPS_LAMBDA {
              OverBlocks<kBlock>(first, first + size,
                                 [&](auto extent, int64_t i, int64_t count)
                                     FASTOPS_LAMBDA { block(extent, at + i, count); });
            });
          }
        });
      }
    }
  }

  // x + residual, rounded to the element type.
  template <typename Extent>
  static FASTOPS_INLINE Pair<A> Load(Extent extent, const GroupNormSet& set, int64_t at,
                                     int64_t count) {
    const Pair<A> x = LoadElements<E>(extent, set.x + at * E::kBytes, count);
    if (set.residual == nullptr) return x;
    const Pair<A> r = LoadElements<E>(extent, set.residual + at * E::kBytes, count);
    return E::Widen(E::Narrow(Add(x, r)));
  }

  // Zeros after the end of a block, if its lanes are added up.
  template <bool kLast, typename Extent>
  static FASTOPS_INLINE Pair<A> Present(Extent, Pair<A> v, int64_t count) {
    if constexpr (kLast || Extent::kWhole) return v;
    return Select(FirstOfPair<A>(count), v, SetPair<A>(0));
  }

  // The numbers of a strip's channels: lanes, or their sum.
  template <bool kLast, typename Use>
  static FASTOPS_INLINE void ForChannels(Pair<A> a, Pair<A> b, Pair<A> c, int64_t count,
                                         const Use& use) {
    if constexpr (kLast) {
      Scalar values[3][2 * A::kLanes];
      StorePair<A>(values[0], a);
      StorePair<A>(values[1], b);
      StorePair<A>(values[2], c);
      for (int64_t i = 0; i < count; ++i) use(i, values[0][i], values[1][i], values[2][i]);
    } else {
      Scalar values[2 * A::kLanes];
      StorePair<A>(values, c);
      use(0, SumOf(a), SumOf(b), values[0]);
    }
  }

  static Scalar ElementAt(const char* x, int64_t i) {
    Scalar values[2 * A::kLanes];
    StorePair<A>(values, LoadElements<E>(Part(), x + i * E::kBytes, 1));
    return values[0];
  }

  template <bool kLast>
  static void DeviationsOf(const GroupNormSet& set) {
    for (int64_t group = 0; group < set.groups; ++group) {
      const int64_t at = group * set.group_channels * set.channel_step;
      const Scalar first = ElementAt(set.x, at) +
                           (set.residual == nullptr ? Scalar(0) : ElementAt(set.residual, at));
      set.bases[group] = first - first == 0 ? static_cast<double>(first) : 0;
    }
    OverStrips<kLast>(
        set, [&](auto of, int64_t channel, int64_t channels, const auto& segments) FASTOPS_LAMBDA {
          segments([&](int64_t begin, int64_t size, const auto& blocks) FASTOPS_LAMBDA {
            Pair<A> shift;
            if constexpr (kLast) {
              shift = Load(of, set, begin, channels);
            } else {
              Scalar values[2 * A::kLanes];
              StorePair<A>(values, Load(Part(), set, begin, 1));
              shift = SetPair<A>(values[0]);
            }
            Pair<A> sum = SetPair<A>(0), squares = SetPair<A>(0);
            blocks([&](auto extent, int64_t at, int64_t count) FASTOPS_LAMBDA {
              const Pair<A> s = Load(extent, set, at, count);
              if (set.sum != nullptr) {
                StoreElements<E, false>(extent, set.sum + at * E::kBytes, E::Narrow(s), count);
              }
              const Pair<A> d = Present<kLast>(extent, Sub(s, shift), count);
              sum = Add(sum, d);
              squares = MulAdd(d, d, squares);
            });
            ForChannels<kLast>(sum, squares, shift, channels,
                               [&](int64_t i, Scalar s1, Scalar s2, Scalar from) FASTOPS_LAMBDA {
                                 const double base = set.bases[(channel + i) / set.group_channels];
                                 const double n = static_cast<double>(size),
                                              apart = static_cast<double>(from) - base;
                                 double* const sums = set.sums + 2 * (channel + i);
                                 sums[0] += static_cast<double>(s1) + n * apart;
                                 sums[1] += static_cast<double>(s2) +
                                            apart * (2 * static_cast<double>(s1) + n * apart);
                               });
          });
        });
  }

  static void Widen(const void* from, int64_t n, void* to) {
    OverBlocks<kBlock>(0, n, [&](auto extent, int64_t i, int64_t count) FASTOPS_LAMBDA {
      const Pair<A> v =
          LoadElements<E>(extent, static_cast<const char*>(from) + i * E::kBytes, count);
      StoreElements<Wide, false>(extent, static_cast<char*>(to) + i * Wide::kBytes, v, count);
    });
  }

  static void Deviations(const GroupNormSet& set) {
    WithFlags([&]<bool kLast>() { DeviationsOf<kLast>(set); }, set.channel_step == 1);
  }
};

template <typename E, typename F>
struct GroupNorm : Strips<E> {
  using A = typename E::A;
  using M = ActivationMath<A>;
  using Vec = typename A::Vec;
  using Scalar = typename A::Scalar;

  template <bool kLast>
  static void ForwardOf(const GroupNormSet& set) {
    Strips<E>::template OverStrips<kLast>(
        set, [&](auto of, int64_t channel, int64_t channels, const auto& segments) FASTOPS_LAMBDA {
          const auto row = [&](int r) FASTOPS_LAMBDA {
            return Strips<E>::template Row<kLast>(of, set, r, channel, channels);
          };
          const Pair<A> mean = row(kMean), factor = row(kFactor), bias = row(kBias);
          segments([&](int64_t, int64_t, const auto& blocks) FASTOPS_LAMBDA {
            blocks([&](auto extent, int64_t at, int64_t count) FASTOPS_LAMBDA {
              const Pair<A> s = Strips<E>::Load(extent, set, at, count);
              const Pair<A> z = MulAdd(Sub(s, mean), factor, bias);
              const Pair<A> y = Each<A>([](Vec v) FASTOPS_LAMBDA { return F::Value(v); }, z);
              StoreElements<E, false>(extent, set.y + at * E::kBytes, E::Narrow(y), count);
            });
          });
        });
  }

  template <bool kLast>
  static void BackwardOf(const GroupNormSet& set) {
    Strips<E>::template OverStrips<kLast>(set, [&](auto of, int64_t channel, int64_t channels,
                                                   const auto& segments) FASTOPS_LAMBDA {
      const auto row = [&](int r) FASTOPS_LAMBDA {
        return Strips<E>::template Row<kLast>(of, set, r, channel, channels);
      };
      const Pair<A> mean = row(kMean), scale = row(kFactor), bias = row(kBias);
      const Pair<A> rstd = row(kRstd);
      segments([&](int64_t, int64_t, const auto& blocks) FASTOPS_LAMBDA {
        const auto over = [&](const auto& use) FASTOPS_LAMBDA {
          blocks([&](auto extent, int64_t at, int64_t count) FASTOPS_LAMBDA {
            const Pair<A> d = Sub(Strips<E>::Load(extent, set, at, count), mean);
            const Pair<A> xhat = Mul(d, rstd), z = MulAdd(xhat, scale, bias);
            const Pair<A> dy = LoadElements<E>(extent, set.dy + at * E::kBytes, count);
            const Pair<A> g =
                Each<A>([](Vec z, Vec dy) FASTOPS_LAMBDA { return Pull<M, F>(z, dy); }, z, dy);
            use(extent, at, count, d, xhat, g);
          });
        };
        if (set.dx != nullptr) {
          const Pair<A> by_g = row(kByG), by_x = row(kByX), constant = row(kConstant);
          over([&](auto extent, int64_t at, int64_t count, Pair<A> d, Pair<A>, Pair<A> g)
                   FASTOPS_LAMBDA {
                     const Pair<A> dx = MulAdd(g, by_g, MulAdd(d, by_x, constant));
                     StoreElements<E, false>(extent, set.dx + at * E::kBytes, E::Narrow(dx), count);
                   });
          return;
        }
        Pair<A> s1 = SetPair<A>(0), s2 = SetPair<A>(0);
        over([&](auto extent, int64_t, int64_t count, Pair<A>, Pair<A> xhat, Pair<A> g)
                 FASTOPS_LAMBDA {
                   s1 = Add(s1, Strips<E>::template Present<kLast>(extent, g, count));
                   s2 = Add(s2, Strips<E>::template Present<kLast>(extent, Mul(g, xhat), count));
                 });
        Strips<E>::template ForChannels<kLast>(
            s1, s2, s1, channels, [&](int64_t i, Scalar a, Scalar b, Scalar) FASTOPS_LAMBDA {
              set.sums[2 * (channel + i)] += static_cast<double>(a);
              set.sums[2 * (channel + i) + 1] += static_cast<double>(b);
            });
      });
    });
  }

  static void Forward(const GroupNormSet& set) {
    WithFlags([&]<bool kLast>() { ForwardOf<kLast>(set); }, set.channel_step == 1);
  }
  static void Backward(const GroupNormSet& set) {
    WithFlags([&]<bool kLast>() { BackwardOf<kLast>(set); }, set.channel_step == 1);
  }

  static constexpr GroupNormPasses kKernels = {Forward, Backward};
};

template <typename E, Activation kActivation>
struct Active : GroupNorm<E, FormulaOf<kActivation, ActivationMath<typename E::A>>> {};
template <typename E>
struct Plain {
  using Passes = GroupNorm<E, Identity<ActivationMath<typename E::A>>>;
  static constexpr GroupNormKernels kKernels = {Passes::kKernels, Strips<E>::Deviations,
                                                Strips<E>::Widen};
};

}  // namespace

#define FASTOPS_ACTIVE(name, Formula) FASTOPS_EACH_DTYPE_OF(Active, Formula)
const GroupNormPasses group_norm_active[][kNumDTypes] = {FASTOPS_ACTIVATIONS(FASTOPS_ACTIVE)};
const GroupNormKernels group_norm_kernels[] = FASTOPS_EACH_DTYPE(Plain, kKernels);

}  // namespace jax_fastops::cpu::FASTOPS_ISA

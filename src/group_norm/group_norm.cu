// Group norm, in one launch. A block sums the elements of a part of a tile, and keeps as many of
// them in shared memory as there is room for (group_norm/plan.h). When the sums of all parts are
// there, it writes its results; other elements are read again, the last ones first, which are in
// the L2 cache. Parts of a tile are a cluster, whose blocks wait for each other; if there must be
// more of them than a cluster has, all blocks are resident, and wait for each other once.
//
// Forward. The sum of squares minus the square of the sum cancels if the mean is large, so what is
// summed are deviations from a base, which is the median of three elements of the group.
//
// Backward. With g = dy * activation'(z) and the sums s1 = sum(g), s2 = sum(g * xhat) of each
// channel: dbias = s1, dscale = s2, and with the averages c1, c2 of scale * s1, scale * s2 over the
// elements of the group, dx = rstd * (g * scale - c1 - xhat * c2).

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/alignment.h"
#include "core/cuda/dependent.cuh"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/group.cuh"
#include "core/cuda/launch.h"
#include "core/cuda/vec.cuh"
#include "group_norm/block.cuh"
#include "group_norm/group_norm.h"
#include "group_norm/plan.h"

namespace jax_fastops::cuda {

struct GroupNormFamily;

namespace {

using namespace group_norm;  // NOLINT: this file is a part of it

// Blocks of a processor that have the registers for it, and units of an array that a thread has
// under way. Elsewhere, fewer blocks with more loads are faster.
constexpr int ForwardBlocks(int item, bool last) { return item == 2 && !last ? 4 : 3; }
constexpr int BackwardBlocks(int item, bool last) { return item == 4 && !last ? 3 : 2; }
constexpr int UnitsOf(int blocks, bool backward, int bytes) {
  return ((backward ? 5 : 7) - blocks) * (bytes < kUnitBytes ? 2 : 1);
}

// What ForChannels needs where nothing is loaded.
struct Nothing {
  __device__ __forceinline__ int operator()(int, int) const { return 0; }
  __device__ __forceinline__ void operator()() const {}
};

// Shared memory, of one kernel for both types of 16 bits where elements are single.
template <typename T>
using Scratch = typename Block<T, sizeof(T), false>::Scratch;
using Doubles = double[2][kThreads / kWarpSize];

// -------------------------------------------------------------------------------------------------
// Forward

// What a forward loads first: the parameters of a channel, and three elements of its group.
template <typename T>
struct Prepared {
  using A = ComputeType<T>;

  Fetched<T> scale, bias;
  T x[3], residual[3];

  template <typename B>
  __device__ __forceinline__ void LoadElements(const B& b, int group, const T* all,
                                               const T* residuals) {
    const Plan& plan = b.plan;
    const int size = plan.group_channels;
    const int64_t first = b.origin + group * size * b.channel_step();
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      const int of = k == 0 ? 0 : k == 1 ? size / 2 : size - 1;
      const int64_t position = k == 0 ? 0 : k == 1 ? plan.positions / 2 : plan.positions - 1;
      const int64_t at = first + of * b.channel_step() + position * b.position_step();
      x[k] = all[at];
      if (residuals != nullptr) residual[k] = residuals[at];
    }
  }

  // The base: the median, or 0 if it is not finite.
  __device__ __forceinline__ A Base(bool has_residual) const {
    A e[3];
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      e[k] = ToCompute(x[k]) + (has_residual ? ToCompute(residual[k]) : A(0));
    }
    const A base = max(min(e[0], e[1]), min(max(e[0], e[1]), e[2]));
    return base - base != A(0) ? A(0) : base;
  }
};

template <typename T, int kBytes, bool kLast>
__device__ __forceinline__ void Forward(const Params<GroupNormForwardCall>& p, Scratch<T>& scratch,
                                        Doubles& doubles) {
  using B = Block<T, kBytes, kLast>;
  using A = typename B::A;
  using V = typename B::V;
  constexpr int kSize = B::kSize, kChannels = B::kChannels;
  constexpr int kUnits = UnitsOf(ForwardBlocks(sizeof(T), kLast), false, kBytes);
  constexpr Nothing nothing;

  LetDependentsStart();
  const GroupNormForwardCall& call = p.call;
  const Plan& plan = p.plan;
  const B b(p, scratch);
  AwaitPredecessors();
  const T *x = static_cast<const T*>(call.x), *r = static_cast<const T*>(call.residual);
  T* const y = static_cast<T*>(call.y);
  // The sum with a residual is written first, and then read in place of x.
  T* const sum = call.sum == nullptr ? y : static_cast<T*>(call.sum);
  A* const stored = static_cast<A*>(call.workspace) + b.sample * call.workspace_size;
  // The first loads are under way while the block waits for what it needs for all elements.
  const auto load_x = [&](int64_t at, int) {
    return V::template Load<CacheHint::kNoAllocate>(x + at);
  };
  V started[kUnits];
  const int row = plan.row;
  b.ForChannels(
      [&](int channel, int group) {
        Prepared<T> f;
        f.scale.Load(call.scale, b.first_channel + channel);
        f.bias.Load(call.bias, b.first_channel + channel);
        f.LoadElements(b, group, x, r);
        return f;
      },
      [&] {
        const auto own = b.Find();
        const auto range = b.template From<1>(own, 0, 0, own.units);
        if (r == nullptr) {
          b.Start(range, load_x, started);
        } else {
          b.template Prefetch<kUnits / 2>(range, x, r);
        }
      },
      [&](int channel, int group, A* c, const Prepared<T>& f) {
        const A base = f.Base(r != nullptr);
        c[0] = f.scale.Value(call.scale, 1), c[row] = f.bias.Value(call.bias, 0);
        c[2 * row] = base;
        if (b.IsFirst(channel, group)) *b.Group(group) = base;
      });
  AwaitBlock<false>();
  A base[1][kChannels];
  const auto add = [&](const V& loaded, int unit, A(&s1)[kSize], A(&s2)[kSize]) {
    if (unit < plan.kept) loaded.Store(b.Kept(unit, 1));
    A values[kSize];
    loaded.Unpack(values);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const A d = values[i] - base[0][kChannels == 1 ? 0 : i];
      s1[i] += d;
      s2[i] = fma(d, d, s2[i]);
    }
  };
  const auto sweep = [&](int pass, A(&s1)[kSize], A(&s2)[kSize]) {
    const auto own = b.Find();
    const auto range = b.template From<1>(own, pass, 0, own.units);
    b.template Read<2>(own, pass, base);
    if (r == nullptr) {
      if (pass > 0) b.Start(range, load_x, started);
      b.Sweep(range, load_x, started,
              [&](const V& loaded, int64_t, int unit) { add(loaded, unit, s1, s2); });
      return;
    }
    struct Terms {
      V x, residual;
    };
    b.template Sweep<kUnits / 2>(
        range,
        [&](int64_t at, int) {
          return Terms{V::template Load<CacheHint::kNoAllocate>(x + at),
                       V::template Load<CacheHint::kNoAllocate>(r + at)};
        },
        [&](const Terms& loaded, int64_t at, int unit) {
          A values[kSize], others[kSize];
          loaded.x.Unpack(values);
          loaded.residual.Unpack(others);
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[i] += others[i];
          const V s = V::Packed(values);
          StoreUnit(s, sum + at);
          add(s, unit, s1, s2);
        });
  };
  b.template Sums<false>(stored, sweep, [](int) { return A(1); });

  b.template TotalParts<false>(stored, 0, 0, doubles, [&](int group, const double (&total)[2]) {
    A* const entry = b.Group(group);
    const double mean = total[0] * plan.inverse_size;
    double variance = total[1] * plan.inverse_size - mean * mean;
    if (isinf(static_cast<A>(variance))) variance = INFINITY;  // as in the reference
    const double shown = (variance < 0 ? 0 : variance) + call.eps;
    const A statistics[2] = {
        static_cast<A>(static_cast<double>(*entry) + mean),
        sizeof(A) == 8 ? static_cast<A>(1 / sqrt(shown)) : static_cast<A>(rsqrt(shown))};
    B::Set(entry + 2, statistics);
    const int64_t at = b.sample * plan.groups + b.first_group + group;
    if (b.part != 0) return;
    if (call.mean != nullptr) static_cast<A*>(call.mean)[at] = statistics[0];
    if (call.rstd != nullptr) static_cast<A*>(call.rstd)[at] = statistics[1];
  });
  b.ForChannels(nothing, nothing, [&](int, int group, A* c, int) {
    A statistics[2];
    B::Get(b.Group(group) + 2, statistics);
    c[0] *= statistics[1];
    c[2 * row] = statistics[0];
    if constexpr (B::kFolds) c[row] = fma(-statistics[0], c[0], c[row]);
  });
  AwaitBlock<false>();
  const T* const from = r == nullptr ? x : sum;
  const auto load = [&](int64_t at, int unit) {
    return V::Load(unit < plan.kept ? static_cast<const void*>(b.Kept(unit, 1)) : from + at);
  };
  for (int pass = plan.passes - 1; pass >= 0; --pass) {
    const auto own = b.Find();
    const auto range = b.template From<-1>(own, pass, own.units - 1, own.units);
    b.Start(range, load, started);
    A c[B::kFolds ? 2 : 3][kChannels];
    b.Read(own, pass, c);
    ForFormula<T>(call, [&](auto formula) {
      Scaled<decltype(formula)>(c[0], c[1]);
      b.Sweep(range, load, started, [&](const V& loaded, int64_t at, int) {
        A z[kSize];
        loaded.Unpack(z);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const int of = kChannels == 1 ? 0 : i;
          if constexpr (!B::kFolds) z[i] -= c[2][of];
          z[i] = formula.Value(fma(z[i], c[0][of], c[1][of]));
        }
        StoreUnit<CacheHint::kStreaming>(V::Packed(z), y + at);
      });
    });
  }
  b.End();
}

template <typename T, int kBytes, bool kLast>
__global__ void __launch_bounds__(kThreads, ForwardBlocks(sizeof(T), kLast))
    ForwardKernel(const __grid_constant__ Params<GroupNormForwardCall> p) {
  __shared__ Scratch<T> scratch;
  __shared__ Doubles doubles;
  if constexpr (kBytes == 2) {
    if (p.call.dtype == DType::kBF16) {
      return Forward<__nv_bfloat16, kBytes, kLast>(p, scratch, doubles);
    }
  }
  Forward<T, kBytes, kLast>(p, scratch, doubles);
}

// -------------------------------------------------------------------------------------------------
// Backward

// What a backward loads of x and of the cotangent.
template <typename V>
struct LoadedPair {
  V x, dy;
};

// Writes dx of a block, when the sums are there. `started`: the registers of loads under way.
template <typename T, int kBytes, bool kLast, int kUnits>
__device__ __forceinline__ void WriteGradients(
    const Block<T, kBytes, kLast>& b, const GroupNormBackwardCall& call,
    LoadedPair<typename Block<T, kBytes, kLast>::V> (&started)[kUnits]) {
  using B = Block<T, kBytes, kLast>;
  using A = typename B::A;
  using V = typename B::V;
  using Loaded = LoadedPair<V>;
  constexpr int kSize = B::kSize, kChannels = B::kChannels;
  const Plan& plan = b.plan;
  const T *const x = static_cast<const T*>(call.s), *const dy = static_cast<const T*>(call.dy);
  T* const dx = static_cast<T*>(call.dx);
  for (int pass = plan.passes - 1; pass >= 0; --pass) {
    const auto own = b.Find();
    A c[5][kChannels];
    b.Read(own, pass, c);
    // From x - mean or x, and g.
    const auto write = [&](A(&d)[kSize], const A(&g)[kSize], int64_t at) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int of = kChannels == 1 ? 0 : i;
        d[i] = fma(g[i], c[0][of], -fma(d[i], c[3][of], c[4][of]));
      }
      StoreUnit<CacheHint::kStreaming>(V::Packed(d), dx + at);
    };
    const auto unpack = [&](const Loaded& loaded, A(&d)[kSize], A(&g)[kSize]) {
      loaded.x.Unpack(d);
      loaded.dy.Unpack(g);
#pragma unroll
      for (int i = 0; i < kSize && !B::kFolds; ++i) d[i] -= c[2][kChannels == 1 ? 0 : i];
    };
    const int kept = b.KeptOf(own, pass);
    const auto reload = [&](int64_t at, int) { return Loaded{V::Load(x + at), V::Load(dy + at)}; };
    const auto again = b.template From<-1>(own, pass, own.units - 1, own.units - kept);
    b.Start(again, reload, started);
    ForFormula<T>(call, [&](auto formula) {
      constexpr A kScale = ScaleOf<decltype(formula)>();
      b.Sweep(again, reload, started, [&](const Loaded& loaded, int64_t at, int) {
        A d[kSize], g[kSize];
        unpack(loaded, d, g);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const int of = kChannels == 1 ? 0 : i;
          const A z = fma(d[i], c[0][of], c[1][of]);
          g[i] = PullOf<T>(formula, z * kScale, g[i]);
        }
        write(d, g, at);
      });
    });
    b.template Sweep<2>(
        b.template From<-1>(own, pass, kept - 1, kept),
        [&](int64_t, int unit) {
          const char* const place = b.Kept(unit, 2);
          return Loaded{V::Load(place), V::Load(place + B::kKeptStride)};
        },
        [&](const Loaded& loaded, int64_t at, int) {
          A d[kSize], g[kSize];
          unpack(loaded, d, g);
          write(d, g, at);
        });
  }
}

template <typename T, int kBytes, bool kLast>
__device__ __forceinline__ void Backward(const Params<GroupNormBackwardCall>& p,
                                         Scratch<T>& scratch, Doubles& doubles) {
  using B = Block<T, kBytes, kLast>;
  using A = typename B::A;
  using V = typename B::V;
  constexpr int kSize = B::kSize, kChannels = B::kChannels;
  constexpr int kUnits = UnitsOf(BackwardBlocks(sizeof(T), kLast), true, kBytes);
  constexpr Nothing nothing;

  LetDependentsStart();
  const GroupNormBackwardCall& call = p.call;
  const Plan& plan = p.plan;
  const B b(p, scratch);
  AwaitPredecessors();
  const T *const x = static_cast<const T*>(call.s), *const dy = static_cast<const T*>(call.dy);
  A* const stored = static_cast<A*>(call.workspace) + b.sample * call.workspace_size;
  const int64_t statistics = b.sample * plan.groups + b.first_group;
  const A* const mean = static_cast<const A*>(call.mean) + statistics;
  const A* const rstd = static_cast<const A*>(call.rstd) + statistics;
  using Loaded = LoadedPair<V>;
  const auto load = [&](int64_t at, int) {
    return Loaded{V::template Load<CacheHint::kNoAllocate>(x + at),
                  V::template Load<CacheHint::kNoAllocate>(dy + at)};
  };
  Loaded started[kUnits];
  struct Prepared {
    Fetched<T> scale, bias;
    A mean, rstd;
  };
  // z = (x - mean) * factor + bias
  const int row = plan.row;
  b.ForChannels(
      [&](int channel, int group) {
        Prepared f;
        f.scale.Load(call.scale, b.first_channel + channel);
        f.bias.Load(call.bias, b.first_channel + channel);
        f.mean = mean[group], f.rstd = rstd[group];
        return f;
      },
      [&] {
        const auto own = b.Find();
        b.Start(b.template From<1>(own, 0, 0, own.units), load, started);
      },
      [&](int channel, int group, A* c, const Prepared& f) {
        const A scale = f.scale.Value(call.scale, 1);
        c[0] = f.rstd * scale, c[row] = f.bias.Value(call.bias, 0);
        c[2 * row] = f.mean, c[3 * row] = scale;
        if (b.IsFirst(channel, group)) *b.Group(group) = f.rstd;
      });
  AwaitBlock<false>();
  {
    const auto sweep = [&](int pass, A(&s1)[kSize], A(&s2)[kSize]) {
      const auto own = b.Find();
      const auto range = b.template From<1>(own, pass, 0, own.units);
      A c[3][kChannels];
      b.Read(own, pass, c);
      if (pass > 0) b.Start(range, load, started);
      ForFormula<T>(call, [&](auto formula) {
        Scaled<decltype(formula)>(c[0], c[1]);
        b.Sweep(range, load, started, [&](const Loaded& loaded, int64_t, int unit) {
          A d[kSize], g[kSize];
          loaded.x.Unpack(d);
          loaded.dy.Unpack(g);
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            const int of = kChannels == 1 ? 0 : i;
            d[i] -= c[2][of];
            g[i] = PullOf<T>(formula, fma(d[i], c[0][of], c[1][of]), g[i]);
            s1[i] += g[i];
            s2[i] = fma(g[i], d[i], s2[i]);
          }
          if (unit < plan.kept) {
            loaded.x.Store(b.Kept(unit, 2));
            V::Packed(g).Store(b.Kept(unit, 2) + B::kKeptStride);
          }
        });
      });
    };
    const A* const scale = B::Memory() + 3 * plan.row;
    b.template Sums<true>(stored, sweep, [&](int channel) { return scale[channel]; });
  }

  // The sums of all groups, and of this part's share of the channels.
  int share = 0, first = 0;
  if (call.dscale != nullptr || call.dbias != nullptr) {
    share = (b.channels - 1) / plan.parts + 1, first = min(b.part * share, b.channels);
    share = min(share, b.channels - first);
  }
  b.template TotalParts<true>(
      stored, first, share, doubles, [&](int result, const double (&total)[2]) {
        const A sums[2] = {static_cast<A>(total[0]), static_cast<A>(total[1])};
        if (result < b.groups) {
          const A own = *b.Group(result), inverse = static_cast<A>(plan.inverse_size);
          B::Set(b.Group(result) + 2,
                 {own * (sums[0] * inverse), own * (own * (own * (sums[1] * inverse)))});
          return;
        }
        const int channel = first + result - b.groups;
        const int64_t at = b.sample * plan.channels + b.first_channel + channel;
        if (call.dbias != nullptr) static_cast<A*>(call.dbias)[at] = sums[0];
        if (call.dscale != nullptr) {
          static_cast<A*>(call.dscale)[at] = sums[1] * *b.Group(b.GroupOf(channel));
        }
      });
  // dx = g * factor - (x - mean) * by_x - less
  b.ForChannels(nothing, nothing, [&](int, int group, A* c, int) {
    A averages[2];
    B::Get(b.Group(group) + 2, averages);
    c[3 * row] = averages[1];
    c[4 * row] = averages[0];
    if constexpr (B::kFolds) {
      c[row] = fma(-c[2 * row], c[0], c[row]);
      c[4 * row] = fma(-c[2 * row], averages[1], averages[0]);
    }
  });
  AwaitBlock<false>();
  WriteGradients(b, call, started);
  b.End();
}

template <typename T, int kBytes, bool kLast>
__global__ void __launch_bounds__(kThreads, BackwardBlocks(sizeof(T), kLast))
    BackwardKernel(const __grid_constant__ Params<GroupNormBackwardCall> p) {
  __shared__ Scratch<T> scratch;
  __shared__ Doubles doubles;
  if constexpr (kBytes == 2) {
    if (p.call.dtype == DType::kBF16) {
      return Backward<__nv_bfloat16, kBytes, kLast>(p, scratch, doubles);
    }
  }
  Backward<T, kBytes, kLast>(p, scratch, doubles);
}

// -------------------------------------------------------------------------------------------------
// Launches

struct ForwardKernels {
  static constexpr auto* Blocks = ForwardBlocks;
  template <typename T, int kBytes, bool kLast>
  static auto Of() {
    return KernelOf<GroupNormFamily, ForwardKernel<CommonType<T, kBytes == 2>, kBytes, kLast>>();
  }
};
struct BackwardKernels {
  static constexpr auto* Blocks = BackwardBlocks;
  template <typename T, int kBytes, bool kLast>
  static auto Of() {
    return KernelOf<GroupNormFamily, BackwardKernel<CommonType<T, kBytes == 2>, kBytes, kLast>>();
  }
};

// The limits of the current device, without `blocks`. Asks the kernel with the most blocks.
cudaError_t GetLimits(Limits* limits) {
  static PerDevice<Limits> known;
  return known.Get(limits, [](Limits* found) {
    Device device;
    cudaError_t error = CurrentDevice(&device);
    if (error == cudaSuccess) error = LoadKernels<GroupNormFamily>();
    if (error != cudaSuccess) return error;
    *found = {.processors = device.processors,
              .shared_per_block = device.shared_per_block - kStaticShared,
              .shared_per_processor = device.shared_per_processor,
              .cooperative = device.cooperative};
    const auto kernel =
        reinterpret_cast<const void*>(ForwardKernels::Of<__nv_bfloat16, kUnitBytes, false>());
    const int logs = device.clusters ? kMaxLogCluster : 0;
    for (int log = 0; log <= logs; ++log) {
      for (int blocks = 1; blocks <= kMaxBlocks; ++blocks) {
        const int shared =
            std::min(found->shared_per_block, found->shared_per_processor / blocks - kBlockShared);
        const LaunchConfig config = Grid(1 << log, kThreads, shared, 1 << log);
        int* const resident = &found->resident[log][blocks - 1];
        // A size that the device does not support is not an error.
        if (ResidentBlocks(kernel, config, resident) != cudaSuccess) *resident = 0;
      }
    }
    return cudaSuccess;
  });
}

// Runs a direction, which keeps `arrays` arrays. `sums` are those of a part in the workspace.
template <typename Kernels, typename Call>
cudaError_t Run(const Call& call, int arrays, int64_t sums, int alignment, cudaStream_t stream) {
  if (call.samples == 0) return cudaSuccess;
  Limits limits;
  const cudaError_t error = GetLimits(&limits);
  if (error != cudaSuccess) return error;
  const int item = static_cast<int>(DTypeSize(call.dtype));
  limits.blocks = Kernels::Blocks(item, call.inner == 1);
  const Shape shape = {call.samples,    call.groups, call.channels,     call.positions(),
                       call.inner == 1, item,        std::max(item, 4), arrays};
  const Plan plan = MakePlan(shape, alignment, call.workspace_size / sums, limits);
  if (plan.parts == 0) return cudaErrorInvalidValue;  // too little shared memory
  const int64_t grid = shape.samples * plan.sets * plan.parts;
  const auto launch = [&](auto kernel) {
    LaunchConfig config = Grid(grid, kThreads, plan.shared_bytes, plan.clusters ? plan.parts : 1);
    config.cooperative = plan.parts > 1 && !plan.clusters;
    config.dependent = !config.cooperative;
    return Launch(kernel, config, stream, Params<Call>{call, plan});
  };
  return ForDType(call.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    const auto by_layout = [&](auto bytes) {
      constexpr int kBytes = decltype(bytes)::value;
      return plan.last ? launch(Kernels::template Of<T, kBytes, true>())
                       : launch(Kernels::template Of<T, kBytes, false>());
    };
    constexpr int kItem = static_cast<int>(sizeof(T));
    if constexpr (kItem < 8) {
      if (plan.unit * kItem == kUnitBytes) {
        return by_layout(std::integral_constant<int, kUnitBytes>());
      }
    }
    if constexpr (kItem == 2) {
      if (plan.unit > 1) return by_layout(std::integral_constant<int, 8>());
    }
    return by_layout(std::integral_constant<int, kItem>());
  });
}

}  // namespace

cudaError_t GroupNormForward(const GroupNormForwardCall& call, cudaStream_t stream) {
  return Run<ForwardKernels>(call, 1, 2 * call.groups,
                             CommonAlignment({call.x, call.residual, call.y, call.sum}), stream);
}

cudaError_t GroupNormBackward(const GroupNormBackwardCall& call, cudaStream_t stream) {
  return Run<BackwardKernels>(call, 2, 2 * (call.groups + call.all_channels()),
                              CommonAlignment({call.dy, call.s, call.dx}), stream);
}

cudaError_t LoadGroupNormKernels() {
  Limits limits;
  return GetLimits(&limits);
}

}  // namespace jax_fastops::cuda

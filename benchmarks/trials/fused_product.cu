// A tiled product on Hopper's tensor cores (CUTLASS 4, sm_90a) with a fused consumer, for XLA.
//
// The trial asks what a product gains if its epilogue does the work of the pass that follows it. It
// is no part of the package. fused_product.py checks its values, and times it against XLA's product
// followed by a kernel of the package.
//
// x [m, k] and the result [m, n] are row-major, of bfloat16, with sums in float32. The weights are
// [k, n], and [n, k] in kGeluBackward, the product of the gradient. `mode` is one of the Modes.
//
// Build, with C the folder `source` of the wheel nvidia-cutlass 4.2 (folder cutlass_library) and J
// that of jax.ffi.include_dir(), for each M of 0 and 1:
//
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -DNDEBUG
//     -DFASTOPS_CUDA -DTRIAL_MODULE=$M -I$C/include -I$C/tools/util/include -Isrc -isystem $J
//     -Xcompiler=-fPIC -shared -cudart static -o product$M.so benchmarks/trials/fused_product.cu
#include <cuda_runtime.h>

#include <cstdint>

#include "core/cuda/activation.cuh"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "cutlass/util/packed_stride.hpp"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
namespace fusion = cutlass::epilogue::fusion;
using namespace cute;

using Element = cutlass::bfloat16_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;
constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

enum Mode : int64_t {
  kPlain,         // y = x w
  kGelu,          // y = gelu(x w + b), by erf
  kGeluKept,      // also x w + b, for the backward
  kGeluTanh,      // y = gelu(x w + b), by tanh
  kGeluTanhKept,  // also x w + b
  kGated,         // y = silu(c) * (x w)
  kGatedKept,     // also x w
  kGeluBackward,  // y = (x w.T) gelu'(c), and the sums of each tile's columns
  kExpSums,       // y = x w, and the sums of exp(y) of each tile's rows. There is no maximum, so
                  // this is the least that logsumexp costs in an epilogue
};

// The build makes two modules, because each takes minutes.
#if TRIAL_MODULE == 0
#define TRIAL_MODES(X) X(kPlain) X(kGelu) X(kGeluKept) X(kGeluTanh) X(kGeluTanhKept)
#else
#define TRIAL_MODES(X) X(kGated) X(kGatedKept) X(kGeluBackward) X(kExpSums)
#endif

// ---- functions of fragments ---------------------------------------------------------------------

template <typename T>
struct ForEach;  // of a fragment's elements

template <int kSize>
struct ForEach<cutlass::Array<float, kSize>> {
  using Values = cutlass::Array<float, kSize>;
  template <typename F, typename... More>
  static CUTLASS_DEVICE Values Call(const F& f, const Values& x, const More&... more) {
    Values y;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSize; ++i) y[i] = f(x[i], more[i]...);
    return y;
  }
};

using Math = jax_fastops::cuda::ActivationMath<__nv_bfloat16>;

template <typename T>
struct GeluErf {
  CUTLASS_DEVICE T operator()(const T& x) const {
    return ForEach<T>::Call([](float s) { return Math::GeluExact::Value(s); }, x);
  }
};
template <typename T>
struct GeluTanh {
  CUTLASS_DEVICE T operator()(const T& x) const {
    return ForEach<T>::Call([](float s) { return jax_fastops::Gelu<Math>::Value(s); }, x);
  }
};
template <typename T>
struct SiluTimes {
  CUTLASS_DEVICE T operator()(const T& gate, const T& x) const {
    return ForEach<T>::Call([](float g, float v) { return jax_fastops::Silu<Math>::Value(g) * v; },
                            gate, x);
  }
};
template <typename T>
struct GeluPull {
  CUTLASS_DEVICE T operator()(const T& kept, const T& g) const {
    return ForEach<T>::Call([](float s, float v) { return Math::GeluExact::Derivative(s) * v; },
                            kept, g);
  }
};
template <typename T>
struct Exp {
  CUTLASS_DEVICE T operator()(const T& x) const {
    return ForEach<T>::Call([](float s) { return exp2f(s * 1.4426950408889634f); }, x);
  }
};
template <typename T>
struct First {
  CUTLASS_DEVICE T operator()(const T& x, const T&) const { return x; }
};

// ---- epilogues ----------------------------------------------------------------------------------

template <template <typename> typename F, typename Out = float>
using Compute = fusion::Sm90Compute<F, Out, float, kRound>;

struct Operands {
  int m, n, k;
  const Element *x, *w, *more;
  Element *y, *kept;
  float* sums;
};

template <typename Tile, typename Schedule, typename Source>
struct Parts {
  using Descriptor = cutlass::epilogue::collective::detail::EpilogueDescriptor<
      Tile, cutlass::epilogue::collective::EpilogueTileAuto, Source, Element, Schedule>;
  using Aux =
      cutlass::epilogue::collective::detail::AuxStoreDescriptor<Descriptor, RowMajor, Element>;
  using StrideAux = cutlass::gemm::TagToStrideC_t<RowMajor>;
  using Store =
      fusion::Sm90AuxStore<Aux::Stages, typename Aux::EpilogueTile, Element, kRound, StrideAux,
                           typename Aux::SmemLayoutAtom, typename Aux::CopyOpR2S>;
  using Product = fusion::Sm90AccFetch;
  using Bias = fusion::Sm90RowBroadcast<0, Tile, Element, float>;
  using Biased = fusion::Sm90EVT<Compute<cutlass::plus>, Product, Bias>;
  static StrideAux Stride(const Operands& o) {
    return cutlass::make_cute_packed_stride(StrideAux{}, make_shape(o.m, o.n, 1));
  }
};

template <Mode kMode, typename Tile, typename Schedule>
struct Epilogue {
  static constexpr bool kReads = kMode == kGated || kMode == kGatedKept || kMode == kGeluBackward;
  using Source = std::conditional_t<kReads, Element, void>;
  using P = Parts<Tile, Schedule, Source>;

  static auto Pick() {
    if constexpr (kMode == kPlain) {
      return std::type_identity<fusion::Sm90EVT<
          Compute<cutlass::epilogue::thread::Identity, Element>, typename P::Product>>{};
    } else if constexpr (kMode == kGelu) {
      return std::type_identity<fusion::Sm90EVT<Compute<GeluErf, Element>, typename P::Biased>>{};
    } else if constexpr (kMode == kGeluTanh) {
      return std::type_identity<fusion::Sm90EVT<Compute<GeluTanh, Element>, typename P::Biased>>{};
    } else if constexpr (kMode == kGeluKept) {
      return std::type_identity<fusion::Sm90EVT<
          Compute<GeluErf, Element>, fusion::Sm90EVT<typename P::Store, typename P::Biased>>>{};
    } else if constexpr (kMode == kGeluTanhKept) {
      return std::type_identity<fusion::Sm90EVT<
          Compute<GeluTanh, Element>, fusion::Sm90EVT<typename P::Store, typename P::Biased>>>{};
    } else if constexpr (kMode == kGated) {
      return std::type_identity<fusion::Sm90EVT<
          Compute<SiluTimes, Element>, fusion::Sm90SrcFetch<Element>, typename P::Product>>{};
    } else if constexpr (kMode == kGatedKept) {
      return std::type_identity<
          fusion::Sm90EVT<Compute<SiluTimes, Element>, fusion::Sm90SrcFetch<Element>,
                          fusion::Sm90EVT<typename P::Store, typename P::Product>>>{};
    } else if constexpr (kMode == kGeluBackward) {
      using Sums =
          fusion::Sm90RowReduction<cutlass::plus, cutlass::plus, cutlass::plus, 0, Tile, float,
                                   float, kRound, cute::Stride<_0, _1, _0>, 4, true, false>;
      return std::type_identity<fusion::Sm90EVT<
          Compute<cutlass::epilogue::thread::Identity, Element>,
          fusion::Sm90EVT<Sums, fusion::Sm90EVT<Compute<GeluPull>, fusion::Sm90SrcFetch<Element>,
                                                typename P::Product>>>>{};
    } else {
      using Sums =
          fusion::Sm90ColReduction<cutlass::plus, cutlass::plus, cutlass::plus, 0, Tile, float,
                                   float, kRound, cute::Stride<_1, _0, _0>, 4, true, false>;
      return std::type_identity<fusion::Sm90EVT<
          Compute<First, Element>, typename P::Product,
          fusion::Sm90EVT<Sums, fusion::Sm90EVT<Compute<Exp>, typename P::Product>>>>{};
    }
  }
  using Tree = typename decltype(Pick())::type;

  static typename Tree::Arguments Arguments(const Operands& o) {
    if constexpr (kMode == kPlain) {
      return {{}, {}};
    } else if constexpr (kMode == kGelu || kMode == kGeluTanh) {
      return {{{}, {o.more, Element(0), {}}, {}}, {}};
    } else if constexpr (kMode == kGeluKept || kMode == kGeluTanhKept) {
      return {{{{}, {o.more, Element(0), {}}, {}}, {o.kept, P::Stride(o)}}, {}};
    } else if constexpr (kMode == kGated) {
      return {{}, {}, {}};
    } else if constexpr (kMode == kGatedKept) {
      return {{}, {{}, {o.kept, P::Stride(o)}}, {}};
    } else if constexpr (kMode == kGeluBackward) {
      return {{{{}, {}, {}}, {o.sums, 0.0f, {}}}, {}};
    } else {
      return {{}, {{{}, {}}, {o.sums, 0.0f, {}}}, {}};
    }
  }
};

// ---- the product --------------------------------------------------------------------------------

template <Mode kMode, int kM, int kN, int kClusterM, int kClusterN, bool kPingpong>
struct Product {
  using Tile = Shape<Int<kM>, Int<kN>, _64>;
  using Cluster = Shape<Int<kClusterM>, Int<kClusterN>, _1>;
  using Schedule = std::conditional_t<kPingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                      cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using EpilogueSchedule = std::conditional_t<kPingpong, cutlass::epilogue::TmaWarpSpecialized,
                                              cutlass::epilogue::TmaWarpSpecializedCooperative>;
  using E = Epilogue<kMode, Tile, EpilogueSchedule>;
  using LayoutW = std::conditional_t<kMode == kGeluBackward, ColumnMajor, RowMajor>;

  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, typename E::Source, RowMajor,
      8, Element, RowMajor, 8, EpilogueSchedule, typename E::Tree>::CollectiveOp;
  using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor, 8, Element, LayoutW,
      8, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename CollectiveEpilogue::SharedStorage))>,
      Schedule>::CollectiveOp;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, CollectiveMainloop,
                                           CollectiveEpilogue, cutlass::gemm::PersistentScheduler>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static cutlass::Status Run(const Operands& o, int swizzle, int processors, cudaStream_t stream) {
    typename Gemm::Arguments a{};
    a.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    a.problem_shape = {o.m, o.n, o.k, 1};
    a.mainloop = {
        o.x, cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, make_shape(o.m, o.k, 1)),
        o.w, cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, make_shape(o.n, o.k, 1))};
    const auto stride =
        cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, make_shape(o.m, o.n, 1));
    a.epilogue.thread = E::Arguments(o);
    if constexpr (E::kReads) {
      a.epilogue.ptr_C = o.more;
      a.epilogue.dC = stride;
    }
    a.epilogue.ptr_D = o.y;
    a.epilogue.dD = stride;
    a.hw_info.sm_count = processors;
    a.scheduler.max_swizzle_size = swizzle;
    if (const auto status = Gemm::can_implement(a); status != cutlass::Status::kSuccess) {
      return status;
    }
    if (Gemm::get_workspace_size(a) != 0) return cutlass::Status::kErrorWorkspaceNull;
    Gemm gemm;
    const auto status = gemm.initialize(a, nullptr, stream);
    return status == cutlass::Status::kSuccess ? gemm.run(stream) : status;
  }
};

template <Mode kMode>
cutlass::Status RunTile(const Operands& o, int64_t tile, int swizzle, int processors,
                        cudaStream_t stream) {
  switch (tile) {
    case 0:
      return Product<kMode, 128, 256, 2, 1, false>::Run(o, swizzle, processors, stream);
    case 1:
      return Product<kMode, 128, 128, 2, 1, true>::Run(o, swizzle, processors, stream);
    case 2:
      return Product<kMode, 256, 128, 2, 1, false>::Run(o, swizzle, processors, stream);
    case 3:
      if constexpr (kMode <= kGeluKept) {
        return Product<kMode, 64, 128, 1, 1, true>::Run(o, swizzle, processors, stream);
      }
    default:
      return cutlass::Status::kErrorInvalidProblem;
  }
}

ffi::Error Run(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t mode,
               int64_t tile, int64_t swizzle) {
  const auto in = [&](size_t i) {
    return static_cast<const Element*>(args.get<ffi::AnyBuffer>(i)->untyped_data());
  };
  const auto out = [&](size_t i) { return (*rets.get<ffi::AnyBuffer>(i))->untyped_data(); };
  const auto size = args.get<ffi::AnyBuffer>(0)->dimensions();
  const auto result = (*rets.get<ffi::AnyBuffer>(0))->dimensions();
  Operands o{};
  o.m = static_cast<int>(size[0]);
  o.k = static_cast<int>(size[1]);
  o.n = static_cast<int>(result[1]);
  o.x = in(0);
  o.w = in(1);
  if (args.size() > 2) o.more = in(2);
  o.y = static_cast<Element*>(out(0));
  if (rets.size() > 1) {
    o.kept = static_cast<Element*>(out(1));
    o.sums = static_cast<float*>(out(1));
  }
  static const int kProcessors = [] {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
  }();
  const auto run = [&]<Mode kMode>() {
    return RunTile<kMode>(o, tile, static_cast<int>(swizzle), kProcessors, stream);
  };
  cutlass::Status status = cutlass::Status::kErrorNotSupported;
  switch (mode) {
#define TRIAL_CASE(kMode)             \
  case kMode:                         \
    status = run.operator()<kMode>(); \
    break;
    TRIAL_MODES(TRIAL_CASE)
#undef TRIAL_CASE
  }
  if (status == cutlass::Status::kSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(cutlass::cutlassGetStatusString(status));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(FusedProduct, Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("mode")
                                  .Attr<int64_t>("tile")
                                  .Attr<int64_t>("swizzle"),
                              {ffi::Traits::kCmdBufferCompatible});

// The gradients of an element-wise op over broadcast operands. Full gradients are written, and
// gradients of broadcast operands are summed in the same pass. A new op is a functor:
//
//   struct F {
//     using Family = ...;  // of KernelOf
//     static constexpr int kOperands = ..., kGradients = ...;
//     // Whether an operand may have the accumulator type.
//     static constexpr bool kMayBeWide = ...;
//     // Whether operand 0 is a bitmask. Its values are 0 and 1.
//     static constexpr bool kBits = ...;
//     // Whether operands may have rows at other distances than the result.
//     static constexpr bool kMayBeStrided = ...;
//     // The classes of the operands (of the gradients, if kBits) for which there is a kernel.
//     using SumsSets = std::integer_sequence<int, RowClasses(...), ...>;
//     // Whether operands 0 and 1 may change places; then there is Swap().
//     static constexpr bool kSymmetric = ...;
//     // Calls visit(choice) with a value of the class that has Gradients: of this one, or of one
//     // that is chosen at run time.
//     template <typename Visit>
//     __device__ void Choose(const Visit& visit) const;
//     template <typename T>
//     __device__ void Gradients(ComputeType<T> dy, const ComputeType<T> (&x)[kOperands],
//                               ComputeType<T> (&g)[kGradients]) const;
//     // Which operands the requested gradients need.
//     static void Needed(const bool* wanted, bool* needed);
//   };
//
// A pass makes the gradients whose sums fit together; elements_sums_kernel.cuh has its kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/broadcast.h"
#include "core/cuda/dispatch.cuh"
#include "core/cuda/elements_sums_kernel.cuh"
#include "core/cuda/gradient_sums.h"
#include "core/cuda/launch.h"
#include "core/fast_divide.h"
#include "core/plan_elements.h"

namespace jax_fastops::cuda {

template <typename F, typename T>
class SumsLauncher {
  using C = ComputeType<T>;
  static constexpr int kOperands = F::kOperands, kGradients = F::kGradients;

 public:
  // Arrays of `shape`: the operands, then the gradients.
  static cudaError_t Launch(const F& f, const BroadcastShape& shape, const void* dy,
                            const Operand* operands, const Gradient* gradients,
                            SumWorkspace workspace, cudaStream_t stream) {
    if (shape.elements() == 0) return cudaSuccess;
    int arrays[kGradients], left = 0;
    bool any = false;
    for (int g = 0; g < kGradients; ++g) {
      if (gradients[g].data == nullptr) continue;
      any = true;
      if (!shape.IsFull(kOperands + g)) arrays[left++] = kOperands + g;
    }
    if (!any) return cudaSuccess;
    // Sums that cannot share a pass get several. The first one also writes the full gradients.
    bool first = true, only_one = false;  // only_one: the pass sums one gradient
    do {
      uint32_t chosen;
      const uint32_t planes = ChoosePlanes(shape, arrays, only_one ? 1 : left, &chosen);
      Gradient now[kGradients];
      for (int g = 0; g < kGradients; ++g) {
        if (first && shape.IsFull(kOperands + g)) now[g] = gradients[g];
      }
      int rest[kGradients], kept = 0;
      for (int i = 0; i < left; ++i) {
        if (chosen >> i & 1) {
          now[arrays[i] - kOperands] = gradients[arrays[i] - kOperands];
        } else {
          rest[kept++] = arrays[i];
        }
      }
      bool taken = false;
      cudaError_t error = cudaSuccess;
      for (const bool words : {true, false}) {
        if (taken || (words && sizeof(T) == 8)) continue;
        error = Pass(f, shape, planes, words, dy, operands, now, workspace, stream, &taken);
        if (error != cudaSuccess) return error;
      }
      // The partial sums of one gradient fit.
      if (!taken && (only_one || left < 2)) return cudaErrorInvalidValue;
      only_one = !taken;
      if (!taken) continue;
      std::copy(rest, rest + kept, arrays);
      left = kept;
      first = false;
    } while (left > 0);
    return cudaSuccess;
  }

 private:
  using Params = SumsParams<F>;
  struct Choice {
    void (*kernel)(Params) = nullptr;
    int rows = 1, blocks = 1;  // in flight; per processor
    bool swapped = false;
  };

  // The kernel for these classes of operands, or of gradients if there is a bitmask. `free`: any
  // class will do.
  template <int... kSets>
  static Choice Find(const RowClass* classes, const bool* free, bool flat,
                     std::integer_sequence<int, kSets...>) {
    Choice found;
    const auto consider = [&]<int kSet>(std::integral_constant<int, kSet>) {
      using Traits = SumsTraits<F, T, kSet>;
      for (const bool swapped : {false, true}) {
        // Flat arrays are cut into rows, and the kernels for row operands take no shorter last row.
        bool fits = found.kernel == nullptr && (F::kSymmetric || !swapped) &&
                    !(flat && CountClass(kSet, kGradients, RowClass::kRow) > 0);
        for (int k = 0; k < kGradients; ++k) {
          const int at = swapped && k < 2 ? 1 - k : k;
          const RowClass own = classes[at] == RowClass::kStrided ? RowClass::kFull : classes[at];
          fits = fits && (free[at] || own == ClassIn(kSet, k));
        }
        if (!fits) continue;
        found = {KernelOf<typename F::Family, SumsKernel<F, T, kSet>>(), Traits::kRows,
                 Traits::kBlocks, swapped};
      }
    };
    (consider(std::integral_constant<int, kSets>()), ...);
    return found;
  }

  // Enqueues one pass if it can take the shape, and after it the second kernel if there are partial
  // sums. `gradients` has the data of those that the pass makes.
  static cudaError_t Pass(const F& f, const BroadcastShape& shape, uint32_t planes, bool words,
                          const void* dy, const Operand* operands, const Gradient* gradients,
                          SumWorkspace workspace, cudaStream_t stream, bool* taken) {
    const int64_t total = shape.elements(), unit = words ? 16 / int64_t{sizeof(T)} : 1;
    const bool flat = shape.rank <= 1;
    const RowsSplit split = SplitRows(shape, planes, kSumsThreads * unit);

    // ---- classes
    RowClass of_operand[kOperands], of_gradient[kGradients];
    bool wanted[kGradients], needed[kOperands], free[kGradients] = {};
    for (int g = 0; g < kGradients; ++g) {
      wanted[g] = gradients[g].data != nullptr;
      of_gradient[g] = split.ClassOf(kOperands + g);
    }
    for (int k = 0; k < kOperands; ++k) of_operand[k] = split.ClassOf(k);
    F::Needed(wanted, needed);
    Choice choice;
    if (!words) {
      choice.rows = SumsTraits<F, T, kAnyClasses>::kRows;
      choice.blocks = SumsTraits<F, T, kAnyClasses>::kBlocks;
    } else if constexpr (sizeof(T) < 8) {
      if (total >= int64_t{1} << 31) return cudaSuccess;
      uintptr_t address = reinterpret_cast<uintptr_t>(dy);
      for (int g = 0; g < kGradients; ++g) {
        // In a partitioned program an operand may have copies along dimensions over which its
        // gradient is summed.
        if (!F::kBits && wanted[g] && of_gradient[g] != of_operand[g]) return cudaSuccess;
        free[g] = !wanted[g] && (F::kBits || !needed[g]);
        if (!wanted[g] || of_gradient[g] != RowClass::kFull) continue;
        if (gradients[g].wide) return cudaSuccess;
        address |= reinterpret_cast<uintptr_t>(gradients[g].data);
      }
      for (int k = 0; k < kOperands; ++k) {
        if (!needed[k]) continue;
        if (F::kBits) {
          if (split.inner_stride[k] != 1 || !Divides(split, k, 8)) return cudaSuccess;
          continue;
        }
        if (of_operand[k] == RowClass::kRow || of_operand[k] == RowClass::kColumn) continue;
        if (operands[k].wide) return cudaSuccess;
        address |= reinterpret_cast<uintptr_t>(operands[k].data);
        const bool strided = of_operand[k] == RowClass::kStrided;
        if (strided && !(F::kMayBeStrided && split.n % unit == 0 && Divides(split, k, unit))) {
          return cudaSuccess;
        }
      }
      if (address % 16 != 0) return cudaSuccess;
      choice = Find(F::kBits ? of_gradient : of_operand, free, flat, typename F::SumsSets());
      if (choice.kernel == nullptr) return cudaSuccess;
    }

    // ---- the plan
    Device device;
    cudaError_t error = CurrentDevice(&device);
    if (error != cudaSuccess) return error;
    SumLayout layouts[kGradients];
    int sums = 0;
    for (int g = 0; g < kGradients; ++g) {
      if (wanted[g] && of_gradient[g] != RowClass::kFull) layouts[sums++].array = kOperands + g;
    }
    const PassPlan plan = PlanPass(split, layouts, sums,
                                   {.unit = static_cast<int>(unit),
                                    .rows_in_flight = choice.rows,
                                    .blocks_of_processor = choice.blocks,
                                    .processors = device.processors,
                                    .workspace = workspace.size});
    if (!plan.valid) return cudaSuccess;
    *taken = true;

    // ---- the parameters
    Params p{};
    p.f = f;
    p.dy = dy;
    for (int k = 0; k < kOperands; ++k) {
      p.operand[k] = operands[k];
      p.operand_class[k] = of_operand[k];
      p.needed[k] = needed[k];
    }
    SumsToFinish unfinished;
    int64_t used = 0;
    for (int g = 0, s = 0; g < kGradients; ++g) {
      SumParams& sum = p.sum[g];
      sum = {gradients[g].data, of_gradient[g], gradients[g].wide, false, true};
      if (!wanted[g] || of_gradient[g] == RowClass::kFull) continue;
      const SumLayout& layout = layouts[s++];
      sum.per_row = layout.per_row;
      sum.direct = layout.direct;
      if (layout.direct) continue;
      C* const parts = static_cast<C*>(workspace.data) + used;
      used += layout.Partial(split);
      FinishSum last = FinishOf(split, layout);
      last.parts = parts;
      last.out = gradients[g].data;
      last.wide = gradients[g].wide;
      unfinished.Add(last);
      sum.out = parts;
      sum.wide = true;
    }
    // Without a dimension of the rows there is one row.
    p.dim[0] = {};
    p.row_rank = static_cast<uint8_t>(std::max(1, split.rows.rank));
    p.plane_rank = static_cast<uint8_t>(split.planes.rank);
    Fill(split.rows, p.dim);
    Fill(split.planes, p.dim + p.row_rank);
    p.plane_count = static_cast<uint32_t>(plan.planes);
    p.row_count = static_cast<uint32_t>(split.rows.length);
    p.n = split.n;
    p.last_n = split.last_n;
    p.row_stride = split.rows.rank > 0 ? split.rows.stride[0][split.rows.rank - 1] : 0;
    p.period = static_cast<uint32_t>(plan.period);
    p.classes = static_cast<uint32_t>(plan.classes);
    p.strips = static_cast<uint32_t>(plan.strips);
    p.boxes = static_cast<uint32_t>(plan.boxes);
    p.tail = static_cast<uint32_t>(total % unit);
    p.tail_word = p.tail == 0 ? -1 : total / unit;
    p.lanes = plan.lanes;
    if constexpr (F::kSymmetric) {
      if (choice.swapped) Swap(&p);
    }
    const LaunchConfig config = Grid(plan.blocks(), plan.threads);
    error = words ? cuda::Launch(choice.kernel, config, stream, p)
                  : LaunchAnyType<typename F::Family, kSumsThreads>(kDTypeOf<T>, config, stream,
                                                                    SumsOfAnyClasses<F>{p});
    return error == cudaSuccess ? unfinished.Launch(kDTypeOf<T>, stream) : error;
  }

  // Whether all rows of an array begin at multiples of `unit` elements.
  static bool Divides(const RowsSplit& split, int array, int64_t unit) {
    for (const DimSet* set : {&split.planes, &split.rows}) {
      for (int d = 0; d < set->rank; ++d) {
        if (set->stride[1 + array][d] % unit != 0) return false;
      }
    }
    return true;
  }

  static void Fill(const DimSet& from, SumDim<Params::kArrays>* to) {
    for (int d = 0; d < from.rank; ++d) {
      to[d].length = FastDivisor(static_cast<uint32_t>(from.size[d]));
      for (int a = 0; a < Params::kArrays; ++a) to[d].stride[a] = from.stride[a][d];
    }
  }

  // Exchanges operands 0 and 1, and their gradients.
  static void Swap(Params* p) {
    std::swap(p->operand[0], p->operand[1]);
    std::swap(p->operand_class[0], p->operand_class[1]);
    std::swap(p->needed[0], p->needed[1]);
    std::swap(p->sum[0], p->sum[1]);
    for (int d = 0; d < p->row_rank + p->plane_rank; ++d) {
      std::swap(p->dim[d].stride[1], p->dim[d].stride[2]);
      std::swap(p->dim[d].stride[1 + kOperands], p->dim[d].stride[2 + kOperands]);
    }
    p->f.Swap();
  }
};

template <typename F>
cudaError_t BackwardWithSums(const F& f, const BroadcastShape& given, DType dtype, const void* dy,
                             const Operand* operands, const Gradient* gradients,
                             SumWorkspace workspace, cudaStream_t stream) {
  BroadcastShape shape;
  if (!WithRows(given, &shape)) return cudaErrorInvalidValue;
  return ForDType(dtype, [&]<typename T>(TypeTag<T>) {
    return SumsLauncher<F, T>::Launch(f, shape, dy, operands, gradients, workspace, stream);
  });
}

}  // namespace jax_fastops::cuda

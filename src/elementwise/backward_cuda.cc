#include "elementwise/backward.h"

#include <algorithm>

#include "core/cuda/launch.h"
#include "elementwise/finish.h"

namespace jax_fastops::cuda {
namespace {

constexpr int kSlotBytes = 64 << 10;  // of shared memory, for a crossed pass

class BackwardLauncher {
 public:
  BackwardLauncher(const BackwardKernels& kernels, const BroadcastShape& shape, DType dtype,
                   const void* dy, const Operand* operands, const Gradient* gradients,
                   SumWorkspace workspace, cudaStream_t stream)
      : kernels_(kernels),
        shape_(shape),
        dtype_(dtype),
        dy_(dy),
        operands_(operands),
        gradients_(gradients),
        workspace_(workspace),
        stream_(stream),
        element_(static_cast<int>(DTypeSize(dtype))),
        accumulator_(dtype == DType::kF64 ? 8 : 4) {}

  // One pass if its sums can share it. Otherwise each sum gets its own pass, and the first of them
  // also writes the full gradients.
  cudaError_t Launch() {
    bool all[kMaxSums], any = false;
    for (int g = 0; g < kernels_.gradients; ++g) {
      all[g] = gradients_[g].data != nullptr;
      any = any || all[g];
    }
    if (!any || shape_.elements() == 0) return cudaSuccess;
    cudaError_t error = cudaSuccess;
    if (Pass(all, &error)) return error;
    bool first = true;
    for (int g = 0; g < kernels_.gradients; ++g) {
      if (!all[g] || IsFull(g)) continue;
      bool wanted[kMaxSums];
      for (int h = 0; h < kernels_.gradients; ++h) {
        wanted[h] = h == g || (first && all[h] && IsFull(h));
      }
      first = false;
      if (!Pass(wanted, &error)) return cudaErrorInvalidValue;
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

 private:
  bool IsFull(int g) const { return shape_.IsFull(kernels_.operands + g); }
  bool Wide(bool wide) const { return wide && element_ < accumulator_; }

  // Whether arrays of the result's shape begin at 16 bytes.
  bool IsAligned(const bool* wanted) const {
    uintptr_t bits = reinterpret_cast<uintptr_t>(dy_);
    for (int k = kernels_.bits ? 1 : 0; k < kernels_.operands; ++k) {
      if (shape_.IsFull(k)) bits |= reinterpret_cast<uintptr_t>(operands_[k].data);
    }
    for (int g = 0; g < kernels_.gradients; ++g) {
      if (wanted[g] && IsFull(g)) bits |= reinterpret_cast<uintptr_t>(gradients_[g].data);
    }
    return bits % 16 == 0;
  }

  // Returns false if the gradients cannot share a pass.
  bool Pass(const bool* wanted, cudaError_t* error) {
    Device device;
    *error = CurrentDevice(&device);
    if (*error != cudaSuccess) return true;
    const bool fast = IsAligned(wanted) && Plan(wanted, device, false, &plan_);
    if (!fast && !Plan(wanted, device, true, &plan_)) return false;
    BackwardParams p{};
    FinishSum finish[kMaxSums];
    SetShape(&p);
    SetOperands(wanted, &p);
    const int unfinished = SetSums(&p, finish);
    const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(plan_.blocks())),
                                 .block = dim3(static_cast<unsigned>(plan_.threads)),
                                 .shared = static_cast<size_t>(plan_.slots) * SlotBytes()};
    const BackwardKernel kernel = kernels_.choose(fast ? plan_.columns : -1, plan_.crossed);
    *error = cuda::Launch(kernel, config, stream_, p);
    if (*error == cudaSuccess) *error = FinishSums(finish, unfinished, dtype_, stream_);
    return true;
  }

  // Shared memory for one index of B of all threads, in a crossed pass.
  int SlotBytes() const { return kBackwardThreads * (16 / element_) * accumulator_; }

  // Plans a pass, of the general kernel or of the others. Returns false if it cannot take it.
  bool Plan(const bool* wanted, const Device& device, bool general, BackwardPlan* plan) const {
    GradientShape shapes[kMaxSums];
    for (int g = 0; g < kernels_.gradients; ++g) {
      shapes[g].wanted = wanted[g];
      shapes[g].array = kernels_.operands + g;
      shapes[g].operand = kernels_.operands == kernels_.gradients ? g : -1;
    }
    BackwardLimits limits;
    limits.unit = general ? 1 : 16 / element_;
    // Kernels count units in 32 bits.
    if (!general && shape_.elements() / limits.unit >= int64_t{1} << 32) return false;
    limits.columns = general ? 1 : 2;
    limits.crossed = !general;
    limits.slots = std::max(1, std::min(kSlotBytes, device.shared_per_block / 2) / SlotBytes());
    limits.workspace = workspace_.size;
    limits.processors = device.processors;
    limits.blocks = kernels_.blocks;
    *plan = PlanBackward(shape_, shapes, kernels_.gradients, limits);
    if (!plan->valid || general) return plan->valid;
    if (kernels_.choose(plan->columns, plan->crossed) == nullptr) return false;
    // Operands that are loaded for each row.
    for (int k = kernels_.bits ? 1 : 0; k < kernels_.operands; ++k) {
      const bool held = !plan->crossed && (plan->columns >> k & 1) != 0;
      if (!held && !shape_.IsFull(k) && shape_.InnerStride(k) != 0 && !InUnits(k)) return false;
    }
    return true;
  }

  // Whether whole units of rows of an operand are aligned to 16 bytes.
  bool InUnits(int k) const {
    const int64_t size = Wide(operands_[k].wide) ? accumulator_ : element_;
    int64_t bits = reinterpret_cast<intptr_t>(operands_[k].data) | (shape_.inner() * element_);
    for (int d = 0; d + 1 < shape_.rank; ++d) bits |= shape_.stride[k][d] * size;
    return bits % 16 == 0;
  }

  void SetShape(BackwardParams* p) const {
    p->dy = dy_;
    p->elements = shape_.elements();
    p->n = shape_.inner();
    p->length_a = plan_.length_a;
    p->length_b = plan_.length_b;
    p->boxes_a = plan_.boxes_a;
    p->boxes_b = plan_.boxes_b;
    p->classes = static_cast<uint32_t>(plan_.classes);
    p->strips = static_cast<uint32_t>(plan_.strips);
    p->segments = static_cast<uint32_t>(plan_.segments);
    p->lanes = plan_.lanes;
    p->slots = plan_.slots;
    p->over_a = plan_.over_a;
    p->rank_a = plan_.rank_a;
    p->rank = plan_.rank;
    int64_t dense[kMaxBroadcastRank], step = 1;
    for (int d = shape_.rank - 1; d >= 0; step *= shape_.size[d--]) dense[d] = step;
    for (int i = 0; i < plan_.rank; ++i) {
      const int d = plan_.dims[i];
      p->size[i] = shape_.size[d];
      p->stride[0][i] = dense[d];
      for (int k = 0; k < kernels_.operands; ++k) p->stride[1 + k][i] = shape_.stride[k][d];
    }
  }

  void SetOperands(const bool* wanted, BackwardParams* p) const {
    bool needed[kMaxElementwiseOperands] = {};
    kernels_.needed(wanted, needed);
    for (int k = 0; k < kernels_.operands; ++k) {
      BackwardOperand& operand = p->operand[k];
      operand.data = operands_[k].data;
      operand.needed = needed[k];
      operand.wide = Wide(operands_[k].wide);
      operand.full = shape_.IsFull(k);
      operand.one = shape_.InnerStride(k) == 0 && !operand.full;
      operand.units = InUnits(k);
    }
  }

  // Returns the number of sums to finish.
  int SetSums(BackwardParams* p, FinishSum* finish) const {
    int unfinished = 0;
    p->column = -1;
    for (int g = 0; g < kernels_.gradients; ++g) {
      const SumPlan& from = plan_.sum[g];
      BackwardSum& sum = p->sum[g];
      sum.kind = from.kind;
      sum.keeps_a = from.keeps_a;
      sum.keeps_b = from.keeps_b;
      sum.plane = from.plane;
      sum.out = gradients_[g].data;
      sum.wide = Wide(gradients_[g].wide);
      if (from.kind == SumKind::kNone || from.kind == SumKind::kFull) continue;
      if (from.kind == SumKind::kColumns) p->column = g;
      if (from.kind == SumKind::kRows) p->any_rows = true;
      for (int i = 0; i < plan_.rank; ++i) {
        p->stride[1 + kMaxElementwiseOperands + g][i] = from.stride[i];
      }
      if (from.complete) continue;
      FinishSum& last = finish[unfinished++];
      last.plan = PlanFinish(shape_, plan_, from, kernels_.operands + g);
      last.out = sum.out;
      last.wide = sum.wide;
      sum.out = static_cast<char*>(workspace_.data) + from.offset * accumulator_;
      sum.wide = true;
      last.parts = sum.out;
    }
    return unfinished;
  }

  const BackwardKernels& kernels_;
  const BroadcastShape& shape_;
  const DType dtype_;
  const void* const dy_;
  const Operand* const operands_;
  const Gradient* const gradients_;
  const SumWorkspace workspace_;
  const cudaStream_t stream_;
  const int element_, accumulator_;  // bytes
  BackwardPlan plan_;                // of the pass
};

}  // namespace

cudaError_t LaunchBackward(const BackwardKernels& kernels, const BroadcastShape& given, DType dtype,
                           const void* dy, const Operand* operands, const Gradient* gradients,
                           SumWorkspace workspace, cudaStream_t stream) {
  BroadcastShape shape;
  const bool wide = operands[0].wide && DTypeSize(dtype) == 2;
  if (wide || !WithRows(given, &shape)) return cudaErrorInvalidValue;
  return BackwardLauncher(kernels, shape, dtype, dy, operands, gradients, workspace, stream)
      .Launch();
}

}  // namespace jax_fastops::cuda
